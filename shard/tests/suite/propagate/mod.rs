//! Steps taken with any gradients, bucket by bucket as they arrive.

mod watched;

use crate::common::{Gradients, Run, STAGES, WhichRule, draws, name, params, turns};
use meshstep_comm::loopback;
use meshstep_optim::{DynamicLossScale, LossScale};
use meshstep_shard::{
    Clip, Combine, Error, Missing, NonFinite, Optimizer, Options, Outcome, Plan, ShardedLbfgs, Stage,
};
use meshstep_tensor::{DType, Layout};
use std::sync::Arc;

const RULES: [WhichRule; 5] =
    [WhichRule::Sgd, WhichRule::SgdMomentum, WhichRule::AdamW, WhichRule::Lamb, WhichRule::Lars];

fn propagating(run: &Run) -> Run {
    let options = Options { non_finite: NonFinite::Propagate, ..run.options.clone() };
    Run { options, ..run.clone() }
}

#[test]
fn finite_gradients_end_with_the_same_bits_as_without() {
    let mut drawn = draws(1);
    for (i, stage) in STAGES.into_iter().enumerate() {
        for (j, rule) in RULES.into_iter().enumerate().filter(|_| drawn()) {
            for (m, max_norm) in [None, Some(1.0)].into_iter().enumerate() {
                let (shuffle, overlap) = ((i + j) % 2 == 0, (i + j) % 3 > 0);
                let combine = [Combine::Mean, Combine::Sum, Combine::Weighted][(i + j) % 3];
                let missing = [Missing::Error, Missing::SkipIfMissingEverywhere][j % 2];
                let clip = if j == 1 && !matches!(stage, Stage::Zero2 | Stage::Zero3) {
                    Clip::BeforeReduce
                } else {
                    Clip::AfterReduce
                };
                let options = Options { overlap, combine, missing, clip, ..Run::default().options };
                let run = Run { rule, max_norm, shuffle, options, ..Run::default() };
                for micro_batches in turns(&[1, 3], i + j + m, 1) {
                    let run = Run { micro_batches, ..run.clone() }.stage(stage);
                    assert_eq!(propagating(&run).run(), run.run(), "{run:?}");
                }
            }
        }
    }
}

#[test]
fn what_a_loop_over_whole_vectors_makes_of_exact_sums() {
    for stage in STAGES {
        for rule in RULES {
            let run = Run { rule, max_norm: None, gradients: Gradients::Grid, ..Run::default() };
            let run = propagating(&run.stage(stage));
            assert_eq!(run.run(), run.naive(), "{stage:?} {rule:?}");
        }
    }
}

/// Returns f32 values, with all NaNs equal.
fn values(params: &[Vec<u8>]) -> Vec<Option<u32>> {
    let floats = params.iter().flat_map(|p| p.chunks(4)).map(|b| f32::from_ne_bytes(b.try_into().unwrap()));
    floats.map(|x| (!x.is_nan()).then_some(x.to_bits())).collect()
}

#[test]
fn what_is_not_finite_goes_where_the_rule_takes_it() {
    for stage in STAGES {
        for rule in RULES {
            let run = Run { rule, max_norm: None, gradients: Gradients::Broken, ..Run::default() };
            let run = propagating(&run.stage(stage));
            let (end, expected) = (run.run(), run.naive());
            let (here, there) = (values(&end.params), values(&expected.params));
            assert_eq!(here, there, "{stage:?} {rule:?}");
            let broken = here.iter().filter(|x| x.is_none()).count();
            assert!(broken > 0 && broken < here.len(), "{stage:?} {rule:?}: {broken}");
            let finite: Vec<bool> = end.norms.iter().map(|&n| f64::from_bits(n).is_finite()).collect();
            assert_eq!(finite, [true, false, true], "{stage:?}");
            assert_eq!(f64::from_bits(end.norms[1]), f64::INFINITY);
            assert_eq!(end.coefs, expected.coefs);
        }
    }
}

/// PyTorch's clip_grad_norm_ does the same for an infinite gradient.
#[test]
fn clipping_takes_nothing_but_what_is_not_finite() {
    for stage in STAGES {
        let run = Run { rule: WhichRule::Sgd, gradients: Gradients::Broken, steps: 1, ..Run::default() };
        let before = values(&propagating(&run.stage(stage)).run().params);
        let end = propagating(&Run { steps: 2, ..run }.stage(stage)).run();
        let after = values(&end.params);
        assert_eq!(after.iter().filter(|x| x.is_none()).count(), 2, "{stage:?}");
        assert!(before.iter().zip(&after).all(|(b, a)| a.is_none() || a == b), "{stage:?}");
        assert_eq!([end.norms[1], end.coefs[1]].map(f64::from_bits), [f64::INFINITY, 0.0]);
    }
}

/// A step counts whatever its gradients hold: `t` advances, and no skip is counted.
#[test]
fn nothing_is_skipped() {
    let run = Run { max_norm: None, gradients: Gradients::Broken, ..Run::default() };
    for stage in STAGES {
        let options = Options { max_skips: 0, ..run.options.clone() };
        let run = propagating(&Run { options, ..run.clone() }.stage(stage));
        loopback::spawn(run.ranks, |comm| {
            let mut opt = run.build(comm).unwrap();
            for t in [2, 2, 2, 1] {
                run.hand_over(&mut opt, t, 0).unwrap();
                let outcome = opt.step(run.at(1)).unwrap().outcome().unwrap();
                assert!(matches!(outcome, Outcome::Applied { .. }), "{stage:?}: {outcome:?}");
            }
            assert!(crate::common::state(&opt).iter().all(|(t, _)| *t == 4));
        })
        .unwrap();
    }
}

#[test]
fn what_contradicts_it_is_refused() {
    let scale = Some(LossScale::Dynamic(DynamicLossScale::default()));
    let run = propagating(&Run::default());
    let options = Options { loss_scale: scale, ..run.options.clone() };
    let told = Plan::new(&run.layout(), 2, &options).unwrap_err();
    assert!(matches!(told, Error::ScaleNeedsSkips) && told.to_string().contains("static"), "{told}");
    let fixed = Options { loss_scale: Some(LossScale::Static(8.0)), ..run.options.clone() };
    assert!(Plan::new(&run.layout(), 2, &fixed).is_ok());
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let with = |options: Options| Run { options, ..run.clone() };
        let told = with(options.clone()).build(Arc::clone(&comm)).map(drop).unwrap_err();
        assert!(matches!(told, Error::ScaleNeedsSkips), "{told}");
        let non_finite = [NonFinite::Skip, NonFinite::Propagate][rank];
        let parted = with(Options { non_finite, ..run.options.clone() });
        let told = parted.build(Arc::clone(&comm)).map(drop).unwrap_err().to_string();
        assert_eq!(told, "ranks disagree on non_finite: rank 0 has Skip, rank 1 has Propagate");
        let layout = Layout::builder().param("w", &[3], DType::F32).build().unwrap();
        let zeros = |_: &meshstep_tensor::Param, _: meshstep_tensor::SliceMut<'_>| Ok(());
        let told = ShardedLbfgs::new(comm, layout, Default::default(), zeros, run.options.clone());
        assert!(matches!(told.map(drop), Err(Error::NotForLbfgs(_))));
    })
    .unwrap();
}

/// Parameters that are added later are stepped with the others.
#[test]
fn a_second_family_joins() {
    for stage in STAGES {
        let end = |non_finite| {
            let options = Options { stage, non_finite, bucket_len: Some(64), ..Options::default() };
            let ends = loopback::spawn(3, |comm| {
                let zeros = |_: &meshstep_tensor::Param, _: meshstep_tensor::SliceMut<'_>| Ok(());
                let layout = |name: &str| Layout::builder().param(name, &[100], DType::F32).build().unwrap();
                let rank = comm.rank() as f32;
                let (first, options) = (layout(&name(0)), options.clone());
                let mut opt = Optimizer::new(comm, first, crate::common::adamw(), zeros, options).unwrap();
                opt.add_param_group(layout(&name(1)), crate::common::adamw(), zeros).unwrap();
                for t in 1..=3 {
                    let mb = opt.micro_batch(1).unwrap();
                    (0..2).for_each(|i| mb.grad(&name(i), &[rank + t as f32; 100][..]).unwrap());
                    mb.finish().unwrap();
                    let _ = opt.step(Default::default()).unwrap();
                }
                params(&opt)
            });
            ends.unwrap().swap_remove(0)
        };
        assert_eq!(end(NonFinite::Propagate), end(NonFinite::Skip), "{stage:?}");
    }
}
