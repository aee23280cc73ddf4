//! Check that pieces cover a whole tensor: every element exactly once.

use super::piece::{Piece, Region, product};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
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

/// Checks that `pieces` cover a tensor of this shape: its boxes form a grid of cuts across whole dimensions, and the pieces of each box
/// follow one another from its first element to its last. Takes time in proportion to the number of pieces, whatever values they hold.
pub fn check<'p>(shape: &[u64], pieces: impl IntoIterator<Item = &'p Piece>) -> Result<(), CoverError> {
    let Some(len) = product(shape) else { return Err(CoverError::TooLarge { shape: shape.to_vec() }) };
    let mut boxes: BTreeMap<&Region, Vec<Range<u64>>> = BTreeMap::new();
    for Piece { region, range } in pieces {
        if !region.fits(shape) {
            return Err(CoverError::Outside { region: region.clone(), shape: shape.to_vec() });
        }
        // The box lies in the tensor, so its number of elements fits in 64 bits.
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
    // The boxes are distinct cells of the grid; as many boxes as cells are therefore all cells.
    if boxes.len() as u64 != expected {
        return Err(CoverError::Boxes { shape: shape.to_vec(), given: boxes.len(), expected });
    }
    Ok(())
}
