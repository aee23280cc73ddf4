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

    /// The same from where `x` is, which becomes `start`.
    fn leave(&mut self, x: SliceMut<'_>, start: SliceMut<'_>, t: f64, d: Slice<'_>) -> Result<(), Error>;

    /// `d = coef g + sum over i of coef_i row_i`, each element in f64 by fused multiply-adds in that order, rounded once.
    fn combine(&mut self, d: SliceMut<'_>, g: (f64, Slice<'_>), rows: &Rows<'_>) -> Result<(), Error>;

    /// Adds to `fold` what is asked for, and the largest magnitude of the last direction. Where vectors are on a GPU, the one
    /// wait of the host for it.
    fn measure(&mut self, of: Measure<'_>, fold: &mut Fold) -> Result<(), Error>;
}

/// The pairs of the history, in the order that products are kept and directions summed up: of the oldest its direction, of which
/// `s` is a multiple, and `y`; of the next, and so on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows<'a> {
    pub(super) ds: Others<'a>,
    pub(super) ys: Others<'a>,
    pub(super) gram: &'a Gram,
    /// Pairs that are left out, the oldest first.
    pub(super) without: usize,
}

impl<'a> Rows<'a> {
    /// How many.
    pub(super) fn len(&self) -> usize {
        2 * (self.gram.len() - self.without)
    }

    /// Row `i`.
    pub(super) fn row(&self, i: usize) -> Slice<'a> {
        let vectors = if i.is_multiple_of(2) { &self.ds } else { &self.ys };
        vectors.get(self.gram.slot(self.without + i / 2)).as_slice()
    }

    /// All of them.
    #[cfg(feature = "cuda")]
    pub(super) fn slices(&self) -> impl Iterator<Item = Slice<'a>> + Clone + use<'a> {
        let rows = *self;
        (0..rows.len()).map(move |i| rows.row(i))
    }

    /// What row `i` counts in the direction.
    pub(super) fn coef(&self, i: usize) -> f64 {
        self.gram.coefs(self.without + i / 2)[i % 2]
    }
}

/// A vector of each slot but one, which is being written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Others<'a> {
    before: &'a [Buffer],
    after: &'a [Buffer],
}

impl<'a> Others<'a> {
    /// That of slot `but`, and the others.
    pub(super) fn of(vectors: &'a mut [Buffer], but: usize) -> (&'a mut Buffer, Others<'a>) {
        let (before, rest) = vectors.split_at_mut(but);
        let (one, after) = rest.split_at_mut(1);
        (&mut one[0], Others { before, after })
    }

    fn get(&self, slot: usize) -> &'a Buffer {
        match slot.checked_sub(self.before.len()) {
            None => &self.before[slot],
            Some(after) => &self.after[after - 1],
        }
    }
}

/// What is summed up over the elements that this shard counts.
#[derive(Debug)]
pub(super) struct Measure<'a> {
    /// The gradient.
    pub(super) g: Slice<'a>,
    /// The direction.
    pub(super) d: Slice<'a>,
    /// Which sums of them.
    pub(super) asked: Asked,
    /// What comes of a step along the direction, if there was one.
    pub(super) pair: Option<NewPair<'a>>,
}

/// Sums that not every measurement is of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    /// The gradient's squares, largest magnitude and elements that are not finite.
    pub(super) gradient: bool,
    /// Its magnitudes.
    pub(super) magnitudes: bool,
    /// `g . d`.
    pub(super) slope: bool,
}

/// A pair of the direction and `y`, which becomes the gradient less the one `before`. What is measured are the products of the
/// rows, the direction and `y` with the gradient, `d . y`, `y . y`, and how many elements of `d` and `y` are not finite.
#[derive(Debug)]
pub(super) struct NewPair<'a> {
    pub(super) y: SliceMut<'a>,
    pub(super) before: Slice<'a>,
    pub(super) rows: Rows<'a>,
}
