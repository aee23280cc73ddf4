//! Evaluation at a rule's own point: the same values on every rank and at every stage, and a way back that changes no bit.

use crate::common::{Gradients, PRECISIONS, Run, STAGES, WhichRule, cases, floats, params};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{Rule, ScheduleFreeAdamW, Sgd};
use meshstep_shard::{Error, Groups, Missing, Optimizer, Options, Outcome, Precision, Stage, Step, StepArgs};
use meshstep_tensor::{Category, DType, Layout, Meter, Param, SliceMut};
use proptest::prelude::*;
use std::sync::Arc;

/// Bits of all parameters: at each evaluation, and at the end.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluated {
    pub seen: Vec<Vec<Vec<u8>>>,
    pub end: Vec<Vec<u8>>,
}

/// A run of schedule-free AdamW in these types.
pub fn run_of((dtype, precision): (DType, Precision), gradients: Gradients) -> Run {
    let options = Options { precision, bucket_len: Some(150), ..Options::default() };
    let rule = WhichRule::ScheduleFree;
    Run { rule, dtype, grads: dtype, gradients, options, steps: 4, ..Run::default() }
}

/// Trains on this rank, and evaluates before the first step and after every step of `after`.
pub fn on_rank(comm: Arc<dyn Communicator>, run: &Run, after: &[u64]) -> Result<Evaluated, Error> {
    let mut opt = run.build(comm)?;
    let mut seen = Vec::new();
    for t in 0..=run.steps {
        if t > 0 {
            run.read_and_hand_over(&mut opt, t, 0)?;
            opt.step(run.at(t))?.outcome()?;
        }
        if after.contains(&t) {
            let trained = params(&opt);
            opt.begin_evaluation()?;
            opt.begin_evaluation()?; // does nothing
            assert!(opt.is_evaluating());
            seen.push(params(&opt));
            opt.end_evaluation()?;
            opt.end_evaluation()?;
            assert!(!opt.is_evaluating());
            assert_eq!(params(&opt), trained, "the way back after step {t} of {run:?}");
        }
    }
    Ok(Evaluated { seen, end: params(&opt) })
}

fn everywhere(run: &Run, after: &[u64]) -> Evaluated {
    let ranks = loopback::spawn(run.ranks, |comm| on_rank(comm, run, after).unwrap()).unwrap();
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "ranks end apart: {run:?}");
    ranks.into_iter().next().unwrap()
}

#[test]
fn every_stage_and_number_of_ranks_evaluates_at_the_same_point() {
    for recipe in PRECISIONS {
        let run = run_of(recipe, Gradients::Equal);
        let alone = Run { ranks: 1, ..run.stage(Stage::Replicated) };
        let one = everywhere(&alone, &[0, 1, 3]);
        assert_eq!(one.end, alone.run().params, "without an evaluation: {recipe:?}");
        assert_ne!(one.seen[2], one.end);
        for (i, stage) in STAGES.into_iter().enumerate() {
            for ranks in [[1, 2], [4, 3]][i % 2] {
                let all = everywhere(&Run { ranks, ..run.stage(stage) }, &[0, 1, 3]);
                assert_eq!(all, one, "{recipe:?} at {stage:?} on {ranks} ranks");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(6, 60), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn evaluations_at_any_time_change_nothing(
        lens in prop::collection::vec(prop_oneof![Just(0usize), Just(1), 2..200usize], 1..6),
        recipe in prop::sample::select(&PRECISIONS[..]),
        stage in prop::sample::select(&STAGES[..]),
        ranks in 1..5usize,
        after in prop::collection::vec(0..5u64, 0..4),
        seed in any::<u64>(),
    ) {
        prop_assume!(lens.iter().any(|&len| len > 0));
        let run = Run { lens, ranks, seed, ..run_of(recipe, Gradients::Equal).stage(stage) };
        let evaluated = everywhere(&run, &after);
        prop_assert_eq!(&evaluated.end, &run.run().params);
        let one = everywhere(&Run { ranks: 1, ..run.stage(Stage::Replicated) }, &after);
        prop_assert_eq!(&evaluated, &one);
    }
}

fn layout() -> Layout {
    Layout::builder().param("w", &[5], DType::F32).param("idle", &[3], DType::F32).build().unwrap()
}

fn built(comm: Arc<dyn Communicator>, rules: impl Into<Groups>, options: Options) -> Optimizer {
    let first = |p: &Param, mut out: SliceMut<'_>| out.copy_from((&vec![0.5f32; p.len()]).into());
    Optimizer::new(comm, layout(), rules, first, options).unwrap()
}

/// Takes a step with a gradient for `w` alone; returns true if it was applied.
fn step(opt: &mut Optimizer, gradient: f32, lr: f64) -> bool {
    let mb = opt.micro_batch(1).unwrap();
    mb.grad("w", &[gradient, 1.0, -1.0, 0.25, 3.0]).unwrap();
    mb.finish().unwrap();
    let outcome = opt.step(StepArgs { lr, ..StepArgs::default() }).unwrap().outcome().unwrap();
    matches!(outcome, Outcome::Applied { .. })
}

fn skipping() -> Options {
    Options { missing: Missing::SkipIfMissingEverywhere, ..Options::default() }
}

#[test]
fn the_point_is_the_average_and_parameters_without_updates_stay() {
    let rule = ScheduleFreeAdamW { beta1: 0.75, ..ScheduleFreeAdamW::default() };
    loopback::spawn(1, |comm| {
        let mut opt = built(comm, rule.clone(), skipping());
        let mut average = [0f64; 5];
        for t in 1..=6u64 {
            assert!(step(&mut opt, t as f32, 0.1));
            // The mean of all z so far.
            let state = opt.state("w").unwrap();
            let z: &[f32] = state.slots[0].1.typed().unwrap();
            average.iter_mut().zip(z).for_each(|(x, &z)| *x += (f64::from(z) - *x) / t as f64);
        }
        opt.begin_evaluation().unwrap();
        for (x, expected) in floats(&opt, "w").into_iter().zip(average) {
            assert!((f64::from(x) - expected).abs() < 1e-6, "{x}, not {expected}");
        }
        assert_eq!(floats(&opt, "idle"), vec![0.5; 3]);
        opt.end_evaluation().unwrap();
        assert_eq!((opt.state("idle").unwrap().t, floats(&opt, "idle")), (0, vec![0.5; 3]));
    })
    .unwrap();
}

#[test]
fn a_skipped_step_does_not_count() {
    let rule = ScheduleFreeAdamW { warmup_steps: 3, ..ScheduleFreeAdamW::default() };
    let ended = loopback::spawn(1, |comm| {
        let ends = [&[1.0, f32::NAN, 2.0, f32::INFINITY, -1.0][..], &[1.0, 2.0, -1.0]].map(|gradients| {
            let mut opt = built(Arc::clone(&comm), rule.clone(), skipping());
            for &gradient in gradients {
                assert_eq!(step(&mut opt, gradient, 0.1), gradient.is_finite());
            }
            opt.begin_evaluation().unwrap();
            let seen = floats(&opt, "w");
            opt.end_evaluation().unwrap();
            (seen, floats(&opt, "w"), opt.state("w").unwrap().t)
        });
        assert_eq!(ends[0], ends[1]);
        ends[0].2
    });
    assert_eq!(ended.unwrap(), [3]);
}

#[test]
fn nothing_else_happens_during_an_evaluation() {
    for stage in STAGES {
        loopback::spawn(2, |comm| {
            let options = Options { stage, ..skipping() };
            let mut opt = built(comm, ScheduleFreeAdamW::default(), options);
            step(&mut opt, 1.0, 0.1);
            let mb = opt.micro_batch(1).unwrap();
            mb.grad("w", &[1f32; 5]).unwrap();
            mb.finish().unwrap();
            let due = opt.begin_evaluation().unwrap_err();
            assert!(matches!(due, Error::StepDue), "{due}");
            opt.step(StepArgs::default()).unwrap().outcome().unwrap();
            let before = params(&opt);
            opt.begin_evaluation().unwrap();
            let at = params(&opt);
            let more = Layout::builder().param("more", &[1], DType::F32).build().unwrap();
            let refused = [
                opt.micro_batch(1).map(drop),
                opt.accumulate(1).map(drop),
                opt.step(StepArgs::default()).map(drop),
                opt.verify().map(drop),
                opt.verify_every(3),
                opt.repair().map(drop),
                opt.set_frozen(["w"], true),
                opt.restore_steps(7),
                opt.state("w").map(drop),
                opt.add_param_group(more, ScheduleFreeAdamW::default(), |_, _| Ok(())),
            ];
            for (i, refused) in refused.into_iter().enumerate() {
                assert!(matches!(refused, Err(Error::Evaluating)), "call {i} at {stage:?}: {refused:?}");
            }
            assert_eq!((params(&opt), opt.steps()), (at, 2));
            let mut w = [0f32; 5];
            opt.read("w", &mut w).unwrap();
            assert_eq!(w.to_vec(), floats(&opt, "w"));
            opt.end_evaluation().unwrap();
            assert_eq!(params(&opt), before);
            assert!(step(&mut opt, 1.0, 0.1));
        })
        .unwrap();
    }
}

#[test]
fn other_rules_evaluate_where_they_train() {
    assert!(Sgd::default().evaluation().is_none());
    loopback::spawn(2, |comm| {
        let mut opt = built(comm, Sgd::default(), skipping());
        step(&mut opt, 1.0, 0.1);
        let (before, bytes) = (params(&opt), opt.options().meter.live_total());
        Step::begin_evaluation(&mut opt).unwrap();
        assert_eq!((params(&opt), opt.options().meter.live_total()), (before, bytes));
        assert!(matches!(opt.micro_batch(1), Err(Error::Evaluating)));
        Step::end_evaluation(&mut opt).unwrap();
        assert!(step(&mut opt, 1.0, 0.1));
    })
    .unwrap();
}

/// The copy of the trained parameters: all of them at stage 0, this rank's share elsewhere; freed afterwards.
#[test]
fn memory_is_the_share_of_parameters_and_masters() {
    for (recipe, bytes) in [(PRECISIONS[0], [4, 0]), (PRECISIONS[2], [2, 4]), (PRECISIONS[4], [2, 2])] {
        for stage in STAGES {
            let run = Run { lens: vec![1000, 600], ranks: 2, ..run_of(recipe, Gradients::Grid).stage(stage) };
            let run = Run { options: Options { bucket_len: None, ..run.options.clone() }, ..run };
            loopback::spawn(2, |comm| {
                let mut opt = run.build(comm).unwrap();
                let owned = opt.params().map(|p| opt.state(p.name()).unwrap().range.len()).sum::<usize>();
                let live = |meter: &Meter| [Category::Params, Category::Master].map(|c| meter.live(c));
                let meter = opt.options().meter.clone();
                let before = live(&meter);
                opt.begin_evaluation().unwrap();
                let more = [0, 1].map(|i| live(&meter)[i] - before[i]);
                // Buckets are padded to whole cache lines.
                let most = |each: usize| (each * (owned + 128)) as _;
                for (more, each) in more.into_iter().zip(bytes) {
                    assert!(more >= (each * owned) as _ && more <= most(each), "{stage:?}: {more}");
                }
                opt.end_evaluation().unwrap();
                assert_eq!(live(&meter), before);
            })
            .unwrap();
        }
    }
}
