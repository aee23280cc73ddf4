//! Whether pieces are a whole tensor: every element once, none twice.

use super::piece::{Piece, Region, product};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// What is wrong with the pieces of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum CoverError {
    /// The shape says more than 64 bits count.
    #[error("a tensor of shape {shape:?} has more than 2^64 elements")]
    TooLarge {
        /// What is said.
        shape: Vec<u64>,
    },
    /// A box reaches beyond the tensor, or has other dimensions.
    #[error("the box of extents {:?} at {:?} does not lie in a tensor of shape {shape:?}", .region.extents, .region.offsets)]
    Outside {
        /// The box.
        region: Region,
        /// The tensor's.
        shape: Vec<u64>,
    },
    /// A range is none, or reaches beyond its box.
    #[error(
        "elements {range:?} are not in a box of extents {extents:?}; ranges ascend and hold one element or more"
    )]
    Range {
        /// The range.
        range: Range<u64>,
        /// The box's.
        extents: Vec<u64>,
    },
    /// Elements of a box are missing, or there twice.
    #[error("of the box of extents {:?} at {:?}, elements {at} to {next} are {}", .region.extents, .region.offsets, if at < next { "missing" } else { "there twice" })]
    Elements {
        /// The box.
        region: Region,
        /// Where the piece before ends.
        at: u64,
        /// Where the next piece begins.
        next: u64,
    },
    /// The boxes are not those that cuts across whole dimensions make.
    #[error(
        "dimension {dim} of a tensor of shape {shape:?} is not cut into boxes: at index {at} one ends, at {next} the next begins"
    )]
    Cuts {
        /// The dimension.
        dim: usize,
        /// The tensor's.
        shape: Vec<u64>,
        /// Where a box ends.
        at: u64,
        /// Where the next begins.
        next: u64,
    },
    /// Some of the boxes that the cuts make are not there.
    #[error("a tensor of shape {shape:?} has {given} boxes, its cuts make {expected}")]
    Boxes {
        /// The tensor's.
        shape: Vec<u64>,
        /// Boxes that are there.
        given: usize,
        /// What the cuts make.
        expected: u64,
    },
}

/// Checks that `pieces` are all of a tensor of this shape: that its boxes are those that cuts across whole dimensions make, and that
/// the pieces of each box follow one another from its first element to its last. Takes time in proportion to the pieces, whatever
/// they say.
pub fn check<'p>(shape: &[u64], pieces: impl IntoIterator<Item = &'p Piece>) -> Result<(), CoverError> {
    let Some(len) = product(shape) else { return Err(CoverError::TooLarge { shape: shape.to_vec() }) };
    let mut boxes: BTreeMap<&Region, Vec<Range<u64>>> = BTreeMap::new();
    for Piece { region, range } in pieces {
        if !region.fits(shape) {
            return Err(CoverError::Outside { region: region.clone(), shape: shape.to_vec() });
        }
        // No more than the tensor's, which 64 bits count.
        if range.is_empty() || region.elements().is_none_or(|len| range.end > len) {
            return Err(CoverError::Range { range: range.clone(), extents: region.extents.clone() });
        }
        boxes.entry(region).or_default().push(range.clone());
    }
    if len == 0 {
        return Ok(());
    }
    for (region, ranges) in &mut boxes {
        check_box(region, ranges)?;
    }
    check_cuts(shape, &boxes.keys().copied().collect::<Vec<_>>())
}

fn check_box(region: &Region, ranges: &mut [Range<u64>]) -> Result<(), CoverError> {
    ranges.sort_by_key(|range| range.start);
    let all = region.elements().unwrap_or(u64::MAX);
    let mut at = 0;
    for Range { start: next, end } in ranges.iter().cloned().chain(std::iter::once(all..all)) {
        if at != next {
            return Err(CoverError::Elements { region: region.clone(), at, next });
        }
        at = end;
    }
    Ok(())
}

fn check_cuts(shape: &[u64], boxes: &[&Region]) -> Result<(), CoverError> {
    let mut expected = 1u64;
    for (dim, &all) in shape.iter().enumerate() {
        let cuts: BTreeSet<(u64, u64)> = boxes
            .iter()
            .map(|region| (region.offsets[dim], region.offsets[dim] + region.extents[dim]))
            .collect();
        let ends = std::iter::once(0).chain(cuts.iter().map(|&(_, end)| end));
        let nexts = cuts.iter().map(|&(start, _)| start).chain([all]);
        if let Some((at, next)) = ends.zip(nexts).find(|(at, next)| at != next) {
            return Err(CoverError::Cuts { dim, shape: shape.to_vec(), at, next });
        }
        expected = expected.saturating_mul(cuts.len() as u64);
    }
    // Different boxes of the grid, as many as it has, are all of it.
    if boxes.len() as u64 != expected {
        return Err(CoverError::Boxes { shape: shape.to_vec(), given: boxes.len(), expected });
    }
    Ok(())
}
