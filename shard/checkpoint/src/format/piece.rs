//! Boxes of tensors, contiguous ranges of their elements, and the intersection of two such pieces. Arithmetic only.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Box of a tensor: its offset and extent in each dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Region {
    /// First index of the box in each dimension of the tensor.
    pub offsets: Vec<u64>,
    /// Number of indices in each dimension.
    pub extents: Vec<u64>,
}

/// Contiguous elements of a box in its row-major order: the part of a local tensor that a rank owns.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Piece {
    /// The box.
    pub region: Region,
    /// Elements of the box, by their index in its row-major order.
    pub range: Range<u64>,
}

/// Elements that are contiguous in two pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the first element in the source piece.
    pub from: u64,
    /// Index of the first element in the target piece.
    pub to: u64,
    /// Number of elements.
    pub len: u64,
}

impl Region {
    /// Returns the box that is the whole tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Region { offsets: vec![0; shape.len()], extents: shape.to_vec() }
    }

    /// Returns the number of elements; `None` if it does not fit in 64 bits.
    pub fn elements(&self) -> Option<u64> {
        product(&self.extents)
    }

    /// Returns true if the box lies in a tensor of this shape.
    pub fn fits(&self, shape: &[u64]) -> bool {
        let dims = self.offsets.len() == shape.len() && self.extents.len() == shape.len();
        let inside = |((&offset, &extent), &all): ((&u64, &u64), &u64)| {
            offset.checked_add(extent).is_some_and(|end| end <= all)
        };
        dims && self.offsets.iter().zip(&self.extents).zip(shape).all(inside)
    }

    fn range(&self, dim: usize) -> Range<u64> {
        self.offsets[dim]..self.offsets[dim] + self.extents[dim]
    }
}

/// Returns the number of elements of a tensor of this shape; `None` if it does not fit in 64 bits.
pub(crate) fn product(shape: &[u64]) -> Option<u64> {
    // The product of the other extents may overflow if one extent is zero.
    let zero = shape.contains(&0);
    shape.iter().try_fold(1u64, |all, &extent| all.checked_mul(extent)).or(zero.then_some(0))
}

impl Piece {
    /// Returns the piece that is a whole tensor of fewer than 2^64 elements.
    pub fn whole(shape: &[u64]) -> Self {
        let region = Region::whole(shape);
        let range = 0..region.elements().unwrap_or(u64::MAX);
        Piece { region, range }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }

    /// Returns true if the piece has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the intersection of `self` and `to` as runs, in ascending order of both. Both pieces lie in tensors of one shape with fewer
    /// than 2^64 elements.
    pub fn runs<'a>(&'a self, to: &'a Piece) -> impl Iterator<Item = Run> + 'a {
        let common = Common::of(self, to);
        let first = common.rows_before(self.range.start, to.range.start);
        (first..common.rows).map_while(move |row| common.run(row, self, to)).filter(|run| run.len > 0)
    }
}

/// Intersection of two boxes, as rows that are contiguous in both.
struct Common {
    rows: u64,
    /// Length of a row in elements.
    len: u64,
    /// Extents of the dimensions that a row does not span.
    extents: Vec<u64>,
    /// Index of the first row in each box, and the strides of each box's dimensions.
    first: [u64; 2],
    strides: [Vec<u64>; 2],
}

impl Common {
    fn of(from: &Piece, to: &Piece) -> Self {
        let (a, b) = (&from.region, &to.region);
        let both: Vec<Range<u64>> = (0..a.extents.len())
            .map(|dim| {
                let (x, y) = (a.range(dim), b.range(dim));
                x.start.max(y.start)..x.end.min(y.end)
            })
            .collect();
        if both.iter().any(Range::is_empty) || from.is_empty() || to.is_empty() {
            let none = [Vec::new(), Vec::new()];
            return Common { rows: 0, len: 0, extents: Vec::new(), first: [0; 2], strides: none };
        }
        let whole = |dim: usize| a.range(dim) == both[dim] && b.range(dim) == both[dim];
        // From this dimension on, the intersection spans both boxes.
        let inner = (0..both.len()).rev().take_while(|&dim| whole(dim)).last().unwrap_or(both.len());
        let outer = inner.saturating_sub(1);
        let extents: Vec<u64> = both.iter().map(|range| range.end - range.start).collect();
        let strides = [a, b].map(|region| {
            let mut strides = vec![1; both.len()];
            for dim in (1..both.len()).rev() {
                strides[dim - 1] = strides[dim] * region.extents[dim];
            }
            strides
        });
        let first = [(a, 0), (b, 1)].map(|(region, side)| {
            let places = both.iter().zip(&region.offsets).zip(&strides[side]);
            places.map(|((range, offset), stride)| (range.start - offset) * stride).sum()
        });
        Common {
            rows: extents[..outer].iter().product(),
            len: extents[outer..].iter().product(),
            extents: extents[..outer].to_vec(),
            first,
            strides,
        }
    }

    /// Returns the index in each box at which row `row` begins.
    fn place(&self, row: u64) -> [u64; 2] {
        let (mut place, mut rest) = (self.first, row);
        for dim in (0..self.extents.len()).rev() {
            let index = rest % self.extents[dim];
            rest /= self.extents[dim];
            place[0] += index * self.strides[0][dim];
            place[1] += index * self.strides[1][dim];
        }
        place
    }

    /// Counts the rows that end before the range of either piece begins. Row indices ascend in both boxes, so a binary search finds them.
    fn rows_before(&self, from: u64, to: u64) -> u64 {
        let (mut low, mut high) = (0, self.rows);
        while low < high {
            let middle = low + (high - low) / 2;
            let [a, b] = self.place(middle);
            let before = a + self.len <= from || b + self.len <= to;
            if before { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// Returns the part of row `row` that lies in both pieces; `None` if the row begins behind the end of either.
    fn run(&self, row: u64, from: &Piece, to: &Piece) -> Option<Run> {
        let [a, b] = self.place(row);
        if a >= from.range.end || b >= to.range.end {
            return None;
        }
        let skip = from.range.start.saturating_sub(a).max(to.range.start.saturating_sub(b));
        let end = self.len.min(from.range.end - a).min(to.range.end - b);
        let len = end.saturating_sub(skip);
        let place = |x: u64, piece: &Piece| (x + skip).saturating_sub(piece.range.start);
        Some(Run { from: place(a, from), to: place(b, to), len })
    }
}
