//! Failed exchanges: nothing is applied on any worker, and every fragment follows its failure policy.

mod delayed;
mod inputs;
mod weights;

use meshstep_comm::loopback;
use meshstep_local::{
    Exchanged, LocalError, LocalOptimizer, LocalPlan, LocalStep, OnFailure, Placement, Veto, Workers,
};
use meshstep_optim::{AdamW, Sgd};
use meshstep_shard::{Error, Fault, Groups, NonFinite, Optimizer, Options, Outcome, Stage, Step, StepArgs};
use meshstep_tensor::{DType, Layout, Slice, SliceMut};

const LEN: usize = 100;

/// Action of a rank in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    /// Provides this gradient with this weight.
    Grad(f32, u64),
    /// Provides no gradient.
    Nothing,
    /// Leaves the run.
    Leaves,
}

/// State of a rank after a step: its parameters, its part of the state, and `t`.
#[derive(Clone, Debug, PartialEq)]
struct Has {
    params: Vec<f32>,
    state: Vec<Vec<f32>>,
    t: u64,
}

type Told = Result<LocalStep, LocalError>;

fn layout() -> Layout {
    Layout::builder().param("x", &[LEN], DType::F32).build().unwrap()
}

fn first(_: &meshstep_tensor::Param, mut x: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    let values: Vec<f32> = (0..LEN).map(|i| i as f32 / 8.0).collect();
    x.copy_from(Slice::from(&values[..]))
}

/// Trains workers of two ranks each; returns each rank's results and states step by step, until it leaves.
fn train(
    workers: usize,
    rules: &Groups,
    options: &Options,
    plan: &LocalPlan,
    steps: u64,
    does: impl Fn(usize, u64) -> Does + Sync,
) -> Vec<Vec<(Told, Has)>> {
    let ranks = loopback::spawn(2 * workers, |world| {
        let rank = world.rank();
        let (comm, between) = Workers::split(world, rank as u32 / 2).unwrap();
        let options = Options { meter: meshstep_tensor::Meter::new(), ..options.clone() };
        let inner = Optimizer::new(comm, layout(), rules.clone(), first, options).unwrap();
        let mut local = LocalOptimizer::new(inner, between, plan.clone()).unwrap();
        let mut all = Vec::new();
        for step in 0..steps {
            let does = does(rank, step);
            if does == Does::Leaves {
                break;
            }
            let weight = if let Does::Grad(_, weight) = does { weight } else { 1 };
            let mb = local.micro_batch(weight).unwrap();
            if let Does::Grad(grad, _) = does {
                mb.grad("x", &[grad; LEN][..]).unwrap();
            }
            mb.finish().unwrap();
            let told = local.step(StepArgs { lr: 0.5, ..StepArgs::default() });
            let params = local.param("x").unwrap().typed::<f32>().unwrap().to_vec();
            let state = local.state("x").unwrap();
            let slots = state.slots.iter().map(|(_, slot)| slot.typed::<f32>().unwrap().to_vec());
            all.push((told, Has { params, state: slots.collect(), t: state.t }));
        }
        all
    });
    ranks.unwrap()
}

fn worker(rank: usize) -> f32 {
    (rank / 2) as f32 + 1.0
}

fn propagate() -> Options {
    Options { stage: Stage::Zero1, non_finite: NonFinite::Propagate, ..Options::default() }
}

fn failed(told: &Told) -> Vec<(usize, Veto)> {
    told.as_ref().unwrap().exchanged.failed.clone()
}

/// The first worker's second rank has a NaN gradient in step 2, which reaches its parameters.
fn broken(rank: usize, step: u64) -> Does {
    Does::Grad(if (rank, step) == (3, 2) { f32::NAN } else { worker(rank) }, 1)
}

#[test]
fn a_nan_anywhere_and_nothing_is_applied_anywhere() {
    let rules = AdamW::default().into();
    let alone = LocalPlan::des_loc(100, None, None);
    let expected = train(2, &rules, &propagate(), &alone, 8, broken);
    let whole = LocalPlan::des_loc(4, 4, 4);
    let ends = train(2, &rules, &propagate(), &whole, 8, broken);
    for (rank, (end, expected)) in ends.iter().zip(&expected).enumerate() {
        // Both shards of worker 1 are NaN; rank 0 is the lowest rank that has seen NaN, in the mean.
        let veto = Veto::NotFinite { rank: 0 };
        assert_eq!(failed(&end[3].0), [0, 1, 2].map(|f| (f, veto)));
        assert_eq!(failed(&end[7].0), [0, 1, 2].map(|f| (f, veto)));
        for (step, ((_, has), (_, expected))) in end.iter().zip(expected).enumerate() {
            let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same(&has.params, &expected.params), "rank {rank}, step {step}");
            assert!(has.state.iter().zip(&expected.state).all(|(a, b)| same(a, b)), "rank {rank}, {step}");
            assert_eq!(has.t, expected.t);
        }
    }
    assert!(ends[0][7].1.params.iter().all(|x| x.is_finite()));
}

#[test]
fn what_is_sent_again_is_due_at_every_step_until_it_arrives() {
    let plan = LocalPlan::local_sgd(4).with(|f| f.on_failure = OnFailure::Retry);
    // Worker 1 breaks in step 2 and stays broken.
    let ends = train(2, &Sgd::default().into(), &propagate(), &plan, 7, broken);
    for end in &ends {
        let at: Vec<usize> = (0..7).filter(|&i| !failed(&end[i].0).is_empty()).collect();
        assert_eq!(at, [3, 4, 5, 6]);
    }
    // A worker that could not take one step can take the next.
    let does = |rank: usize, step| match (rank, step) {
        (1, 3) => Does::Nothing,
        _ => Does::Grad(worker(rank), 1),
    };
    let ends = train(2, &Sgd::default().into(), &Options::default(), &plan, 7, does);
    for (rank, end) in ends.iter().enumerate() {
        match (&end[3].0, rank) {
            (Err(LocalError::Shard(Error::Fault { rank: 1, fault })), 0 | 1) => {
                assert_eq!(fault, &Fault::MissingGradient { name: "x".into() });
            }
            (Ok(told), 2 | 3) => assert_eq!(told.exchanged.failed, [(0, Veto::Fault { rank: 0 })]),
            (told, _) => panic!("rank {rank}: {told:?}"),
        }
        let again = &end[4].0.as_ref().unwrap().exchanged;
        assert_eq!(again, &Exchanged { merged: vec![0], ..Exchanged::default() });
        assert_eq!(end[4].1.params, ends[0][4].1.params);
        assert_eq!(end[5].0.as_ref().unwrap().exchanged, Exchanged::default());
    }
    let before = plan.clone().placed(Placement::Before);
    let does = |rank: usize, step| match (rank, step) {
        (2, 4) => Does::Nothing,
        _ => Does::Grad(worker(rank), 1),
    };
    let placed = train(2, &Sgd::default().into(), &Options::default(), &before, 6, does);
    for (rank, end) in placed.iter().enumerate() {
        assert_eq!(end[4].0.is_err(), rank >= 2);
        assert_eq!(end[5].0.as_ref().unwrap().exchanged.merged, [0]);
    }
    // Four and five steps with the gradients 1 and 2, at lr 0.5.
    assert_eq!(ends[0][4].1.params[0], -(4.0 * 1.0 + 5.0 * 2.0) * 0.5 / 2.0);
}

#[test]
fn a_step_tells_of_its_own_failures_alone() {
    let plan = LocalPlan::local_sgd(2);
    // Worker 1 is gone while worker 0 cannot take its step.
    let does = |rank: usize, step| match (rank, step) {
        (0 | 1, 3) => Does::Nothing,
        (2 | 3, 3) => Does::Leaves,
        _ => Does::Grad(worker(rank), 1),
    };
    let ends = train(2, &Sgd::default().into(), &Options::default(), &plan, 6, does);
    for end in &ends[..2] {
        assert!(matches!(&end[3].0, Err(LocalError::Shard(Error::Fault { .. }))), "{:?}", end[3].0);
        assert_eq!(end[4].0.as_ref().unwrap().exchanged, Exchanged::default());
        assert!(matches!(&end[5].0, Err(LocalError::Workers { .. })), "{:?}", end[5].0);
    }
}

#[test]
fn who_rolls_back_goes_on_from_the_last_exchange() {
    // Worker 1 breaks in step 2 and is repaired after the failed exchange in step 3.
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2] {
        let plan = LocalPlan::local_sgd(2).with(|f| f.on_failure = OnFailure::RollBack);
        let options = Options { stage, ..propagate() };
        let ends = train(2, &Sgd::default().into(), &options, &plan, 6, broken);
        for end in &ends {
            let x = |step: usize| end[step].1.params[0];
            assert_eq!([x(1), x(3), x(5)], [-1.5, -1.5, -3.0], "{stage:?}");
            assert!(end[3].1.params == end[1].1.params && failed(&end[5].0).is_empty());
            assert_eq!(end[3].1.t, 4);
        }
    }
}

#[test]
fn an_outer_step_that_fails_moves_no_momentum() {
    let broken = |rank, step| Does::Grad(if (rank, step) == (3, 1) { f32::INFINITY } else { 2.0 }, 1);
    let plan = LocalPlan::diloco(1).with(|f| f.on_failure = OnFailure::RollBack);
    let ends = train(2, &Sgd::default().into(), &propagate(), &plan, 4, broken);
    for end in &ends {
        let x: Vec<f32> = end.iter().map(|(_, has)| has.params[0]).collect();
        let near = |x: f32, y: f32| (x - y).abs() < 1e-6;
        assert!(near(x[0], -1.33) && x[1] == x[0] && near(x[2], -3.227) && near(x[3], -5.6343), "{x:?}");
    }
}

#[test]
fn a_skipped_step_takes_part_and_does_not_count() {
    // By default a step with a non-finite gradient is skipped.
    for stage in [Stage::Replicated, Stage::Zero2] {
        let grad = |rank| [1.0, 3.0][rank / 2];
        let does = |rank, step| Does::Grad(if (rank, step) == (2, 1) { f32::NAN } else { grad(rank) }, 1);
        let options = Options { stage, ..Options::default() };
        let ends = train(2, &Sgd::default().into(), &options, &LocalPlan::local_sgd(2), 2, does);
        for (rank, end) in ends.iter().enumerate() {
            let told = end[1].0.as_ref().unwrap();
            assert_eq!(matches!(told.outcome, Outcome::Skipped { .. }), rank >= 2);
            assert_eq!((told.step, &told.exchanged.merged), (1, &vec![0]));
            // Two steps of 1 and one of 3, at lr 0.5: all of the parameter, on every rank.
            let expected: Vec<f32> = (0..LEN).map(|i| i as f32 / 8.0 - 1.25).collect();
            assert_eq!(end[1].1.params, expected, "{stage:?}, rank {rank}");
            assert_eq!(end[1].1.t, if rank < 2 { 2 } else { 1 });
        }
    }
}
