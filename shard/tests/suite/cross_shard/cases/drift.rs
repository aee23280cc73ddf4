//! Drift between groups, and the mean that removes it.

use super::{Ranks, at_one, build, first_state, give, layout, of, replicated, step, t, there, values, zeros};
use crate::common::{self, adamw};
use meshstep_cases::{Effort, effort};
use meshstep_comm::loopback;
use meshstep_optim::Sgd;
use meshstep_shard::{CrossShard, Error, Master, Missing, Options, Outcome, Precision, Step, StepArgs};
use meshstep_tensor::{DType, Layout, Param, Slice, SliceMut};
use std::sync::Arc;

/// Groups of one rank drift, computed by hand: SGD with momentum 0.5, gradients 1 and 3 for w, and b missing on rank 1.
pub(crate) fn drift_is_measured_and_averaged_away(on: &impl Ranks) {
    let alone = [vec![0], vec![1]];
    on.run(2, |comm, queue| {
        let rank = comm.rank();
        let rule = Sgd { momentum: 0.5, ..Sgd::default() };
        let mut opt = build(comm, &queue, Some(&alone), rule, replicated()).unwrap();
        assert!(opt.synchronize_state().unwrap().is_none());
        let g = 1.0 + 2.0 * rank as f32;
        let _ = step(&mut opt, 1, Some([1.0, g]), (rank == 0).then_some(4.0), at_one()).unwrap();
        for averaged in [false, true] {
            let drift = if averaged { opt.synchronize_state() } else { opt.compare_state() }.unwrap();
            let found: Vec<_> = drift.slots.iter().map(|s| (s.slot, s.max_abs, s.differing)).collect();
            // w[1]: -1 and -3; b: -4 and 0. The momentum: 1 and 3; 4 and 0.
            assert_eq!(found, [("param", 4.0, 4), (opt.optimizer().state("w").unwrap().slots[0].0, 4.0, 4)]);
            assert!(drift.slots.iter().all(|s| s.at == Some(("b".to_owned(), 0))));
            assert_eq!(drift.t, Some((1, "b".to_owned())));
            assert!(!drift.is_none());
            let expected = if averaged { [-2.0, -2.0] } else { [-g, if rank == 0 { -4.0 } else { 0.0 }] };
            assert_eq!([values(&opt, "w")[1], values(&opt, "b")[0]], expected);
        }
        assert_eq!((t(&opt, "w"), t(&opt, "b")), (1, 1));
        assert_eq!(values(&opt, "w")[0], -1.0);
        let m = |name| first_state(&opt, name);
        assert_eq!((m("w"), m("b")), (vec![1.0, 2.0], vec![2.0; 3]));
        assert!(opt.compare_state().unwrap().is_none());
        // Both continue, with equal values.
        let _ = step(&mut opt, 1, Some([0.0; 2]), Some(0.0), at_one()).unwrap();
        assert_eq!((values(&opt, "w"), values(&opt, "b")), (vec![-1.5, -3.0], vec![-3.0; 3]));
    });
}

/// 16-bit parameters are their averaged masters, rounded; elements equal on three ranks keep their bits.
pub(crate) fn masters_are_averaged_and_parameters_follow(on: &impl Ranks) {
    let alone = [vec![0], vec![1], vec![2]];
    on.run(3, |comm, queue| {
        let rank = comm.rank();
        let layout = Layout::builder().param("h", &[70], DType::BF16).param("d", &[5], DType::F64);
        let layout = layout.build().unwrap();
        let first = |_: &Param, mut w: SliceMut<'_>| w.cast_from(Slice::from(&vec![0.1f64; w.len()][..]));
        let options = Options {
            precision: Precision { master: Master::F32, ..Precision::default() },
            bucket_len: Some(16),
            ..replicated()
        };
        let mut opt =
            CrossShard::new(comm, Some(&alone), layout, Sgd::default(), first, there(&queue, options))
                .unwrap();
        let mb = opt.micro_batch(1).unwrap();
        let mut h = [meshstep_tensor::bf16::ZERO; 70];
        h[69] = meshstep_tensor::bf16::from_f32([1.0, 2.0, 4.5][rank]);
        give(&mb, "h", &h[..], &queue).unwrap();
        give(&mb, "d", &[0.0, 0.0, rank as f64, 0.0, 0.0][..], &queue).unwrap();
        mb.finish().unwrap();
        let _ = opt.step(at_one()).unwrap();
        let drift = opt.synchronize_state().unwrap();
        let slots: Vec<_> = drift.slots.iter().map(|s| (s.slot, s.differing, s.at.clone())).collect();
        let at = || Some(("h".to_owned(), 69));
        assert_eq!(slots, [("param", 2, at()), ("master", 1, at())]);
        assert_eq!(drift.slots[1].max_abs, 3.5);
        let state = opt.optimizer().state("h").unwrap();
        let master: Vec<f32> = of(&opt, state.master.unwrap());
        let start = meshstep_tensor::bf16::from_f32(0.1).to_f32();
        assert!((master[69] - (start - 2.5)).abs() < 1e-6 && master[68] == start);
        let h = of::<meshstep_tensor::bf16>(&opt, opt.param("h").unwrap());
        assert_eq!((h[69], h[68].to_f32()), (meshstep_tensor::bf16::from_f32(master[69]), start));
        // Three times 0.1, divided by 3, is not 0.1.
        let d = of::<f64>(&opt, opt.param("d").unwrap());
        assert_eq!([d[0], d[1], d[3], d[4]], [0.1; 4]);
        assert!((d[2] + 0.9).abs() < 1e-15);
    });
}

/// A group that skipped a step is one behind; afterwards all continue with the largest `t`, which corrects their moments.
pub(crate) fn a_skip_of_one_group_is_a_drift_of_t(on: &impl Ranks) {
    let pairs = [vec![0, 2], vec![1, 3]];
    let ends = on.run(4, |comm, queue| {
        let rank = comm.rank();
        let mut opt = build(comm, &queue, Some(&pairs), adamw(), replicated()).unwrap();
        let at = StepArgs { lr: 0.5, ..StepArgs::default() };
        for n in 1..=3 {
            let g = if (n, rank) == (2, 3) { f32::NAN } else { 1.0 + (rank % 2) as f32 };
            let outcome = step(&mut opt, 1, Some([g, 1.0]), Some(1.0), at).unwrap();
            assert_eq!(matches!(outcome, Outcome::Skipped { .. }), n == 2 && rank % 2 == 1);
        }
        assert_eq!((t(&opt, "w"), t(&opt, "b")), [(3, 3), (2, 2)][rank % 2]);
        let drift = opt.synchronize_state().unwrap();
        assert_eq!(drift.t, Some((1, "w".to_owned())));
        assert_eq!((t(&opt, "w"), t(&opt, "b")), (3, 3));
        let _ = step(&mut opt, 1, Some([1.0, -1.0]), Some(2.0), at).unwrap();
        assert_eq!((t(&opt, "w"), t(&opt, "b")), (4, 4));
        assert!(opt.compare_state().unwrap().is_none());
        [values(&opt, "w"), values(&opt, "b"), first_state(&opt, "w")]
    });
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
}

/// Values of every rank after each of some steps in pairs and synchronizations, to the bit: sums of the gradients are exact.
pub(crate) fn story(on: &impl Ranks, options: &Options) -> Vec<Vec<String>> {
    let pairs = [vec![3, 0], vec![1, 2]];
    on.run(4, |comm, queue| {
        let rank = comm.rank();
        let mut opt = build(comm, &queue, Some(&pairs), adamw(), options.clone()).unwrap();
        let mut told = Vec::new();
        for n in 0..7 {
            let g = |i: u64| common::hash(&[n, rank as u64, i]) % 32;
            let w = [g(0), g(1)].map(|g| g as f32 / 8.0 - 2.0);
            let w = if (n, rank) == (3, 1) { [f32::INFINITY; 2] } else { w };
            let at = StepArgs { lr: 0.25, max_norm: Some(1.5), ..StepArgs::default() };
            let lacks = options.missing == Missing::Zero && g(4) % 2 == 0;
            match step(&mut opt, 1 + g(2), Some(w), (!lacks).then(|| g(3) as f32 / 4.0), at).unwrap() {
                Outcome::Applied { norm, coef, .. } => told.push(format!("{norm:e} {coef:e}")),
                Outcome::Skipped { non_finite, .. } => told.push(format!("{non_finite} are not finite")),
            }
            if n == 2 || n == 4 {
                told.push(format!("{:?}", opt.synchronize_state().unwrap()));
            }
            let (params, state) = (common::params(opt.optimizer()), common::state(opt.optimizer()));
            told.push(format!("{:?} {params:?} {state:?}", opt.compare_state().unwrap()));
        }
        told
    })
}

/// The parameter is longer than a block of the comparison.
pub(crate) fn drift_is_found_at_the_end_of_a_long_parameter(on: &impl Ranks) {
    // When a tenth is run, the block also contains the parameter in front.
    let part: usize = if effort() == Effort::Tenth { 1 << 17 } else { 1 << 20 };
    let len = part + 200;
    let layout = Layout::builder().param("short", &[70], DType::F32).param("long", &[len], DType::F32);
    let layout = layout.build().unwrap();
    on.run(2, |comm, queue| {
        let rank = comm.rank();
        let alone = [vec![0], vec![1]];
        let options = Options { missing: Missing::Zero, ..replicated() };
        let mut opt = CrossShard::new(
            comm,
            Some(&alone),
            layout.clone(),
            Sgd::default(),
            zeros,
            there(&queue, options),
        )
        .unwrap();
        let mut take = |at: StepArgs, early: f32, late: f32| {
            let mb = opt.micro_batch(1).unwrap();
            let mut grad = vec![1f32; len];
            (grad[7], grad[len - 3]) = (early, late);
            give(&mb, "long", &grad[..], &queue).unwrap();
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
        let (drift, _) = take(StepArgs { lr: 1e19, ..at_one() }, 1.0, 1.0 + 1e38 * r);
        let error = drift.unwrap_err();
        assert!(matches!(&error, Error::DriftNotFinite { index, .. } if *index == len - 3), "{error}");
    });
}

pub(crate) fn what_is_not_finite_is_not_averaged(on: &impl Ranks) {
    let alone = [vec![0], vec![1]];
    on.run(2, |comm, queue| {
        let rank = comm.rank();
        let first =
            |_: &Param, mut w: SliceMut<'_>| w.cast_from(Slice::from(&vec![f64::INFINITY; w.len()][..]));
        let build = |first: &mut dyn FnMut(&Param, SliceMut<'_>) -> _| {
            CrossShard::new(
                Arc::clone(&comm),
                Some(&alone),
                layout(),
                Sgd::default(),
                first,
                there(&queue, replicated()),
            )
        };
        // Infinite on every rank is equal.
        assert!(build(&mut { first }).unwrap().synchronize_state().unwrap().is_none());
        let mut opt = build(&mut { zeros }).unwrap();
        let lr = if rank == 1 { 1.5e19 } else { 1.0 };
        let _ =
            step(&mut opt, 1, Some([0.0, 3e38]), Some(0.0), StepArgs { lr, ..StepArgs::default() }).unwrap();
        let before = values(&opt, "w");
        let error = opt.synchronize_state().unwrap_err();
        let told = matches!(&error, Error::DriftNotFinite { slot: "param", name, index: 1 } if name == "w");
        assert!(told, "{error}");
        assert_eq!(values(&opt, "w"), before);
    });
}

/// Numbers with a sum beyond f64's range still have a mean; small ones beside them keep theirs.
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
        let _ = opt.step(StepArgs { lr: 1.0, ..StepArgs::default() }).unwrap().outcome().unwrap();
        assert!(!opt.synchronize_state().unwrap().is_none());
        let w = opt.param("w").unwrap().typed::<f64>().unwrap().to_vec();
        let near = |got: f64, want: f64| ((got - want) / want).abs() < 1e-15;
        assert!(near(w[0], 1.5e308 - 1e307 / 3.0) && near(w[1], 1.5e308 + 1e307 / 3.0), "{w:?}");
        assert_eq!(w[2], 4.0e-323);
        assert!(opt.compare_state().unwrap().is_none());
    })
    .unwrap();
}

/// The two zeros are different numbers, and are averaged; NaN on every rank is equal.
pub(crate) fn replicas_have_the_same_bits_once_synchronized(on: &impl Ranks) {
    let alone = [vec![0], vec![1]];
    on.run(2, |comm, queue| {
        let rank = comm.rank();
        let nan = |_: &Param, mut w: SliceMut<'_>| {
            let mut first = vec![1f64; w.len()];
            first[1] = f64::NAN;
            w.cast_from(Slice::from(&first[..]))
        };
        let rule = Sgd { momentum: 0.5, ..Sgd::default() };
        let mut opt =
            CrossShard::new(comm, Some(&alone), layout(), rule, nan, there(&queue, replicated())).unwrap();
        let _ = step(&mut opt, 1, Some([[0.0, -0.0][rank], 0.0]), Some(0.0), at_one()).unwrap();
        let drift = opt.synchronize_state().unwrap();
        let found: Vec<_> = drift.slots.iter().map(|s| (s.max_abs, s.differing, s.at.clone())).collect();
        assert_eq!(found, [(0.0, 0, None), (0.0, 1, Some(("w".to_owned(), 0)))]);
        let m = first_state(&opt, "w");
        assert_eq!(m.iter().map(|m| m.to_bits()).collect::<Vec<_>>(), [0; 2]);
        assert!(opt.compare_state().unwrap().is_none());
    });
}
