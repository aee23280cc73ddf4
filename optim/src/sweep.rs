//! One pass over typed memory: blocks that stay in cache, spread over the cores. The arithmetic is a rule's `Step`.

use crate::Segment;
use crate::isa::{Body, Isa};
use crate::number::{Real, Stored};
use meshstep_tensor::{bf16, f16};
use std::array::from_fn;
use std::ops::Range;

/// What one element of a rule with `S` state vectors goes through; the constants of one step count.
pub(crate) trait Step<T: Real, const S: usize>: Copy + Send + Sync {
    /// The element's new parameter and state. `#[inline(always)]`, without calls.
    fn step(&self, p: T, g: T, s: [T; S]) -> (T, [T; S]);

    /// The same over slices of one length, slow and obvious: the definition `step` must equal.
    fn reference<G: Stored<T>>(&self, p: &mut [T], g: &[G], s: [&mut [T]; S]);
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

/// Sweeps over `segments`, which ascend within `streams` without overlap. `constants` gives each step count's.
pub(crate) fn sweep<T, G, C, const S: usize>(
    constants: &(impl Fn(u64) -> C + Sync),
    isa: Isa,
    zero_grads: bool,
    streams: Streams<'_, T, G, S>,
    segments: &[Segment],
) where
    T: Real,
    G: Stored<T>,
    C: Step<T, S>,
{
    let (Some(first), Some(last)) = (segments.first(), segments.last()) else { return };
    let span = first.range.start..last.range.end;
    let leaf = |from: usize, mut streams: Streams<'_, T, G, S>, segments: &[Segment]| {
        for Segment { range, t } in segments {
            let start = range.start.max(from) - from;
            let end = range.end.min(from + streams.params.len()) - from;
            if start < end {
                let part = streams.part(start..end);
                update(isa, zero_grads, constants(*t), part);
            }
        }
    };
    let start = span.start;
    let threads = if span.len() > SPLIT_FROM { rayon::current_num_threads() } else { 1 };
    let mut streams = streams;
    fork(&leaf, threads > 1, start, streams.part(span), segments);
}

/// Halves the range until it is small, the halves side by side.
fn fork<T, G, const S: usize>(
    leaf: &(impl Fn(usize, Streams<'_, T, G, S>, &[Segment]) + Sync),
    spread: bool,
    from: usize,
    streams: Streams<'_, T, G, S>,
    segments: &[Segment],
) where
    T: Real,
    G: Stored<T>,
{
    let len = streams.params.len();
    if !spread || len <= SPLIT_FROM || segments.is_empty() {
        return leaf(from, streams, segments);
    }
    let half = (len / 2).next_multiple_of(BLOCK);
    let middle = from + half;
    let (left, right) = streams.split_at(half);
    // A segment across the middle is in both tables.
    let left_segments = &segments[..segments.partition_point(|s| s.range.start < middle)];
    let right_segments = &segments[segments.partition_point(|s| s.range.end <= middle)..];
    rayon::join(
        || fork(leaf, spread, from, left, left_segments),
        || fork(leaf, spread, middle, right, right_segments),
    );
}

/// Updates every element of `streams` with one step count's constants.
fn update<T: Real, G: Stored<T>, const S: usize>(
    isa: Isa,
    zero_grads: bool,
    step: impl Step<T, S>,
    mut streams: Streams<'_, T, G, S>,
) {
    if isa != Isa::Reference {
        return isa.run(Blocks { step, streams, zero_grads });
    }
    let Streams { params, grads, state, copy } = streams.part(0..streams.params.len());
    step.reference(params, grads, state);
    match copy {
        CopyOut::None => (),
        CopyOut::BF16(copy) => copy.iter_mut().zip(&*params).for_each(|(c, p)| *c = plainly(*p)),
        CopyOut::F16(copy) => copy.iter_mut().zip(&*params).for_each(|(c, p)| *c = plainly(*p)),
    }
    if zero_grads {
        grads.fill(G::ZERO);
    }
}

fn plainly<T: Real, H: Stored<f32>>(p: T) -> H {
    H::narrow_plainly(p.to_f32())
}

/// The fast loop.
struct Blocks<'a, T, G, C, const S: usize> {
    step: C,
    streams: Streams<'a, T, G, S>,
    zero_grads: bool,
}

impl<T: Real, G: Stored<T>, C: Step<T, S>, const S: usize> Body for Blocks<'_, T, G, C, S> {
    type Output = ();

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
    state: [&mut [T]; S],
) {
    let len = params.len();
    assert!(grads.len() == len && state.iter().all(|s| s.len() == len), "streams of one length");
    for i in 0..len {
        let (p, s) = step.step(params[i], grads[i].widen(), from_fn(|k| state[k][i]));
        params[i] = p;
        for k in 0..S {
            state[k][i] = s[k];
        }
    }
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
