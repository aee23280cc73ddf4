//! What a rank has of a tensor, as pieces of the whole, and which of the ranks that have the same write it. Arithmetic only.

use super::piece::{Piece, Region};
use std::collections::BTreeMap;
use std::ops::Range;

/// What a rank holds of a tensor: boxes of the whole, and where they lie in what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Of the whole tensor.
    pub shape: Vec<u64>,
    /// Of what the rank holds.
    pub local: Vec<u64>,
    /// Each box in the whole, and the same in what the rank holds: every element of that once.
    pub boxes: Vec<(Region, Region)>,
}

/// Elements that lie after each other in a box: of the whole, and of what a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// In the whole.
    pub global: Piece,
    /// The same elements, in what the rank holds.
    pub local: Piece,
}

impl Holding {
    /// All of a tensor.
    pub fn whole(shape: &[u64]) -> Self {
        let all = Region::whole(shape);
        Holding { shape: shape.to_vec(), local: shape.to_vec(), boxes: vec![(all.clone(), all)] }
    }

    /// Elements `range` of what the rank holds, in row-major order: a part of each box they reach. They lie after each other in a
    /// box too, since its order is theirs.
    pub fn parts(&self, range: Range<u64>) -> Vec<Part> {
        let part = |(global, local): &(Region, Region)| {
            let range = before(local, &self.local, range.start)..before(local, &self.local, range.end);
            let of = |region: &Region| Piece { region: region.clone(), range: range.clone() };
            (!range.is_empty()).then(|| Part { global: of(global), local: of(local) })
        };
        self.boxes.iter().filter_map(part).collect()
    }
}

/// Elements of a box that come before element `at` of the tensor it lies in.
fn before(region: &Region, shape: &[u64], at: u64) -> u64 {
    let mut rest = at;
    let mut index = vec![0; shape.len()];
    for dim in (1..shape.len()).rev() {
        index[dim] = rest % shape[dim].max(1);
        rest /= shape[dim].max(1);
    }
    // The first dimension's is not wrapped: the end of the tensor lies behind its last index.
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

/// Which rank writes each of what ranks have: `claims` are every rank's, of tensors by number, with the bytes they take. What several
/// have is written by the one with the fewest bytes so far, so that writers are balanced; every rank decides the same.
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
    // The largest first, which leaves the small ones to even out.
    let mut order: Vec<_> = claimants.into_iter().collect();
    order.sort_by(|(a, (x, _)), (b, (y, _))| y.cmp(x).then_with(|| a.cmp(b)));
    let elect = |(key, (bytes, ranks)): (_, (u64, Vec<usize>))| {
        let writer = ranks.into_iter().min_by_key(|&rank| (load[rank], rank)).unwrap_or_default();
        load[writer] += bytes;
        (key, writer)
    };
    order.into_iter().map(elect).collect()
}
