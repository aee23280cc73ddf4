//! Clipping, before and after the reduction.

use super::{Assignment, Ranks, at_one, build, fetch, give, layout, replicated, step, there, values, zeros};
use meshstep_optim::Sgd;
use meshstep_shard::{
    Clip, Combine, Error, LocalClip, Missing, Optimizer, Options, Outcome, Owners, Stage, Step, StepArgs,
};

/// Rank 0 has (3, 4), of norm 5, rank 1 (0, 0.5), rank 2 (-3, -4), rank 3 (0, 0.5); the bound is 1.
///
/// Before: (0.6, 0.8), (0, 0.5), (-0.6, -0.8), (0, 0.5), with mean (0, 0.25). After: the mean is (0, 0.25) too, within the bound.
/// In groups [0, 1] and [2, 3] the results differ. Before: (0.3, 0.65) and (-0.3, -0.15). After: the means (1.5, 2.25), of norm
/// sqrt(7.3125), and (-1.5, -1.75), of norm sqrt(5.3125), are cut to norm 1.
pub(crate) fn clipping_before_and_after_the_reduction(on: &impl Ranks) {
    let grads = [[3.0f32, 4.0], [0.0, 0.5], [-3.0, -4.0], [0.0, 0.5]];
    let pairs = [vec![0, 1], vec![2, 3]];
    let (left, right) = (7.3125f64.sqrt(), 5.3125f64.sqrt());
    let cut = |x: f64, norm: f64| x / (norm + 1e-6);
    let table: [(Assignment<'_>, Clip, [[f64; 2]; 4]); 4] = [
        (None, Clip::BeforeReduce, [[0.0, 0.25]; 4]),
        (None, Clip::AfterReduce, [[0.0, 0.25]; 4]),
        (Some(&pairs), Clip::BeforeReduce, [[0.3, 0.65], [0.3, 0.65], [-0.3, -0.15], [-0.3, -0.15]]),
        (
            Some(&pairs),
            Clip::AfterReduce,
            [
                [cut(1.5, left), cut(2.25, left)],
                [cut(1.5, left), cut(2.25, left)],
                [cut(-1.5, right), cut(-1.75, right)],
                [cut(-1.5, right), cut(-1.75, right)],
            ],
        ),
    ];
    for (groups, clip, expected) in table {
        let options = Options { clip, ..replicated() };
        on.run(4, |comm, queue| {
            let rank = comm.rank();
            let mut opt = build(comm, &queue, groups, Sgd::default(), options.clone()).unwrap();
            let at = StepArgs { max_norm: Some(1.0), ..at_one() };
            let outcome = step(&mut opt, 1, Some(grads[rank]), Some(0.0), at).unwrap();
            let Outcome::Applied { norm, coef, .. } = outcome else { panic!("{outcome:?}") };
            for (w, expected) in values(&opt, "w").into_iter().zip(expected[rank]) {
                assert!((f64::from(w) + expected).abs() < 2e-6, "{clip:?} rank {rank}: {w} {expected}");
            }
            let after = (groups.is_some() && clip == Clip::AfterReduce) as u8;
            assert_eq!((coef < 1.0) as u8, after);
            let local = opt.optimizer().local_clip();
            if clip == Clip::BeforeReduce {
                let own = if rank % 2 == 0 { (5.0, 1.0 / (5.0 + 1e-6)) } else { (0.5, 1.0) };
                assert_eq!(local, Some(LocalClip { norm: own.0, coef: own.1 }));
                assert!(norm <= 1.0);
            } else {
                assert_eq!(local, None);
            }
        });
    }
}

/// Micro-batches, weights, sums and the factor apply before a rank's own clipping.
pub(crate) fn a_rank_clips_what_its_micro_batches_have_together(on: &impl Ranks) {
    // Two micro-batches, (6, 0) and (0, 8), of batch sizes 1 and 3; the bound is 1. Rank 1 has zeros, of batch size 4.
    let table = [
        // The mean (3, 4), of norm 5, is cut to (0.6, 0.8), its mean with zeros is half of that.
        (Combine::Mean, 1.0, 5.0, [0.3, 0.4]),
        // The sum (6, 8), of norm 10.
        (Combine::Sum, 1.0, 10.0, [0.6, 0.8]),
        // The weighted mean (6 + 0, 0 + 24) / 4 = (1.5, 6), of norm sqrt(38.25); it weighs 4 of 8.
        (Combine::Weighted, 1.0, 38.25f64.sqrt(), [0.75 / 38.25f64.sqrt(), 3.0 / 38.25f64.sqrt()]),
        // A factor of 1/2 halves the norm, which is still above 1.
        (Combine::Mean, 0.5, 2.5, [0.3, 0.4]),
        // A factor of 1/10 brings it within the bound: (0.3, 0.4) / 2.
        (Combine::Mean, 0.1, 0.5, [0.15, 0.2]),
    ];
    for stage in [Stage::Replicated, Stage::Zero1, Stage::WholeParams(Owners::RoundRobin)] {
        for (combine, grad_scale, own, expected) in table {
            let options = Options { stage, combine, clip: Clip::BeforeReduce, ..Options::default() };
            on.run(2, |comm, queue| {
                let first = comm.rank() == 0;
                let mut opt =
                    Optimizer::new(comm, layout(), Sgd::default(), zeros, there(&queue, options.clone()))
                        .unwrap();
                for (i, (batch, grad)) in [(1, [6.0f32, 0.0]), (3, [0.0, 8.0])].into_iter().enumerate() {
                    let batch = if first { batch } else { 2 };
                    let mb = if i == 0 { opt.accumulate(batch) } else { opt.micro_batch(batch) }.unwrap();
                    give(&mb, "w", if first { &grad[..] } else { &[0.0; 2][..] }, &queue).unwrap();
                    give(&mb, "b", &[0f32; 3][..], &queue).unwrap();
                    mb.finish().unwrap();
                }
                let at = StepArgs { max_norm: Some(1.0), grad_scale, ..at_one() };
                let _ = opt.step(at).unwrap().outcome().unwrap();
                let norm = opt.local_clip().unwrap().norm;
                assert!((norm - if first { own } else { 0.0 }).abs() < 1e-12, "{combine:?} {norm}");
                let w = fetch::<f32>(opt.param("w").unwrap(), &queue);
                for (w, expected) in w.into_iter().zip(expected) {
                    assert!((f64::from(w) + expected).abs() < 2e-6, "{combine:?} {w} {expected}");
                }
            });
        }
    }
}

/// A non-finite gradient on one rank is found although it was held back, and the next step is unaffected.
pub(crate) fn a_held_gradient_that_is_not_finite_skips_the_step(on: &impl Ranks) {
    on.run(2, |comm, queue| {
        let rank = comm.rank();
        let options = Options { clip: Clip::BeforeReduce, ..replicated() };
        let mut opt = build(comm, &queue, None, Sgd::default(), options).unwrap();
        let at = StepArgs { max_norm: Some(1.0), ..at_one() };
        let bad = if rank == 1 { f32::INFINITY } else { 1.0 };
        let outcome = step(&mut opt, 1, Some([bad, 5.0]), Some(0.0), at).unwrap();
        assert!(matches!(outcome, Outcome::Skipped { non_finite: 1, .. }), "{outcome:?}");
        let local = opt.optimizer().local_clip().unwrap();
        assert_eq!(local.coef == 1.0, rank == 1, "{local:?}");
        opt.micro_batch(1).unwrap().finish().unwrap();
        opt.discard_gradients().unwrap();
        let _ = step(&mut opt, 1, Some([0.25, 0.5]), Some(0.0), at).unwrap();
        assert_eq!(values(&opt, "w"), [-0.25, -0.5]);
    });
}

/// The sum of short gradients may be long; it is not clipped again. Gradients that an earlier step left in a place do not count.
pub(crate) fn only_a_ranks_own_gradients_of_this_step_are_clipped(on: &impl Ranks) {
    on.run(2, |comm, queue| {
        let options = Options {
            clip: Clip::BeforeReduce,
            combine: Combine::Sum,
            missing: Missing::Zero,
            ..replicated()
        };
        let mut opt = build(comm, &queue, None, Sgd::default(), options).unwrap();
        let at = StepArgs { max_norm: Some(1.0), ..at_one() };
        let _ = step(&mut opt, 1, Some([0.0; 2]), Some(100.0), at).unwrap();
        let outcome = step(&mut opt, 1, Some([3.0, 4.0]), None, at).unwrap();
        let Outcome::Applied { norm, coef, .. } = outcome else { panic!("{outcome:?}") };
        assert!(coef == 1.0 && (norm - 2.0).abs() < 1e-5, "{norm} {coef}");
        assert_eq!(opt.optimizer().local_clip().unwrap().norm, 5.0);
        for (w, expected) in values(&opt, "w").into_iter().zip([-1.2f32, -1.6]) {
            assert!((w - expected).abs() < 1e-5, "{w} {expected}");
        }
        // Without a bound nothing is clipped.
        let _ = step(&mut opt, 1, Some([30.0, 40.0]), None, at_one()).unwrap();
        assert!(values(&opt, "w")[0] < -61.0 && opt.optimizer().local_clip().is_none());
    });
}

pub(crate) fn clipping_before_the_reduction_needs_gradients_that_stay(on: &impl Ranks) {
    on.run(2, |comm, queue| {
        let options = Options { stage: Stage::Zero2, clip: Clip::BeforeReduce, ..Options::default() };
        let refused = Optimizer::new(comm, layout(), Sgd::default(), zeros, there(&queue, options)).map(drop);
        assert!(matches!(refused, Err(Error::ClipNeedsGradients)));
    });
}
