//! Reference for exact sums: schoolbook arithmetic on integers of any length.

use meshstep_optim::ExactSum;

/// Exponent of an integer's last bit, as in the square of the smallest f64.
const LOWEST: i32 = -2148;

/// Fixed-point number as two schoolbook integers: the sum of positive and the sum of negative terms.
#[derive(Clone, Default)]
pub(crate) struct Naive([Vec<u64>; 2]);

impl Naive {
    /// Adds `x * y`.
    pub(crate) fn add_product(&mut self, x: f64, y: f64) {
        let ((sx, ex), (sy, ey)) = (significand(x), significand(y));
        let product = u128::from(sx) * u128::from(sy);
        let at = (ex + ey - LOWEST) as usize;
        let (first, shift) = (at / 64, at % 64);
        // The product has at most 106 bits, so three digits hold it at any offset.
        let above = if shift == 0 { 0 } else { product >> (128 - shift) };
        let below = product << shift;
        for (i, digit) in [below as u64, (below >> 64) as u64, above as u64].into_iter().enumerate() {
            add_digit(&mut self.0[usize::from((x < 0.0) != (y < 0.0))], first + i, digit);
        }
    }

    /// Returns the difference of both sums as digits of 64 bits, with its sign.
    pub(crate) fn difference(&self) -> (bool, Vec<u64>) {
        let [plus, minus] = &self.0;
        let len = plus.len().max(minus.len());
        let digit = |x: &[u64], i: usize| x.get(i).copied().unwrap_or(0);
        let negative = (0..len).rev().map(|i| digit(plus, i).cmp(&digit(minus, i))).find(|o| o.is_ne());
        let negative = negative == Some(std::cmp::Ordering::Less);
        let (large, small) = if negative { (minus, plus) } else { (plus, minus) };
        let mut borrow = false;
        let digits = (0..len).map(|i| {
            let (x, b1) = digit(large, i).overflowing_sub(digit(small, i));
            let (x, b2) = x.overflowing_sub(borrow.into());
            borrow = b1 || b2;
            x
        });
        (negative, digits.collect())
    }

    /// Converts to decimal, so that the standard library's parser does the rounding.
    pub(crate) fn parse(&self) -> f64 {
        let (negative, mut digits) = self.difference();
        // Times 10^2148 / 2^2148 = 5^2148 makes an integer of decimal digits, 2148 of them after the point.
        for _ in 0..-LOWEST {
            multiply(&mut digits, 5);
        }
        let mut text = Vec::new();
        while digits.iter().any(|&d| d != 0) {
            text.push(format!("{:019}", divide(&mut digits, 10_000_000_000_000_000_000)));
        }
        text.reverse();
        let text = format!("{}0{}e{LOWEST}", if negative { "-" } else { "" }, text.concat());
        text.parse().unwrap()
    }
}

fn significand(x: f64) -> (u64, i32) {
    let (bits, exponent) = (x.to_bits() & ((1 << 52) - 1), (x.to_bits() >> 52 & 0x7ff) as i32);
    if exponent == 0 { (bits, -1074) } else { (bits | 1 << 52, exponent - 1075) }
}

fn add_digit(digits: &mut Vec<u64>, at: usize, digit: u64) {
    let (mut i, mut carry) = (at, digit);
    while carry != 0 {
        digits.resize(digits.len().max(i + 1), 0);
        let (sum, over) = digits[i].overflowing_add(carry);
        (digits[i], carry, i) = (sum, over.into(), i + 1);
    }
}

fn multiply(digits: &mut Vec<u64>, by: u64) {
    let mut carry = 0u128;
    for digit in digits.iter_mut() {
        carry += u128::from(*digit) * u128::from(by);
        *digit = carry as u64;
        carry >>= 64;
    }
    digits.push(carry as u64);
    while digits.last() == Some(&0) {
        digits.pop();
    }
}

fn divide(digits: &mut [u64], by: u64) -> u64 {
    let mut rest = 0u128;
    for digit in digits.iter_mut().rev() {
        rest = rest << 64 | u128::from(*digit);
        (*digit, rest) = ((rest / u128::from(by)) as u64, rest % u128::from(by));
    }
    rest as u64
}

/// Returns the words of a sum of squares or magnitudes, from the naive integer.
pub(crate) fn words(naive: &Naive) -> Vec<u64> {
    let (negative, digits) = naive.difference();
    assert!(!negative);
    let halves = digits.iter().flat_map(|d| [d & 0xffff_ffff, d >> 32]);
    let mut words: Vec<u64> = halves.chain(std::iter::repeat(0)).take(ExactSum::WORDS + 1).collect();
    let last = words.pop().unwrap();
    words[ExactSum::WORDS - 1] |= last << 32;
    words
}
