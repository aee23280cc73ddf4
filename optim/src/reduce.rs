//! Sums and maxima over all shards of a vector. This crate declares the trait; other crates implement it.

use std::error::Error;

/// Reduction over the shards of one vector: one exchange of two small vectors.
///
/// Every shard calls it equally often with vectors of the same lengths, and all shards get the same words.
///
/// ```
/// use meshstep_optim::{Alone, Reduce, ReduceError};
///
/// /// Two shards of which the other has always counted 3, with a largest magnitude of 9.
/// struct Two;
///
/// impl Reduce for Two {
///     fn fold(&self, sums: &mut [u64], maxima: &mut [u64]) -> Result<(), ReduceError> {
///         sums.iter_mut().for_each(|sum| *sum = sum.wrapping_add(3));
///         maxima.iter_mut().for_each(|most| *most = (*most).max(9));
///         Ok(())
///     }
///
///     fn part(&self) -> usize {
///         0
///     }
/// }
///
/// let (mut sums, mut maxima) = ([4], [8]);
/// Alone.fold(&mut sums, &mut maxima)?; // one shard: nothing to add
/// assert_eq!((sums, maxima), ([4], [8]));
/// Two.fold(&mut sums, &mut maxima)?;
/// assert_eq!((sums, maxima), ([7], [9]));
/// # Ok::<(), ReduceError>(())
/// ```
pub trait Reduce {
    /// Replaces every word of `sums` by its wrapping sum over all shards: counts, and [`ExactSum`](crate::ExactSum)s laid end to end.
    /// Replaces every word of `maxima` by its maximum over all shards: see [`ordered`].
    fn fold(&self, sums: &mut [u64], maxima: &mut [u64]) -> Result<(), ReduceError>;

    /// Returns the index of this shard, from 0, for errors.
    fn part(&self) -> usize;
}

/// Reduction over a single shard: does nothing.
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

/// Error of a reduction, from its implementation.
#[derive(thiserror::Error)]
#[error(transparent)]
pub struct ReduceError(Box<dyn Error + Send + Sync>);

meshstep_tensor::debug_is_display!(ReduceError);

impl ReduceError {
    /// Wraps an error of the implementation.
    pub fn new(source: impl Error + Send + Sync + 'static) -> Self {
        ReduceError(Box::new(source))
    }

    /// Returns the wrapped error if it is an `E`.
    pub fn downcast<E: Error + Send + Sync + 'static>(self) -> Result<E, ReduceError> {
        self.0.downcast().map(|source| *source).map_err(ReduceError)
    }
}

/// Returns `x` as a word that orders like the number: -0 is below 0, and NaN above infinity. The word 0 is below every number, so it can
/// mean "no number".
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

/// Returns the number of a word made by [`ordered`].
pub fn unordered(word: u64) -> f64 {
    f64::from_bits(if word >> 63 == 1 { word & !(1 << 63) } else { !word })
}
