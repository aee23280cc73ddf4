//! One pass over typed memory, in blocks that stay in cache, distributed over the cores. The arithmetic is a rule's `Step`.
//!
//! Memory in another type than that of the computation is converted block by block, in loops independent of the rule: every rule is
//! compiled for f32 and f64 only, and the conversions are compiled once.

use crate::engine::cpu::Cpu;
use crate::engine::streams::{Draw, Streams};
use crate::engine::view::ViewPlace;
use crate::precision::number::Real;
use crate::precision::philox::{self, Bits};
use crate::{Rounding, Segment};
use meshstep_tensor::SplitParts;
use meshstep_tensor::fetch::{LINE, fetch, fetch_line};
use meshstep_tensor::simd::{Body, Isa};

/// Update of one element by a rule with `S` state vectors; holds the constants of one segment.
pub trait Step<T: Real, const S: usize>: Copy + Send + Sync {
    /// Returns the new parameter and state of an element with gradient `g`. The loop around it is compiled for every instruction
    /// set and vectorises if this method is `#[inline(always)]` and calls nothing that is not.
    fn step(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]);

    /// Slow and obvious: the definition that `step` must equal, for [`Isa::Reference`]. The default is `step` itself.
    fn reference(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]) {
        self.step(p, g, s)
    }
}

/// Least number of elements of a part: waking a second thread costs more than shorter ones save. Measured: AdamW of 65,536 f32 elements
/// takes 1.27 times as long on two threads, and 100,000 take 1.22 times.
const PART: usize = 64 << 10;

/// Elements converted, updated, copied out and reset in turn: few enough that the memory, which only the update prefetches, is not idle
/// during the other loops. Measured: with a remainder AdamW runs at 82% of a copy's speed with twice as many.
const BLOCK: usize = 1 << 9;

/// Elements between two prefetches, and their distance: a block and more if blocks are converted first. Measured: with a root and two
/// divisions per element AdamW runs at 82% of a copy's speed without prefetches and at 97% with them; at twice the distance it takes 1.03
/// to 1.08 of the time, and Adagrad 1.15.
const GROUP: usize = 32;
const AHEAD: usize = 256;
const FAR_AHEAD: usize = 2 * BLOCK;

/// Gradients read ahead at a time for rules without state: with so little arithmetic, reading two streams in turns is faster than side by
/// side. Measured: SGD at 97% of a copy's speed, at 72% side by side.
const TURN: usize = 256;

/// Settings of one pass.
pub(crate) struct Sweep<'a, F> {
    /// Function that returns a segment's constants.
    pub(crate) constants: F,
    pub(crate) on: Cpu<'a>,
    pub(crate) zero_grads: bool,
    pub(crate) rounding: Rounding,
}

/// Buffers for converted blocks; empty if nothing is converted.
struct SweepScratch<'r, T, const S: usize> {
    params: &'r mut [T],
    grads: &'r mut [T],
    state: [&'r mut [T]; S],
    random: &'r mut [u16],
}

impl<F> Sweep<'_, F> {
    /// Updates the elements of `segments`, which ascend within `streams` without overlap.
    pub(crate) fn run<T, C, const S: usize>(&self, mut streams: Streams<'_, T, S>, segments: &[Segment])
    where
        T: Real,
        C: Step<T, S>,
        F: Fn(&Segment) -> C + Sync,
    {
        let (Some(first), Some(last)) = (segments.first(), segments.last()) else { return };
        let (from, span) = (first.range.start, first.range.start..last.range.end);
        let part = self.on.threads.part_len(span.len(), PART).next_multiple_of(BLOCK);
        let parts = SplitParts::new(streams.part(span.clone()), span.len(), part, Streams::split_at);
        self.on.threads.for_each(parts, |(first, streams)| {
            let (start, end) = (from + first, from + first + streams.params.len());
            // A segment across the border of two parts is in both tables.
            let first = segments.partition_point(|segment| segment.range.end <= start);
            let last = segments.partition_point(|segment| segment.range.start < end);
            self.leaf(start, streams, &segments[first..last.max(first)]);
        });
    }

    /// Updates the parts of `segments` within a range that begins at `from`.
    fn leaf<T, C, const S: usize>(&self, from: usize, streams: Streams<'_, T, S>, segments: &[Segment])
    where
        T: Real,
        C: Step<T, S>,
        F: Fn(&Segment) -> C,
    {
        if streams.are_same() {
            let state = std::array::from_fn(|_| Default::default());
            let mut room = SweepScratch { params: &mut [], grads: &mut [], state, random: &mut [] };
            return self.update(from, streams, segments, &mut room);
        }
        let zero = T::from_f32(0.0);
        let (mut params, mut grads, mut state) = ([zero; BLOCK], [zero; BLOCK], [[zero; BLOCK]; S]);
        let (state, random) = (state.each_mut().map(|s| &mut s[..]), &mut [0; BLOCK + philox::GROUP]);
        let mut room = SweepScratch { params: &mut params, grads: &mut grads, state, random };
        self.update(from, streams, segments, &mut room);
    }

    fn update<T, C, const S: usize>(
        &self,
        from: usize,
        mut streams: Streams<'_, T, S>,
        segments: &[Segment],
        room: &mut SweepScratch<'_, T, S>,
    ) where
        T: Real,
        C: Step<T, S>,
        F: Fn(&Segment) -> C,
    {
        let to = from + streams.params.len();
        for segment in segments {
            let both = segment.range.start.max(from)..segment.range.end.min(to);
            if both.is_empty() {
                continue;
            }
            let pass = Pass {
                step: (self.constants)(segment),
                isa: self.on.isa,
                zero_grads: self.zero_grads,
                segment,
                rounding: self.rounding,
                offset: both.start - segment.range.start,
            };
            let streams = streams.part(both.start - from..both.end - from);
            if self.on.isa == Isa::Reference { pass.run_plainly(streams) } else { pass.run(streams, room) }
        }
    }
}

/// Update of one segment's elements.
struct Pass<'a, C> {
    step: C,
    isa: Isa,
    zero_grads: bool,
    segment: &'a Segment,
    rounding: Rounding,
    /// First element, relative to the segment's start.
    offset: usize,
}

impl Segment {
    /// Returns the random bits for one vector, 0 for parameters and k + 1 for state k, if rounding is stochastic.
    pub(crate) fn draw(&self, rounding: Rounding, stream: u16) -> Option<Draw> {
        let bits = Bits::new(self.key, self.t, stream);
        (rounding == Rounding::Stochastic).then_some(Draw { bits, strided: self.strided, first: self.first })
    }
}

impl<C> Pass<'_, C> {
    /// Returns the random bits for one vector, from element `start` on.
    fn draw(&self, stream: usize, start: usize) -> Option<Draw> {
        let draw = self.segment.draw(self.rounding, stream as u16)?;
        Some(Draw { first: draw.first.wrapping_add((self.offset + start) as u64), ..draw })
    }

    /// Updates element by element: the definition.
    fn run_plainly<T: Real, const S: usize>(&self, mut streams: Streams<'_, T, S>)
    where
        C: Step<T, S>,
    {
        for i in 0..streams.params.len() {
            let state = streams.state.each_ref().map(|s| s.view().get_plainly(i));
            let (p, g) = (streams.params.view().get_plainly(i), streams.grads.view().get_plainly(i));
            let (p, state) = self.step.reference(p, g, state);
            streams.params.set_plainly(i, p, self.draw(0, 0));
            for (k, (slot, value)) in streams.state.iter_mut().zip(state).enumerate() {
                slot.set_plainly(i, value, self.draw(k + 1, 0));
            }
            if let Some(copy) = &mut streams.copy {
                copy.set_plainly(i, p, None);
            }
        }
        if self.zero_grads {
            streams.grads.zero();
        }
    }

    /// Fast loop.
    fn run<T: Real, const S: usize>(&self, mut streams: Streams<'_, T, S>, room: &mut SweepScratch<'_, T, S>)
    where
        C: Step<T, S>,
    {
        let len = streams.params.len();
        // Unconverted vectors can be prefetched without a list.
        let listed = !streams.are_same() || streams.copy.is_some();
        let ahead = listed.then(|| Ahead::of(&streams));
        if !listed && !self.zero_grads {
            // A single loop does everything, so no block must stay in cache for another.
            return self.block(0, streams, room, None);
        }
        let mut start = 0;
        while start < len {
            // Blocks end at the ends of groups of random bits, so that none is computed twice.
            let skip = self.draw(0, start).map_or(0, |draw| draw.index(0) % philox::GROUP as u64);
            let end = len.min(start + BLOCK - skip as usize);
            self.block(start, streams.part(start..end), room, ahead.as_ref());
            start = end;
        }
    }

    /// Updates the elements from `start` on, which fit into `room`.
    fn block<T: Real, const S: usize>(
        &self,
        start: usize,
        mut streams: Streams<'_, T, S>,
        room: &mut SweepScratch<'_, T, S>,
        ahead: Option<&Ahead>,
    ) where
        C: Step<T, S>,
    {
        let isa = self.isa;
        let mut state: [&mut [T]; S] = std::array::from_fn(|_| Default::default());
        for ((numbers, stream), room) in state.iter_mut().zip(&mut streams.state).zip(&mut room.state) {
            *numbers = stream.load(isa, room);
        }
        let params = streams.params.load(isa, room.params);
        let grads = streams.grads.view().load(isa, room.grads);
        isa.run(Each { step: &self.step, params, grads, state, ahead: ahead.map(|ahead| (ahead, start)) });
        if let Some(copy) = &mut streams.copy {
            copy.write(isa, params);
        }
        streams.params.store(isa, room.params, self.draw(0, start), room.random);
        for (k, (stream, numbers)) in streams.state.iter_mut().zip(&room.state).enumerate() {
            stream.store(isa, numbers, self.draw(k + 1, start), room.random);
        }
        if self.zero_grads {
            streams.grads.zero();
        }
    }
}

/// Cache lines to prefetch for the first group of a pass. For later groups, each address advances by the given bytes for each element
/// before them.
struct Ahead {
    lines: [(*const u8, usize); Ahead::MOST],
    count: usize,
}

impl Ahead {
    /// Maximum number of lines of a group; prefetches are hints, and more would come too late.
    const MOST: usize = 24;

    fn of<T: Real, const S: usize>(streams: &Streams<'_, T, S>) -> Self {
        let mut ahead = Ahead { lines: [(std::ptr::null(), 0); Ahead::MOST], count: 0 };
        let all = [&streams.params, &streams.grads].into_iter().chain(&streams.state).chain(&streams.copy);
        for stream in all {
            let distance = if stream.view().is_same() { BLOCK } else { FAR_AHEAD };
            stream.view().places(distance).into_iter().flatten().for_each(|place| ahead.add(place));
        }
        ahead
    }

    fn add(&mut self, ViewPlace { first, size }: ViewPlace) {
        for offset in (0..GROUP * size).step_by(LINE) {
            if let Some(line) = self.lines.get_mut(self.count) {
                *line = (first.wrapping_add(offset), size);
                self.count += 1;
            }
        }
    }

    /// Prefetches the lines for the group at element `start`.
    #[inline(always)]
    fn fetch(&self, start: usize) {
        self.lines[..self.count]
            .iter()
            .for_each(|(first, size)| fetch_line(first.wrapping_add(start * size)));
    }
}

/// Elements of a block.
struct Each<'a, T, C, const S: usize> {
    step: &'a C,
    params: &'a mut [T],
    grads: &'a [T],
    state: [&'a mut [T]; S],
    /// Lines to prefetch, and the index of the block's first element in the pass. None: prefetch the block's own vectors further on.
    ahead: Option<(&'a Ahead, usize)>,
}

impl<T: Real, C: Step<T, S>, const S: usize> Body for Each<'_, T, C, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Each { step, params, grads, mut state, ahead } = self;
        // A local copy without other references, so that it stays in registers.
        let step = *step;
        let len = params.len();
        assert!(grads.len() == len && state.iter().all(|s| s.len() == len), "streams of one length");
        // Pointers, because a bounds check that the compiler cannot remove would prevent vectorisation.
        let (params, grads) = (params.as_mut_ptr(), grads.as_ptr());
        let state = state.each_mut().map(|s| s.as_mut_ptr());
        if S == 0 && ahead.is_none() {
            for start in (0..len).step_by(TURN) {
                let end = len.min(start + TURN);
                for line in (start..end).step_by(LINE / size_of::<T>()) {
                    // SAFETY: `line < len`; volatile, so that the compiler keeps the unused read.
                    unsafe { grads.add(line).read_volatile() };
                    fetch_line(params.wrapping_add(line + TURN).cast());
                }
                for i in start..end {
                    // SAFETY: `i < len`, the length of every slice, and all slices are borrowed exclusively.
                    unsafe { update_one(&step, params, grads, &state, i) };
                }
            }
            return;
        }
        let whole = len - len % GROUP;
        for start in (0..whole).step_by(GROUP) {
            match ahead {
                Some((ahead, first)) => ahead.fetch(first + start),
                None => {
                    fetch(params.wrapping_add(start + AHEAD), GROUP);
                    fetch(grads.wrapping_add(start + AHEAD), GROUP);
                    state.iter().for_each(|s| fetch(s.wrapping_add(start + AHEAD), GROUP));
                }
            }
            for i in start..start + GROUP {
                // SAFETY: as above.
                unsafe { update_one(&step, params, grads, &state, i) };
            }
        }
        for i in whole..len {
            // SAFETY: as above.
            unsafe { update_one(&step, params, grads, &state, i) };
        }
    }
}

/// Updates element `i`. No closure: the compiler may leave a large one out of line, where it is compiled for no instruction set, and then
/// a fused multiply-add is a call.
///
/// # Safety
/// `i` is less than the length of every vector, and the caller borrows all of them exclusively.
#[inline(always)]
unsafe fn update_one<T: Real, C: Step<T, S>, const S: usize>(
    step: &C,
    params: *mut T,
    grads: *const T,
    state: &[*mut T; S],
    i: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (p, s) = step.step(*params.add(i), *grads.add(i), state.map(|s| *s.add(i)));
        *params.add(i) = p;
        for k in 0..S {
            *state[k].add(i) = s[k];
        }
    }
}
