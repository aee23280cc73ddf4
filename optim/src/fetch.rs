//! Asking for memory before it is needed.

/// Asks for the cache lines of `count` elements from `first` on, which may lie past the end of their memory.
///
/// Arithmetic with long latencies fills the processor's window, so that it does not look far enough ahead by itself.
#[inline(always)]
pub(crate) fn fetch<X>(first: *const X, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..(count * size_of::<X>()).div_ceil(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint about an address; it reads nothing and faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(first.cast::<i8>().wrapping_add(64 * line)) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, count);
}
