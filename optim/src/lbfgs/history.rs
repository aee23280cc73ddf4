//! Element types of the pairs that L-BFGS keeps, and the scales of f16 rows.

use crate::Error;
use meshstep_tensor::DType;

/// Type in which [`Lbfgs`](super::Lbfgs) keeps its pairs.
///
/// A history of 16 bits takes half the bytes of f32. Each element of a pair is rounded to nearest even once, when the pair enters the
/// history, and every product is one of rounded rows: the direction is L-BFGS's for the rounded pairs exactly, and a pair is accepted if
/// its rounded `y . s` exceeds 1e-10. Points, gradients and the current direction stay f32. Vectors must be f32, in CPU memory.
///
/// | | rounding error of an element |
/// |---|---|
/// | `Bf16` | at most 2^-8 of a magnitude from 2^-126 on, and at most 2^-134 below |
/// | `F16` | at most 2^-11 of a magnitude from 2^-28 of the row's largest on, and at most 2^-39 of the largest below |
///
/// bf16 has the range of f32, except that magnitudes from 2^128 - 2^119 on round to infinity: a pair with such an element is refused, as
/// one that is not finite. An f16 row holds every f32, because a power of two beside it moves its largest magnitude into 2^14 .. 2^15; if
/// the largest is below 2^-113, the power is 2^127 and errors are at most 2^-152.
///
/// The scale of an f16 row follows from maxima over all shards, so `F16` with a fixed step exchanges twice for each pair, as a line search
/// does.
///
/// ```
/// use meshstep_optim::{History, Lbfgs};
/// use meshstep_tensor::{Category, DType, Meter};
///
/// let (meter, len) = (Meter::new(), 1000);
/// let rule = Lbfgs { history: History::Bf16, history_len: 10, ..Lbfgs::default() };
/// let state = rule.state(len, DType::F32, &meter)?;
/// // 22 rows of bf16; the start of an iteration, its direction and two gradients in f32.
/// assert_eq!(meter.live(Category::State), 1000 * (22 * 2 + 4 * 4));
/// assert!(rule.state(len, DType::F64, &meter).is_err());
/// # drop(state);
/// # Ok::<(), meshstep_optim::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum History {
    /// The type of the vectors.
    #[default]
    Exact,
    /// bf16.
    Bf16,
    /// f16 with a scale for each row.
    F16,
}

impl History {
    /// Returns the type of rows for vectors of `dtype`, f32 or f64.
    pub(super) fn row_type(self, dtype: DType) -> Result<DType, Error> {
        match (self, dtype) {
            (History::Exact, dtype) => Ok(dtype),
            (History::Bf16, DType::F32) => Ok(DType::BF16),
            (History::F16, DType::F32) => Ok(DType::F16),
            (_, given) => Err(Error::DType {
                what: "vectors with a history of 16 bits",
                given,
                works: "f32, or History::Exact",
            }),
        }
    }

    /// Returns true if rows are rounded.
    pub(super) fn is_rounded(self) -> bool {
        self != History::Exact
    }

    /// Returns the number of products of each row in a measurement: with the gradient, and with the new `y` if that is not the exact
    /// change of the gradient.
    pub(super) fn products(self) -> usize {
        if self.is_rounded() { 2 } else { 1 }
    }

    /// Returns true if a pair's largest magnitudes must be known before it is rounded.
    pub(super) fn has_scales(self) -> bool {
        self == History::F16
    }

    /// Returns the history with this code.
    pub(super) fn of_code(code: u64) -> Option<History> {
        [History::Exact, History::Bf16, History::F16].into_iter().find(|history| *history as u64 == code)
    }
}

/// Returns the power of two that moves numbers up to `largest`, an f32, below 2^15. Products with it are exact unless they lie far below
/// the smallest f16.
pub(super) fn scale_below(largest: f64) -> f32 {
    if !(largest.is_finite() && largest > 0.0) {
        return 1.0;
    }
    let exponent = (largest.to_bits() >> 52) as i32 - 1023;
    // At 2^127 the smallest subnormal f32 becomes 2^-22, which f16 holds.
    let power = (14 - exponent).min(127);
    f32::from_bits(((power + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_powers_of_two_that_use_the_range_of_f16() {
        let smallest = f32::from_bits(1);
        for largest in [smallest, f32::MIN_POSITIVE, 1e-38, 1e-20, 0.7, 1.0, 1.5, 65504.0, 1e30, f32::MAX] {
            let scale = scale_below(f64::from(largest));
            assert_eq!(scale.to_bits() & 0x7f_ffff, 0, "{largest:e}");
            let scaled = largest * scale;
            assert!(scaled < 32768.0 && scaled / scale == largest, "{largest:e} {scale:e}");
            assert!(scaled >= 16384.0 || scale == 2f32.powi(127), "{largest:e} {scale:e}");
        }
        assert_eq!([0.0, f64::INFINITY, f64::NAN].map(scale_below), [1.0; 3]);
    }

    #[test]
    fn codes_name_histories() {
        for history in [History::Exact, History::Bf16, History::F16] {
            assert_eq!(History::of_code(history as u64), Some(history));
        }
        assert_eq!(History::of_code(3), None);
    }
}
