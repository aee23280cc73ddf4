//! Values of every type, and reductions of them by a loop.

use crate::Reduction;
use meshstep_tensor::{Element, bf16, f16};

/// Element type with its reductions.
pub(super) trait Sample: Element + PartialOrd {
    /// Name of the type.
    const NAME: &'static str;
    /// True for types with means and factors.
    const FLOAT: bool;
    /// Converts a small integer, or for u64 its two's complement.
    fn small(x: i64) -> Self;
    /// Sums each rank's value times its factor.
    fn sum(values: &[Self], factors: &[f64]) -> Self;
    /// Divides the sum by the number of values, in the type's accumulator.
    fn mean(values: &[Self]) -> Self;
}

macro_rules! sample {
    ($t:ty, $wide:ty, $name:literal, $to:expr, $from:expr) => {
        impl Sample for $t {
            const NAME: &'static str = $name;
            const FLOAT: bool = true;
            fn small(x: i64) -> Self {
                $from(x as $wide)
            }
            fn sum(values: &[Self], factors: &[f64]) -> Self {
                let products = values.iter().zip(factors).map(|(x, factor)| $to(*x) * *factor as $wide);
                $from(products.sum::<$wide>())
            }
            fn mean(values: &[Self]) -> Self {
                $from(values.iter().map(|x| $to(*x)).sum::<$wide>() / values.len() as $wide)
            }
        }
    };
}
sample!(f32, f64, "f32", f64::from, |x: f64| x as f32);
sample!(f64, f64, "f64", |x: f64| x, |x: f64| x);
sample!(bf16, f32, "bf16", bf16::to_f32, bf16::from_f32);
sample!(f16, f32, "f16", f16::to_f32, f16::from_f32);

impl Sample for u64 {
    const NAME: &'static str = "u64";
    const FLOAT: bool = false;
    fn small(x: i64) -> Self {
        x as u64
    }
    fn sum(values: &[Self], _: &[f64]) -> Self {
        values.iter().fold(0, |sum: u64, x| sum.wrapping_add(*x))
    }
    fn mean(values: &[Self]) -> Self {
        // Refused for integers, so that no check asks for it.
        Self::sum(values, &[]) / values.len() as u64
    }
}

/// Returns the factor of a rank in a sum of products: sums of a few small integers times these are exact.
pub(super) fn factor(rank: usize) -> f64 {
    [0.5, -1.0, 2.0, 1.0][rank % 4]
}

/// Returns element `i` of rank `rank` in call `salt`: an integer between -8 and 8.
pub(super) fn value<T: Sample>(salt: u64, rank: usize, i: usize) -> T {
    T::small((random(random(salt) ^ (rank as u64) << 56 ^ i as u64) % 17) as i64 - 8)
}

/// Returns a rank's values.
pub(super) fn values<T: Sample>(salt: u64, rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| value(salt, rank, i)).collect()
}

/// Returns element `i` of the reduction over `ranks` ranks.
pub(super) fn reduced<T: Sample>(how: Reduction, salt: u64, ranks: usize, i: usize) -> T {
    let column: Vec<T> = (0..ranks).map(|rank| value(salt, rank, i)).collect();
    let best = |better: fn(&T, &T) -> bool| {
        column.iter().copied().fold(column[0], |best, x| if better(&x, &best) { x } else { best })
    };
    match how {
        // Exact, in any order.
        Reduction::Sum | Reduction::Pairwise => T::sum(&column, &vec![1.0; ranks]),
        Reduction::Mean => T::mean(&column),
        Reduction::PreMulSum { .. } => T::sum(&column, &(0..ranks).map(factor).collect::<Vec<_>>()),
        Reduction::Max => best(|x, best| x > best),
        Reduction::Min => best(|x, best| x < best),
        Reduction::SumThenMax { sums } => {
            reduced(if i < sums { Reduction::Sum } else { Reduction::Max }, salt, ranks, i)
        }
    }
}

/// SplitMix64 (Steele et al. 2014).
pub(super) fn random(seed: u64) -> u64 {
    let x = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
