//! Replicas in groups: how gradients combine, clip and go missing, how far groups drift, and what is refused.

#![allow(clippy::unwrap_used, reason = "tests say what is wrong by failing")]

mod common;

use common::adamw;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, DynamicLossScale, Lbfgs, LossScale, Rounding, Rule, Sgd};
use meshstep_shard::{
    AssignmentError, At, Clip, Combine, CrossShard, Error, Fault, Initial, LocalClip, Master, Missing,
    Optimizer, Options, Outcome, Owners, Precision, ShardedLbfgs, Stage,
};
use meshstep_tensor::{DType, Layout, Param, Slice, SliceMut};
use std::sync::Arc;

type Comm = Arc<dyn Communicator>;
type Assignment<'a> = Option<&'a [Vec<usize>]>;

fn zeros(_: &Param, _: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

fn layout() -> Layout {
    Layout::builder().param("w", &[2], DType::F32).param("b", &[3], DType::F32).build().unwrap()
}

fn replicated() -> Options {
    Options { stage: Stage::Replicated, ..Options::default() }
}

fn build(
    comm: Comm,
    groups: Assignment<'_>,
    rule: impl Rule + 'static,
    options: Options,
) -> Result<CrossShard, Error> {
    CrossShard::new(comm, groups, layout(), rule, zeros, options)
}

fn at_one() -> At {
    At { lr: 1.0, ..At::default() }
}

/// A step with gradient `w` for parameter w, and `b` for b; `None`: not handed over.
fn step(
    opt: &mut CrossShard,
    batch: u64,
    w: Option<[f32; 2]>,
    b: Option<f32>,
    at: At,
) -> Result<Outcome, Error> {
    let mb = opt.micro_batch(batch)?;
    w.into_iter().for_each(|w| mb.grad("w", &w[..]).unwrap());
    b.into_iter().for_each(|b| mb.grad("b", &[b; 3][..]).unwrap());
    mb.finish()?;
    opt.step(at)?.outcome()
}

fn values(opt: &CrossShard, name: &str) -> Vec<f32> {
    opt.param(name).unwrap().typed::<f32>().unwrap().to_vec()
}

fn t(opt: &CrossShard, name: &str) -> u64 {
    opt.optimizer().state(name).unwrap().t
}

/// Loss g_r w with g = 1..4 on 4 ranks, SGD with lr 1 from 0, counted by hand.
#[test]
fn gradients_combine_within_groups() {
    let pairs = [vec![0, 2], vec![1, 3]];
    let swapped = [vec![3, 1], vec![2, 0]];
    let table: [(Assignment<'_>, Combine, bool, [f32; 4]); 7] = [
        (None, Combine::Mean, false, [-2.5; 4]),
        (None, Combine::Sum, false, [-10.0; 4]),
        (Some(&pairs), Combine::Mean, false, [-2.0, -3.0, -2.0, -3.0]),
        (Some(&swapped), Combine::Mean, false, [-2.0, -3.0, -2.0, -3.0]),
        (Some(&pairs), Combine::Sum, false, [-4.0, -6.0, -4.0, -6.0]),
        (None, Combine::Weighted, true, [-3.0; 4]),
        // (1 + 9) / 4 and (4 + 16) / 6.
        (Some(&pairs), Combine::Weighted, true, [-2.5, -20.0 / 6.0, -2.5, -20.0 / 6.0]),
    ];
    for (groups, combine, weighted, expected) in table {
        for clip in [Clip::AfterReduce, Clip::BeforeReduce] {
            let options = Options { combine, clip, ..replicated() };
            let ends = loopback::spawn(4, |comm| {
                let rank = comm.rank();
                let mut opt = build(comm, groups, Sgd::default(), options.clone()).unwrap();
                let g = 1.0 + rank as f32;
                let batch = if weighted { rank as u64 + 1 } else { 1 };
                let outcome = step(&mut opt, batch, Some([g, 0.0]), Some(g), at_one()).unwrap();
                assert!(matches!(outcome, Outcome::Applied { coef: 1.0, .. }), "{outcome:?}");
                let (w, b) = (values(&opt, "w"), values(&opt, "b"));
                assert_eq!((w[1], b), (0.0, vec![w[0]; 3]));
                w[0]
            });
            for (end, expected) in ends.unwrap().into_iter().zip(expected) {
                assert!((end - expected).abs() <= expected.abs() * 1e-7, "{combine:?} {groups:?} {end}");
            }
        }
    }
}

/// One group of all is what `Optimizer` does, to the bit, with a real rule and clipping.
#[test]
fn one_group_of_everyone_is_a_replicated_optimizer() {
    let g = |rank: usize, t: u64| (rank as f32 + 1.5) * (0.3 + t as f32).sin();
    loopback::spawn(3, |comm| {
        let rank = comm.rank();
        let at = At { max_norm: Some(0.7), ..at_one() };
        let mut plain = Optimizer::new(Arc::clone(&comm), layout(), adamw(), zeros, replicated()).unwrap();
        let mut cross = build(comm, None, adamw(), replicated()).unwrap();
        for t in 1..=4 {
            let mb = plain.micro_batch(1).unwrap();
            mb.grad("w", &[g(rank, t), 1.0][..]).unwrap();
            mb.grad("b", &[g(rank, t + 9); 3][..]).unwrap();
            mb.finish().unwrap();
            let _ = plain.step(at).unwrap();
            let _ = step(&mut cross, 1, Some([g(rank, t), 1.0]), Some(g(rank, t + 9)), at).unwrap();
        }
        assert_eq!(common::params(&plain), common::params(cross.optimizer()));
        assert_eq!(common::state(&plain), common::state(cross.optimizer()));
    })
    .unwrap();
}

/// Rank 0 has (3, 4), of norm 5, rank 1 (0, 0.5), rank 2 (-3, -4), rank 3 (0, 0.5); the bound is 1.
///
/// Before: (0.6, 0.8), (0, 0.5), (-0.6, -0.8), (0, 0.5), whose mean is (0, 0.25). After: the mean is (0, 0.25) too, and short.
/// In groups [0, 1] and [2, 3] the ways part. Before: (0.3, 0.65) and (-0.3, -0.15). After: the means (1.5, 2.25), of norm
/// sqrt(7.3125), and (-1.5, -1.75), of norm sqrt(5.3125), are cut to norm 1.
#[test]
fn clipping_before_and_after_the_reduction() {
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
        loopback::spawn(4, |comm| {
            let rank = comm.rank();
            let mut opt = build(comm, groups, Sgd::default(), options.clone()).unwrap();
            let at = At { max_norm: Some(1.0), ..at_one() };
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
        })
        .unwrap();
    }
}

/// Micro-batches, weights, sums and a factor come before a rank's own clipping.
#[test]
fn a_rank_clips_what_its_micro_batches_have_together() {
    // Two micro-batches, (6, 0) and (0, 8), of batch sizes 1 and 3; the bound is 1. Rank 1 has zeros, of batch size 4.
    let table = [
        // The mean (3, 4), of norm 5, is cut to (0.6, 0.8), its mean with zeros is half of that.
        (Combine::Mean, 1.0, 5.0, [0.3, 0.4]),
        // The sum (6, 8), of norm 10.
        (Combine::Sum, 1.0, 10.0, [0.6, 0.8]),
        // (6 + 0, 0 + 24) / 4 = (1.5, 6), of norm sqrt(38.25); weighs 4 of 8.
        (Combine::Weighted, 1.0, 38.25f64.sqrt(), [0.75 / 38.25f64.sqrt(), 3.0 / 38.25f64.sqrt()]),
        // A factor of 1/2 halves the norm, which is still above 1.
        (Combine::Mean, 0.5, 2.5, [0.3, 0.4]),
        // One of 1/10 makes it short enough: (0.3, 0.4) / 2.
        (Combine::Mean, 0.1, 0.5, [0.15, 0.2]),
    ];
    for stage in [Stage::Replicated, Stage::Zero1, Stage::WholeParams(Owners::RoundRobin)] {
        for (combine, grad_scale, own, expected) in table {
            let options = Options { stage, combine, clip: Clip::BeforeReduce, ..Options::default() };
            loopback::spawn(2, |comm| {
                let first = comm.rank() == 0;
                let mut opt = Optimizer::new(comm, layout(), Sgd::default(), zeros, options.clone()).unwrap();
                for (i, (batch, grad)) in [(1, [6.0f32, 0.0]), (3, [0.0, 8.0])].into_iter().enumerate() {
                    let batch = if first { batch } else { 2 };
                    let mb = if i == 0 { opt.accumulate(batch) } else { opt.micro_batch(batch) }.unwrap();
                    mb.grad("w", if first { &grad[..] } else { &[0.0; 2][..] }).unwrap();
                    mb.grad("b", &[0f32; 3][..]).unwrap();
                    mb.finish().unwrap();
                }
                let at = At { max_norm: Some(1.0), grad_scale, ..at_one() };
                let _ = opt.step(at).unwrap().outcome().unwrap();
                let norm = opt.local_clip().unwrap().norm;
                assert!((norm - if first { own } else { 0.0 }).abs() < 1e-12, "{combine:?} {norm}");
                let w = opt.param("w").unwrap().typed::<f32>().unwrap().to_vec();
                for (w, expected) in w.into_iter().zip(expected) {
                    assert!((f64::from(w) + expected).abs() < 2e-6, "{combine:?} {w} {expected}");
                }
            })
            .unwrap();
        }
    }
}

/// What is not finite on one rank is found though it was held back, and the next step is as if it had not been.
#[test]
fn a_held_gradient_that_is_not_finite_skips_the_step() {
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let options = Options { clip: Clip::BeforeReduce, ..replicated() };
        let mut opt = build(comm, None, Sgd::default(), options).unwrap();
        let at = At { max_norm: Some(1.0), ..at_one() };
        let bad = if rank == 1 { f32::INFINITY } else { 1.0 };
        let outcome = step(&mut opt, 1, Some([bad, 5.0]), Some(0.0), at).unwrap();
        assert!(matches!(outcome, Outcome::Skipped { non_finite: 1, .. }), "{outcome:?}");
        let local = opt.optimizer().local_clip().unwrap();
        assert_eq!(local.coef == 1.0, rank == 1, "{local:?}");
        opt.micro_batch(1).unwrap().finish().unwrap();
        opt.discard_gradients().unwrap();
        let _ = step(&mut opt, 1, Some([0.25, 0.5]), Some(0.0), at).unwrap();
        assert_eq!(values(&opt, "w"), [-0.25, -0.5]);
    })
    .unwrap();
}

/// The sum of short gradients may be long; it is not clipped again. What an earlier step left in a place is not of this one.
#[test]
fn only_a_ranks_own_gradients_of_this_step_are_clipped() {
    loopback::spawn(2, |comm| {
        let options = Options {
            clip: Clip::BeforeReduce,
            combine: Combine::Sum,
            missing: Missing::Zero,
            ..replicated()
        };
        let mut opt = build(comm, None, Sgd::default(), options).unwrap();
        let at = At { max_norm: Some(1.0), ..at_one() };
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
    })
    .unwrap();
}

#[test]
fn what_no_rank_of_a_group_has_is_left_alone() {
    let pairs = [vec![0, 2], vec![1, 3]];
    for missing in [Missing::Error, Missing::Zero, Missing::SkipIfMissingEverywhere, Missing::AllOrNone] {
        for clip in [Clip::AfterReduce, Clip::BeforeReduce] {
            loopback::spawn(4, |comm| {
                let rank = comm.rank();
                let options = Options { missing, clip, ..replicated() };
                let rule = AdamW { weight_decay: 0.5, ..AdamW::default() };
                let first =
                    |_: &Param, mut w: SliceMut<'_>| w.cast_from(Slice::from(&vec![1f64; w.len()][..]));
                let mut opt = CrossShard::new(comm, Some(&pairs), layout(), rule, first, options).unwrap();
                let at = At { lr: 0.1, ..At::default() };
                // Ranks 0 and 2 have no gradient for b.
                let b = (rank % 2 == 1).then_some(1.0);
                let _ = step(&mut opt, 1, Some([1.0; 2]), b, at).unwrap();
                assert_eq!((t(&opt, "w"), t(&opt, "b")), (1, (rank % 2) as u64));
                assert_eq!(values(&opt, "b")[0] == 1.0, rank % 2 == 0);
                let state = opt.optimizer().state("b").unwrap();
                let m = state.slots[0].1.typed::<f32>().unwrap();
                assert_eq!(m[0] == 0.0, rank % 2 == 0);
            })
            .unwrap();
        }
    }
}

#[test]
fn what_some_ranks_of_a_group_lack_is_decided_by_the_policy() {
    let pairs = [vec![0, 2], vec![1, 3]];
    for clip in [Clip::AfterReduce, Clip::BeforeReduce] {
        for missing in [Missing::Error, Missing::AllOrNone, Missing::Zero, Missing::SkipIfMissingEverywhere] {
            loopback::spawn(4, |comm| {
                let rank = comm.rank();
                let options = Options { missing, clip, ..replicated() };
                let mut opt = build(comm, Some(&pairs), Sgd::default(), options).unwrap();
                // Rank 3 has no gradient for b; rank 1, of its group, has. Nobody there has one for w.
                let w = (rank % 2 == 0).then_some([2.0; 2]);
                let b = (rank != 3).then_some(2.0);
                let outcome = step(&mut opt, 1, w, b, at_one());
                let strict = matches!(missing, Missing::Error | Missing::AllOrNone);
                let expected = match (rank % 2, strict) {
                    (0, _) => -2.0,
                    (_, true) => 0.0,
                    (_, false) => -1.0,
                };
                assert_eq!(values(&opt, "b"), [expected; 3], "{missing:?} rank {rank}");
                match outcome {
                    Err(Error::Fault { rank: 1, fault: Fault::MissingGradient { name } }) => {
                        // Rank 3 of the world is rank 1 of its group.
                        assert!(rank % 2 == 1 && strict && name == "b");
                        assert_eq!(t(&opt, "b"), 0);
                    }
                    outcome => assert!(outcome.is_ok() && !(rank % 2 == 1 && strict), "{outcome:?}"),
                }
                // Nothing is left of it.
                let _ = step(&mut opt, 1, Some([1.0; 2]), Some(1.0), at_one()).unwrap();
                assert_eq!(values(&opt, "b"), [expected - 1.0; 3]);
            })
            .unwrap();
        }
    }
}

/// The same without groups: `AllOrNone` at every stage, naming the lowest rank without.
#[test]
fn all_or_none_holds_at_every_stage() {
    for stage in common::STAGES {
        let options = Options { stage, missing: Missing::AllOrNone, ..Options::default() };
        loopback::spawn(3, |comm| {
            let rank = comm.rank();
            let mut opt = Optimizer::new(comm, layout(), Sgd::default(), zeros, options.clone()).unwrap();
            for round in 0..2 {
                let mb = opt.micro_batch(1).unwrap();
                mb.grad("w", &[1f32; 2][..]).unwrap();
                if round == 1 && rank == 0 {
                    mb.grad("b", &[1f32; 3][..]).unwrap();
                }
                mb.finish().unwrap();
                match opt.step(at_one()) {
                    Ok(_) => assert_eq!(round, 0),
                    Err(Error::Fault { rank, fault: Fault::MissingGradient { name } }) => {
                        assert_eq!((round, rank, &*name), (1, 1, "b"), "{stage:?}");
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            assert_eq!((opt.state("w").unwrap().t, opt.state("b").unwrap().t), (1, 0));
        })
        .unwrap();
    }
}

/// A gradient of nothing counts as one, handed over or filled in place.
#[test]
fn slots_of_empty_parameters_count_as_present() {
    let layout = Layout::builder().param("w", &[2], DType::F32).param("none", &[0, 3], DType::F32);
    let layout = layout.build().unwrap();
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let options = Options { missing: Missing::AllOrNone, ..Options::default() };
        let mut opt = Optimizer::new(comm, layout.clone(), Sgd::default(), zeros, options).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        mb.grad("w", &[1f32; 2][..]).unwrap();
        match rank {
            0 => mb.grad("none", &[0f32; 0][..]).unwrap(),
            _ => mb.slot("none").unwrap().fill().unwrap(),
        }
        mb.finish().unwrap();
        let _ = opt.step(at_one()).unwrap();
        assert_eq!(opt.state("none").unwrap().t, 1);
    })
    .unwrap();
}

/// Groups of one drift by hand: SGD with momentum 0.5, gradients 1 and 3 for w, and b missing on rank 1.
#[test]
fn drift_is_measured_and_averaged_away() {
    let alone = [vec![0], vec![1]];
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let rule = Sgd { momentum: 0.5, ..Sgd::default() };
        let mut opt = build(comm, Some(&alone), rule, replicated()).unwrap();
        assert!(opt.synchronize_state().unwrap().is_none());
        let g = 1.0 + 2.0 * rank as f32;
        let _ = step(&mut opt, 1, Some([1.0, g]), (rank == 0).then_some(4.0), at_one()).unwrap();
        for averaged in [false, true] {
            let drift = if averaged { opt.synchronize_state() } else { opt.compare_state() }.unwrap();
            let found: Vec<_> = drift.slots.iter().map(|s| (s.slot, s.max_abs, s.differing)).collect();
            // w[1]: -1 and -3; b: -4 and 0. The momentum: 1 and 3; 4 and 0.
            assert_eq!(found, [("params", 4.0, 4), (opt.optimizer().state("w").unwrap().slots[0].0, 4.0, 4)]);
            assert!(drift.slots.iter().all(|s| s.at == Some(("b".to_owned(), 0))));
            assert_eq!(drift.t, Some((1, "b".to_owned())));
            assert!(!drift.is_none());
            let expected = if averaged { [-2.0, -2.0] } else { [-g, if rank == 0 { -4.0 } else { 0.0 }] };
            assert_eq!([values(&opt, "w")[1], values(&opt, "b")[0]], expected);
        }
        assert_eq!((t(&opt, "w"), t(&opt, "b")), (1, 1));
        assert_eq!(values(&opt, "w")[0], -1.0);
        let m = |name| opt.optimizer().state(name).unwrap().slots[0].1.typed::<f32>().unwrap().to_vec();
        assert_eq!((m("w"), m("b")), (vec![1.0, 2.0], vec![2.0; 3]));
        assert!(opt.compare_state().unwrap().is_none());
        // On they go, alike.
        let _ = step(&mut opt, 1, Some([0.0; 2]), Some(0.0), at_one()).unwrap();
        assert_eq!((values(&opt, "w"), values(&opt, "b")), (vec![-1.5, -3.0], vec![-3.0; 3]));
    })
    .unwrap();
}

/// 16-bit parameters are their averaged masters, rounded; what three ranks have alike keeps its bits.
#[test]
fn masters_are_averaged_and_parameters_follow() {
    let alone = [vec![0], vec![1], vec![2]];
    loopback::spawn(3, |comm| {
        let rank = comm.rank();
        let layout = Layout::builder().param("h", &[70], DType::BF16).param("d", &[5], DType::F64);
        let layout = layout.build().unwrap();
        let first = |_: &Param, mut w: SliceMut<'_>| w.cast_from(Slice::from(&vec![0.1f64; w.len()][..]));
        let options = Options {
            precision: Precision { master: Master::F32, ..Precision::default() },
            bucket_len: Some(16),
            ..replicated()
        };
        let mut opt = CrossShard::new(comm, Some(&alone), layout, Sgd::default(), first, options).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        let mut h = [meshstep_tensor::bf16::ZERO; 70];
        h[69] = meshstep_tensor::bf16::from_f32([1.0, 2.0, 4.5][rank]);
        mb.grad("h", &h[..]).unwrap();
        mb.grad("d", &[0.0, 0.0, rank as f64, 0.0, 0.0][..]).unwrap();
        mb.finish().unwrap();
        let _ = opt.step(at_one()).unwrap();
        let drift = opt.synchronize_state().unwrap();
        let slots: Vec<_> = drift.slots.iter().map(|s| (s.slot, s.differing, s.at.clone())).collect();
        let at = || Some(("h".to_owned(), 69));
        assert_eq!(slots, [("params", 2, at()), ("master", 1, at())]);
        assert_eq!(drift.slots[1].max_abs, 3.5);
        let state = opt.optimizer().state("h").unwrap();
        let master = state.master.unwrap().typed::<f32>().unwrap();
        let start = meshstep_tensor::bf16::from_f32(0.1).to_f32();
        assert!((master[69] - (start - 2.5)).abs() < 1e-6 && master[68] == start);
        let h = opt.param("h").unwrap().typed::<meshstep_tensor::bf16>().unwrap();
        assert_eq!((h[69], h[68].to_f32()), (meshstep_tensor::bf16::from_f32(master[69]), start));
        // Three times 0.1, divided by 3, is another number.
        let d = opt.param("d").unwrap().typed::<f64>().unwrap();
        assert_eq!([d[0], d[1], d[3], d[4]], [0.1; 4]);
        assert!((d[2] + 0.9).abs() < 1e-15);
    })
    .unwrap();
}

/// Longer than is compared at a time.
#[test]
fn drift_is_found_at_the_end_of_a_long_parameter() {
    let len = (1 << 20) + 200;
    let layout = Layout::builder().param("short", &[70], DType::F32).param("long", &[len], DType::F32);
    let layout = layout.build().unwrap();
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let alone = [vec![0], vec![1]];
        let options = Options { missing: Missing::Zero, ..replicated() };
        let mut opt =
            CrossShard::new(comm, Some(&alone), layout.clone(), Sgd::default(), zeros, options).unwrap();
        let mut take = |at: At, early: f32, late: f32| {
            let mb = opt.micro_batch(1).unwrap();
            let mut grad = vec![1f32; len];
            (grad[7], grad[len - 3]) = (early, late);
            mb.grad("long", &grad[..]).unwrap();
            mb.finish().unwrap();
            let _ = opt.step(at).unwrap();
            let drift = opt.synchronize_state();
            let long = values(&opt, "long");
            (drift, [long[7], long[8], long[len - 3], long[len - 1]])
        };
        let r = rank as f32;
        for (early, late, furthest, expected) in [
            (2.0 + r, 3.0 - 2.0 * r, len - 3, [-2.5, -1.0, -2.0, -1.0]),
            (4.0 * r, r, 7, [-4.5, -2.0, -2.5, -2.0]),
        ] {
            let (drift, long) = take(at_one(), early, late);
            let params = &drift.unwrap().slots[0];
            assert_eq!((params.differing, params.at.clone()), (2, Some(("long".to_owned(), furthest))));
            assert_eq!((params.max_abs, long), (if furthest == 7 { 4.0 } else { 2.0 }, expected));
        }
        let (drift, _) = take(At { lr: 1e38, ..at_one() }, 1.0, 1.0 + 1e38 * r);
        let error = drift.unwrap_err();
        assert!(matches!(&error, Error::DriftNotFinite { index, .. } if *index == len - 3), "{error}");
    })
    .unwrap();
}

#[test]
fn what_is_not_finite_is_not_averaged() {
    let alone = [vec![0], vec![1]];
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let first =
            |_: &Param, mut w: SliceMut<'_>| w.cast_from(Slice::from(&vec![f64::INFINITY; w.len()][..]));
        let build = |first: &mut dyn FnMut(&Param, SliceMut<'_>) -> _| {
            CrossShard::new(Arc::clone(&comm), Some(&alone), layout(), Sgd::default(), first, replicated())
        };
        // Infinite everywhere is alike.
        assert!(build(&mut { first }).unwrap().synchronize_state().unwrap().is_none());
        let mut opt = build(&mut { zeros }).unwrap();
        let lr = if rank == 1 { 3e38 } else { 1.0 };
        let _ = step(&mut opt, 1, Some([0.0, 3e38]), Some(0.0), At { lr, ..At::default() }).unwrap();
        let before = values(&opt, "w");
        let error = opt.synchronize_state().unwrap_err();
        let told = matches!(&error, Error::DriftNotFinite { slot: "params", name, index: 1 } if name == "w");
        assert!(told, "{error}");
        assert_eq!(values(&opt, "w"), before);
    })
    .unwrap();
}

/// Numbers whose sum leaves f64 have a mean nevertheless; small ones beside them keep theirs.
#[test]
fn means_of_the_largest_numbers_are_finite() {
    let alone = [vec![0], vec![1], vec![2]];
    loopback::spawn(3, |comm| {
        let rank = comm.rank();
        let layout = Layout::builder().param("w", &[3], DType::F64).build().unwrap();
        let first = |_: &Param, mut w: SliceMut<'_>| w.cast_from(Slice::from(&[1.5e308, 1.5e308, 0.0][..]));
        let mut opt =
            CrossShard::new(comm, Some(&alone), layout, Sgd::default(), first, replicated()).unwrap();
        let batch = opt.micro_batch(1).unwrap();
        let down = [0.0, 0.5e307, 0.5e307][rank];
        batch.grad("w", &[down, -down, -(rank as f64) * 4.0e-323][..]).unwrap();
        batch.finish().unwrap();
        let _ = opt.step(At { lr: 1.0, ..At::default() }).unwrap().outcome().unwrap();
        assert!(!opt.synchronize_state().unwrap().is_none());
        let w = opt.param("w").unwrap().typed::<f64>().unwrap().to_vec();
        let near = |got: f64, want: f64| ((got - want) / want).abs() < 1e-15;
        assert!(near(w[0], 1.5e308 - 1e307 / 3.0) && near(w[1], 1.5e308 + 1e307 / 3.0), "{w:?}");
        assert_eq!(w[2], 4.0e-323);
        assert!(opt.compare_state().unwrap().is_none());
    })
    .unwrap();
}

/// Two zeros are two numbers, which would not stay apart; NaN everywhere is alike.
#[test]
fn replicas_have_the_same_bits_once_synchronized() {
    let alone = [vec![0], vec![1]];
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let nan = |_: &Param, mut w: SliceMut<'_>| {
            let mut first = vec![1f64; w.len()];
            first[1] = f64::NAN;
            w.cast_from(Slice::from(&first[..]))
        };
        let rule = Sgd { momentum: 0.5, ..Sgd::default() };
        let mut opt = CrossShard::new(comm, Some(&alone), layout(), rule, nan, replicated()).unwrap();
        let _ = step(&mut opt, 1, Some([[0.0, -0.0][rank], 0.0]), Some(0.0), at_one()).unwrap();
        let drift = opt.synchronize_state().unwrap();
        let found: Vec<_> = drift.slots.iter().map(|s| (s.max_abs, s.differing, s.at.clone())).collect();
        assert_eq!(found, [(0.0, 0, None), (0.0, 1, Some(("w".to_owned(), 0)))]);
        let m = opt.optimizer().state("w").unwrap().slots[0].1.typed::<f32>().unwrap().to_vec();
        assert_eq!(m.iter().map(|m| m.to_bits()).collect::<Vec<_>>(), [0; 2]);
        assert!(opt.compare_state().unwrap().is_none());
    })
    .unwrap();
}

/// What each of 4 ranks is told when it builds with what `of` gives it.
fn refused(of: impl Fn(usize) -> (Option<Vec<Vec<usize>>>, Options) + Sync) -> Vec<Error> {
    let told = loopback::spawn(4, |comm| {
        let (groups, options) = of(comm.rank());
        build(comm, groups.as_deref(), Sgd::default(), options).unwrap_err()
    });
    told.unwrap()
}

#[test]
fn assignments_that_do_not_cover_are_refused_on_every_rank() {
    let table = [
        (vec![vec![0, 1], vec![1, 2]], AssignmentError::Twice { rank: 1, first: 0, second: 1 }),
        (vec![vec![0, 1], vec![2, 2]], AssignmentError::Twice { rank: 2, first: 1, second: 1 }),
        (vec![vec![0, 1]], AssignmentError::Uncovered { rank: 2 }),
        (vec![], AssignmentError::Uncovered { rank: 0 }),
        (vec![vec![0, 1], vec![2, 4]], AssignmentError::OutOfRange { rank: 4, group: 1, world_size: 4 }),
        (vec![vec![0, 1, 2], vec![3]], AssignmentError::Unequal { group: 1, len: 1, expected: 3 }),
    ];
    for (groups, expected) in table {
        for error in refused(|_| (Some(groups.clone()), replicated())) {
            assert!(matches!(&error, Error::Assignment(e) if *e == expected), "{error}");
        }
    }
    for error in refused(|_| (None, Options::default())) {
        assert!(matches!(error, Error::NotReplicated { stage: Stage::Zero1 }), "{error}");
    }
    let precision = Precision { master: Master::Remainder, ..Precision::default() };
    for error in refused(|_| (None, Options { precision, ..replicated() })) {
        assert!(matches!(error, Error::RemaindersOfReplicas), "{error}");
    }
}

#[test]
fn ranks_with_different_assignments_are_told() {
    let pairs = || Some(vec![vec![0, 2], vec![1, 3]]);
    for error in refused(|rank| (if rank == 2 { None } else { pairs() }, replicated())) {
        let told =
            "ranks disagree on group assignment: rank 0 has [[0, 2], [1, 3]], rank 2 has [[0, 1, 2, 3]]";
        assert_eq!(error.to_string(), told);
    }
    // One that only rank 3 is given wrong.
    let bad = || Some(vec![vec![0, 1], vec![1, 3]]);
    for (rank, error) in
        refused(|rank| (if rank == 3 { bad() } else { pairs() }, replicated())).into_iter().enumerate()
    {
        let said = if rank == 3 { "rank 1 is in group 0" } else { "rank 3 has rank 1 is in group 0" };
        assert!(error.to_string().contains(said), "{error}");
    }
    // Options that differ between groups, where no group would notice.
    let sum = |rank| if rank % 2 == 1 { Combine::Sum } else { Combine::Mean };
    for error in refused(|rank| (pairs(), Options { combine: sum(rank), ..replicated() })) {
        assert_eq!(error.to_string(), "ranks disagree on combine: rank 0 has Mean, rank 1 has Sum");
    }
}

/// Groups begin alike: from rank 0's values, or because they were compared.
#[test]
fn first_values_are_the_worlds() {
    let pairs = [vec![1, 2], vec![3, 0]];
    for initial in [Initial::Broadcast, Initial::Compare] {
        let ends = loopback::spawn(4, |comm| {
            let rank = comm.rank();
            // Alike within a group, different between groups.
            let value = if rank == 0 || rank == 3 { 7.0 } else { 5.0 };
            let first = |_: &Param, mut w: SliceMut<'_>| w.cast_from(Slice::from(&vec![value; w.len()][..]));
            let options = Options { initial, ..replicated() };
            CrossShard::new(comm, Some(&pairs), layout(), Sgd::default(), first, options)
                .map(|opt| values(&opt, "b")[0])
                .map_err(|e| e.to_string())
        });
        for end in ends.unwrap() {
            match initial {
                Initial::Broadcast => assert_eq!(end, Ok(7.0)),
                Initial::Compare => {
                    assert!(end.unwrap_err().starts_with("ranks disagree on values of \"w\""))
                }
            }
        }
    }
    // What one group's first rank cannot do, no group does.
    let told = loopback::spawn(4, |comm| {
        let rank = comm.rank();
        let first = |_: &Param, w: SliceMut<'_>| match rank {
            1 => w.slice(9..10).map(drop),
            _ => Ok(()),
        };
        let built = CrossShard::new(comm, Some(&pairs), layout(), Sgd::default(), first, replicated());
        built.map(drop).unwrap_err().to_string()
    });
    assert!(told.unwrap().iter().all(|t| t.contains("no initial value for parameter \"w\"")));
}

#[test]
fn sparse_gradients_are_refused_and_dense_ones_still_taken() {
    loopback::spawn(2, |comm| {
        let mut opt = build(comm, None, Sgd::default(), replicated()).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        let error = mb.sparse_grad("b", &[2], &[1f32][..]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "gradient of \"b\" is sparse (1 indices, 1 values); sparse gradients cannot be reduced here: scatter \
             them into 3 elements and hand those over"
        );
        assert!(matches!(mb.sparse_grad("c", &[], &[0f32; 0][..]), Err(Error::UnknownParam { .. })));
        mb.grad("w", &[0f32; 2][..]).unwrap();
        mb.grad("b", &[0.0f32, 0.0, 1.0][..]).unwrap();
        mb.finish().unwrap();
        let _ = opt.step(at_one()).unwrap();
        assert_eq!(values(&opt, "b"), [0.0, 0.0, -1.0]);
    })
    .unwrap();
}

#[test]
fn synchronizing_in_the_middle_of_a_step_is_refused_everywhere() {
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let mut opt = build(comm, Some(&[vec![0], vec![1]]), Sgd::default(), replicated()).unwrap();
        if rank == 1 {
            opt.accumulate(1).unwrap().finish().unwrap();
        }
        let error = opt.synchronize_state().unwrap_err();
        assert!(if rank == 1 {
            matches!(error, Error::StepDue)
        } else {
            matches!(error, Error::Disagree { .. })
        });
        opt.discard_gradients().unwrap();
        assert!(opt.synchronize_state().unwrap().is_none());
        assert_eq!((opt.group(), opt.world().world_size()), (&[rank][..], 2));
    })
    .unwrap();
}

/// Groups' losses are their own, and so are their loss scales, which go on from where they were saved.
#[test]
fn groups_step_with_closures_and_restore_their_scales() {
    let pairs = [vec![0, 2], vec![1, 3]];
    let scale = DynamicLossScale { init_scale: 4.0, growth_interval: 1, ..DynamicLossScale::default() };
    let options = Options { loss_scale: Some(LossScale::Dynamic(scale)), ..replicated() };
    loopback::spawn(4, |comm| {
        let rank = comm.rank();
        let mut opt = build(Arc::clone(&comm), Some(&pairs), Sgd::default(), options.clone()).unwrap();
        for (loss_scale, overflow) in [(4.0, false), (8.0, true)] {
            let told = opt.step_with(at_one(), 1, |mb| {
                assert_eq!(mb.loss_scale(), loss_scale);
                let g = if overflow && rank == 1 { f32::INFINITY } else { loss_scale as f32 };
                mb.grad("w", &[g; 2][..])?;
                mb.grad("b", &[g; 3][..])?;
                Ok::<_, Error>(rank as f64)
            });
            assert_eq!(told.unwrap().loss, [1.0, 2.0][rank % 2]);
            let next = match (overflow, rank % 2) {
                (false, _) => 8.0,
                (true, 0) => 16.0,
                (true, _) => 4.0,
            };
            assert_eq!(opt.optimizer().loss_scale(), next);
        }
        let saved = opt.optimizer().loss_scale_state().unwrap();
        let mut again = build(comm, Some(&pairs), Sgd::default(), options.clone()).unwrap();
        again.restore_loss_scale(saved).unwrap();
        assert_eq!(again.optimizer().loss_scale(), [16.0, 4.0][rank % 2]);
    })
    .unwrap();
}

/// It reads reduced gradients, so what a step would do to them first is refused and not forgotten.
#[test]
fn lbfgs_refuses_what_only_a_step_does() {
    let loss_scale = Some(LossScale::Static(2.0));
    let precision = Precision { rounding: Rounding::Stochastic, ..Precision::default() };
    for (options, says) in [
        (Options { clip: Clip::BeforeReduce, ..replicated() }, "no clip: Clip::BeforeReduce:"),
        (Options { loss_scale, ..replicated() }, "no loss_scale:"),
        (Options { missing: Missing::AllOrNone, ..replicated() }, "no missing: Missing::AllOrNone:"),
        (Options { precision, ..replicated() }, "no rounding: Rounding::Stochastic:"),
    ] {
        let told = loopback::spawn(2, |comm| {
            let dtype = if options.precision == precision { DType::BF16 } else { DType::F32 };
            let layout = Layout::builder().param("w", &[2], dtype).build().unwrap();
            let made = ShardedLbfgs::new(comm, layout, Lbfgs::default(), zeros, options.clone());
            made.map(drop).unwrap_err().to_string()
        });
        assert!(told.unwrap().iter().all(|t| t.contains(says)), "{says}");
    }
}

#[test]
fn clipping_before_the_reduction_needs_gradients_that_stay() {
    loopback::spawn(2, |comm| {
        let options = Options { stage: Stage::Zero2, clip: Clip::BeforeReduce, ..Options::default() };
        let refused = Optimizer::new(comm, layout(), Sgd::default(), zeros, options).map(drop);
        assert!(matches!(refused, Err(Error::ClipNeedsGradients)));
    })
    .unwrap();
}
