//! What a step does to whole vectors: all that depends on where they are.

use super::fold::Fold;
use super::gram::Gram;
use crate::Error;
use meshstep_tensor::{Buffer, Slice, SliceMut};
use std::fmt::Debug;
use std::ops::Range;

/// Passes over vectors of one length, type and place. Each element is computed by one fixed sequence and each sum is exact, so
/// that the bits are the same at every place.
pub(super) trait Passes: Debug + Send + Sync {
    /// Adds only elements of `ranges` to what is measured from now on.
    fn count(&mut self, ranges: Vec<Range<usize>>);

    /// `x = fma(t, d, start)`.
    fn walk(&mut self, x: SliceMut<'_>, start: Slice<'_>, t: f64, d: Slice<'_>) -> Result<(), Error>;

    /// `s = t d` and `y = g - before`.
    fn pair(
        &mut self,
        new: [SliceMut<'_>; 2],
        t: f64,
        d: Slice<'_>,
        grads: [Slice<'_>; 2],
    ) -> Result<(), Error>;

    /// `d = coef g + sum over i of coef_i row_i`, each element in f64 by fused multiply-adds in that order, rounded once.
    fn combine(&mut self, d: SliceMut<'_>, g: (f64, Slice<'_>), rows: &Rows<'_>) -> Result<(), Error>;

    /// Adds to `fold` what is asked for, and the largest magnitude of the last direction. Where vectors are on a GPU, the one
    /// wait of the host for it.
    fn measure(&mut self, of: &Measure<'_>, fold: &mut Fold) -> Result<(), Error>;
}

/// Vectors that rows are measured with: the gradient and the newest `y`.
pub(super) const NEWS: usize = 2;

/// Rows of the history, in the order that products are kept and directions summed up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    pub(super) history: &'a [Buffer],
    pub(super) gram: &'a Gram,
    pub(super) count: usize,
}

impl<'a> Rows<'a> {
    /// How many.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Row `i`.
    pub(super) fn row(&self, i: usize) -> &'a Buffer {
        &self.history[self.gram.row(i)]
    }

    /// All of them.
    #[cfg(feature = "cuda")]
    pub(super) fn slices(&self) -> impl Iterator<Item = Slice<'a>> + Clone + use<'a> {
        let rows = *self;
        (0..rows.count).map(move |i| rows.row(i).as_slice())
    }

    /// What row `i` counts in the direction.
    pub(super) fn coef(&self, i: usize) -> f64 {
        self.gram.coef(self.gram.row(i))
    }

    /// The newest `s` and `y`.
    pub(super) fn newest(&self) -> [&'a Buffer; 2] {
        [self.gram.spare(), self.gram.y(self.gram.spare())].map(|row| &self.history[row])
    }
}

/// What is summed up over the elements that this shard counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measure<'a> {
    /// The gradient.
    pub(super) g: Slice<'a>,
    /// The direction.
    pub(super) d: Slice<'a>,
    /// Whether the gradient's squares, largest magnitude and elements that are not finite.
    pub(super) gradient: bool,
    /// Whether the sum of its magnitudes.
    pub(super) magnitudes: bool,
    /// Whether `g . d`.
    pub(super) slope: bool,
    /// Rows, the newest last, whose products with the gradient and the newest `y` are; of the newest pair also the elements that
    /// are not finite.
    pub(super) rows: Rows<'a>,
}
