//! Reduction of contributions where they lie, in memory of several ranks.

use crate::Reduction;
use crate::reduce::{self, Accumulator, BLOCK, Contributions, WireElement, fold_block};
use meshstep_tensor::fetch::fetch;
use meshstep_tensor::simd::{Body, Isa};
use meshstep_tensor::{DType, bf16, f16};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Addresses of the ranks' contributions to one tile, by rank, and their factors. The lists stay allocated between tiles.
#[derive(Debug, Default)]
pub(crate) struct Tiles {
    pub(crate) from: Vec<NonNull<u8>>,
    pub(crate) factors: Vec<f64>,
}

// SAFETY: addresses, which only `fold` dereferences, with its own contract.
unsafe impl Send for Tiles {}

/// Memory of the tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TileMemory {
    /// Rings, in the cache.
    Cached,
    /// Buffers of the ranks, which are read from main memory.
    Main,
}

/// Prefetch distance in bytes for each tile in main memory, as of loopback.
const AHEAD: usize = 1 << 10;

/// Memory for a reduced tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoldInto {
    pub(crate) base: NonNull<u8>,
    /// Index of the tile's first element in the operation's buffer.
    pub(crate) first: usize,
    /// Elements of the tile.
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

/// Reduces the tiles into `into`.
///
/// # Safety
/// - Each address is valid for reads of as many elements of the type as `into` has.
/// - `into` is valid for writes of its elements, and this call alone accesses them. A tile may be `into` itself, and overlaps it in no
///   other way.
pub(crate) unsafe fn fold((tiles, of): (&Tiles, TileMemory), into: FoldInto, reduction: Reduction) {
    assert_eq!(tiles.from.len(), tiles.factors.len(), "a tile has a factor");
    match into.dtype {
        DType::F32 => typed::<f32>((tiles, of), into, reduction),
        DType::F64 => typed::<f64>((tiles, of), into, reduction),
        DType::BF16 => typed::<bf16>((tiles, of), into, reduction),
        DType::F16 => typed::<f16>((tiles, of), into, reduction),
        DType::U64 => typed::<u64>((tiles, of), into, reduction),
        other => debug_assert!(false, "{other} is refused by `Op::check`"),
    }
}

fn typed<T: WireElement>((tiles, of): (&Tiles, TileMemory), into: FoldInto, reduction: Reduction) {
    let FoldInto { base: into, first, len, .. } = into;
    let times = matches!(reduction, Reduction::PreMulSum { .. }) && T::DTYPE.is_float();
    let isa = Isa::detect();
    let element = PhantomData;
    match (times, of) {
        (false, TileMemory::Cached) => {
            isa.run(FoldTiles::<T, false, false> { tiles, into, first, len, reduction, element });
        }
        (false, TileMemory::Main) => {
            isa.run(FoldTiles::<T, false, true> { tiles, into, first, len, reduction, element });
        }
        (true, TileMemory::Cached) => {
            isa.run(FoldTiles::<T, true, false> { tiles, into, first, len, reduction, element });
        }
        (true, TileMemory::Main) => {
            isa.run(FoldTiles::<T, true, true> { tiles, into, first, len, reduction, element });
        }
    }
}

struct FoldTiles<'a, T, const TIMES: bool, const FETCHES: bool> {
    tiles: &'a Tiles,
    into: NonNull<u8>,
    /// Index of the first element in the buffer.
    first: usize,
    len: usize,
    reduction: Reduction,
    element: PhantomData<T>,
}

impl<T: WireElement, const TIMES: bool, const FETCHES: bool> Body for FoldTiles<'_, T, TIMES, FETCHES> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (mut sum, mut rounded) = ([T::Wide::ZERO; BLOCK], [T::narrow(T::Wide::ZERO); BLOCK]);
        let n = self.tiles.from.len();
        let mut at = 0;
        while at < self.len {
            let mut count = reduce::block::<T>().min(self.len - at);
            let mut reduction = self.reduction;
            if T::DTYPE == DType::U64 {
                // Only words have a reduction that depends on the element's place.
                let (here, until) = self.reduction.of_element(self.first + at);
                (reduction, count) = (here, count.min(until - (self.first + at)));
            }
            let (sum, rounded) = (&mut sum[..count], &mut rounded[..count]);
            if FETCHES {
                let ahead = at * size_of::<T>() + AHEAD;
                let tiles = self.tiles.from.iter().map(|tile| tile.as_ptr().cast_const().cast::<T>());
                tiles.for_each(|tile| fetch(tile.wrapping_byte_add(ahead), reduce::block::<T>()));
            }
            let mut block = TileBlock { tiles: self.tiles, at, count };
            fold_block::<T, TIMES>(&mut block, (sum, &mut *rounded), (reduction, n));
            // SAFETY: `fold`'s contract: the elements from `at` on are within `into`, and this block's tiles have been read.
            unsafe {
                let to = self.into.as_ptr().add(at * size_of::<T>());
                to.copy_from_nonoverlapping(rounded.as_ptr().cast(), size_of_val(rounded));
            }
            at += count;
        }
    }
}

/// Elements `at..at + count` of each tile.
struct TileBlock<'a> {
    tiles: &'a Tiles,
    at: usize,
    count: usize,
}

impl<T: WireElement> Contributions<T> for TileBlock<'_> {
    #[inline(always)]
    fn values(&mut self, rank: usize) -> impl Iterator<Item = T> {
        let tile = self.tiles.from[rank].as_ptr().cast_const().cast::<T>();
        let (at, count) = (self.at, self.count);
        // SAFETY: `fold`'s contract: the tile has these elements; their alignment does not matter, and any bits are an element.
        (at..at + count).map(move |i| unsafe { tile.add(i).read_unaligned() })
    }

    #[inline(always)]
    fn factor(&self, rank: usize) -> f64 {
        self.tiles.factors[rank]
    }
}
