//! Steps with closures, and whole runs, of rules that are not L-BFGS.

use crate::common::{self, Run as Training, WhichRule};
use crate::lbfgs::STAGES;
use meshstep_optim::{DynamicLossScale, LossScale};
use meshstep_shard::{
    Clip, Combine, Error, Fault, MicroBatch, Optimizer, Options, Outcome, StepArgs, Stop, Until, WeightError,
};

const LENS: [usize; 3] = [5, 0, 70];
const RANKS: usize = 3;

fn training(stage: meshstep_shard::Stage, rule: WhichRule, combine: Combine) -> Training {
    let options = Options { combine, bucket_len: Some(64), ..Options::default() };
    Training { lens: LENS.to_vec(), ranks: RANKS, rule, options, ..Training::default() }.stage(stage)
}

/// Reads every parameter's values, from the two units.
fn read(mb: &MicroBatch<'_>) -> Result<Vec<Vec<f32>>, Error> {
    let (first, others) = (mb.gather("p0")?, mb.gather("u0")?);
    let values = |i: usize| {
        let unit = if i == 0 { &first } else { &others };
        Ok(unit.param(&common::name(i))?.typed::<f32>()?.to_vec())
    };
    (0..LENS.len()).map(values).collect()
}

/// Each rank pulls every element towards its own number: loss |x - rank|^2 / 2.
fn pull(mb: &MicroBatch<'_>, rank: usize) -> Result<f64, Error> {
    let mut loss = 0.0;
    for (i, values) in read(mb)?.into_iter().enumerate() {
        let name = common::name(i);
        let away: Vec<f32> = values.iter().map(|x| x - rank as f32).collect();
        loss += away.iter().map(|a| f64::from(a * a) / 2.0).sum::<f64>();
        mb.grad(&name, &away[..])?;
    }
    Ok(loss)
}

#[test]
fn a_step_with_a_closure_is_a_step_and_tells_the_loss() {
    for stage in STAGES {
        for combine in [Combine::Mean, Combine::Sum, Combine::Weighted] {
            let run = training(stage, WhichRule::AdamW, combine);
            let weight = |rank: usize| rank as u64 + 1;
            let plain = meshstep_comm::loopback::spawn(RANKS, |comm| {
                let rank = comm.rank();
                let mut opt = run.build(comm).unwrap();
                let mut losses = Vec::new();
                for t in 1..=4 {
                    let mb = opt.micro_batch(weight(rank)).unwrap();
                    losses.push(pull(&mb, rank).unwrap());
                    mb.finish().unwrap();
                    opt.step(run.at(t)).unwrap().outcome().unwrap();
                }
                (common::params(&opt), losses)
            })
            .unwrap();
            let told = meshstep_comm::loopback::spawn(RANKS, |comm| {
                let rank = comm.rank();
                let mut opt = run.build(comm).unwrap();
                let step = |t| opt.step_with(run.at(t), weight(rank), |mb| pull(mb, rank)).unwrap();
                let steps: Vec<_> = (1..=4).map(step).collect();
                (common::params(&opt), steps)
            })
            .unwrap();
            for (rank, (params, steps)) in told.iter().enumerate() {
                assert_eq!(*params, plain[rank].0, "{stage:?} {combine:?}");
                for (t, step) in steps.iter().enumerate() {
                    assert_eq!(step.loss, told[0].1[t].loss);
                    assert!(matches!(step.outcome, Outcome::Applied { .. }));
                    let losses = plain.iter().map(|p| p.1[t]);
                    let weights =
                        (0..RANKS).map(|r| if combine == Combine::Weighted { weight(r) } else { 1 });
                    let total: u64 = if combine == Combine::Sum { 1 } else { weights.clone().sum() };
                    let expected: f64 =
                        losses.zip(weights).map(|(l, w)| l * w as f64).sum::<f64>() / total as f64;
                    assert!((step.loss - expected).abs() <= 1e-14 * expected, "{} {expected}", step.loss);
                }
            }
        }
    }
}

#[test]
fn a_closure_that_fails_costs_a_step_and_nothing_else() {
    for stage in STAGES {
        let run = training(stage, WhichRule::AdamW, Combine::Mean);
        let ends = meshstep_comm::loopback::spawn(RANKS, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            for t in 1..=4 {
                if t == 2 {
                    let before = (common::params(&opt), common::state(&opt));
                    let failed = opt.step_with(run.at(t), 1, |mb| {
                        if rank == 1 { read(mb).and(Err(Error::NoRanks)) } else { pull(mb, rank) }
                    });
                    match rank {
                        1 => assert!(matches!(failed, Err(Error::Closure { .. })), "{failed:?}"),
                        _ => {
                            assert!(matches!(failed, Err(Error::ClosureElsewhere { rank: 1 })), "{failed:?}")
                        }
                    }
                    assert_eq!((common::params(&opt), common::state(&opt)), before);
                }
                opt.step_with(run.at(t), 1, |mb| pull(mb, rank)).unwrap();
            }
            let without = |opt: &Optimizer| (common::params(opt), common::state(opt));
            without(&opt)
        })
        .unwrap();
        let plain = meshstep_comm::loopback::spawn(RANKS, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            for t in 1..=4 {
                opt.step_with(run.at(t), 1, |mb| pull(mb, rank)).unwrap();
            }
            (common::params(&opt), common::state(&opt))
        })
        .unwrap();
        assert_eq!(ends, plain, "{stage:?}");
    }
}

#[test]
fn a_gradient_that_is_missing_is_the_steps_own_error() {
    let run = training(STAGES[1], WhichRule::AdamW, Combine::Mean);
    meshstep_comm::loopback::spawn(RANKS, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        let before = common::params(&opt);
        let told = opt.step_with(run.at(1), 1, |mb| {
            if rank == 2 { mb.grad("p0", &[0f32; 5][..]).map(|()| 1.0) } else { pull(mb, rank) }
        });
        let expected = Fault::MissingGradient { name: "p2".into() };
        assert!(matches!(told, Err(Error::Fault { rank: 2, fault }) if fault == expected));
        assert_eq!(common::params(&opt), before);
        opt.step_with(run.at(1), 1, |mb| pull(mb, rank)).unwrap();
    })
    .unwrap();
}

#[test]
fn a_run_ends_at_a_tolerance_or_a_bound() {
    for stage in STAGES {
        let run = training(stage, WhichRule::Sgd, Combine::Mean);
        let go = |until: Until| {
            let ends = meshstep_comm::loopback::spawn(RANKS, |comm| {
                let rank = comm.rank();
                let mut opt = run.build(comm).unwrap();
                let at = |_| StepArgs { lr: 0.5, ..StepArgs::default() };
                (opt.minimize(until, at, 1, |mb| pull(mb, rank)).unwrap(), common::params(&opt))
            })
            .unwrap();
            assert!(ends.iter().all(|end| *end == ends[0]));
            ends[0].0.clone()
        };
        let bound = go(Until { max_iter: 3, ..Until::default() });
        assert_eq!(
            (bound.stop, bound.iterations, bound.evaluations, bound.history.len()),
            (Stop::Iterations, 3, 3, 3)
        );
        let flat = go(Until { tolerance_change: 0.0, tolerance_grad: 1e-4, ..Until::default() });
        assert!(flat.stop == Stop::Gradient && flat.grad_norm <= 1e-4, "{flat:?}");
        let still = go(Until { tolerance_grad: 0.0, tolerance_change: 1e-6, ..Until::default() });
        assert!(still.stop == Stop::Loss, "{still:?}");
        // Ranks 0, 1, 2 pull in different directions: each element settles at 1, 1/3 from the mean of squares.
        assert!((still.loss - 75.0 / 3.0).abs() < 1e-3, "{still:?}");
        println!("{stage:?}: {} and {} iterations", flat.iterations, still.iterations);
    }
}

/// Constant losses do not end a run if nothing moved: skipped steps, rates of 0, a rule's first call.
#[test]
fn a_run_does_not_end_where_nothing_moved() {
    // Overflows from 256 down to 16, and whenever the scale grows beyond 8 again.
    let scale = DynamicLossScale { init_scale: 256.0, growth_interval: 2, ..DynamicLossScale::default() };
    let scale = LossScale::Dynamic(scale);
    for (rule, loss_scale, warm) in [
        (WhichRule::Sgd, Some(scale), 0),
        (WhichRule::Sgd, None, 3),
        (WhichRule::Adopt, None, 0),
        (WhichRule::QhAdopt, None, 0),
    ] {
        let run = training(STAGES[1], rule, Combine::Mean);
        let options = Options { loss_scale, ..run.options.clone() };
        let run = Training { options, ..run };
        let ends = meshstep_comm::loopback::spawn(RANKS, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            let until = Until { tolerance_change: 1e-6, max_iter: 60, ..Until::default() };
            let at = |t| StepArgs { lr: if t <= warm { 0.0 } else { 0.1 }, ..StepArgs::default() };
            let scaled = |mb: &MicroBatch<'_>| {
                let scale = mb.loss_scale() as f32;
                let scale = if scale > 8.0 { f32::INFINITY } else { scale };
                let mut loss = 0.0;
                for i in 0..LENS.len() {
                    let name = common::name(i);
                    let x = mb.param(&name)?.typed::<f32>()?;
                    let away: Vec<f32> = x.iter().map(|x| x - rank as f32 - 0.5).collect();
                    loss += away.iter().map(|a| f64::from(a * a) / 2.0).sum::<f64>();
                    mb.grad(&name, &away.iter().map(|a| a * scale).collect::<Vec<_>>()[..])?;
                }
                Ok::<_, Error>(loss)
            };
            opt.minimize(until, at, 1, scaled).unwrap()
        })
        .unwrap();
        let end = &ends[0];
        assert!(end.loss < 0.7 * end.history[0].loss, "{rule:?}: {end:?}");
        assert_eq!(end.iterations < end.evaluations, loss_scale.is_some(), "{rule:?}: {end:?}");
    }
}

/// A rank that would continue waits for one that has ended.
#[test]
fn ranks_with_different_ends_are_told() {
    let run = training(STAGES[1], WhichRule::Sgd, Combine::Mean);
    meshstep_comm::loopback::spawn(RANKS, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        let until = |max_iter| Until { max_iter, tolerance_change: 0.0, ..Until::default() };
        let mut go = |until| opt.minimize(until, |_| StepArgs::default(), 1, |mb| pull(mb, rank));
        let told = go(until(2 + rank as u64 / 2)).unwrap_err();
        assert_eq!(told.to_string(), "ranks disagree on max_iter: rank 0 has 2, rank 2 has 3");
        assert_eq!(go(until(2)).unwrap().iterations, 2);
    })
    .unwrap();
}

/// Rank 1 gives too large a weight, or has already begun a micro-batch of a step.
#[test]
fn a_closure_that_cannot_be_called_costs_a_step_and_nothing_else() {
    // With sharded parameters the others' closures would wait for this rank's gathers.
    for stage in STAGES.into_iter().filter(|&stage| stage != meshstep_shard::Stage::Zero3) {
        for clip in [Clip::AfterReduce, Clip::BeforeReduce] {
            for under_way in [None, Some(false), Some(true)] {
                let two = stage == meshstep_shard::Stage::Zero2;
                if two && (clip == Clip::BeforeReduce || under_way == Some(false)) {
                    continue; // refused, or sent already
                }
                let run = training(stage, WhichRule::Sgd, Combine::Weighted);
                let run = Training { options: Options { clip, ..run.options.clone() }, ..run };
                meshstep_comm::loopback::spawn(RANKS, |comm| {
                    let rank = comm.rank();
                    let mut opt = run.build(comm).unwrap();
                    let before = common::params(&opt);
                    if let Some(last) = under_way.filter(|_| rank == 1) {
                        let mb = if last { opt.micro_batch(1) } else { opt.accumulate(1) }.unwrap();
                        pull(&mb, rank).unwrap();
                        mb.finish().unwrap();
                    }
                    let weight = if rank == 1 && under_way.is_none() { (1 << 24) + 1 } else { 1 };
                    match opt.step_with(run.at(1), weight, |mb| pull(mb, rank)) {
                        Err(Error::Weights(WeightError::TooLarge { .. }) | Error::StepDue) => {
                            assert_eq!(rank, 1)
                        }
                        Err(Error::ClosureElsewhere { rank: 1 }) => assert_ne!(rank, 1),
                        other => panic!("{stage:?} {clip:?} {under_way:?} rank {rank}: {other:?}"),
                    }
                    assert_eq!(common::params(&opt), before);
                    opt.step_with(run.at(1), 1, |mb| pull(mb, rank)).unwrap();
                })
                .unwrap();
            }
        }
    }
}
