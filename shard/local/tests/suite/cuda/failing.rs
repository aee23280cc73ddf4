//! Failed exchanges between workers on GPUs: no worker applies anything, and every rank gets the same outcome as on the CPU.

use crate::common::elsewhere::Elsewhere;
use crate::common::gpus::{alone, fail, on, room_for, stand_in, two};
use crate::common::{self, Gradients, Run};
use crate::cuda::exchanges::{begin, step, told};
use meshstep_comm::Communicator;
use meshstep_local::{LocalOptimizer, LocalPlan, OnFailure, Outer, Placement, Workers};
use meshstep_shard::{NonFinite, Optimizer, Options, Step};
use meshstep_tensor::{Category, Meter, Slice};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Barrier};

/// Contribution of rank 1 to a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Brings {
    Gradients,
    NotANumber,
    NotAll,
}

/// Vectors of floats, with all NaNs equal.
type Floats = Vec<Vec<Option<f32>>>;

/// Returns parameters and state.
fn floats(local: &LocalOptimizer) -> Floats {
    let known = |x: f32| (!x.is_nan()).then_some(x);
    let of =
        |bytes: &Vec<u8>| bytes.chunks(4).map(|b| known(f32::from_ne_bytes(b.try_into().unwrap()))).collect();
    let (params, state) = (common::params(local.optimizer()), common::state(local.optimizer()));
    params.iter().chain(state.iter().flat_map(|(_, slots)| slots)).map(of).collect()
}

/// Returns the outcome of each step of a rank, and its values after the step.
fn story(gpus: bool, run: &Run, plan: &LocalPlan, events: &[Brings]) -> Vec<Vec<(String, Floats)>> {
    on(gpus, run, |world, run| {
        let rank = world.rank();
        let mut local = begin(run, plan, 2, world);
        let happen = |(t, event): (usize, &Brings)| {
            let event = if rank == 1 { *event } else { Brings::Gradients };
            let mb = local.micro_batch(1).unwrap();
            for i in (0..run.lens.len()).filter(|&i| !(event == Brings::NotAll && i == 3)) {
                let mut grad = run.gradient(t as u64 + 1, 0, rank, i);
                if event == Brings::NotANumber && i == 0 {
                    grad[5] = f64::NAN;
                }
                common::with_dtype(run.grads, &grad, |grad| {
                    let grad = common::put(grad, &run.options.queue);
                    mb.grad(&common::name(i), grad.as_slice()).unwrap();
                });
            }
            mb.finish().unwrap();
            let told = told(&mut local, run.at(t as u64 + 1));
            (told, floats(&local))
        };
        events.iter().enumerate().map(happen).collect()
    })
}

#[test]
fn vetoes_skips_and_faults_are_those_of_loopback() {
    use Brings::{Gradients as Plain, NotANumber, NotAll};
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let late = [Plain, NotAll, Plain, Plain, NotAll, NotAll, Plain, Plain, Plain, NotANumber, Plain, Plain];
    let early = [Plain, NotANumber, Plain, Plain];
    let plans = [
        LocalPlan::des_loc(2, 3, 4),
        LocalPlan::diloco(2).with(|f| f.on_failure = OnFailure::RollBack),
        LocalPlan::local_sgd(4).with(|f| f.on_failure = OnFailure::Retry),
        LocalPlan::streaming_diloco(4, 2, 1, 0.5).with(|f| f.on_failure = OnFailure::RollBack),
        LocalPlan::local_adam(2).placed(Placement::Before),
    ];
    for plan in &plans {
        for non_finite in [NonFinite::Skip, NonFinite::Propagate] {
            for events in [&late[..], &early] {
                let options = Options { non_finite, ..Run::default().options };
                let max_norm = (non_finite == NonFinite::Skip).then_some(20.0);
                let gradients = Gradients::Rough;
                let run = Run { ranks: 2, gradients, max_norm, options, ..Run::default() };
                let (gpus, cpu) = (story(true, &run, plan, events), story(false, &run, plan, events));
                for (rank, (gpu, cpu)) in gpus.iter().zip(&cpu).enumerate() {
                    for (t, (gpu, cpu)) in gpu.iter().zip(cpu).enumerate() {
                        assert_eq!(gpu, cpu, "step {t} on rank {rank}, {non_finite:?}, {plan:?}");
                    }
                }
            }
        }
    }
}

/// A rank gets no memory for its part of an exchange: each worker has its own update only, and no rank waits.
#[test]
fn memory_that_one_rank_does_not_get_leaves_every_worker_its_own() {
    const OUT_OF_MEMORY: i32 = 2;
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    let plans = [LocalPlan::local_adam(2), LocalPlan::diloco(2)];
    for plan in &plans {
        let run = Run { ranks: 2, ..Run::default() };
        let never = LocalPlan::local_adam(100);
        let expected = on(false, &run, |world, run| {
            let rank = world.rank();
            let mut local = begin(run, &never, 2, world);
            (0..2).for_each(|_| drop(step(run, &mut local, (rank, rank))));
            (common::params(local.optimizer()), common::state(local.optimizer()))
        });
        let both = Barrier::new(2);
        let ends = two(|run, comm| {
            let rank = comm.rank();
            let mut local = begin(&run, plan, 2, comm);
            assert!(step(&run, &mut local, (rank, rank)).starts_with("0 applied"));
            let mb = local.micro_batch(1).unwrap();
            for i in 0..run.lens.len() {
                common::with_dtype(run.grads, &run.gradient(2, 0, rank, i), |grad| {
                    let grad = common::put(grad, &run.options.queue);
                    mb.grad(&common::name(i), grad.as_slice()).unwrap();
                });
            }
            mb.finish().unwrap();
            both.wait();
            if rank == 1 {
                fail(c"cuMemAlloc_v2", OUT_OF_MEMORY);
            }
            both.wait();
            let told = local.step(run.at(2)).unwrap_err().to_string();
            let queue = &run.options.queue;
            let params =
                (0..run.lens.len()).map(|i| common::fetch(local.param(&common::name(i)).unwrap(), queue));
            (told, params.collect::<Vec<_>>(), common::state(local.optimizer()))
        });
        for (rank, ((told, params, state), expected)) in ends.iter().zip(&expected).enumerate() {
            assert!(*params == expected.0 && *state == expected.1, "rank {rank} was told {told}");
        }
        assert_eq!(ends.iter().filter(|(told, ..)| told.contains("memory")).count(), 1, "{plan:?}");
    }
}

#[test]
fn what_a_gpu_cannot_exchange_is_refused() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let run = Run { ranks: 1, ..Run::default() };
    let told = on(true, &run, |world, run| {
        let rule = Arc::new(Elsewhere { beta1: Arc::new(AtomicU64::new(0.9f64.to_bits())), kernels: false });
        let plan = LocalPlan::diloco_with(2, Outer { rule, lr: 1.0 });
        let (comm, between) = Workers::split(Arc::clone(&world), 0).unwrap();
        let outer = LocalOptimizer::new(run.build(comm).unwrap(), between, plan).unwrap_err().to_string();
        let (comm, _) = Workers::split(world, 0).unwrap();
        let inner = run.build(comm).unwrap();
        let join = LocalOptimizer::join_through_rank0(inner, LocalPlan::local_adam(2), |_| unreachable!());
        [outer, join.unwrap_err().to_string()]
    });
    let [outer, join] = &told[0];
    assert!(outer.contains("no CUDA kernels") && outer.contains("AdamW"), "{outer}");
    assert!(join.contains("come and go") && join.contains("regroup"), "{join}");
}

/// Returns the bytes that a plan keeps, the most that an exchange holds temporarily, and those left at the end.
fn memory(gpus: bool, run: &Run, plan: &LocalPlan) -> [u64; 3] {
    let meter = Meter::new();
    let kept = on(gpus, run, |world, run| {
        let rank = world.rank();
        let (comm, between) = Workers::split(world, rank as u32).unwrap();
        let options = Options { meter: meter.clone(), ..run.options.clone() };
        let first = |p: &meshstep_tensor::Param, mut x: meshstep_tensor::SliceMut<'_>| {
            x.cast_from(Slice::from(&run.initial(p.name()[1..].parse().unwrap())[..]))
        };
        let inner = Optimizer::new(comm, run.layout(), run.groups(), first, options).unwrap();
        let before = meter.live(Category::State);
        let mut local = LocalOptimizer::new(inner, between, plan.clone()).unwrap();
        let kept = meter.live(Category::State) - before;
        meter.reset_peaks();
        (0..run.steps).for_each(|_| assert!(step(run, &mut local, (rank, rank)).contains("applied")));
        kept
    });
    [kept[0], meter.peak(Category::Staging), meter.live_total()]
}

#[test]
fn memory_of_workers_is_counted_and_given_back() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    const MODEL: u64 = 20_000;
    let run = Run { ranks: 1, lens: vec![MODEL as usize], steps: 4, ..Run::default() };
    for (plan, outer) in &[(LocalPlan::diloco(2), true), (LocalPlan::local_adam(2), false)] {
        let (gpu, cpu) = (memory(true, &run, plan), memory(false, &run, plan));
        assert_eq!((gpu[0], gpu[2]), (cpu[0], 0), "{plan:?}");
        assert_eq!(cpu[2], 0);
        // Copies to the host would be staged there.
        let outer = if *outer { 2 * 8 * MODEL } else { 0 };
        assert!(gpu[1] < cpu[1] + outer + 2 * MODEL, "{gpu:?} {cpu:?}");
    }
}
