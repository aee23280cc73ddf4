//! Sums and maxima over all shards of a vector, which this crate asks for and does not know how to get.

use std::error::Error;

/// Brings what the shards of one vector know together: one exchange of two small vectors.
///
/// Every shard calls it equally often with vectors of the same lengths, and all end with the same words.
pub trait Reduce {
    /// Every word of `sums` becomes its sum over all shards, wrapping: counts, and [`ExactSum`](crate::ExactSum)s laid end to
    /// end. Every word of `maxima` becomes the largest of all shards: see [`ordered`].
    fn fold(&self, sums: &mut [u64], maxima: &mut [u64]) -> Result<(), ReduceError>;

    /// Which shard this is, from 0, to be named in errors.
    fn part(&self) -> usize;
}

/// The reduction over the only shard: nothing to do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Reduce for Alone {
    fn fold(&self, _sums: &mut [u64], _maxima: &mut [u64]) -> Result<(), ReduceError> {
        Ok(())
    }

    fn part(&self) -> usize {
        0
    }
}

/// Why the shards could not be brought together: whatever carries them says it.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ReduceError(Box<dyn Error + Send + Sync>);

impl ReduceError {
    /// What went wrong.
    pub fn new(source: impl Error + Send + Sync + 'static) -> Self {
        ReduceError(Box::new(source))
    }

    /// The error that was given, where it is an `E`.
    pub fn downcast<E: Error + Send + Sync + 'static>(self) -> Result<E, ReduceError> {
        self.0.downcast().map(|source| *source).map_err(ReduceError)
    }
}

/// `x` as a word: larger numbers are larger words, -0 is below 0, NaN beyond the infinities, and 0 is below every number, so
/// that it says nothing.
///
/// ```
/// use meshstep_optim::{ordered, unordered};
///
/// assert!(0 < ordered(-2.0) && ordered(-2.0) < ordered(-1.0) && ordered(-1.0) < ordered(3.0));
/// assert_eq!(unordered(ordered(-2.5)), -2.5);
/// ```
pub fn ordered(x: f64) -> u64 {
    let bits = if x.is_nan() { f64::NAN.to_bits() & !(1 << 63) } else { x.to_bits() };
    if bits >> 63 == 1 { !bits } else { bits | 1 << 63 }
}

/// The number that [`ordered`] made a word of.
pub fn unordered(word: u64) -> f64 {
    f64::from_bits(if word >> 63 == 1 { word & !(1 << 63) } else { !word })
}
