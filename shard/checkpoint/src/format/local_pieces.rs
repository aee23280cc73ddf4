//! Local part of a tensor as pieces of the whole, and election of the rank that writes a piece held by several. Arithmetic only.

use super::piece::{Piece, Region};
use std::collections::BTreeMap;
use std::ops::Range;

/// Local part of a tensor on one rank: boxes of the whole tensor, and their places in the local tensor.
///
/// ```
/// use meshstep_checkpoint::{CoverError, LocalPieces, Part, Piece, Region, check_cover};
///
/// // The right half of a 4 x 6 matrix, a tensor of 4 x 3 on this rank.
/// let right = Region { offsets: vec![0, 3], extents: vec![4, 3] };
/// let held = LocalPieces { shape: vec![4, 6], local: vec![4, 3], boxes: vec![(right.clone(), Region::whole(&[4, 3]))] };
/// let parts: Vec<Part> = held.parts(3..6); // the second row of it
/// assert_eq!(parts[0].global, Piece { region: right.clone(), range: 3..6 });
///
/// let alone = [Piece { region: right, range: 0..12 }];
/// assert!(matches!(check_cover(&[4, 6], &alone), Err(CoverError::Cuts { dim: 1, at: 0, next: 3, .. })));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalPieces {
    /// Shape of the whole tensor.
    pub shape: Vec<u64>,
    /// Shape of the local tensor.
    pub local: Vec<u64>,
    /// Each box in the whole tensor and in the local tensor; together they hold every element of the local tensor once.
    pub boxes: Vec<(Region, Region)>,
}

/// Contiguous elements of a box, located in the whole tensor and in the local tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Elements in the whole tensor.
    pub global: Piece,
    /// The same elements in the local tensor.
    pub local: Piece,
}

impl LocalPieces {
    /// Returns a holding of the whole tensor.
    pub fn whole(shape: &[u64]) -> Self {
        let all = Region::whole(shape);
        LocalPieces { shape: shape.to_vec(), local: shape.to_vec(), boxes: vec![(all.clone(), all)] }
    }

    /// Returns elements `range` of the local tensor, in row-major order, as one part for each box that contains some. They are contiguous
    /// in the box too, since a box keeps the row-major order of the local tensor.
    pub fn parts(&self, range: Range<u64>) -> Vec<Part> {
        let part = |(global, local): &(Region, Region)| {
            let range = before(local, &self.local, range.start)..before(local, &self.local, range.end);
            let of = |region: &Region| Piece { region: region.clone(), range: range.clone() };
            (!range.is_empty()).then(|| Part { global: of(global), local: of(local) })
        };
        self.boxes.iter().filter_map(part).collect()
    }
}

/// Counts the elements of a box that come before element `at` of the tensor that contains it.
fn before(region: &Region, shape: &[u64], at: u64) -> u64 {
    let mut rest = at;
    let mut index = vec![0; shape.len()];
    for dim in (1..shape.len()).rev() {
        index[dim] = rest % shape[dim].max(1);
        rest /= shape[dim].max(1);
    }
    // The first dimension's index does not wrap around: the end of the tensor lies behind the last index.
    match index.first_mut() {
        Some(first) => *first = rest,
        None => return at,
    }
    let mut count = 0;
    for (dim, &index) in index.iter().enumerate() {
        let inner: u64 = region.extents[dim + 1..].iter().product();
        let along = index.saturating_sub(region.offsets[dim]).min(region.extents[dim]);
        count += along * inner;
        let inside = index >= region.offsets[dim] && along < region.extents[dim];
        if !inside {
            break;
        }
    }
    count
}

/// Elects the rank that writes each piece. `claims` lists each rank's pieces: the tensor's index, the piece, and its size in bytes. A piece
/// with several claimants goes to the one with the fewest bytes so far, which balances the writers; every rank elects the same.
pub fn writers(claims: &[Vec<(usize, Piece, u64)>]) -> BTreeMap<(usize, Region, u64), usize> {
    let mut claimants: BTreeMap<(usize, Region, u64), (u64, Vec<usize>)> = BTreeMap::new();
    for (rank, claims) in claims.iter().enumerate() {
        for (tensor, piece, bytes) in claims {
            let key = (*tensor, piece.region.clone(), piece.range.start);
            let (_, ranks) = claimants.entry(key).or_insert((*bytes, Vec::new()));
            ranks.push(rank);
        }
    }
    let mut load = vec![0; claims.len()];
    // The largest pieces come first; the small ones then even out the load.
    let mut order: Vec<_> = claimants.into_iter().collect();
    order.sort_by(|(a, (x, _)), (b, (y, _))| y.cmp(x).then_with(|| a.cmp(b)));
    let elect = |(key, (bytes, ranks)): (_, (u64, Vec<usize>))| {
        let writer = ranks.into_iter().min_by_key(|&rank| (load[rank], rank)).unwrap_or_default();
        load[writer] += bytes;
        (key, writer)
    };
    order.into_iter().map(elect).collect()
}
