//! Operations of a step on whole vectors: everything that depends on their place.

use super::fold::Fold;
use super::gram::Gram;
use crate::Error;
use meshstep_tensor::{Buffer, Slice, SliceMut};
use std::fmt::Debug;
use std::ops::Range;

/// Passes over vectors of one length, type and place. Each element is computed by one fixed sequence and each sum is exact, so the bits
/// are the same at every place.
pub(super) trait Passes: Debug + Send + Sync {
    /// Limits later measurements to the elements of `ranges`.
    fn count(&mut self, ranges: Vec<Range<usize>>);

    /// Computes `x = fma(t, d, start)`.
    fn walk(&mut self, x: SliceMut<'_>, start: Slice<'_>, t: f64, d: Slice<'_>) -> Result<(), Error>;

    /// Computes `start = x` and `x = fma(t, d, start)`.
    fn leave(&mut self, x: SliceMut<'_>, start: SliceMut<'_>, t: f64, d: Slice<'_>) -> Result<(), Error>;

    /// Computes `d = coef g + sum over i of coef_i row_i`, each element in f64 by fused multiply-adds in that order, rounded once.
    fn combine(&mut self, d: SliceMut<'_>, g: (f64, Slice<'_>), rows: &Rows<'_>) -> Result<(), Error>;

    /// Adds the requested sums and the largest magnitude of the last direction to `fold`. On a GPU, the host waits here and nowhere else.
    fn measure(&mut self, of: Measure<'_>, fold: &mut Fold) -> Result<(), Error>;
}

/// Pairs of the history as rows, in the order of products and of the direction's sum: `d` of the oldest pair (`s` is a multiple of it),
/// its `y`, then those of the next pair, and so on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    pub(super) ds: Others<'a>,
    pub(super) ys: Others<'a>,
    pub(super) gram: &'a Gram,
    /// Number of oldest pairs left out.
    pub(super) without: usize,
}

impl<'a> Rows<'a> {
    /// Returns the number of rows.
    pub(super) fn len(&self) -> usize {
        2 * (self.gram.len() - self.without)
    }

    /// Returns row `i`.
    pub(super) fn row(&self, i: usize) -> Slice<'a> {
        let vectors = if i.is_multiple_of(2) { &self.ds } else { &self.ys };
        vectors.get(self.gram.slot(self.without + i / 2)).as_slice()
    }

    /// Iterates over all rows.
    #[cfg(feature = "cuda")]
    pub(super) fn slices(&self) -> impl Iterator<Item = Slice<'a>> + Clone + use<'a> {
        let rows = *self;
        (0..rows.len()).map(move |i| rows.row(i))
    }

    /// Returns the coefficient of row `i` in the direction.
    pub(super) fn coef(&self, i: usize) -> f64 {
        self.gram.coefs(self.without + i / 2)[i % 2]
    }
}

/// Vectors of all slots except the one being written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Others<'a> {
    before: &'a [Buffer],
    after: &'a [Buffer],
}

impl<'a> Others<'a> {
    /// Splits `vectors` into that of slot `but` and the others.
    pub(super) fn of(vectors: &'a mut [Buffer], but: usize) -> (&'a mut Buffer, Others<'a>) {
        let (before, rest) = vectors.split_at_mut(but);
        let (one, after) = rest.split_at_mut(1);
        (&mut one[0], Others { before, after })
    }

    /// Splits the vectors of `d` into the direction, its row in a rounded history, and the rows of the other slots. `d` is the direction of
    /// a rounded history; in an exact one the direction is the row of slot `but`.
    pub(super) fn of_direction(
        d: &'a mut Option<Buffer>,
        rows: &'a mut [Buffer],
        but: usize,
    ) -> (&'a mut Buffer, Option<&'a mut Buffer>, Others<'a>) {
        let (row, others) = Others::of(rows, but);
        match d {
            Some(d) => (d, Some(row), others),
            None => (row, None, others),
        }
    }

    fn get(&self, slot: usize) -> &'a Buffer {
        match slot.checked_sub(self.before.len()) {
            None => &self.before[slot],
            Some(after) => &self.after[after - 1],
        }
    }
}

/// Vectors to sum over, limited to the elements that this shard counts.
#[derive(Debug)]
pub(super) struct Measure<'a> {
    /// The gradient.
    pub(super) g: Slice<'a>,
    /// The direction.
    pub(super) d: Slice<'a>,
    /// Requested sums of both.
    pub(super) asked: Asked,
    /// Gradient before a step along the direction, if the largest magnitudes of `d` and of the gradient's change are requested. Only a
    /// history with scales requests them.
    pub(super) change_from: Option<Slice<'a>>,
    /// New pair after a step along the direction, if there was one.
    pub(super) pair: Option<NewPair<'a>>,
}

/// Sums that only some measurements need.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// The gradient's squares, largest magnitude and number of non-finite elements.
    pub(super) gradient: bool,
    /// The gradient's magnitudes.
    pub(super) magnitudes: bool,
    /// `g . d`.
    pub(super) slope: bool,
}

/// New pair: the direction, and `y`, which receives the gradient minus `before`. Measures the products of the rows, the direction and `y`
/// with the gradient, `d . y`, `y . y`, and the number of non-finite elements of `d` and `y`. In a rounded history all of these are the
/// rounded rows', and the products of all rows with the rounded `y` follow those with the gradient.
#[derive(Debug)]
pub(super) struct NewPair<'a> {
    pub(super) y: SliceMut<'a>,
    pub(super) before: Slice<'a>,
    pub(super) rows: Rows<'a>,
    /// Present if the history is rounded: then `y` is a row too.
    pub(super) rounded: Option<RoundedRow<'a>>,
}

/// Row of a new pair's direction in a rounded history, and the scales of this row and of that of `y`.
#[derive(Debug)]
pub(super) struct RoundedRow<'a> {
    pub(super) d: SliceMut<'a>,
    /// Powers of two by which `d` and `y` are multiplied before they are rounded.
    pub(super) scales: [f32; 2],
}
