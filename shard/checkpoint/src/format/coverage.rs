//! Check that pieces cover a whole tensor: every element exactly once.

use super::numbers::{Cursor, numbers, put};
use super::piece::{Piece, Region, product};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Reason why pieces do not cover their tensor exactly once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum CoverError {
    /// The number of elements does not fit in 64 bits.
    #[error("a tensor of shape {shape:?} has more than 2^64 elements")]
    TooLarge {
        /// Shape of the tensor.
        shape: Vec<u64>,
    },
    /// A box reaches beyond the tensor, or has another number of dimensions.
    #[error("the box of extents {:?} at {:?} does not lie in a tensor of shape {shape:?}", .region.extents, .region.offsets)]
    Outside {
        /// The box.
        region: Region,
        /// Shape of the tensor.
        shape: Vec<u64>,
    },
    /// A range is empty, or reaches beyond its box.
    #[error(
        "elements {range:?} are not in a box of extents {extents:?}; ranges ascend and hold one element or more"
    )]
    Range {
        /// The range.
        range: Range<u64>,
        /// Extents of the box.
        extents: Vec<u64>,
    },
    /// Elements of a box are missing or stored twice.
    #[error("box of extents {:?} at {:?}: elements {at} to {next} are {}", .region.extents, .region.offsets, if at < next { "missing" } else { "stored twice" })]
    Elements {
        /// The box.
        region: Region,
        /// Index at which the previous piece ends.
        at: u64,
        /// Index at which the next piece begins.
        next: u64,
    },
    /// The boxes do not form a grid: cuts must go across whole dimensions.
    #[error(
        "boxes do not tile dimension {dim} of a tensor of shape {shape:?}: one ends at index {at}, the next begins at {next}"
    )]
    Cuts {
        /// The dimension.
        dim: usize,
        /// Shape of the tensor.
        shape: Vec<u64>,
        /// Index at which a box ends.
        at: u64,
        /// Index at which the next box begins.
        next: u64,
    },
    /// Some boxes of the grid that the cuts form are missing.
    #[error("a tensor of shape {shape:?} has {given} boxes, its cuts form a grid of {expected}")]
    Boxes {
        /// Shape of the tensor.
        shape: Vec<u64>,
        /// Number of boxes found.
        given: usize,
        /// Number of boxes in the grid.
        expected: u64,
    },
}

meshstep_tensor::debug_is_display!(CoverError);

/// Piece whose box is two lists of bytes, see [`numbers`](super::numbers).
#[derive(Clone, Debug)]
pub(crate) struct Located<'b> {
    pub(crate) offsets: &'b [u8],
    pub(crate) extents: &'b [u8],
    pub(crate) range: Range<u64>,
}

impl<'b> Located<'b> {
    fn region(&self) -> Region {
        Region { offsets: numbers(self.offsets).collect(), extents: numbers(self.extents).collect() }
    }

    /// Returns the box in a form that compares as boxes do.
    fn place(&self) -> [&'b [u8]; 2] {
        [self.offsets, self.extents]
    }
}

/// Checks that `pieces` cover a tensor of this shape: its boxes form a grid of cuts across whole dimensions, and the pieces of each box
/// follow one another from its first element to its last. Takes time in proportion to the number of pieces, whatever values they hold.
pub fn check<'p>(shape: &[u64], pieces: impl IntoIterator<Item = &'p Piece>) -> Result<(), CoverError> {
    let (mut lists, mut ends) = (Vec::new(), Vec::new());
    for Piece { region: Region { offsets, extents }, range } in pieces {
        let mut end = |list: &[u64]| {
            list.iter().for_each(|&number| put(&mut lists, number));
            lists.len()
        };
        ends.push((end(offsets), end(extents), range.clone()));
    }
    let mut begin = 0;
    let located = ends.into_iter().map(|(middle, end, range)| {
        let start = std::mem::replace(&mut begin, end);
        Located { offsets: &lists[start..middle], extents: &lists[middle..end], range }
    });
    check_located(shape, located.collect())
}

/// Same as [`check`].
pub(crate) fn check_located(shape: &[u64], mut pieces: Vec<Located<'_>>) -> Result<(), CoverError> {
    let Some(len) = product(shape) else { return Err(CoverError::TooLarge { shape: shape.to_vec() }) };
    for piece in &pieces {
        let (region, range) = (piece.region(), piece.range.clone());
        if !region.fits(shape) {
            return Err(CoverError::Outside { region, shape: shape.to_vec() });
        }
        // The box lies in the tensor, so its number of elements fits in 64 bits.
        if range.is_empty() || region.elements().is_none_or(|len| range.end > len) {
            return Err(CoverError::Range { range, extents: region.extents });
        }
    }
    if len == 0 {
        return Ok(());
    }
    let order = |piece: &Located<'_>| (piece.range.start, piece.range.end);
    pieces.sort_unstable_by(|a, b| a.place().cmp(&b.place()).then_with(|| order(a).cmp(&order(b))));
    let alike = |a: &Located<'_>, b: &Located<'_>| a.place() == b.place();
    pieces.chunk_by(alike).try_for_each(check_box)?;
    pieces.dedup_by(|b, a| alike(a, b));
    check_cuts(shape, pieces)
}

/// Checks the pieces of one box, in ascending order.
fn check_box(pieces: &[Located<'_>]) -> Result<(), CoverError> {
    let Some(first) = pieces.first() else { return Ok(()) };
    let region = first.region();
    let all = region.elements().unwrap_or(u64::MAX);
    let mut at = 0;
    let ranges = pieces.iter().map(|piece| piece.range.clone());
    for Range { start: next, end } in ranges.chain(std::iter::once(all..all)) {
        if at != next {
            return Err(CoverError::Elements { region, at, next });
        }
        at = end;
    }
    Ok(())
}

/// Checks the boxes, one piece of each.
fn check_cuts(shape: &[u64], mut boxes: Vec<Located<'_>>) -> Result<(), CoverError> {
    let mut expected = 1u64;
    let mut cuts: Vec<(u64, u64)> = Vec::with_capacity(boxes.len());
    for (dim, &all) in shape.iter().enumerate() {
        cuts.clear();
        cuts.extend(boxes.iter_mut().map(|piece| {
            let [start, extent] = [&mut piece.offsets, &mut piece.extents].map(next);
            (start, start + extent)
        }));
        cuts.sort_unstable();
        cuts.dedup();
        let ends = std::iter::once(0).chain(cuts.iter().map(|&(_, end)| end));
        let nexts = cuts.iter().map(|&(start, _)| start).chain([all]);
        if let Some((at, next)) = ends.zip(nexts).find(|(at, next)| at != next) {
            return Err(CoverError::Cuts { dim, shape: shape.to_vec(), at, next });
        }
        expected = expected.saturating_mul(cuts.len() as u64);
    }
    // The boxes are distinct cells of the grid; as many boxes as cells are therefore all cells.
    if boxes.len() as u64 != expected {
        return Err(CoverError::Boxes { shape: shape.to_vec(), given: boxes.len(), expected });
    }
    Ok(())
}

/// Takes the first number from a list.
fn next(list: &mut &[u8]) -> u64 {
    let mut cursor = Cursor(list);
    let number = cursor.number();
    *list = cursor.0;
    number
}
