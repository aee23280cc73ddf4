//! One pass over typed memory: blocks that stay in cache, spread over the cores. The arithmetic is a rule's `Step`.

use crate::Segment;
use crate::fetch::fetch;
use crate::number::{Real, Stored};
use meshstep_tensor::simd::{Body, Isa};
use meshstep_tensor::{bf16, f16};
use std::ops::Range;

/// What one element of a rule with `S` state vectors goes through; the constants of one segment.
pub(crate) trait Step<T: Real, const S: usize>: Copy + Send + Sync {
    /// The element's new parameter and state. `#[inline(always)]`, without calls.
    fn step(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]);

    /// The same, slow and obvious: the definition `step` must equal.
    fn reference(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]);
}

/// Slices of one length that are swept together.
#[derive(Debug)]
pub(crate) struct Streams<'a, T, G, const S: usize> {
    pub(crate) params: &'a mut [T],
    pub(crate) grads: &'a mut [G],
    pub(crate) state: [&'a mut [T]; S],
    pub(crate) copy: CopyOut<'a>,
}

/// Where the updated parameters go in low precision.
#[derive(Debug)]
pub(crate) enum CopyOut<'a> {
    None,
    BF16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

/// Above this many elements work is split in two; below, starting a second thread costs more than it saves.
const SPLIT_FROM: usize = 64 << 10;

/// Elements updated, copied out and reset in turn: few enough that the later loops find them in the first-level cache.
const BLOCK: usize = 1 << 10;

/// Elements between two requests for memory ahead, and how far ahead. Measured: with a root and two divisions per element
/// AdamW runs at 82% of a copy's speed without them and at 97% with them.
const GROUP: usize = 32;
const AHEAD: usize = 512;

/// One pass: how its elements are updated.
pub(crate) struct Sweep<F> {
    /// A segment's constants.
    pub(crate) constants: F,
    pub(crate) isa: Isa,
    pub(crate) zero_grads: bool,
}

impl<F> Sweep<F> {
    /// Updates the elements of `segments`, which ascend within `streams` without overlap.
    pub(crate) fn run<T, G, C, const S: usize>(&self, mut streams: Streams<'_, T, G, S>, segments: &[Segment])
    where
        T: Real,
        G: Stored<T>,
        C: Step<T, S>,
        F: Fn(&Segment) -> C + Sync,
    {
        let (Some(first), Some(last)) = (segments.first(), segments.last()) else { return };
        let (from, span) = (first.range.start, first.range.start..last.range.end);
        if span.len() > SPLIT_FROM && rayon::current_num_threads() > 1 {
            self.fork(from, streams.part(span), segments);
        } else {
            self.update(from, streams.part(span), segments);
        }
    }

    /// Halves a range that begins at `from` until it is small, the halves side by side.
    fn fork<T, G, C, const S: usize>(&self, from: usize, streams: Streams<'_, T, G, S>, segments: &[Segment])
    where
        T: Real,
        G: Stored<T>,
        C: Step<T, S>,
        F: Fn(&Segment) -> C + Sync,
    {
        let len = streams.params.len();
        if len <= SPLIT_FROM || segments.is_empty() {
            return self.update(from, streams, segments);
        }
        let half = (len / 2).next_multiple_of(BLOCK);
        let middle = from + half;
        let (left, right) = streams.split_at(half);
        // A segment across the middle is in both tables.
        let left_segments = &segments[..segments.partition_point(|s| s.range.start < middle)];
        let right_segments = &segments[segments.partition_point(|s| s.range.end <= middle)..];
        rayon::join(|| self.fork(from, left, left_segments), || self.fork(middle, right, right_segments));
    }

    /// Updates what of `segments` lies in a range that begins at `from`.
    fn update<T, G, C, const S: usize>(
        &self,
        from: usize,
        mut streams: Streams<'_, T, G, S>,
        segments: &[Segment],
    ) where
        T: Real,
        G: Stored<T>,
        C: Step<T, S>,
        F: Fn(&Segment) -> C,
    {
        let to = from + streams.params.len();
        for segment in segments {
            let both = segment.range.start.max(from)..segment.range.end.min(to);
            if !both.is_empty() {
                let streams = streams.part(both.start - from..both.end - from);
                let pass = Pass { step: (self.constants)(segment), streams, zero_grads: self.zero_grads };
                if self.isa == Isa::Reference { pass.run_plainly() } else { self.isa.run(pass) }
            }
        }
    }
}

/// One segment's elements.
struct Pass<'a, T, G, C, const S: usize> {
    step: C,
    streams: Streams<'a, T, G, S>,
    zero_grads: bool,
}

impl<T: Real, G: Stored<T>, C: Step<T, S>, const S: usize> Pass<'_, T, G, C, S> {
    /// The definition.
    fn run_plainly(self) {
        let Streams { params, grads, mut state, copy } = self.streams;
        for i in 0..params.len() {
            let before = state.each_ref().map(|s| s[i]);
            let (p, after) = self.step.reference(params[i], grads[i].widen_plainly(), before);
            params[i] = p;
            state.iter_mut().zip(after).for_each(|(s, after)| s[i] = after);
        }
        match copy {
            CopyOut::None => (),
            CopyOut::BF16(copy) => copy.iter_mut().zip(&*params).for_each(|(c, p)| *c = plainly(*p)),
            CopyOut::F16(copy) => copy.iter_mut().zip(&*params).for_each(|(c, p)| *c = plainly(*p)),
        }
        if self.zero_grads {
            grads.fill(G::ZERO);
        }
    }
}

fn plainly<T: Real, H: Stored<f32>>(p: T) -> H {
    H::narrow_plainly(p.to_f32())
}

impl<T: Real, G: Stored<T>, C: Step<T, S>, const S: usize> Body for Pass<'_, T, G, C, S> {
    type Output = ();

    /// The fast loop.
    #[inline(always)]
    fn run(mut self) {
        let len = self.streams.params.len();
        let mut start = 0;
        while start < len {
            let end = len.min(start + BLOCK);
            let Streams { params, grads, state, copy } = self.streams.part(start..end);
            each(&self.step, params, grads, state);
            match copy {
                CopyOut::None => (),
                CopyOut::BF16(copy) => narrow(params, copy),
                CopyOut::F16(copy) => narrow(params, copy),
            }
            if self.zero_grads {
                grads.fill(G::ZERO);
            }
            start = end;
        }
    }
}

#[inline(always)]
fn each<T: Real, G: Stored<T>, const S: usize>(
    step: &impl Step<T, S>,
    params: &mut [T],
    grads: &[G],
    mut state: [&mut [T]; S],
) {
    let len = params.len();
    assert!(grads.len() == len && state.iter().all(|s| s.len() == len), "streams of one length");
    let (params, grads) = (params.as_mut_ptr(), grads.as_ptr());
    let state = state.each_mut().map(|s| s.as_mut_ptr());
    // Pointers, because a bounds check that the compiler cannot prove away costs the loop its vectors.
    let one = |i: usize| {
        // SAFETY: callers below pass `i < len`, the length of every slice; they are borrowed exclusively meanwhile.
        unsafe {
            let (p, s) = step.step(*params.add(i), (*grads.add(i)).widen(), state.map(|s| *s.add(i)));
            *params.add(i) = p;
            for k in 0..S {
                *state[k].add(i) = s[k];
            }
        }
    };
    let whole = len - len % GROUP;
    for start in (0..whole).step_by(GROUP) {
        fetch(params.wrapping_add(start + AHEAD), GROUP);
        fetch(grads.wrapping_add(start + AHEAD), GROUP);
        state.iter().for_each(|s| fetch(s.wrapping_add(start + AHEAD), GROUP));
        (start..start + GROUP).for_each(one);
    }
    (whole..len).for_each(one);
}

#[inline(always)]
fn narrow<T: Real, H: Stored<f32>>(params: &[T], copy: &mut [H]) {
    for (c, p) in copy.iter_mut().zip(params) {
        *c = H::narrow(p.to_f32());
    }
}

impl<'a, T, G, const S: usize> Streams<'a, T, G, S> {
    /// Elements `range`, for a shorter time.
    #[inline(always)]
    fn part(&mut self, range: Range<usize>) -> Streams<'_, T, G, S> {
        Streams {
            params: &mut self.params[range.clone()],
            grads: &mut self.grads[range.clone()],
            state: self.state.each_mut().map(|s| &mut s[range.clone()]),
            copy: match &mut self.copy {
                CopyOut::None => CopyOut::None,
                CopyOut::BF16(copy) => CopyOut::BF16(&mut copy[range]),
                CopyOut::F16(copy) => CopyOut::F16(&mut copy[range]),
            },
        }
    }

    /// Elements `..at` and `at..`.
    fn split_at(self, at: usize) -> (Self, Self) {
        let (params, params_right) = self.params.split_at_mut(at);
        let (grads, grads_right) = self.grads.split_at_mut(at);
        let mut halves = self.state.map(|s| s.split_at_mut(at));
        let state = halves.each_mut().map(|(left, _)| std::mem::take(left));
        let state_right = halves.map(|(_, right)| right);
        let (copy, copy_right) = self.copy.split_at(at);
        let left = Streams { params, grads, state, copy };
        (left, Streams { params: params_right, grads: grads_right, state: state_right, copy: copy_right })
    }
}

impl<'a> CopyOut<'a> {
    fn split_at(self, at: usize) -> (CopyOut<'a>, CopyOut<'a>) {
        match self {
            CopyOut::None => (CopyOut::None, CopyOut::None),
            CopyOut::BF16(copy) => {
                let (left, right) = copy.split_at_mut(at);
                (CopyOut::BF16(left), CopyOut::BF16(right))
            }
            CopyOut::F16(copy) => {
                let (left, right) = copy.split_at_mut(at);
                (CopyOut::F16(left), CopyOut::F16(right))
            }
        }
    }
}
