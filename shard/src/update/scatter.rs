//! Pieces of a matrix between the memory in which they travel and their places in the matrix.

use crate::error::Error;
use crate::plan::matrix_exchange::Scattered;
use crate::plan::tensor_cuts::runs_of;
use meshstep_tensor::{Buffer, Queue};
use std::ops::Range;

/// Copies a piece to its places in the matrix.
pub(crate) fn scatter(piece: &Scattered, scratch: &mut Buffer, queue: &Queue) -> Result<(), Error> {
    let (mut matrix, rest) = scratch.as_mut().split_at(piece.place.start)?;
    let from = rest.as_slice();
    pairs(piece)
        .try_for_each(|(own, place)| Ok(queue.copy(from.slice(own)?, matrix.reborrow().slice(place)?)?))
}

/// Copies a piece out of its places in the matrix.
pub(crate) fn collect(piece: &Scattered, scratch: &mut Buffer, queue: &Queue) -> Result<(), Error> {
    let (matrix, mut rest) = scratch.as_mut().split_at(piece.place.start)?;
    pairs(piece).try_for_each(|(own, place)| {
        Ok(queue.copy(matrix.as_slice().slice(place)?, rest.reborrow().slice(own)?)?)
    })
}

/// Returns the runs of a piece, each with its place in the scratch memory.
fn pairs(piece: &Scattered) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let first = piece.whole.start;
    piece.places.iter().flat_map(runs_of).map(move |(own, at)| {
        let place = first + at..first + at + own.len();
        (own, place)
    })
}
