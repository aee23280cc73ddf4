//! Random values of every type, and factors of ranks.

use meshstep_comm::Reduction;
use meshstep_tensor::{Element, bf16, f16};

/// Element that is drawn from random bits.
pub(crate) trait Drawn: Element + Copy {
    fn from_random(bits: u64) -> Self;
}

/// Returns values of many magnitudes, so that rounding shows, and zeros of both signs.
fn float(bits: u64) -> f64 {
    match bits % 8 {
        0 => 0.0,
        1 => -0.0,
        _ => ((bits >> 24) as f64 / (1u64 << 39) as f64 - 1.0) * 2f64.powi((bits >> 8) as i32 % 16 - 8),
    }
}

impl Drawn for f32 {
    fn from_random(bits: u64) -> Self {
        float(bits) as f32
    }
}

impl Drawn for f64 {
    fn from_random(bits: u64) -> Self {
        float(bits)
    }
}

impl Drawn for bf16 {
    fn from_random(bits: u64) -> Self {
        bf16::from_f64(float(bits))
    }
}

impl Drawn for f16 {
    fn from_random(bits: u64) -> Self {
        f16::from_f64(float(bits))
    }
}

impl Drawn for u64 {
    fn from_random(bits: u64) -> Self {
        bits
    }
}

/// Returns the reduction with the rank's own factor, if it has factors.
pub(crate) fn own(reduction: Reduction, rank: usize) -> Reduction {
    match reduction {
        Reduction::PreMulSum { factor } => Reduction::PreMulSum { factor: factor + 0.3 * rank as f64 },
        other => other,
    }
}

/// Returns the next random number (SplitMix64).
pub(crate) fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (*seed ^ (*seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
