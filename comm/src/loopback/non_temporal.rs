//! Copies of blocks that bypass the cache, without a fence for each.

use meshstep_tensor::Element;
use meshstep_tensor::fetch::LINE;

/// Copies `from` to `to`: if `streams`, and `to` is whole cache lines, by non-temporal stores.
///
/// # Safety
/// This thread calls [`fence`] before it lets another thread read `to`.
#[inline(always)]
pub(super) unsafe fn copy_unfenced<T: Element>(to: &mut [T], from: &[T], streams: bool) {
    assert_eq!(to.len(), from.len(), "the destination of a copy must be as long as its source");
    let lines = to.as_ptr().addr().is_multiple_of(LINE) && size_of_val(to).is_multiple_of(LINE);
    if streams && lines && cfg!(target_arch = "x86_64") {
        // SAFETY: both have this many bytes, `to` begins at a cache line, and references do not overlap.
        unsafe { stream(to.as_mut_ptr().cast(), from.as_ptr().cast(), size_of_val(from)) }
    } else {
        to.copy_from_slice(from);
    }
}

/// Orders all non-temporal stores of this thread before its later stores.
#[inline(always)]
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction, and it has no precondition.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    }
}

/// # Safety
/// - `from` is valid for reads and `to` for writes of `bytes` bytes, a multiple of 16, and they do not overlap.
/// - `to` is aligned to 16 bytes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn stream(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let (to, from) = (to.cast::<__m128i>(), from.cast::<__m128i>());
    for i in 0..bytes / size_of::<__m128i>() {
        // SAFETY: the `i`th 16 bytes lie within both, and `to` is aligned to them.
        unsafe { _mm_stream_si128(to.add(i), _mm_loadu_si128(from.add(i))) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream(_: *mut u8, _: *const u8, _: usize) {}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_tensor::{Buffer, Category, DType, Meter};

    #[test]
    fn every_element_is_copied_at_any_offset_and_length() {
        let from: Vec<f32> = (1u16..200).map(f32::from).collect();
        let mut to = Buffer::zeroed(200, DType::F32, &Meter::new(), Category::Staging).unwrap();
        let to = to.typed_mut::<f32>().unwrap();
        for (start, len) in [(0, 64), (0, 63), (1, 64), (16, 16), (16, 100), (3, 0)] {
            for streams in [true, false] {
                to.fill(0.0);
                // SAFETY: no other thread reads it.
                unsafe { copy_unfenced(&mut to[start..start + len], &from[..len], streams) };
                fence();
                assert_eq!(to[start..start + len], from[..len]);
                assert_eq!(to.iter().filter(|x| **x != 0.0).count(), len, "nothing beside it");
            }
        }
    }
}
