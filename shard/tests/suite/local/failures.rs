//! Failed exchanges: nothing is applied on any worker, and every fragment follows its failure policy.

use meshstep_comm::loopback;
use meshstep_optim::{AdamW, Sgd};
use meshstep_shard::local::{
    Exchanged, Fragment, LocalError, LocalOptimizer, LocalPlan, LocalStep, OnFailure, Placement, Select,
    Timing, Veto, Weights, What, Workers,
};
use meshstep_shard::{
    Error, Fault, Groups, Master, Missing, NonFinite, Optimizer, Options, Outcome, Precision, Stage, Step,
    StepArgs,
};
use meshstep_tensor::{DType, Layout, Slice, SliceMut, bf16};
use std::sync::Arc;

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

#[test]
fn weights_count_those_who_have_tokens() {
    let plan = LocalPlan::local_sgd(2).with(|f| f.weights = Weights::Tokens);
    let run = |tokens: fn(usize, u64) -> u64| {
        let does = move |rank: usize, step| Does::Grad(worker(rank), tokens(rank, step));
        train(3, &Sgd::default().into(), &Options::default(), &plan, 4, does)
    };
    // Gradients of 1, 2 and 3 at lr 0.5: two steps move by -1, -2, -3.
    let ends = run(|rank, _| [1, 2, 5][rank / 2]);
    assert!(ends.iter().all(|end| end[1].1.params[0] == -(1.0 + 4.0 + 15.0) / 8.0));
    let ends = run(|rank, _| [0, 3, 0][rank / 2]);
    assert!(ends.iter().all(|end| end[1].1.params[0] == -2.0 && end[3].1.params[0] == -4.0));
    // Tokens count since the last exchange.
    let ends = run(|rank, step| if (step < 2) == (rank < 2) { 1 } else { 0 });
    assert!(ends.iter().all(|end| end[1].1.params[0] == -1.0 && end[3].1.params[0] == -1.0 - 2.5));
    // Tokens of a skipped step do not count.
    let does = |rank: usize, step| {
        let skipped = (rank / 2, step) == (0, 0);
        Does::Grad(if skipped { f32::NAN } else { worker(rank) }, if skipped { 1000 } else { 1 })
    };
    let ends = train(3, &Sgd::default().into(), &Options::default(), &plan, 2, does);
    assert!(ends.iter().all(|end| (end[1].1.params[0] + (0.5 + 4.0 + 6.0) / 5.0).abs() < 1e-6));
    // Fragments that are sent together may have different weights.
    let part = |range, period| Fragment {
        params: Select::Elements { name: "x".into(), range },
        weights: Weights::Tokens,
        ..Fragment::mean(What::Params, Timing::every(period))
    };
    let parts = LocalPlan::new(vec![part(0..50, 2), part(50..LEN, 4)]);
    let does = |rank, step| Does::Grad(worker(rank), if rank < 2 && step < 2 { 3 } else { 1 });
    for end in train(2, &Sgd::default().into(), &Options::default(), &parts, 4, does) {
        let moved = |i: usize| end[3].1.params[i] - i as f32 / 8.0;
        // (3 x -1 + -2) / 4, and then the plain mean of -1 and -2; four steps in one exchange, weighted 8 to 4.
        assert!((moved(0) + 1.25 + 1.5).abs() < 1e-5 && (moved(99) + 8.0 / 3.0).abs() < 1e-5);
    }
    let ends = run(|_, _| 0);
    for end in &ends {
        assert_eq!(failed(&end[1].0), [(0, Veto::NoWeight { fragment: 0 })]);
    }
    assert_eq!([0, 2, 4].map(|rank| ends[rank][3].1.params[0]), [-2.0, -4.0, -6.0]);
}

#[test]
fn who_enters_counts_from_the_second_exchange_on() {
    let ends = loopback::spawn(3, |world| {
        let rank = world.rank();
        let (comm, between) = Workers::split(world, rank as u32).unwrap();
        let inner = Optimizer::new(comm, layout(), Sgd::default(), first, Options::default()).unwrap();
        let mut local = LocalOptimizer::new(inner, between, LocalPlan::local_sgd(1)).unwrap();
        if rank == 2 {
            local.enter();
        }
        let mut x = Vec::new();
        for _ in 0..2 {
            let mb = local.micro_batch(1).unwrap();
            mb.grad("x", &[[2.0f32, 4.0, 12.0][rank]; LEN][..]).unwrap();
            mb.finish().unwrap();
            let _ = local.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap();
            x.push(local.param("x").unwrap().typed::<f32>().unwrap()[0]);
        }
        x
    });
    assert!(ends.unwrap().iter().all(|x| *x == [-3.0, -9.0]));
    // Values with weight 0 may be anything.
    let ends = loopback::spawn(3, |world| {
        let rank = world.rank();
        let (comm, between) = Workers::split(world, rank as u32).unwrap();
        let inner = Optimizer::new(comm, layout(), Sgd::default(), first, propagate()).unwrap();
        let mut local = LocalOptimizer::new(inner, between, LocalPlan::local_sgd(1)).unwrap();
        if rank == 2 {
            local.enter();
        }
        let mb = local.micro_batch(1).unwrap();
        mb.grad("x", &[[2.0f32, 4.0, f32::NAN][rank]; LEN][..]).unwrap();
        mb.finish().unwrap();
        let _ = local.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap();
        local.param("x").unwrap().typed::<f32>().unwrap()[0]
    });
    assert_eq!(ends.unwrap(), [-3.0; 3]);
}

#[test]
fn without_the_others_a_worker_hears_of_it_and_goes_on() {
    let does = |rank: usize, step| match rank {
        3 if step == 4 => Does::Leaves,
        2 if step == 4 => Does::Leaves,
        _ => Does::Grad(worker(rank), 1),
    };
    let plan = LocalPlan::local_sgd(3).with(|f| f.on_failure = OnFailure::RollBack);
    let ends = train(2, &Sgd::default().into(), &Options::default(), &plan, 8, does);
    assert_eq!(ends[2].len(), 4);
    for end in &ends[..2] {
        let x = |step: usize| end[step].1.params[0];
        assert!(matches!(end[5].0, Err(LocalError::Workers { .. })), "{:?}", end[5].0);
        // Back to the exchange of step 2, then steps of the worker alone.
        assert_eq!([x(2), x(5), x(6), x(7)], [-2.25, -2.25, -2.75, -3.25]);
        assert!(end[6].0.is_ok() && end[7].0.is_ok());
    }
}

#[test]
fn what_was_sent_and_is_not_finite_fails_where_it_arrives() {
    let plan = LocalPlan::local_sgd(3).with(|f| {
        f.timing.delay = 2;
        f.on_failure = OnFailure::RollBack;
    });
    let ends = train(2, &Sgd::default().into(), &propagate(), &plan, 9, broken);
    for end in &ends {
        let sent: Vec<usize> = (0..9).filter(|&i| end[i].0.as_ref().unwrap().exchanged.sent == [0]).collect();
        assert_eq!(sent, [2, 5, 8]);
        assert_eq!(failed(&end[4].0), [(0, Veto::NotFinite { rank: 0 })]);
        assert_eq!(end[4].1.params[0], 0.0);
        assert_eq!(end[7].0.as_ref().unwrap().exchanged.merged, [0]);
    }
    // From 0 after step 4: one step each, sent; then the mean of it, and two steps alone.
    assert_eq!([0, 2].map(|rank| ends[rank][7].1.params[0]), [-0.75 - 1.0, -0.75 - 2.0]);
}

#[test]
fn what_is_sent_again_and_late_is_not_sent_twice() {
    let plan = LocalPlan::local_sgd(3).with(|f| (f.timing.delay, f.on_failure) = (2, OnFailure::Retry));
    let does = |rank: usize, step| match (rank, step) {
        (1, 2 | 3) => Does::Nothing,
        _ => Does::Grad(worker(rank), 1),
    };
    let ends = train(2, &Sgd::default().into(), &Options::default(), &plan, 12, does);
    for end in &ends[2..] {
        let steps = |of: fn(&Exchanged) -> bool| -> Vec<usize> {
            (0..12).filter(|&i| of(&end[i].0.as_ref().unwrap().exchanged)).collect()
        };
        assert_eq!(steps(|e| e.failed == [(0, Veto::Fault { rank: 0 })]), [2, 3]);
        assert_eq!(steps(|e| e.sent == [0]), [4, 8, 11]);
        assert_eq!(steps(|e| e.merged == [0]), [6, 10]);
    }
}

#[test]
fn nobody_waits_for_a_worker_that_has_lost_a_rank() {
    let told = std::sync::Barrier::new(4);
    let ends = loopback::spawn(4, |world| {
        let rank = world.rank();
        let (comm, between) = Workers::split(world, rank as u32 / 2).unwrap();
        let options = Options::default();
        let inner = Optimizer::new(Arc::clone(&comm), layout(), Sgd::default(), first, options).unwrap();
        let mut local = LocalOptimizer::new(inner, between, LocalPlan::local_sgd(2)).unwrap();
        if rank == 3 {
            comm.abort();
            told.wait();
            return None;
        }
        let mut step = || {
            let mb = local.micro_batch(1)?;
            mb.grad("x", &[1.0f32; LEN][..])?;
            mb.finish()?;
            local.step(StepArgs { lr: 0.5, ..StepArgs::default() })
        };
        let error = [step(), step()].into_iter().find_map(Result::err);
        // The worker's ranks stay until the others have noticed.
        told.wait();
        error
    });
    let ends = ends.unwrap();
    assert!(matches!(ends[0], Some(LocalError::Workers { .. })), "{ends:?}");
    assert!(matches!(ends[1], Some(LocalError::Workers { .. })), "{ends:?}");
    assert!(matches!(ends[2], Some(LocalError::Shard(Error::Comm(_)))), "{ends:?}");
}

#[test]
fn masters_are_averaged_and_differences_travel_in_bf16() {
    let precision = Precision { master: Master::F32, ..Precision::default() };
    // At lr 0.01 the change is too small for bf16 parameters, which would lose it; at lr 1 they follow.
    let table = [
        (Stage::Zero1, None, 0.01),
        (Stage::Replicated, None, 1.0),
        (Stage::Zero1, None, 1.0),
        (Stage::Zero2, Some(DType::BF16), 0.01),
    ];
    for (stage, wire, lr) in table {
        let options = Options { stage, precision, ..Options::default() };
        let ends = loopback::spawn(4, |world| {
            let worker = world.rank() / 2;
            let (comm, between) = Workers::split(world, worker as u32).unwrap();
            let layout = Layout::builder().param("x", &[LEN], DType::BF16).build().unwrap();
            let first = |_: &_, mut x: SliceMut<'_>| x.cast_from(Slice::from(&[100.0f32; LEN][..]));
            let options = Options { meter: meshstep_tensor::Meter::new(), ..options.clone() };
            let inner = Optimizer::new(comm, layout, Sgd::default(), first, options).unwrap();
            let plan = LocalPlan::local_sgd(2).with(|f| f.wire = wire);
            let mut local = LocalOptimizer::new(inner, between.clone(), plan).unwrap();
            for _ in 0..2 {
                let mb = local.micro_batch(1).unwrap();
                mb.grad("x", &[bf16::from_f32(worker as f32 + 1.0); LEN][..]).unwrap();
                mb.finish().unwrap();
                let _ = local.step(StepArgs { lr, ..StepArgs::default() }).unwrap();
            }
            let state = local.state("x").unwrap();
            let master = state.master.unwrap().typed::<f32>().unwrap().to_vec();
            let params = local.param("x").unwrap().typed::<bf16>().unwrap().to_vec();
            (master, params, between.across.stats().total().bytes)
        });
        for (master, params, _) in &ends.unwrap() {
            let expected = 100.0 - 3.0 * lr as f32;
            let near = |x: &f32| (x - expected).abs() < if wire.is_some() { 2e-4 } else { 1e-5 };
            assert!(master.iter().all(|x| near(x) && x == &master[0]), "{stage:?}: {:?}", &master[..2]);
            assert!(params.iter().all(|x| *x == bf16::from_f32(expected)) && params.len() == LEN);
        }
    }
}

#[test]
fn bad_input_is_every_rank_s_error() {
    let made = |plan: fn(usize) -> LocalPlan, options: Options, dtype: DType, value: fn(usize) -> f32| {
        let all = loopback::spawn(4, |world| {
            let (rank, worker) = (world.rank(), world.rank() / 2);
            let (comm, between) = Workers::split(world, worker as u32).unwrap();
            let layout = Layout::builder().param("x", &[LEN], dtype).build().unwrap();
            let first = |_: &_, mut x: SliceMut<'_>| x.cast_from(Slice::from(&[value(worker); LEN][..]));
            let options = Options { meter: meshstep_tensor::Meter::new(), ..options.clone() };
            let inner = Optimizer::new(comm, layout, AdamW::default(), first, options).unwrap();
            LocalOptimizer::new(inner, between, plan(rank)).map(drop).unwrap_err().to_string()
        });
        let all = all.unwrap();
        assert!(all.iter().all(|error| *error == all[0]), "{all:?}");
        all[0].clone()
    };
    let plain = Options::default;
    let same = |_: usize| 1.0f32;
    assert_eq!(
        made(|_| LocalPlan::local_sgd(0), plain(), DType::F32, same),
        "fragment 0 has the period 0; use 1 or more, or None for never"
    );
    assert_eq!(
        made(|rank| LocalPlan::local_sgd(if rank == 3 { 5 } else { 4 }), plain(), DType::F32, same),
        "ranks disagree on period of fragment 0: rank 0 has 4, rank 3 has 5"
    );
    assert_eq!(
        made(|_| LocalPlan::local_sgd(4), plain(), DType::F32, |worker| worker as f32),
        "rank 2 of all workers' ranks begins with other values than the first worker; give all workers the same"
    );
    let precision = Precision { master: Master::Remainder, ..Precision::default() };
    assert_eq!(
        made(|_| LocalPlan::local_sgd(4), Options { precision, ..plain() }, DType::BF16, same),
        "replicas that drift are averaged, and bf16 remainders cannot be; use `Master::F32`"
    );
    let error = |rules: &Groups, plan: &LocalPlan| {
        let told = loopback::spawn(1, |world| {
            let (comm, between) = Workers::split(world, 0).unwrap();
            let options = Options { missing: Missing::Zero, ..Options::default() };
            let inner = Optimizer::new(comm, layout(), rules.clone(), first, options).unwrap();
            LocalOptimizer::new(inner, between, plan.clone()).map(|local| local.warnings().len())
        });
        told.unwrap().remove(0)
    };
    // One worker alone is valid; warnings are returned on request.
    let apart = LocalPlan::des_loc(2, 4, None);
    assert_eq!(error(&AdamW::default().into(), &apart).unwrap(), 1);
    assert!(matches!(error(&Sgd::default().into(), &apart), Err(LocalError::NoState { .. })));
    let outer = apart.with(|f| {
        if f.what == What::Params {
            f.taken = 2.0
        }
    });
    assert!(matches!(error(&AdamW::default().into(), &outer), Err(LocalError::Taken { .. })));
}

/// Before an update the tokens of the steps before it count; before the first step there are none, and all workers count equally.
#[test]
fn tokens_weigh_what_is_exchanged_before_an_update() {
    for period in [1, 3] {
        let plan = LocalPlan::local_sgd(period);
        let plan = plan.with(|f| (f.weights, f.timing.placement) = (Weights::Tokens, Placement::Before));
        // Gradients of 1 and 2 at lr 0.5, with 1 and 3 tokens.
        let does = |rank: usize, _| Does::Grad(worker(rank), 1 + 2 * (rank / 2) as u64);
        let ends = train(2, &Sgd::default().into(), &Options::default(), &plan, 7, does);
        for (rank, end) in ends.iter().enumerate() {
            for (step, (told, _)) in (0u64..).zip(end) {
                let Exchanged { merged, failed, .. } = &told.as_ref().unwrap().exchanged;
                let due = usize::from(step.is_multiple_of(period));
                assert_eq!((merged.len(), failed.len()), (due, 0), "step {step}, period {period}");
            }
            // Six steps averaged, and one of the worker alone.
            let together = -6.0 * (0.5 + 3.0) / 4.0;
            assert!((end[6].1.params[0] - (together - 0.5 * worker(rank))).abs() < 1e-5, "period {period}");
        }
    }
}
