//! One pass over typed memory: blocks that stay in cache, spread over the cores. The arithmetic is a rule's `Step`.
//!
//! What lies in memory in another form than it is computed with is converted block by block, by loops that no rule is part
//! of: every rule is compiled for f32 and f64 alone, and the recipes are compiled once.

use crate::number::Real;
use crate::philox::{self, Bits};
use crate::streams::{Draw, Streams};
use crate::view::Place;
use crate::{Rounding, Segment};
use meshstep_tensor::fetch::{LINE, fetch, fetch_line};
use meshstep_tensor::simd::{Body, Isa};

/// What one element of a rule with `S` state state goes through; the constants of one segment.
pub(crate) trait Step<T: Real, const S: usize>: Copy + Send + Sync {
    /// The element's new parameter and state. `#[inline(always)]`, without calls.
    fn step(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]);

    /// The same, slow and obvious: the definition `step` must equal.
    fn reference(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]);
}

/// Above this many elements work is split in two; below, starting a second thread costs more than it saves.
const SPLIT_FROM: usize = 64 << 10;

/// Parts that each thread finds of what is long: enough for balance. Memory is slow at the beginning of each. Measured: AdamW on
/// 64 Mi takes 0.88 of the time that it takes in parts of `SPLIT_FROM`.
const PARTS: usize = 8;

/// Elements converted, updated, copied out and reset in turn: few enough that memory, which only the update asks for, does not
/// stand still during the other loops. Measured: with a remainder AdamW runs at 82% of a copy's speed with twice as many.
const BLOCK: usize = 1 << 9;

/// Elements between two requests for memory ahead, and how far ahead: a block and further where blocks are converted first. Measured: with
/// a root and two divisions per element AdamW runs at 82% of a copy's speed without them and at 97% with them; twice as far ahead
/// it takes 1.03 to 1.08 of the time, and Adagrad 1.15.
const GROUP: usize = 32;
const AHEAD: usize = 256;
const FAR_AHEAD: usize = 2 * BLOCK;

/// Gradients brought near at a time where there is no state: so little arithmetic waits for two state that they come faster
/// in turns than side by side. Measured: SGD at 97% of a copy's speed, at 72% side by side.
const TURN: usize = 256;

/// One pass: how its elements are updated.
pub(crate) struct Sweep<F> {
    /// A segment's constants.
    pub(crate) constants: F,
    pub(crate) isa: Isa,
    pub(crate) zero_grads: bool,
    pub(crate) rounding: Rounding,
}

/// Where blocks are converted; empty where none is.
struct Room<'r, T, const S: usize> {
    params: &'r mut [T],
    grads: &'r mut [T],
    state: [&'r mut [T]; S],
    random: &'r mut [u16],
}

impl<F> Sweep<F> {
    /// Updates the elements of `segments`, which ascend within `streams` without overlap.
    pub(crate) fn run<T, C, const S: usize>(&self, mut streams: Streams<'_, T, S>, segments: &[Segment])
    where
        T: Real,
        C: Step<T, S>,
        F: Fn(&Segment) -> C + Sync,
    {
        let (Some(first), Some(last)) = (segments.first(), segments.last()) else { return };
        let (from, span) = (first.range.start, first.range.start..last.range.end);
        if span.len() > SPLIT_FROM && rayon::current_num_threads() > 1 {
            let part = SPLIT_FROM.max(span.len() / (PARTS * rayon::current_num_threads()));
            self.fork(from, streams.part(span), segments, part);
        } else {
            self.leaf(from, streams.part(span), segments);
        }
    }

    /// Halves a range that begins at `from` until it is no longer than `part`, the halves side by side.
    fn fork<T, C, const S: usize>(
        &self,
        from: usize,
        streams: Streams<'_, T, S>,
        segments: &[Segment],
        part: usize,
    ) where
        T: Real,
        C: Step<T, S>,
        F: Fn(&Segment) -> C + Sync,
    {
        let len = streams.params.len();
        if len <= part || segments.is_empty() {
            return self.leaf(from, streams, segments);
        }
        let half = (len / 2).next_multiple_of(BLOCK);
        let middle = from + half;
        let (left, right) = streams.split_at(half);
        // A segment across the middle is in both tables.
        let left_segments = &segments[..segments.partition_point(|s| s.range.start < middle)];
        let right_segments = &segments[segments.partition_point(|s| s.range.end <= middle)..];
        rayon::join(
            || self.fork(from, left, left_segments, part),
            || self.fork(middle, right, right_segments, part),
        );
    }

    /// Updates what of `segments` lies in a range that begins at `from`.
    fn leaf<T, C, const S: usize>(&self, from: usize, streams: Streams<'_, T, S>, segments: &[Segment])
    where
        T: Real,
        C: Step<T, S>,
        F: Fn(&Segment) -> C,
    {
        if streams.are_same() {
            let state = std::array::from_fn(|_| Default::default());
            let mut room = Room { params: &mut [], grads: &mut [], state, random: &mut [] };
            return self.update(from, streams, segments, &mut room);
        }
        let zero = T::from_f32(0.0);
        let (mut params, mut grads, mut state) = ([zero; BLOCK], [zero; BLOCK], [[zero; BLOCK]; S]);
        let (state, random) = (state.each_mut().map(|s| &mut s[..]), &mut [0; BLOCK + philox::GROUP]);
        let mut room = Room { params: &mut params, grads: &mut grads, state, random };
        self.update(from, streams, segments, &mut room);
    }

    fn update<T, C, const S: usize>(
        &self,
        from: usize,
        mut streams: Streams<'_, T, S>,
        segments: &[Segment],
        room: &mut Room<'_, T, S>,
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
                isa: self.isa,
                zero_grads: self.zero_grads,
                segment,
                rounding: self.rounding,
                offset: both.start - segment.range.start,
            };
            let streams = streams.part(both.start - from..both.end - from);
            if self.isa == Isa::Reference { pass.run_plainly(streams) } else { pass.run(streams, room) }
        }
    }
}

/// One segment's elements.
struct Pass<'a, C> {
    step: C,
    isa: Isa,
    zero_grads: bool,
    segment: &'a Segment,
    rounding: Rounding,
    /// The first element, counted from the segment's.
    offset: usize,
}

impl Segment {
    /// Random bits for one of the state, 0 for parameters and k + 1 for state k, where rounding is by random bits.
    pub(crate) fn draw(&self, rounding: Rounding, stream: u16) -> Option<Draw> {
        let bits = Bits::new(self.key, self.t, stream);
        (rounding == Rounding::Stochastic).then_some(Draw { bits, strided: self.strided, first: self.first })
    }
}

impl<C> Pass<'_, C> {
    /// Random bits for one of the state, from element `start` on.
    fn draw(&self, stream: usize, start: usize) -> Option<Draw> {
        let draw = self.segment.draw(self.rounding, stream as u16)?;
        Some(Draw { first: draw.first.wrapping_add((self.offset + start) as u64), ..draw })
    }

    /// The definition.
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

    /// The fast loop.
    fn run<T: Real, const S: usize>(&self, mut streams: Streams<'_, T, S>, room: &mut Room<'_, T, S>)
    where
        C: Step<T, S>,
    {
        let len = streams.params.len();
        // What lies in memory as it is can be asked for without a list.
        let listed = !streams.are_same() || streams.copy.is_some();
        let ahead = listed.then(|| Ahead::of(&streams));
        if !listed && !self.zero_grads {
            // One loop does it all: nothing to keep in a cache for another.
            return self.block(0, streams, room, None);
        }
        let mut start = 0;
        while start < len {
            // Blocks end where groups of random bits do, so that none is made twice.
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
        room: &mut Room<'_, T, S>,
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

/// What will be needed some time after the first group of a pass, cache line by cache line: for other groups, so many bytes
/// further for each element before them.
struct Ahead {
    lines: [(*const u8, usize); Ahead::MOST],
    count: usize,
}

impl Ahead {
    /// Lines a group asks for; a request is a hint, and more would come too late.
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

    fn add(&mut self, Place { first, size }: Place) {
        for offset in (0..GROUP * size).step_by(LINE) {
            if let Some(line) = self.lines.get_mut(self.count) {
                *line = (first.wrapping_add(offset), size);
                self.count += 1;
            }
        }
    }

    /// Asks for what lies as far ahead of the group at element `start`.
    #[inline(always)]
    fn fetch(&self, start: usize) {
        self.lines[..self.count]
            .iter()
            .for_each(|(first, size)| fetch_line(first.wrapping_add(start * size)));
    }
}

/// The elements of a block.
struct Each<'a, T, C, const S: usize> {
    step: &'a C,
    params: &'a mut [T],
    grads: &'a [T],
    state: [&'a mut [T]; S],
    /// What to ask for, and which element of the pass is the block's first. None: the very state of the block, further on.
    ahead: Option<(&'a Ahead, usize)>,
}

impl<T: Real, C: Step<T, S>, const S: usize> Body for Each<'_, T, C, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Each { step, params, grads, mut state, ahead } = self;
        // A copy that nothing else can reach, so that it stays in registers.
        let step = *step;
        let len = params.len();
        assert!(grads.len() == len && state.iter().all(|s| s.len() == len), "streams of one length");
        let (params, grads) = (params.as_mut_ptr(), grads.as_ptr());
        let state = state.each_mut().map(|s| s.as_mut_ptr());
        // Pointers, because a bounds check that the compiler cannot prove away costs the loop its state.
        let one = |i: usize| {
            // SAFETY: callers below pass `i < len`, the length of every slice; they are borrowed exclusively meanwhile.
            unsafe {
                let (p, s) = step.step(*params.add(i), *grads.add(i), state.map(|s| *s.add(i)));
                *params.add(i) = p;
                for k in 0..S {
                    *state[k].add(i) = s[k];
                }
            }
        };
        if S == 0 && ahead.is_none() {
            for start in (0..len).step_by(TURN) {
                let end = len.min(start + TURN);
                for line in (start..end).step_by(LINE / size_of::<T>()) {
                    // SAFETY: as above; volatile, so that it is read though nobody uses it.
                    unsafe { grads.add(line).read_volatile() };
                    fetch_line(params.wrapping_add(line + TURN).cast());
                }
                (start..end).for_each(one);
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
            (start..start + GROUP).for_each(one);
        }
        (whole..len).for_each(one);
    }
}
