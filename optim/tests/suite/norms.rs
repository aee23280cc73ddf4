//! Norms against integers of any length: exact, with the same bits for any order, split, merge and instruction set.

use crate::common::naive::{Naive, words};
use crate::common::{Random, Values, cases, fast};
use meshstep_optim::{ExactSum, Isa, Norm, NormAccumulator};
use meshstep_tensor::{DType, Slice, Threads};
use proptest::prelude::*;

/// Returns sum, largest magnitude and non-finite count, by definition.
fn expected(norm: Norm, values: &[f64]) -> (Vec<u64>, u64, u64) {
    let mut naive = Naive::default();
    let finite = values.iter().filter(|x| x.is_finite());
    for &x in finite.clone() {
        match norm {
            Norm::L1 => naive.add_product(x.abs(), 1.0),
            Norm::L2 => naive.add_product(x, x),
            _ => (),
        }
    }
    let largest = finite.clone().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    (words(&naive), largest.to_bits(), (values.len() - finite.count()) as u64)
}

fn parts(norm: &NormAccumulator) -> (Vec<u64>, u64, u64) {
    (norm.sum().words().to_vec(), norm.max_bits(), norm.non_finite())
}

fn of(norm: Norm, isa: Isa, values: Slice<'_>) -> NormAccumulator {
    let mut accumulator = NormAccumulator::new(norm);
    accumulator.add_on(isa, &Threads::shared(), values).unwrap();
    accumulator
}

/// Ordinary numbers; random bits; tiny ones beside huge ones; all on one side of the range; zeros with a few others.
fn values(dtype: DType, len: usize, kind: u8, seed: u64) -> Values {
    let mut random = Random::new(seed);
    Values::new(dtype, len, move || match kind {
        0 => random.unit(),
        1 if dtype == DType::F64 => f64::from_bits(random.next()),
        1 => f32::from_bits(random.next() as u32).into(),
        2 => random.unit() * 2f64.powi((random.next() % 250) as i32 - 148),
        3 => random.unit() * 1e-38 * if dtype == DType::F64 { 1e-270 } else { 1.0 },
        4 => random.unit() * f64::from(f32::MAX) * if dtype == DType::F64 { 5e269 } else { 1.0 },
        5 => random.unit() * 2f64.powi(-((random.next() % 24) as i32)),
        _ if random.next().is_multiple_of(7) => random.any(),
        _ => 0.0,
    })
}

/// Returns a number between 3/4 and 1 with a square just above the middle of two multiples of 2^-42, so that the rests of a block's lanes
/// add up as far as possible; now and then a small one, with the last bit of its square as low as `gap` allows.
fn hard(random: &mut Random, gap: i32) -> f64 {
    loop {
        let x = f64::from((0.75 + 0.25 * random.unit().abs()) as f32);
        let left = (x * x * 2f64.powi(42)).fract();
        match random.next() % 64 {
            0 => return (1.0 + 2f64.powi(-23)) * 2f64.powi(-gap),
            _ if left > 0.5 => return x,
            _ => (),
        }
    }
}

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

proptest! {
    #![proptest_config(cases(150, 15_000))]

    #[test]
    fn sums_are_exact_on_every_instruction_set(
        dtype in 0..4usize,
        kind in 0..7u8,
        len in prop_oneof![0usize..70, 2000usize..4200],
        seed: u64,
    ) {
        let values = values(DTYPES[dtype], len, kind, seed);
        for norm in [Norm::L1, Norm::L2] {
            let expected = expected(norm, &values.f64());
            for isa in Isa::available() {
                prop_assert_eq!(&parts(&of(norm, isa, values.slice())), &expected, "{:?} on {}", norm, isa);
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(60, 15_000))]

    #[test]
    fn order_split_and_merge_do_not_matter(
        dtype in 0..4usize,
        kind in 0..7u8,
        len in prop_oneof![1usize..3000, 200_000usize..400_000],
        cuts in prop::collection::vec(0.0f64..1.0, 0..6),
        seed: u64,
    ) {
        let values = values(DTYPES[dtype], len, kind, seed);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| (cut * len as f64) as usize).chain([0, len]).collect();
        cuts.sort();
        for norm in [Norm::L1, Norm::L2, Norm::Inf] {
            let whole = of(norm, Isa::detect(), values.slice());
            let mut split = NormAccumulator::new(norm);
            let mut merged = NormAccumulator::new(norm);
            let mut summed = vec![0u64; ExactSum::WORDS];
            // Last part first.
            for pair in cuts.windows(2).rev() {
                let part = values.slice().slice(pair[0]..pair[1]).unwrap();
                split.add(part).unwrap();
                let part = of(norm, Isa::Baseline, part);
                merged.merge(&part);
                summed.iter_mut().zip(part.sum().words()).for_each(|(s, word)| *s = s.wrapping_add(word));
            }
            prop_assert_eq!(parts(&split), parts(&whole));
            prop_assert_eq!(&merged, &whole);
            let travelled = ExactSum::from_words(&summed);
            let again = NormAccumulator::from_parts(norm, travelled, merged.max_bits(), merged.non_finite());
            prop_assert_eq!(again.finish().to_bits(), whole.finish().to_bits());
            prop_assert_eq!(again, whole);
        }
    }
}

/// Small numbers from where the lanes hold the rests of terms to where two levels do not.
#[test]
fn lanes_filled_to_the_last_bit_are_exact() {
    for gap in 14..34 {
        for seed in 0..u64::from(meshstep_cases::cases(5, 500)) {
            let mut random = Random::new(seed);
            let values = Values::new(DType::F32, 8192, || hard(&mut random, gap));
            let expected = expected(Norm::L2, &values.f64());
            for isa in fast() {
                let parts = parts(&of(Norm::L2, isa, values.slice()));
                assert_eq!(parts, expected, "{isa}, seed {seed}, small ones at 2^-{gap}");
            }
        }
    }
}

/// Sums continue from block to block: the next block is larger, smaller, or has bits further down.
#[test]
fn blocks_that_differ_in_magnitude_are_exact_together() {
    for seed in 0..u64::from(meshstep_cases::cases(40, 2000)) {
        let mut random = Random::new(seed);
        let steps = [1, 4, 16, 40][seed as usize % 4];
        let mut values = Vec::new();
        for _ in 0..12 {
            let scale = 2f32.powi((random.next() % (2 * steps + 1)) as i32 - steps as i32);
            let gap = 8 + (random.next() % 12) as i32;
            values.extend((0..2048).map(|_| (hard(&mut random, gap) as f32) * scale));
        }
        let values = Values::F32(values);
        let expected = expected(Norm::L2, &values.f64());
        for isa in fast() {
            let parts = parts(&of(Norm::L2, isa, values.slice()));
            assert_eq!(parts, expected, "{isa}, seed {seed}, scales of 2^±{steps}");
        }
    }
}

#[test]
fn known_norms() {
    let values = Values::F32(vec![3.0, -4.0, 0.0]);
    let norms = [(Norm::L1, 7.0), (Norm::L2, 5.0), (Norm::Inf, 4.0)];
    for isa in fast() {
        for (norm, expected) in norms {
            assert_eq!(of(norm, isa, values.slice()).finish(), expected);
            assert_eq!(of(norm, isa, Slice::from(&[0f32; 0][..])).finish(), 0.0);
        }
    }
    let cubes = of(Norm::P(3.0), Isa::detect(), values.slice()).finish();
    assert!((cubes - 91f64.cbrt()).abs() < 1e-14);
}

#[test]
fn norms_beyond_squares_of_f64_are_right() {
    for (x, n) in [(1e200, 4), (1e-200, 4), (f64::MIN_POSITIVE, 9), (5e-324, 16)] {
        let root = (n as f64).sqrt();
        assert_eq!(of(Norm::L2, Isa::detect(), (&vec![x; n][..]).into()).finish(), x * root);
    }
    assert_eq!(of(Norm::L1, Isa::detect(), (&[f64::MAX; 2][..]).into()).finish(), f64::INFINITY);
}

#[test]
fn what_is_not_finite_is_counted_and_left_out() {
    let mut values = vec![1f32; 5000];
    for (i, x) in [(0, f32::NAN), (1023, f32::INFINITY), (1024, f32::NEG_INFINITY), (4999, -f32::NAN)] {
        values[i] = x;
    }
    for isa in Isa::available() {
        for (norm, expected) in
            [(Norm::L1, 4996.0), (Norm::L2, 4996f64.sqrt()), (Norm::Inf, 1.0), (Norm::P(2.0), 4996f64.sqrt())]
        {
            let norm = of(norm, isa, (&values[..]).into());
            assert_eq!((norm.finish(), norm.non_finite()), (expected, 4));
        }
    }
    let overflow = of(Norm::P(20.0), Isa::detect(), (&[1e30f32, 2.0][..]).into());
    assert_eq!((overflow.finish(), overflow.non_finite()), (2.0, 1));
}

#[test]
fn a_norm_that_is_none_is_refused() {
    for p in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let mut norm = NormAccumulator::new(Norm::P(p));
        assert!(Norm::P(p).check().unwrap_err().to_string().contains("p > 0"));
        assert!(norm.add((&[1f32][..]).into()).is_err());
        assert_eq!(norm.max_bits(), 0);
    }
    assert!(NormAccumulator::new(Norm::L2).add((&[1u64][..]).into()).is_err());
}

#[test]
fn reset_forgets() {
    let mut norm = of(Norm::L2, Isa::detect(), (&[1f32, f32::NAN][..]).into());
    norm.reset();
    assert_eq!(norm, NormAccumulator::new(Norm::L2));
}
