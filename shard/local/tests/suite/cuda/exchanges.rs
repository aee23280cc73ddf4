//! Local updates in GPU memory: workers end with the bits of loopback, for every plan.

use crate::common::gpus::{alone, on, room_for, seed, some, stand_in};
use crate::common::{self, F32_MASTER, Gradients, PRECISIONS, Run, WhichRule, cases};
use crate::equal::plans;
use meshstep_comm::Communicator;
use meshstep_local::{Fragment, LocalOptimizer, LocalPlan, Merge, Slots, Timing, Weights, What, Workers};
use meshstep_shard::{Options, Outcome, Precision, Stage, Step, StepArgs};
use meshstep_tensor::DType;
use std::sync::Arc;

/// Result of a rank: parameters, its part of the state, each parameter's `t`; and the outcome of every step.
#[derive(Clone, Debug, PartialEq)]
struct End {
    params: Vec<Vec<u8>>,
    state: Vec<(u64, Vec<Vec<u8>>)>,
    told: Vec<String>,
}

/// Tokens of a worker's step: with four workers shares are powers of two, by which NCCL multiplies exactly too.
fn tokens(worker: usize) -> u64 {
    [1, 1, 2, 4][worker % 4]
}

pub fn begin(run: &Run, plan: &LocalPlan, workers: usize, world: Arc<dyn Communicator>) -> LocalOptimizer {
    let worker = world.rank() / (run.ranks / workers);
    let (comm, between) = Workers::split(world, worker as u32).unwrap();
    LocalOptimizer::new(run.build(comm).unwrap(), between, plan.clone()).unwrap()
}

/// Takes one step of a rank, and returns its outcome.
pub fn step(run: &Run, local: &mut LocalOptimizer, (rank, worker): (usize, usize)) -> String {
    let t = local.steps() + 1;
    let mb = local.micro_batch(tokens(worker)).unwrap();
    for i in (0..run.lens.len()).rev() {
        common::with_dtype(run.grads, &run.gradient(t, 0, rank, i), |grad| {
            let grad = common::put(grad, &run.options.queue);
            mb.grad(&common::name(i), grad.as_slice()).unwrap();
        });
    }
    mb.finish().unwrap();
    told(local, run.at(t))
}

/// Returns the outcome of a step, without the bytes it moved.
pub fn told(local: &mut LocalOptimizer, at: StepArgs) -> String {
    match local.step(at) {
        Ok(done) => {
            let outcome = match done.outcome {
                Outcome::Applied { norm, coef, .. } => format!("applied {norm:e} {coef:e}"),
                Outcome::Skipped { non_finite, in_a_row, .. } => format!("skipped {non_finite} {in_a_row}"),
            };
            format!("{} {outcome} {:?}", done.step, done.exchanged)
        }
        Err(error) => error.to_string(),
    }
}

fn end(local: &LocalOptimizer, told: Vec<String>) -> End {
    let params = common::params(local.optimizer());
    End { params, state: common::state(local.optimizer()), told }
}

fn train(gpus: bool, run: &Run, plan: &LocalPlan, workers: usize) -> Vec<End> {
    on(gpus, run, |world, run| {
        let (rank, worker) = (world.rank(), world.rank() / (run.ranks / workers));
        let mut local = begin(run, plan, workers, world);
        let told = (0..run.steps).map(|_| step(run, &mut local, (rank, worker))).collect();
        end(&local, told)
    })
}

fn assert_alike(run: &Run, plan: &LocalPlan, workers: usize, what: &str) {
    let (gpus, cpu) = (train(true, run, plan, workers), train(false, run, plan, workers));
    for (rank, (gpu, cpu)) in gpus.iter().zip(&cpu).enumerate() {
        let what =
            format!("{what}: rank {rank} of {workers} workers, {:?}, {}", run.options.stage, run.dtype);
        assert_eq!(gpu.told, cpu.told, "{what}");
        assert!(gpu.params == cpu.params, "parameters, {what}");
        assert!(gpu.state == cpu.state, "state, {what}");
    }
}

fn run(workers: usize, inside: usize) -> Run {
    let (gradients, max_norm) = (Gradients::Rough, Some(20.0));
    Run { ranks: workers * inside, steps: 9, gradients, max_norm, ..Run::default() }
}

/// Plans of the CPU's suite, and those that differ only in types and places of memory.
fn all_plans() -> Vec<(&'static str, WhichRule, LocalPlan)> {
    let adamw = WhichRule::AdamW;
    let narrow = |h: u64, delay: u64| {
        LocalPlan::diloco(h).with(|f| (f.wire, f.timing.delay) = (Some(DType::BF16), delay))
    };
    let momentum = |merge, timing| Fragment { merge, ..Fragment::mean(What::OuterMomentum(0), timing) };
    let outer = |fragment| LocalPlan::new([LocalPlan::diloco(2).fragments, vec![fragment]].concat());
    let mut all = plans();
    all.extend([
        ("every step", adamw, LocalPlan::local_adam(1)),
        ("period of 4", adamw, LocalPlan::local_adam(4)),
        ("as bf16", adamw, LocalPlan::local_adam(2).with(|f| f.wire = Some(DType::BF16))),
        ("as f64", adamw, LocalPlan::local_adam(2).with(|f| f.wire = Some(DType::F64))),
        ("differences", adamw, narrow(2, 0)),
        ("differences, delayed", adamw, narrow(3, 1)),
        ("outer momentum", adamw, outer(momentum(Merge::Mean, Timing::every(2)))),
        ("outer momentum is reset", adamw, outer(momentum(Merge::Reset, Timing::every(4)))),
        (
            "some zeros",
            adamw,
            LocalPlan::des_loc(2, 3, 4).with(|f| {
                if f.what == What::State(Slots::First) {
                    (f.merge, f.taken) = (Merge::Reset, 0.5);
                }
            }),
        ),
    ]);
    all
}

/// Types and precisions that plans accept.
fn precisions() -> Vec<(DType, Precision)> {
    let wide = |(dtype, precision): &(DType, Precision)| {
        matches!(dtype, DType::F32 | DType::F64) || precision.master == F32_MASTER.master
    };
    PRECISIONS.into_iter().filter(wide).collect()
}

#[test]
fn every_plan_ends_with_the_bits_of_loopback() {
    let _alone = alone();
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];
    for (w, (workers, inside)) in [(2, 1), (4, 1), (2, 2)].into_iter().enumerate() {
        if !room_for(workers * inside) {
            continue;
        }
        for (p, (name, rule, mut plan)) in all_plans().into_iter().enumerate() {
            if workers == 2 {
                // The shares of these workers are not powers of two.
                plan = plan.with(|f| f.weights = Weights::Uniform);
            }
            for stage in some(&stages, p + w, 1) {
                assert_alike(&Run { rule, ..run(workers, inside) }.stage(stage), &plan, workers, name);
            }
        }
    }
}

#[test]
fn every_precision_ends_with_the_bits_of_loopback() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let plans = [
        LocalPlan::local_adam(2),
        LocalPlan::diloco(3),
        LocalPlan::streaming_diloco(4, 2, 2, 0.5),
        LocalPlan::local_adam(2).with(|f| f.wire = Some(DType::BF16)),
    ];
    for (i, (dtype, precision)) in precisions().into_iter().enumerate() {
        for plan in some(&[0, 1, 2, 3], i, 2) {
            let options = Options { precision, ..Run::default().options };
            let run = Run { dtype, grads: dtype, options, ..run(2, 1) };
            assert_alike(&run, &plans[plan], 2, &format!("plan {plan}, {precision:?}"));
        }
    }
}

#[test]
fn no_order_of_streams_shows_between_workers() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    let plans = [LocalPlan::streaming_diloco(4, 3, 2, 0.5), LocalPlan::des_loc(2, 3, 4)];
    for plan in plans {
        let run = run(2, 2).stage(Stage::Zero1);
        let expected = train(false, &run, &plan, 2);
        for order in 0..u64::from(cases(12, 50)) {
            seed(order);
            assert!(train(true, &run, &plan, 2) == expected, "order {order}");
        }
    }
}
