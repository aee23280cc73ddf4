//! Asking for memory before it is needed.

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Asks for the cache lines of `count` elements from `first` on, which may lie past the end of their memory.
///
/// Arithmetic with long latencies fills the processor's window, so that it does not look far enough ahead by itself. Lines come
/// into the second cache: blocks of several vectors ahead would push out of the first what is being computed with.
#[inline(always)]
pub fn fetch<X>(first: *const X, count: usize) {
    for line in 0..(count * size_of::<X>()).div_ceil(LINE) {
        fetch_line(first.cast::<u8>().wrapping_add(LINE * line));
    }
}

/// Asks for the cache line of `address`, which may be anywhere.
#[inline(always)]
pub fn fetch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch is a hint about an address; it reads nothing and faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
