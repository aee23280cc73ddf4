//! The share of an update in the average of all: a function of its number.
//!
//! With `q = r + weight_lr_power`, `W = warmup_steps` and `S_a(n) = 1^a + 2^a + ... + n^a`:
//!
//! ```text
//! c_t = t^q / S_q(t)                                              t <= W
//! c_t = t^r / (S_q(W) / W^weight_lr_power - S_r(W) + S_r(t))      t > W
//! ```
//!
//! `S_a` is summed up to n = 32. Further on it is the Euler-Maclaurin formula (Graham, Knuth and Patashnik, *Concrete mathematics*,
//! section 9.5) with a constant that makes both agree at 32. Powers are products and square roots, each rounded on its own, so that a GPU
//! has the same bits.

use crate::precision::number::power;

/// Weights of an average.
#[derive(Clone, Copy, Debug)]
pub(super) struct Averaging {
    /// Updates of the warm-up.
    pub(super) warmup: f64,
    /// Power of `t` in a weight after the warm-up.
    pub(super) r: f64,
    /// Power of `t` in a weight during the warm-up.
    pub(super) q: f64,
    /// Constants of the sums of powers `r` and `q`.
    pub(super) zeta_r: f64,
    pub(super) zeta_q: f64,
    /// Sum of the warm-up's weights, less `S_r(W)`.
    pub(super) offset: f64,
}

/// Number of powers that are summed one by one.
const SUMMED: u64 = 32;

impl Averaging {
    /// Computes what does not depend on `t`.
    pub(super) fn new(warmup_steps: u64, r: f64, weight_lr_power: f64) -> Self {
        let (warmup, q) = (warmup_steps as f64, r + weight_lr_power);
        let (zeta_r, zeta_q) = (zeta(r), zeta(q));
        let offset = match warmup_steps {
            0 => 0.0,
            n => sum(n, q, zeta_q) / real_power(warmup, weight_lr_power) - sum(n, r, zeta_r),
        };
        Averaging { warmup, r, q, zeta_r, zeta_q, offset }
    }

    /// Returns the learning rate of update `t`.
    pub(super) fn warmed_up(&self, lr: f64, t: u64) -> f64 {
        let t = t as f64;
        if t < self.warmup { lr * (t / self.warmup) } else { lr }
    }

    /// Returns the share of update `t` in the average; 1 at t = 1.
    pub(super) fn share(&self, t: u64) -> f64 {
        match t as f64 {
            n if n <= self.warmup => real_power(n, self.q) / sum(t, self.q, self.zeta_q),
            n => real_power(n, self.r) / (self.offset + sum(t, self.r, self.zeta_r)),
        }
    }
}

/// Returns `1^a + ... + n^a`.
fn sum(n: u64, a: f64, zeta: f64) -> f64 {
    if n <= SUMMED { one_by_one(n, a) } else { smooth(n as f64, a) + zeta }
}

fn one_by_one(n: u64, a: f64) -> f64 {
    (1..=n).fold(0.0, |sum, i| sum + real_power(i as f64, a))
}

/// Returns the constant with which the formula is the sum.
fn zeta(a: f64) -> f64 {
    one_by_one(SUMMED, a) - smooth(SUMMED as f64, a)
}

/// Returns the terms of the Euler-Maclaurin formula that depend on `n`, up to the sixth Bernoulli number.
fn smooth(n: f64, a: f64) -> f64 {
    let (third, inverse) = (a * (a - 1.0) * (a - 2.0), 1.0 / n);
    let fifth = third * (a - 3.0) * (a - 4.0);
    let square = inverse * inverse;
    let corrections = inverse * (a / 12.0 - square * (third / 720.0 - square * (fifth / 30240.0)));
    real_power(n, a) * (n / (a + 1.0) + 0.5 + corrections)
}

/// Returns `base^exponent` for a base of at least 1 and an exponent of at least 0: a power of the base, and for each binary digit of the
/// exponent's fraction a repeated square root.
fn real_power(base: f64, exponent: f64) -> f64 {
    let whole = exponent.trunc();
    let (mut result, mut root, mut left) = (power(base, whole as u64), base, exponent - whole);
    while left > 0.0 && root > 1.0 {
        root = root.sqrt();
        left *= 2.0;
        if left >= 1.0 {
            result *= root;
            left -= 1.0;
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, expected: f64, by: f64) {
        assert!((got - expected).abs() <= by * expected.abs(), "{got:e}, not {expected:e}");
    }

    #[test]
    fn powers_are_powers() {
        for base in [1.0, 2.0, 3.0, 10.0, 1234.0, 1e12] {
            for exponent in [0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.3, 2.0, 2.999, 8.0, 15.7, 1e-300] {
                close(real_power(base, exponent), base.powf(exponent), 1e-14);
            }
        }
        assert_eq!([real_power(3.0, 2.0), real_power(16.0, 0.25), real_power(7.0, 0.0)], [9.0, 2.0, 1.0]);
    }

    /// The program's sums, step by step, for a constant rate.
    #[test]
    fn shares_are_those_of_running_sums() {
        for (warmup, r, p) in [
            (0, 0.0, 2.0),
            (1, 0.0, 2.0),
            (7, 0.0, 2.0),
            (500, 0.0, 2.0),
            (40, 0.75, 2.0),
            (33, 0.1, 0.0),
            (1000, 2.0, 1.3),
            (5000, 4.0, 4.0),
            (20, 3.5, 0.5),
        ] {
            let averaging = Averaging::new(warmup, r, p);
            let mut total = 0.0;
            for t in 1..=3000u64 {
                let risen = if t < warmup { t as f64 / warmup as f64 } else { 1.0 };
                let weight = (t as f64).powf(r) * risen.powf(p);
                total += weight;
                close(averaging.share(t), weight / total, 2e-13);
                assert_eq!(averaging.warmed_up(0.5, t), 0.5 * risen);
            }
            assert_eq!(averaging.share(1), 1.0);
        }
    }

    #[test]
    fn plain_averages_weigh_all_alike() {
        let averaging = Averaging::new(0, 0.0, 2.0);
        for t in [1, 2, 3, 31, 32, 33, 34, 1000, 1 << 40] {
            assert_eq!(averaging.share(t), 1.0 / t as f64);
        }
        // Far beyond 2^53, and with the largest powers, shares stay shares.
        let largest = Averaging::new(1 << 40, 4.0, 4.0);
        for t in [1, 33, 1 << 20, 1 << 40, (1 << 40) + 1, 1 << 62] {
            let share = largest.share(t);
            assert!(share > 0.0 && share <= 1.0, "{share} at {t}");
        }
    }
}
