//! Exact sum of f64 values, squares or products: the words do not depend on order, splits or merges.

use std::ops::Range;

/// Limbs below the last hold 32 bits of the sum; the upper 32 bits of the word let additions postpone carries.
const LIMB: u32 = 32;

/// Exponent of bit 0, as in the square of the smallest f64: `2^LOWEST`.
const LOWEST: i32 = -2148;

/// After this many deposits of less than `2^32` per limb, limbs are below `2^62 + 2^32` and must be carried.
const CARRY_AFTER: u32 = 1 << 30;
const _: () = assert!(((CARRY_AFTER as u128 + 1) << LIMB) < 1 << 63);

/// Fixed-point sum that holds any finite f64 and any square of one exactly, with room for `2^64` of them on each of `2^24` ranks.
///
/// The sum travels as words: words of several ranks, added with wrapping, are the words of the total.
///
/// ```
/// use meshstep_optim::ExactSum;
///
/// let mut sum = ExactSum::new();
/// [1e300, 1.0, -1e300].into_iter().for_each(|x| sum.add(x));
/// assert_eq!(sum.to_f64(), 1.0);
/// ```
#[derive(Clone)]
pub struct ExactSum {
    /// Two's complement over all limbs once carried; limbs below the last are then in `0..2^32`.
    limbs: [i64; ExactSum::WORDS],
    /// Deposits since the last carry.
    waiting: u32,
}

impl ExactSum {
    /// Words of one sum: bits from `2^-2148` to `2^2139`, 32 a word, 64 in the last.
    pub const WORDS: usize = 133;

    /// Zero.
    pub const fn new() -> Self {
        ExactSum { limbs: [0; Self::WORDS], waiting: 0 }
    }

    /// Adds `x`. Infinities and NaN are left out, because an exact sum cannot hold them; count them separately if they matter.
    pub fn add(&mut self, x: f64) {
        if let Some((significand, exponent)) = parts(x) {
            self.deposit(x < 0.0, significand, exponent);
        }
    }

    /// Adds `x * x`. Infinities and NaN are left out, as in [`add`](Self::add).
    pub fn add_square(&mut self, x: f64) {
        if let Some((significand, exponent)) = parts(x) {
            let square = u128::from(significand) * u128::from(significand);
            self.deposit(false, square as u64, 2 * exponent);
            self.deposit(false, (square >> 64) as u64, 2 * exponent + 64);
        }
    }

    /// Adds `integer * 2^exponent`, for exponents from that of the smallest square to 2006.
    pub(super) fn add_integer(&mut self, integer: i64, exponent: i32) {
        self.deposit(integer < 0, integer.unsigned_abs(), exponent);
    }

    /// Adds `x * y`, or nothing if one of them is not finite.
    pub fn add_product(&mut self, x: f64, y: f64) {
        if let (Some((a, i)), Some((b, j))) = (parts(x), parts(y)) {
            let product = u128::from(a) * u128::from(b);
            let negative = (x < 0.0) != (y < 0.0);
            self.deposit(negative, product as u64, i + j);
            self.deposit(negative, (product >> 64) as u64, i + j + 64);
        }
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &ExactSum) {
        // The carried part of the other sum counts as one more deposit.
        let waiting = self.waiting.saturating_add(other.waiting).saturating_add(1);
        if waiting >= CARRY_AFTER {
            let mut carried = other.clone();
            carried.carry();
            self.carry();
            return self.merge(&carried);
        }
        let limbs = self.limbs.iter_mut().zip(&other.limbs);
        limbs.for_each(|(mine, theirs)| *mine = mine.wrapping_add(*theirs));
        self.waiting = waiting;
    }

    /// Returns this sum minus `other`.
    pub(crate) fn minus(&self, other: &ExactSum) -> ExactSum {
        let mut difference = self.clone();
        difference.carry();
        for (mine, theirs) in difference.limbs.iter_mut().zip(other.words()) {
            *mine = mine.wrapping_sub(theirs as i64);
        }
        difference.carry();
        difference
    }

    /// Returns the sum as words, each but the last below `2^32`. Equal sums have equal words.
    pub fn words(&self) -> [u64; Self::WORDS] {
        let mut carried = self.clone();
        carried.carry();
        carried.limbs.map(|limb| limb as u64)
    }

    /// Returns the sum of up to `2^24` sums from their words, added one by one with wrapping.
    ///
    /// # Panics
    /// If there are not [`WORDS`](Self::WORDS) words.
    pub fn from_words(words: &[u64]) -> Self {
        assert_eq!(words.len(), Self::WORDS, "an exact sum travels as this many words");
        let mut sum = ExactSum::new();
        sum.limbs.iter_mut().zip(words).for_each(|(limb, &word)| *limb = word as i64);
        sum.carry();
        sum
    }

    /// Writes the words of `window`, with the sign in the last one: enough for a sum without bits below the window that fits 60 bits of
    /// the last limb. They add up over ranks like all words.
    pub(crate) fn write_window(&self, window: &Range<usize>, words: &mut [u64]) {
        let all = self.words();
        words.copy_from_slice(&all[window.clone()]);
        if let (Some(last), Some(above)) = (words.last_mut(), all.get(window.end)) {
            *last = last.wrapping_add(above << LIMB);
        }
    }

    /// Returns the sum from the words of a window.
    pub(crate) fn from_window(window: &Range<usize>, words: &[u64]) -> Self {
        let mut sum = ExactSum::new();
        let limbs = &mut sum.limbs[window.clone()];
        limbs.iter_mut().zip(words).for_each(|(limb, &word)| *limb = word as i64);
        sum.carry();
        sum
    }

    /// Window of words for any sum of products of two f32: bits from `2^-298` to `2^344`, with room for `2^64` of them on each of `2^24`
    /// ranks.
    pub(crate) const F32_PRODUCTS: Range<usize> = 57..78;

    /// Returns the nearest f64, ties to even; infinite only if the sum is beyond f64.
    pub fn to_f64(&self) -> f64 {
        let Some((negative, top, exponent)) = self.top() else { return 0.0 };
        // Bits below f64's last place, at least the 11 bits that exceed 53.
        let dropped = (-1074 - exponent).max(11);
        let rounded = shift_to_even(top, dropped as u32);
        let magnitude = libm::scalbn(rounded as f64, exponent.saturating_add(dropped));
        if negative { -magnitude } else { magnitude }
    }

    /// Returns the f64 nearest to the sum divided by `count`, ties to even. It is rounded once, so the mean of equal numbers is that
    /// number. NaN for a count of 0.
    pub fn mean(&self, count: u64) -> f64 {
        if count == 0 {
            return f64::NAN;
        }
        let (negative, magnitude) = self.magnitude();
        let mut quotient = ExactSum::new();
        let mut rest = 0u128;
        for i in (0..=Self::WORDS).rev() {
            let part = rest << LIMB | u128::from(magnitude.digit(i));
            // Only the last limb has a second digit.
            let place = i.min(Self::WORDS - 1);
            quotient.limbs[place] |=
                ((part / u128::from(count)) as i64) << (LIMB * u32::from(i == Self::WORDS));
            rest = part % u128::from(count);
        }
        // The remainder is less than the lowest bit, so setting that bit rounds correctly: no f64 has bits that low.
        quotient.limbs[0] |= i64::from(rest != 0);
        if negative { -quotient.to_f64() } else { quotient.to_f64() }
    }

    /// Returns the square root of the nearest 53-bit number, also if the sum itself is beyond f64. NaN for a negative sum.
    pub fn sqrt(&self) -> f64 {
        let Some((negative, top, exponent)) = self.top() else { return 0.0 };
        if negative {
            return f64::NAN;
        }
        // `top as f64` rounds to nearest even; its last bit is sticky for all bits below, so this rounds only once.
        let odd = exponent.rem_euclid(2);
        let root = libm::scalbn(top as f64, odd).sqrt();
        libm::scalbn(root, (exponent - odd) / 2)
    }

    /// Adds `significand * 2^exponent`, for `LOWEST <= exponent <= 2006`.
    fn deposit(&mut self, negative: bool, significand: u64, exponent: i32) {
        let place = (exponent - LOWEST) as u32;
        let first = (place / LIMB) as usize;
        // 64 bits shifted by at most 31 reach into three limbs.
        let mut rest = u128::from(significand) << (place % LIMB);
        for limb in &mut self.limbs[first..first + 3] {
            let part = (rest as u32) as i64;
            *limb = limb.wrapping_add(if negative { -part } else { part });
            rest >>= LIMB;
        }
        self.waiting += 1;
        if self.waiting == CARRY_AFTER {
            self.carry();
        }
    }

    /// Carries bits above 32 from limb to limb; the last limb keeps the sign.
    fn carry(&mut self) {
        let mut carry = 0;
        for limb in &mut self.limbs[..Self::WORDS - 1] {
            let full = limb.wrapping_add(carry);
            *limb = full & 0xffff_ffff;
            carry = full >> LIMB;
        }
        let last = &mut self.limbs[Self::WORDS - 1];
        *last = last.wrapping_add(carry);
        self.waiting = 0;
    }

    /// Returns the sign, the 64 bits from the highest set one down, and the exponent of the lowest of these. The lowest bit is sticky: it
    /// is set if any bit below is set. None for zero.
    fn top(&self) -> Option<(bool, u64, i32)> {
        let (negative, magnitude) = self.magnitude();
        let digit = |i: usize| magnitude.digit(i);
        let high = (0..=Self::WORDS).rfind(|&i| digit(i) != 0)?;
        // Three digits hold the highest set bit and at least 64 bits below it.
        let low = high.saturating_sub(2);
        let window = (low..=high).rev().fold(0u128, |window, i| window << LIMB | u128::from(digit(i)));
        let drop = (128 - window.leading_zeros()).saturating_sub(64);
        let lost = window & ((1 << drop) - 1) != 0 || (0..low).any(|i| digit(i) != 0);
        let kept = (window >> drop) as u64;
        // Leading zeros only occur if no bits lie below.
        let spare = kept.leading_zeros();
        let exponent = LOWEST + (low as u32 * LIMB + drop) as i32 - spare as i32;
        Some((negative, kept << spare | u64::from(lost), exponent))
    }

    /// Returns sign and magnitude, carried.
    fn magnitude(&self) -> (bool, ExactSum) {
        let mut magnitude = self.clone();
        magnitude.carry();
        let negative = magnitude.limbs[Self::WORDS - 1].is_negative();
        if negative {
            magnitude.limbs.iter_mut().for_each(|limb| *limb = limb.wrapping_neg());
            magnitude.carry();
        }
        (negative, magnitude)
    }

    /// Returns 32 bits of a carried sum, counted from the lowest; the last limb has two digits.
    fn digit(&self, i: usize) -> u32 {
        let last = Self::WORDS - 1;
        if i > last { (self.limbs[last] >> LIMB) as u32 } else { self.limbs[i] as u32 }
    }
}

impl Default for ExactSum {
    fn default() -> Self {
        Self::new()
    }
}

impl PartialEq for ExactSum {
    fn eq(&self, other: &Self) -> bool {
        self.words() == other.words()
    }
}

impl Eq for ExactSum {}

impl std::fmt::Debug for ExactSum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ExactSum").field(&self.to_f64()).finish()
    }
}

/// Splits `|x| = significand * 2^exponent` with a significand of at most 53 bits; None if `x` is not finite.
fn parts(x: f64) -> Option<(u64, i32)> {
    let bits = x.to_bits();
    let fraction = bits & ((1 << 52) - 1);
    match (bits >> 52) as i32 & 0x7ff {
        0x7ff => None,
        0 => Some((fraction, -1074)),
        exponent => Some((fraction | 1 << 52, exponent - 1075)),
    }
}

/// Returns `x / 2^by` rounded to nearest, ties to even.
fn shift_to_even(x: u64, by: u32) -> u64 {
    if by > 64 {
        return 0;
    }
    let wide = u128::from(x);
    let (kept, lost, half) = (wide >> by, wide & ((1 << by) - 1), 1u128 << (by - 1));
    let up = lost > half || lost == half && kept & 1 == 1;
    (kept + u128::from(up)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_what_is_left_however_little() {
        let sum = |terms: &[f64]| {
            let mut sum = ExactSum::new();
            terms.iter().for_each(|&x| sum.add_product(x, 1.0));
            sum
        };
        let (large, small) = (sum(&[1e300, 3.0, 1e-300]), sum(&[1e300, 3.0]));
        assert_eq!(large.minus(&small), sum(&[1e-300]));
        assert_eq!(small.minus(&large), sum(&[-1e-300]));
        assert_eq!(small.minus(&small), ExactSum::new());
        assert_eq!(sum(&[-7.0]).minus(&large), sum(&[-7.0, -1e300, -3.0, -1e-300]));
    }

    /// Doubles a sum of numbers with full limbs until its carries are due, and further.
    #[test]
    fn merging_carries_in_time() {
        for x in [f64::MAX, -f64::MAX, -1.0 / 3.0] {
            let (mut sum, mut times) = (ExactSum::new(), 1u64);
            sum.add(x);
            for _ in 0..40 {
                sum.merge(&sum.clone());
                times *= 2;
                assert!(sum.waiting < CARRY_AFTER);
                assert_eq!(sum.mean(times), x, "{times} times");
            }
        }
    }

    #[test]
    fn a_window_holds_every_sum_of_f32_products() {
        let window = ExactSum::F32_PRODUCTS;
        let factors = [f32::MAX, -f32::MAX, f32::from_bits(1), -f32::from_bits(1), 1.5, -0.1, 3e-20, 0.0];
        for (i, &x) in factors.iter().enumerate() {
            for &y in &factors[i..] {
                for &z in &factors {
                    let mut sum = ExactSum::new();
                    sum.add_product(x.into(), y.into());
                    sum.add_product(z.into(), 1.0f64);
                    let mut words = vec![0; window.len()];
                    sum.write_window(&window, &mut words);
                    assert_eq!(ExactSum::from_window(&window, &words), sum);
                    // The sum over 2^20 ranks.
                    words.iter_mut().for_each(|word| *word = word.wrapping_mul(1 << 20));
                    let mut all = sum.words();
                    all.iter_mut().for_each(|word| *word = word.wrapping_mul(1 << 20));
                    assert_eq!(ExactSum::from_window(&window, &words), ExactSum::from_words(&all));
                }
            }
        }
        let all = 0..ExactSum::WORDS;
        let mut sum = ExactSum::new();
        sum.add_product(-f64::MAX, f64::MAX);
        let mut words = vec![0; all.len()];
        sum.write_window(&all, &mut words);
        assert_eq!((words, ExactSum::from_window(&all, &sum.words())), (sum.words().to_vec(), sum));
    }
}
