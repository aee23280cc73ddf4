//! Loss scaling through sharded steps: the scale that divides a gradient, the next scale, and the agreement of ranks.

use crate::common::STAGES;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{DynamicLossScale, LossScale, LossScaleState, Sgd};
use meshstep_shard::{Error, Fault, Optimizer, Options, Outcome, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Param, SliceMut};
use std::sync::Arc;

const PATTERN: &str = "110001000001110000";

fn zeros(_: &Param, _: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

fn dynamic(init_scale: f64, growth_interval: u64) -> LossScale {
    LossScale::Dynamic(DynamicLossScale { init_scale, growth_interval, ..DynamicLossScale::default() })
}

/// One parameter `w` = 0, updated by plain SGD.
fn build(comm: Arc<dyn Communicator>, options: Options) -> Result<Optimizer, Error> {
    let layout = Layout::builder().param("w", &[3], DType::F32).build().unwrap();
    Optimizer::new(comm, layout, Sgd::default(), zeros, options)
}

fn scaled(stage: Stage, loss_scale: LossScale) -> Options {
    Options { stage, loss_scale: Some(loss_scale), ..Options::default() }
}

/// A step with the loss `w`, scaled: the gradient handed over is the scale, or infinite.
fn step(opt: &mut Optimizer, at: StepArgs, overflow: bool) -> Result<Outcome, Error> {
    let mb = opt.micro_batch(1).unwrap();
    let scale = mb.loss_scale() as f32;
    mb.grad("w", &[if overflow { f32::INFINITY } else { scale }, scale, scale][..]).unwrap();
    mb.finish().unwrap();
    opt.step(at)?.outcome()
}

fn w(opt: &Optimizer) -> f32 {
    crate::common::floats(opt, "w")[1]
}

fn at_one() -> StepArgs {
    StepArgs { lr: 1.0, ..StepArgs::default() }
}

/// The true gradient is 1. Divided by the scale that comes next instead, it would be 1/2 from the second step on.
#[test]
fn gradients_are_divided_by_the_scale_their_loss_had() {
    for stage in STAGES {
        loopback::spawn(2, |comm| {
            let mut opt = build(comm, scaled(stage, dynamic(4.0, 1))).unwrap();
            for (t, scale) in [(1.0, 4.0), (2.0, 8.0), (3.0, 16.0)] {
                assert_eq!(opt.loss_scale(), scale, "{stage:?}");
                let outcome = step(&mut opt, at_one(), false).unwrap();
                assert!(
                    matches!(outcome, Outcome::Applied { norm, .. } if norm == 3f64.sqrt()),
                    "{outcome:?}"
                );
                assert_eq!(w(&opt), -t, "{stage:?}");
            }
        })
        .unwrap();
    }
}

/// Micro-batches of one step share its scale; the caller's factor and clipping come on top.
#[test]
fn the_scale_goes_with_micro_batches_factors_and_clipping() {
    for stage in STAGES {
        loopback::spawn(2, |comm| {
            let mut opt = build(comm, scaled(stage, dynamic(4.0, 1))).unwrap();
            let mb = opt.accumulate(1).unwrap();
            mb.grad("w", &[mb.loss_scale() as f32; 3][..]).unwrap();
            mb.finish().unwrap();
            let _ = step(&mut opt, at_one(), false).unwrap();
            assert_eq!((w(&opt), opt.loss_scale()), (-1.0, 8.0));
            let _ = step(&mut opt, StepArgs { grad_scale: 0.25, ..at_one() }, false).unwrap();
            assert_eq!((w(&opt), opt.loss_scale()), (-1.25, 16.0));
            let clipped = step(&mut opt, StepArgs { max_norm: Some(0.5), ..at_one() }, false).unwrap();
            let Outcome::Applied { norm, coef, .. } = clipped else { panic!("{clipped:?}") };
            assert_eq!((norm, coef), (3f64.sqrt(), 0.5 / (3f64.sqrt() + 1e-6)), "{stage:?}");
            assert!((w(&opt) + 1.25 + coef as f32).abs() < 1e-6);
        })
        .unwrap();
    }
}

/// An overflow on one rank changes every rank's scale as the documented table says, across a save and a restore.
#[test]
fn an_overflow_on_one_rank_is_every_ranks() {
    let rule =
        LossScale::Dynamic(DynamicLossScale { growth_interval: 2, hysteresis: 2, ..Default::default() });
    for stage in STAGES {
        for save_before in [0, 5, 12, 17] {
            loopback::spawn(2, |comm| {
                let rank = comm.rank();
                let mut opt = build(Arc::clone(&comm), scaled(stage, rule)).unwrap();
                let mut expected = rule.start();
                for (i, overflow) in PATTERN.chars().map(|c| c == '1').enumerate() {
                    if i == save_before {
                        let saved = opt.loss_scale_state().unwrap();
                        opt = build(Arc::clone(&comm), scaled(stage, rule)).unwrap();
                        opt.restore_loss_scale(saved).unwrap();
                    }
                    assert_eq!(opt.loss_scale_state(), Some(expected), "{stage:?} step {i}");
                    let before = w(&opt);
                    let outcome = step(&mut opt, at_one(), overflow && rank == i % 2).unwrap();
                    assert_eq!(matches!(outcome, Outcome::Skipped { .. }), overflow, "{stage:?} step {i}");
                    assert_eq!(w(&opt), if overflow { before } else { before - 1.0 });
                    rule.update(&mut expected, overflow);
                }
                assert_eq!(opt.loss_scale(), 262_144.0);
            })
            .unwrap();
        }
    }
}

/// Falls from 4 to 2 to 1 do not count; then `max_skips` skips are allowed.
#[test]
fn skips_count_once_the_scale_cannot_fall() {
    for (rule, free) in [(dynamic(4.0, 9), 2), (LossScale::Static(4.0), 0)] {
        loopback::spawn(2, |comm| {
            let mut opt = build(comm, Options { max_skips: 3, ..scaled(Stage::Zero1, rule) }).unwrap();
            for round in 0..2 {
                for skips in 1..=free + 3 {
                    let outcome = step(&mut opt, at_one(), true).unwrap();
                    assert!(matches!(outcome, Outcome::Skipped { in_a_row, .. } if in_a_row == skips));
                }
                if round == 0 {
                    let _ = step(&mut opt, at_one(), false).unwrap();
                    opt.restore_loss_scale(rule.start()).unwrap();
                }
            }
            let before = opt.loss_scale_state();
            let error = step(&mut opt, at_one(), true).unwrap_err();
            assert!(matches!(error, Error::TooManySkips { skips } if skips == free + 4), "{error}");
            assert_eq!(opt.loss_scale_state(), before);
        })
        .unwrap();
    }
}

/// A restored scale may fall again: the skips before the restore belonged to another scale.
#[test]
fn a_restored_scale_is_given_its_chance() {
    loopback::spawn(2, |comm| {
        let rule = dynamic(4.0, 9);
        let mut opt = build(comm, Options { max_skips: 1, ..scaled(Stage::Zero1, rule) }).unwrap();
        for _ in 0..2 {
            for _ in 0..3 {
                let _ = step(&mut opt, at_one(), true).unwrap();
            }
            assert_eq!(opt.loss_scale(), 1.0);
            assert!(matches!(step(&mut opt, at_one(), true), Err(Error::TooManySkips { .. })));
            opt.restore_loss_scale(rule.start()).unwrap();
        }
    })
    .unwrap();
}

#[test]
fn ranks_with_different_scales_are_told() {
    let usual = dynamic(4.0, 3).start();
    for (state, told) in [
        (LossScaleState { scale: 8.0, ..usual }, "ranks disagree on loss_scale: rank 0 has 4, rank 1 has 8"),
        (
            LossScaleState { growth_tracker: 2, ..usual },
            "ranks disagree on growth_tracker of loss_scale: rank 0 has 0, rank 1 has 2",
        ),
    ] {
        loopback::spawn(3, |comm| {
            let rank = comm.rank();
            let mut opt = build(comm, scaled(Stage::Zero2, dynamic(4.0, 3))).unwrap();
            if rank == 1 {
                opt.restore_loss_scale(state).unwrap();
            }
            let error = step(&mut opt, at_one(), false).unwrap_err();
            assert_eq!(error.to_string(), told);
            assert_eq!(w(&opt), 0.0);
            // An error is not a step: the scale does not change.
            assert_eq!(opt.loss_scale_state(), Some(if rank == 1 { state } else { usual }));
            opt.restore_loss_scale(usual).unwrap();
            let _ = step(&mut opt, at_one(), false).unwrap();
            assert_eq!(w(&opt), -1.0);
        })
        .unwrap();
    }
    let told = loopback::spawn(2, |comm| {
        let rule = dynamic(4.0, 1 + comm.rank() as u64);
        build(comm, scaled(Stage::Zero1, rule)).unwrap_err().to_string()
    });
    assert!(
        told.unwrap().iter().all(|t| t.starts_with("ranks disagree on loss_scale: rank 0 has Some(Dynamic("))
    );
}

#[test]
fn what_cannot_be_is_refused() {
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let refused = build(Arc::clone(&comm), scaled(Stage::Zero1, LossScale::Static(-1.0))).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "loss scale: scale = -1 is out of range; use a number from 1e-24 to 1e24"
        );

        let mut plain = build(Arc::clone(&comm), Options::default()).unwrap();
        assert_eq!((plain.loss_scale(), plain.loss_scale_state()), (1.0, None));
        let state = dynamic(4.0, 1).start();
        assert!(matches!(plain.restore_loss_scale(state), Err(Error::NoLossScale)));

        let mut opt = build(comm, scaled(Stage::Zero1, dynamic(4.0, 1))).unwrap();
        let bad = LossScaleState { scale: f64::NAN, ..state };
        assert!(matches!(opt.restore_loss_scale(bad), Err(Error::Optim(_))));
        opt.accumulate(1).unwrap().finish().unwrap();
        assert!(matches!(opt.restore_loss_scale(state), Err(Error::StepDue)));
        opt.discard_gradients().unwrap();

        // 1e-30 is in range by itself; divided by a scale of 4 it is not.
        let grad_scale = if rank == 1 { 1e-30 } else { 1.0 };
        let error = step(&mut opt, StepArgs { grad_scale, ..at_one() }, false).unwrap_err();
        assert!(matches!(error, Error::Fault { rank: 1, fault: Fault::GradScale }), "{error}");
        assert_eq!(opt.loss_scale(), 4.0);
    })
    .unwrap();
}
