//! Kernels for portions of an operation's elements. They work in pieces that stay in cache from the first read to the last write.

use super::cut::CutPart;
use super::non_temporal::{copy_unfenced, fence};
use super::shared::{Portion, Share};
use crate::reduce::{self, Accumulator, BLOCK, Contributions, WireElement};
use crate::{Action, Reduction};
use meshstep_tensor::fetch::fetch;
use meshstep_tensor::simd::{Body, Isa};
use meshstep_tensor::{DType, Threads, bf16, copy_non_temporal, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// Total bytes of the buffers from which copies bypass the cache: the buckets of a step together are larger than caches. Measured on 4
/// ranks: an all_gather of 64 MiB takes 0.83 of the time and a step with it 0.88; a step in 16 buckets of 4 MiB takes 0.9 of its time
/// with a bound of 32 MiB.
const NON_TEMPORAL_FROM: usize = 1 << 20;

/// Total bytes of the values from which their former contents are kept by stores that bypass the cache. Measured between 2 ranks with
/// 2 MiB of second-level cache each: an exchange of 24 MiB takes 0.7 of the time, one of 6 MiB the same.
const KEPT_NON_TEMPORAL_FROM: usize = 4 << 20;

/// Prefetch distance of a reduction in bytes, for each buffer. Measured: a reduce_scatter of 64 MiB among 4 ranks takes 0.79 of
/// the time, an all_reduce 0.85; both take longer than without prefetch if the number of lines is not a constant.
const AHEAD: usize = 1 << 10;

/// Elements of a part that one thread copies.
const SENT_BY_ONE: usize = 32 << 10;

/// Moves portions until none is left. Returns the non-finite elements of the result in them, if the operation keeps former values.
pub(super) fn perform(share: Share<'_>) -> u64 {
    match share.dtype() {
        DType::F32 => typed::<f32>(share),
        DType::F64 => typed::<f64>(share),
        DType::BF16 => typed::<bf16>(share),
        DType::F16 => typed::<f16>(share),
        DType::U64 => typed::<u64>(share),
        other => unreachable!("{other} is refused by `Op::check`"),
    }
}

/// Copies a part that rank `from` has written to all other ranks.
pub(super) fn send(portion: Portion<'_>, from: usize, threads: &Threads) {
    match portion.dtype() {
        DType::F32 => send_typed::<f32>(portion, from, threads),
        DType::F64 => send_typed::<f64>(portion, from, threads),
        DType::BF16 => send_typed::<bf16>(portion, from, threads),
        DType::F16 => send_typed::<f16>(portion, from, threads),
        DType::U64 => send_typed::<u64>(portion, from, threads),
        other => unreachable!("{other} is refused by `Op::check`"),
    }
}

fn send_typed<T: WireElement>(mut portion: Portion<'_>, from: usize, threads: &Threads) {
    let n = portion.world_size();
    let plain: fn(&mut [T], &[T]) = <[T]>::copy_from_slice;
    let to = if portion.bytes() < NON_TEMPORAL_FROM { plain } else { copy_non_temporal };
    // Ranks share the processors of their process.
    if threads.count() / n <= 1 {
        return copy::<T>(&mut portion, from, 0..n, to);
    }
    let range = portion.range.clone();
    for rank in (0..n).filter(|&rank| rank != from) {
        let (from, into) = portion.two::<T>((from, range.clone()), (rank, range.clone()));
        let parts = into.chunks_mut(SENT_BY_ONE).zip(from.chunks(SENT_BY_ONE));
        threads.for_each(parts, |(into, from)| to(into, from));
    }
}

fn typed<T: WireElement>(mut share: Share<'_>) -> u64 {
    let (action, n) = (share.action(), share.world_size());
    if let Some(reduction) = action.reduction() {
        let times = matches!(reduction, Reduction::PreMulSum { .. }) && T::DTYPE.is_float();
        return fold::<T>(share, reduction, times);
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
    0
}

/// Runs the kernel of a reduction, with factors if `times`.
fn fold<T: WireElement>(share: Share<'_>, reduction: Reduction, times: bool) -> u64 {
    let isa = Isa::detect();
    match (times, share.keeps()) {
        (false, false) => isa.run(Fold::<T, false, false> { share, reduction, _element: PhantomData }),
        (false, true) => isa.run(Fold::<T, false, true> { share, reduction, _element: PhantomData }),
        (true, false) => isa.run(Fold::<T, true, false> { share, reduction, _element: PhantomData }),
        (true, true) => isa.run(Fold::<T, true, true> { share, reduction, _element: PhantomData }),
    }
}

/// Reduction of portions of all ranks' values, written to all of them or to those of the chunk's owner. `TIMES` adds a factor for
/// each rank. `KEEPS` keeps the former values of the ranks that lend them, and counts the non-finite elements of the result. Neither
/// costs the loops without it anything.
struct Fold<'a, T, const TIMES: bool, const KEEPS: bool> {
    share: Share<'a>,
    reduction: Reduction,
    _element: PhantomData<T>,
}

impl<T: WireElement, const TIMES: bool, const KEEPS: bool> Body for Fold<'_, T, TIMES, KEEPS> {
    type Output = u64;

    #[inline(always)]
    fn run(mut self) -> u64 {
        let (n, to_all) = (self.share.world_size(), matches!(self.share.action(), Action::AllReduce(_)));
        let streams = KEEPS && self.share.bytes() >= KEPT_NON_TEMPORAL_FROM;
        let done = self.share.action().is_done_alone(n);
        let (mut sum, mut rounded) = ([T::Wide::ZERO; BLOCK], [T::narrow(T::Wide::ZERO); BLOCK]);
        let mut non_finite = 0;
        while let Some(mut portion) = self.share.claim() {
            let targets = match portion.part {
                CutPart::Chunk(chunk) if !to_all => chunk..chunk + 1,
                _ => 0..n,
            };
            let mut at = portion.range.start;
            while at < portion.range.end {
                let run = if KEEPS { portion.enter(at) } else { portion.range.clone() };
                at = run.end;
                let first = if KEEPS { portion.to_line(run.start) } else { 0 };
                for block in blocks(run, first, reduce::block::<T>()) {
                    let (sum, rounded) = (&mut sum[..block.len()], &mut rounded[..block.len()]);
                    if KEEPS && done {
                        rounded.copy_from_slice(portion.slice(0, block.clone()));
                    } else {
                        let into = (sum, &mut *rounded);
                        reduce_block::<T, TIMES>(&mut portion, &block, into, (self.reduction, n));
                    }
                    for rank in targets.clone() {
                        if KEEPS {
                            portion.keep::<T>(rank, block.clone(), |to, from| {
                                // SAFETY: the fence comes before this rank leaves the operation, and the others wait for that.
                                unsafe { copy_unfenced(to, from, streams) }
                            });
                        }
                        portion.slice::<T>(rank, block.clone()).copy_from_slice(rounded);
                    }
                    if KEEPS {
                        non_finite += reduce::non_finite(rounded);
                    }
                }
            }
        }
        if streams {
            fence();
        }
        non_finite
    }
}

/// Reduces one block of the values of `n` ranks.
#[inline(always)]
fn reduce_block<T: WireElement, const TIMES: bool>(
    portion: &mut Portion<'_>,
    block: &Range<usize>,
    accumulators: (&mut [T::Wide], &mut [T]),
    (reduction, n): (Reduction, usize),
) {
    for rank in 0..n {
        let values = portion.slice::<T>(rank, block.clone());
        fetch(values.as_ptr().wrapping_byte_add(AHEAD), reduce::block::<T>());
    }
    let (sum, rounded) = accumulators;
    if T::DTYPE != DType::U64 {
        let mut block = PortionBlock { portion, block };
        return reduce::fold_block::<T, TIMES>(&mut block, (sum, rounded), (reduction, n));
    }
    // Only words have a reduction that depends on the element's place.
    let mut at = block.start;
    while at < block.end {
        let (reduction, until) = reduction.of_element(at);
        let part = at..until.min(block.end);
        let of_block = part.start - block.start..part.end - block.start;
        let into = (&mut sum[of_block.clone()], &mut rounded[of_block]);
        at = part.end;
        let mut block = PortionBlock { portion: &mut *portion, block: &part };
        reduce::fold_block::<T, TIMES>(&mut block, into, (reduction, n));
    }
}

/// Block of a portion, in the memory of every rank.
struct PortionBlock<'a, 'b> {
    portion: &'a mut Portion<'b>,
    block: &'a Range<usize>,
}

impl<T: WireElement> Contributions<T> for PortionBlock<'_, '_> {
    #[inline(always)]
    fn values(&mut self, rank: usize) -> impl Iterator<Item = T> {
        self.portion.slice::<T>(rank, self.block.clone()).iter().copied()
    }

    #[inline(always)]
    fn factor(&self, rank: usize) -> f64 {
        self.portion.factor(rank)
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

/// Cuts `range` into blocks of `len` elements, of which the first has `first` if that is not 0.
#[inline(always)]
fn blocks(range: Range<usize>, first: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    let (start, end) = (range.start, range.end);
    let rest = end.min(start + first);
    let head = Some(start..rest).filter(|head| !head.is_empty());
    head.into_iter().chain((rest..end).step_by(len).map(move |start| start..end.min(start + len)))
}
