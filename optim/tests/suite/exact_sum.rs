//! Exact sums against integers of any length, and their rounding against the standard library's parser.

use crate::common::cases;
use crate::common::naive::Naive;
use meshstep_optim::ExactSum;
use proptest::prelude::*;

proptest! {
    #![proptest_config(cases(300, 30_000))]

    #[test]
    fn a_sum_is_rounded_once(
        xs in prop::collection::vec((any::<u64>(), any::<bool>()), 0..12),
        narrow: bool,
        tiny: bool,
    ) {
        let mut sum = ExactSum::new();
        let mut naive = Naive::default();
        for (bits, cancel) in xs {
            // A narrow range of exponents makes cancellation and ties likely.
            let exponent = if tiny { bits >> 52 & 3 } else { 1000 + (bits >> 52 & 63) };
            let x = f64::from_bits(if narrow { bits & !(0x7ff << 52) | exponent << 52 } else { bits });
            let x = if cancel { f64::from_bits(x.to_bits() & !0xfff_ffff) } else { x };
            if x.is_finite() {
                naive.add_product(x, 1.0);
            }
            sum.add(x);
        }
        prop_assert_eq!(sum.to_f64() + 0.0, naive.parse() + 0.0);
        prop_assert_eq!(ExactSum::from_words(&sum.words()), sum);
    }

    #[test]
    fn a_root_is_within_one_last_place(xs in prop::collection::vec(any::<f64>(), 1..50), narrow: bool) {
        let mut naive = Naive::default();
        let mut sum = ExactSum::new();
        // With a narrow range of exponents many terms matter; arbitrary exponents exceed the range of f64's squares.
        for x in xs.into_iter().map(|x| if narrow { x % 8.0 } else { x }).filter(|x| x.is_finite()) {
            naive.add_product(x, x);
            sum.add_square(x);
        }
        let root = sum.sqrt();
        if root.is_finite() && root > 0.0 {
            let mut below = naive.clone();
            below.add_product(-root.next_down(), root.next_down());
            let mut above = naive;
            above.add_product(-root.next_up(), root.next_up());
            prop_assert!(!below.difference().0 && above.difference().0);
        }
    }
}

proptest! {
    #![proptest_config(cases(300, 30_000))]

    #[test]
    fn products_are_exact(
        pairs in prop::collection::vec((any::<f64>(), any::<f64>()), 0..40),
        narrow: bool,
    ) {
        let mut naive = Naive::default();
        let mut sum = ExactSum::new();
        let finite = pairs.into_iter().map(|(x, y)| if narrow { (x % 8.0, y % 0.25) } else { (x, y) });
        for (x, y) in finite.filter(|(x, y)| x.is_finite() && y.is_finite()) {
            // Products beyond the naive sum's range would not parse.
            naive.add_product(x, y);
            sum.add_product(x, y);
        }
        prop_assert_eq!(sum.to_f64() + 0.0, naive.parse() + 0.0);
    }

    #[test]
    fn a_mean_is_rounded_once(x in any::<f64>(), y in -1e3..1e3f64, count in 1u64..1 << 40, small in 1u64..9) {
        let mut equal = ExactSum::new();
        if x.is_finite() {
            equal.add_product(x, count as f64);
            prop_assert_eq!(equal.mean(count) + 0.0, x + 0.0);
        }
        // The mean of one term is a division, which also rounds once.
        let mut one = ExactSum::new();
        one.add(y);
        prop_assert_eq!(one.mean(small) + 0.0, y / small as f64 + 0.0);
        prop_assert!(one.mean(0).is_nan());
    }
}

/// Returns the sum of `xs` and the squares of `roots`, rounded.
fn rounded(xs: &[f64], roots: &[f64]) -> f64 {
    let mut sum = ExactSum::new();
    xs.iter().for_each(|&x| sum.add(x));
    roots.iter().for_each(|&x| sum.add_square(x));
    sum.to_f64()
}

#[test]
fn ties_go_to_even_unless_anything_lies_below() {
    let (half, tiny) = (2f64.powi(-53), f64::from_bits(1));
    assert_eq!(rounded(&[1.0, half], &[]), 1.0);
    assert_eq!(rounded(&[1.0, half, tiny], &[]), 1.0 + 2.0 * half);
    assert_eq!(rounded(&[1.0, half, -tiny], &[]), 1.0);
    assert_eq!(rounded(&[-1.0, -half], &[tiny]), -1.0);
    assert_eq!(rounded(&[-1.0, -half, -tiny], &[]), -1.0 - 2.0 * half);
    // Two squares of 2^-538 are half the smallest f64.
    let root = 2f64.powi(-538);
    assert_eq!(rounded(&[], &[root]), 0.0);
    assert_eq!(rounded(&[], &[root; 2]), 0.0);
    assert_eq!(rounded(&[], &[root, root, tiny]), tiny);
    assert_eq!(rounded(&[tiny], &[root; 2]), 2.0 * tiny);
}

#[test]
fn only_what_is_beyond_f64_is_infinite() {
    assert_eq!(rounded(&[f64::MAX, f64::MAX, -f64::MAX], &[]), f64::MAX);
    assert_eq!(rounded(&[f64::MAX, 2f64.powi(969)], &[]), f64::MAX);
    assert_eq!(rounded(&[f64::MAX, 2f64.powi(970)], &[]), f64::INFINITY);
    assert_eq!(rounded(&[-f64::MAX, -f64::MAX], &[]), f64::NEG_INFINITY);
    let mut sum = ExactSum::new();
    (0..4).for_each(|_| sum.add_square(f64::MAX));
    assert_eq!(sum.sqrt(), f64::INFINITY);
    [f64::NAN, f64::INFINITY].into_iter().for_each(|x| sum.add(x));
    assert_ne!(sum, ExactSum::new());
}

#[test]
fn words_of_many_ranks_wrap_to_their_sum() {
    let mut one = ExactSum::new();
    one.add(-1.5);
    one.add(2f64.powi(-1074));
    // The sum over 2^20 ranks: each word times that, wrapping.
    let many: Vec<u64> = one.words().iter().map(|word| word.wrapping_mul(1 << 20)).collect();
    let mut expected = ExactSum::new();
    expected.add(-1.5 * f64::from(1 << 20));
    expected.add(2f64.powi(-1054));
    assert_eq!(ExactSum::from_words(&many), expected);
}
