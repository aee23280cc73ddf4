//! Copies that bypass the cache.

use crate::Element;

/// Copies `from` to `to` with non-temporal stores, which bypass the cache, where the machine has them.
///
/// The cache lines of `to` are not read before they are written and evict nothing. Use it for copies larger than the caches that
/// are not read back soon; small copies are slower with it.
///
/// # Panics
/// If the lengths differ.
pub fn copy_non_temporal<T: Element>(to: &mut [T], from: &[T]) {
    copy_bytes_non_temporal(bytemuck::cast_slice_mut(to), bytemuck::cast_slice(from));
}

/// Copies bytes as [`copy_non_temporal`] copies elements.
///
/// # Panics
/// If the lengths differ.
pub fn copy_bytes_non_temporal(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "the destination of a copy must be as long as its source");
    #[cfg(target_arch = "x86_64")]
    stream(to, from);
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

/// Copies whole cache lines with non-temporal stores, which every x86-64 has, and the unaligned head and tail with plain ones.
#[cfg(target_arch = "x86_64")]
fn stream(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    #[repr(align(64))]
    struct Line([__m128i; 4]);

    // SAFETY: bytes and lines are plain numbers, for which any bit pattern is valid.
    let (head, lines, tail) = unsafe { to.align_to_mut::<Line>() };
    let (first, rest) = from.split_at(head.len());
    let (whole, last) = rest.split_at(size_of_val(lines));
    head.copy_from_slice(first);
    tail.copy_from_slice(last);
    for (line, from) in lines.iter_mut().zip(whole.chunks_exact(size_of::<Line>())) {
        let from = from.as_ptr().cast::<__m128i>();
        for (i, part) in line.0.iter_mut().enumerate() {
            // SAFETY: both are the `i`th quarter of a line: the source of a chunk as long as a line, the destination of an
            // aligned line.
            unsafe { _mm_stream_si128(part, _mm_loadu_si128(from.add(i))) };
        }
    }
    // SAFETY: a fence has no precondition. It orders the stores before later ones, so that a thread synchronised afterwards sees
    // the copy.
    unsafe { _mm_sfence() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_arrives_wherever_a_copy_begins_and_nothing_else_changes() {
        let from: Vec<u64> = (0..300).map(|i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let narrow: Vec<u16> = (0..300).map(|i: u16| i.wrapping_mul(977)).collect();
        for start in 0..40 {
            for len in (0..40).chain([63, 64, 65, 128, 200]) {
                let mut to = vec![7u64; 300];
                copy_non_temporal(&mut to[start..start + len], &from[3..3 + len]);
                let copied =
                    |i: usize| if (start..start + len).contains(&i) { from[3 + i - start] } else { 7 };
                assert!(to.iter().enumerate().all(|(i, &x)| x == copied(i)), "{start} {len}");
                let mut to: Vec<_> = vec![crate::bf16::from_bits(7); 300];
                let from: Vec<_> = narrow.iter().map(|&x| crate::bf16::from_bits(x)).collect();
                copy_non_temporal(&mut to[start..start + len], &from[3..3 + len]);
                let copied =
                    |i: usize| if (start..start + len).contains(&i) { narrow[3 + i - start] } else { 7 };
                assert!(to.iter().enumerate().all(|(i, x)| x.to_bits() == copied(i)), "{start} {len}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "as long as")]
    fn unequal_lengths_are_a_fault() {
        copy_non_temporal(&mut [0f32; 3], &[0f32; 4]);
    }
}
