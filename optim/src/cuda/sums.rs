//! Arguments of the kernels of exact sums. They add to device memory what [`NormAccumulator`] and [`ExactSum::add_dot`] would add, word
//! for word once carried.
//!
//! [`NormAccumulator`]: crate::NormAccumulator
//! [`ExactSum::add_dot`]: crate::ExactSum::add_dot

use super::THREADS;
use crate::Norm;
use meshstep_tensor::DType;
use std::ops::Range;

/// Kernel that carries sums, so that equal sums have equal words: `(u64* sums, u64 count)`, one block for each.
pub const CARRY_SUMS: &str = "norm_carry";

/// Kernel that writes a sum into the vectors of an exchange: `(const u64* from, u64* sum, u64* max)`, one block. `from` has a count, the
/// words and the bits of the largest magnitude. `sum` receives the count, then a word that stays unchanged, then the carried words; `max`
/// begins with the bits.
pub const WRITE_SUM: &str = "norm_write";

/// Range of the flat memory, in the layout of the sum kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First element.
    pub start: u64,
    /// One past the last element.
    pub end: u64,
    /// Number of tiles of all spans before this one.
    pub tile: u64,
}

/// Addresses that a norm's kernel adds to, `(const void* values, const Span* spans, u64 count, u64 tiles, NormAt)`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormAt {
    /// Address of the count of infinite and NaN elements.
    pub non_finite: u64,
    /// Address of the [`ExactSum::WORDS`](crate::ExactSum::WORDS) words of the sum; unused for [`Norm::Inf`].
    pub words: u64,
    /// Address of the largest finite magnitude as the bits of an f64.
    pub max_bits: u64,
}

/// Returns the norm's kernel for vectors of a type; none for [`Norm::P`] and for types that are no numbers.
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

/// Returns the elements of a tile of a norm's kernel: 64 bytes for each thread, or 32 bytes for f64.
pub fn norm_tile(dtype: DType) -> u64 {
    u64::from(THREADS) * if dtype == DType::F64 { 4 } else { 64 / dtype.size() as u64 }
}

/// Returns the elements of a tile of the dot product kernels: 32 bytes for each thread.
pub fn dot_tile(dtype: DType) -> u64 {
    u64::from(THREADS) * 32 / dtype.size() as u64
}

/// Returns the table of ranges in tiles of `tile` elements, and the number of all tiles, an argument of the launch.
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
