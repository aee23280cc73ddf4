//! Random numbers that are pure functions of a seed, a name and an index.
//!
//! So drawing order, ranks and stages cannot change them. The generator is SplitMix64 (Steele, Lea and Flood, "Fast
//! splittable pseudorandom number generators", 2014), evaluated directly at any index: its state after `n` draws is `base +
//! n * GOLDEN`.

use std::f64::consts::TAU;

/// Increment of SplitMix64: the odd constant nearest to 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// An endless sequence of random numbers, addressed by index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    base: u64,
}

impl Stream {
    /// Returns the sequence of `seed` and `words`.
    pub(crate) fn new(seed: u64, words: &[u64]) -> Self {
        let base = words.iter().fold(mix(seed ^ GOLDEN), |base, &word| mix(base ^ word.wrapping_mul(GOLDEN)));
        Self { base }
    }

    /// Returns the sequence of `seed` and a name.
    pub(crate) fn named(seed: u64, name: &str) -> Self {
        let words: Vec<u64> = name.bytes().map(u64::from).collect();
        Self::new(seed, &words)
    }

    /// Returns 64 uniform bits.
    pub(crate) fn bits(self, index: u64) -> u64 {
        mix(self.base.wrapping_add(GOLDEN.wrapping_mul(index.wrapping_add(1))))
    }

    /// Returns a whole number below `n`, by multiplication instead of division (Lemire 2019, without the rejection step:
    /// the bias is below n / 2^64).
    pub(crate) fn below(self, index: u64, n: u64) -> u64 {
        ((u128::from(self.bits(index)) * u128::from(n)) >> 64) as u64
    }

    /// Returns a normal number of mean 0 and deviation 1 (the cosine of Box and Muller's transform of two uniform numbers).
    pub(crate) fn normal(self, index: u64) -> f64 {
        let unit = |bits: u64| (bits >> 11) as f64 * (-53f64).exp2();
        let (a, b) = (unit(self.bits(2 * index)), unit(self.bits(2 * index + 1)));
        libm::sqrt(-2.0 * libm::log(1.0 - a)) * libm::cos(TAU * b)
    }
}

/// SplitMix64's finalizer: every input bit changes every output bit with probability one half.
fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_published_sequence() {
        // SplitMix64 from state 1234567, as listed with the reference implementation.
        let stream = Stream { base: 1_234_567 };
        let first: Vec<u64> = (0..3).map(|i| stream.bits(i)).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn normal_numbers_have_mean_0_and_deviation_1() {
        let n = 100_000u64;
        let draws: Vec<f64> = (0..n).map(|i| Stream::named(7, "wte").normal(i)).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
    }

    #[test]
    fn every_key_has_its_own_numbers() {
        let firsts = [
            Stream::named(1, "wte").bits(0),
            Stream::named(1, "wpe").bits(0),
            Stream::named(2, "wte").bits(0),
            Stream::new(1, &[0, 1]).bits(0),
            Stream::new(1, &[1, 0]).bits(0),
            Stream::new(1, &[1]).bits(0),
        ];
        for (i, a) in firsts.iter().enumerate() {
            assert!(firsts.iter().skip(i + 1).all(|b| a != b), "key {i} repeats: {firsts:?}");
        }
    }

    #[test]
    fn numbers_below_a_bound_reach_both_ends() {
        let stream = Stream::new(3, &[]);
        let draws: Vec<u64> = (0..1000).map(|i| stream.below(i, 7)).collect();
        assert_eq!((draws.iter().min(), draws.iter().max()), (Some(&0), Some(&6)));
    }
}
