//! What the kernels of exact sums are told. They add to memory of the device what [`NormAccumulator`] and
//! [`ExactSum::add_dot`] would have, word for word once carried.
//!
//! [`NormAccumulator`]: crate::NormAccumulator
//! [`ExactSum::add_dot`]: crate::ExactSum::add_dot

use super::THREADS;
use crate::Norm;
use meshstep_tensor::DType;
use std::ops::Range;

/// The kernel that carries sums, after which equal ones have equal words: `(u64* sums, u64 count)`, a block for each.
pub const CARRY_SUMS: &str = "norm_carry";

/// The kernel that writes a sum into the vectors of an exchange: `(const u64* from, u64* sum, u64* max)`, one block. `from` has a
/// count, the words and the bits of the largest magnitude; `sum` becomes the count, a word that is left alone, and the words,
/// carried; `max` begins with the bits.
pub const WRITE_SUM: &str = "norm_write";

/// A range of the flat memory, as the kernels of sums take them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its first element.
    pub start: u64,
    /// The element behind its last.
    pub end: u64,
    /// Tiles of all spans before it.
    pub tile: u64,
}

/// Addresses of what a norm's kernel adds to, `(const void* values, const Span* spans, u64 count, u64 tiles, NormAt)`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormAt {
    /// Of a count: elements that were infinite or NaN.
    pub non_finite: u64,
    /// Of the [`ExactSum::WORDS`](crate::ExactSum::WORDS) words of the sum; nothing is there for [`Norm::Inf`].
    pub words: u64,
    /// Of the largest finite magnitude as the bits of an f64.
    pub max_bits: u64,
}

/// The norm's kernel for vectors of a type; none for [`Norm::P`], and for what is no vector of numbers.
pub fn norm_kernel(norm: Norm, dtype: DType) -> Option<String> {
    let norm = match norm {
        Norm::L1 => "l1",
        Norm::L2 => "l2",
        Norm::Inf => "inf",
        Norm::P(_) => return None,
    };
    let dtype = match dtype {
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        _ => return None,
    };
    Some(format!("norm_{norm}_{dtype}"))
}

/// Elements of a tile of a norm's kernel: 64 bytes for each thread, and 32 of f64.
pub fn norm_tile(dtype: DType) -> u64 {
    u64::from(THREADS) * if dtype == DType::F64 { 4 } else { 64 / dtype.size() as u64 }
}

/// Elements of a tile of the kernels of dot products: 32 bytes for each thread.
pub fn dot_tile(dtype: DType) -> u64 {
    u64::from(THREADS) * 32 / dtype.size() as u64
}

/// The table of some ranges in tiles of so many elements, and the tiles of all, which a launch is told.
pub fn spans(ranges: impl IntoIterator<Item = Range<usize>>, tile: u64) -> (Vec<Span>, u64) {
    let mut tiles = 0;
    let span = |range: Range<usize>| {
        let (start, end, before) = (range.start as u64, range.end as u64, tiles);
        tiles += (end - start).div_ceil(tile);
        Span { start, end, tile: before }
    };
    let table = ranges.into_iter().map(span).collect();
    (table, tiles)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_count_the_tiles_before_them() {
        let (table, tiles) = spans([5..6, 7..7, 10..2058, 3000..5049], dot_tile(DType::F32));
        assert_eq!(table.iter().map(|span| span.tile).collect::<Vec<_>>(), [0, 1, 1, 2]);
        assert_eq!((table[2].start, table[2].end, tiles), (10, 2058, 4));
        assert_eq!(spans([], 8), (vec![], 0));
        for (dtype, norm, dot) in [(DType::F64, 9, 9), (DType::F32, 3, 5), (DType::BF16, 2, 3)] {
            let tiles = [norm_tile, dot_tile].map(|tile| spans([0..8192, 0..1], tile(dtype)).1);
            assert_eq!(tiles, [norm, dot], "{dtype}");
        }
    }

    #[test]
    fn layouts_are_those_of_the_kernels() {
        assert_eq!((size_of::<Span>(), size_of::<NormAt>()), (24, 24));
        assert_eq!(norm_kernel(Norm::P(3.0), DType::F32), None);
        assert_eq!(norm_kernel(Norm::L2, DType::U64), None);
    }
}
