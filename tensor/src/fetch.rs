//! Software prefetch.

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Prefetches the cache lines of `count` elements from `first` on. The range may lie past the end of its allocation.
///
/// Arithmetic with long latencies fills the reorder window, so that the processor does not look far enough ahead by itself. Lines
/// go to the second-level cache: blocks of several vectors ahead would evict the current block from the first.
#[inline(always)]
pub fn fetch<X>(first: *const X, count: usize) {
    for line in 0..(count * size_of::<X>()).div_ceil(LINE) {
        fetch_line(first.cast::<u8>().wrapping_add(LINE * line));
    }
}

/// Prefetches the cache line of `address`, which may be any address.
#[inline(always)]
pub fn fetch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch is a hint; it dereferences nothing and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
