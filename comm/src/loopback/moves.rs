//! Kernels for portions of an operation's elements. They work in pieces that stay in cache from the first read to the last write.

use super::cut::CutPart;
use super::shared::{Portion, Share};
use crate::reduce::{self, Accumulator, BLOCK, WireElement};
use crate::{Action, Reduction};
use meshstep_tensor::fetch::fetch;
use meshstep_tensor::simd::{Body, Isa};
use meshstep_tensor::{DType, bf16, copy_non_temporal, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// Total bytes of the buffers from which copies bypass the cache, which would not keep them. Measured with a last-level cache of
/// 32 MiB: an all_gather of 64 MiB among 4 ranks takes 0.83 of the time, and a step with it 0.88.
const NON_TEMPORAL_FROM: usize = 32 << 20;

/// Prefetch distance of a reduction in bytes, for each buffer. Measured: a reduce_scatter of 64 MiB among 4 ranks takes 0.79 of
/// the time, an all_reduce 0.85; both take longer than without prefetch if the number of lines is not a constant.
const AHEAD: usize = 1 << 10;

/// Moves portions until none is left.
pub(super) fn perform(share: Share<'_>) {
    // A barrier may carry a buffer of any type.
    if !share.action().moves_data() {
        return;
    }
    match share.dtype() {
        DType::F32 => typed::<f32>(share),
        DType::F64 => typed::<f64>(share),
        DType::BF16 => typed::<bf16>(share),
        DType::F16 => typed::<f16>(share),
        DType::U64 => typed::<u64>(share),
        other => debug_assert!(false, "{other} is refused by `Op::check`"),
    }
}

fn typed<T: WireElement>(mut share: Share<'_>) {
    let (action, n) = (share.action(), share.world_size());
    match action.reduction() {
        Some(reduction @ Reduction::PreMulSum { .. }) if T::DTYPE.is_float() => {
            return Isa::detect().run(Fold::<T, true> { share, reduction, _element: PhantomData });
        }
        Some(reduction) => {
            return Isa::detect().run(Fold::<T, false> { share, reduction, _element: PhantomData });
        }
        None => {}
    }
    let plain: fn(&mut [T], &[T]) = <[T]>::copy_from_slice;
    let to = if share.bytes() < NON_TEMPORAL_FROM { plain } else { copy_non_temporal };
    while let Some(mut portion) = share.claim() {
        match (portion.part, action) {
            (CutPart::Chunk(_), Action::Broadcast { root }) => copy::<T>(&mut portion, root, 0..n, to),
            (CutPart::Chunk(chunk), _) => copy::<T>(&mut portion, chunk, 0..n, to),
            (CutPart::Pair { from, to: peer }, _) => copy::<T>(&mut portion, from, peer..peer + 1, to),
            (CutPart::Swap { a, b }, _) => swap::<T>(&mut portion, a, b),
        }
    }
}

/// Reduction of portions of all buffers, written to all of them or to that of the chunk's owner. `TIMES` adds a factor for each
/// rank, at no cost to the loops without factors.
struct Fold<'a, T, const TIMES: bool> {
    share: Share<'a>,
    reduction: Reduction,
    _element: PhantomData<T>,
}

impl<T: WireElement, const TIMES: bool> Body for Fold<'_, T, TIMES> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let (n, to_all) = (self.share.world_size(), matches!(self.share.action(), Action::AllReduce(_)));
        let (mut sum, mut rounded) = ([T::Wide::ZERO; BLOCK], [T::narrow(T::Wide::ZERO); BLOCK]);
        while let Some(mut portion) = self.share.claim() {
            let targets = match portion.part {
                CutPart::Chunk(chunk) if !to_all => chunk..chunk + 1,
                _ => 0..n,
            };
            for block in blocks(portion.range.clone(), reduce::block::<T>()) {
                let (sum, rounded) = (&mut sum[..block.len()], &mut rounded[..block.len()]);
                for rank in 0..n {
                    let values = portion.slice::<T>(rank, block.clone());
                    fetch(values.as_ptr().wrapping_byte_add(AHEAD), reduce::block::<T>());
                }
                if TIMES {
                    let factor = portion.factor(0);
                    reduce::first_times(sum, portion.slice::<T>(0, block.clone()), factor);
                } else {
                    reduce::first(sum, portion.slice::<T>(0, block.clone()));
                }
                for rank in 1..n {
                    if TIMES {
                        let factor = portion.factor(rank);
                        reduce::next_times(sum, portion.slice::<T>(rank, block.clone()), factor);
                    } else {
                        reduce::next(sum, portion.slice::<T>(rank, block.clone()), self.reduction);
                    }
                }
                reduce::last(rounded, sum, self.reduction, n);
                for rank in targets.clone() {
                    portion.slice::<T>(rank, block.clone()).copy_from_slice(rounded);
                }
            }
        }
    }
}

/// Copies a portion from the buffer of one rank to those of the other ranks in `targets`.
fn copy<T: WireElement>(
    portion: &mut Portion<'_>,
    from: usize,
    targets: Range<usize>,
    copy: fn(&mut [T], &[T]),
) {
    let range = portion.range.clone();
    for to in targets.filter(|&to| to != from) {
        let (from, to) = portion.two::<T>((from, range.clone()), (to, range.clone()));
        copy(to, from);
    }
}

/// Swaps a portion of the chunks that two ranks exchange.
fn swap<T: WireElement>(portion: &mut Portion<'_>, a: usize, b: usize) {
    let (in_a, in_b) = portion.swapped(a, b);
    let (in_a, in_b) = portion.two::<T>((a, in_a), (b, in_b));
    in_a.swap_with_slice(in_b);
}

fn blocks(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(len).map(move |start| start..end.min(start + len))
}
