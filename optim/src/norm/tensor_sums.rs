//! Two norms of each tensor, summed over its parts, by which layer-wise rules scale their steps.

use crate::engine::cpu::Cpu;
use crate::engine::pass::{self, PassKind};
use crate::engine::sweep::Step;
use crate::engine::view::View;
use crate::norm::{self, Adder, Ahead, Extent, Source, Wide};
use crate::precision::number::Real;
use crate::{Error, ExactSum, Flat, Isa, Norm, NormAccumulator, Reduce, ReduceError, Rule, Scalars, Segment};
use meshstep_tensor::fetch::fetch;
use meshstep_tensor::simd::Body;
use meshstep_tensor::{DType, SliceMut};
use std::ops::Range;

/// Norms in progress of a tensor's parameters and of its step's direction: integers, so the bits do not depend on the order of its parts
/// or the number of ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSums {
    params: NormAccumulator,
    direction: NormAccumulator,
}

impl TensorSums {
    /// Number of u64 words of one pair.
    pub const WORDS: usize = 2 * (ExactSum::WORDS + 1);

    /// Creates the sums of no elements.
    pub fn new() -> Self {
        let zero = NormAccumulator::new(Norm::L2);
        TensorSums { params: zero.clone(), direction: zero }
    }

    /// Resets the sums.
    pub fn reset(&mut self) {
        self.params.reset();
        self.direction.reset();
    }

    /// Returns the norms of the parameters and of the direction; infinite if an element was not finite.
    pub fn norms(&self) -> (f64, f64) {
        let finish =
            |norm: &NormAccumulator| if norm.non_finite() > 0 { f64::INFINITY } else { norm.finish() };
        (finish(&self.params), finish(&self.direction))
    }

    /// Writes the pair as words. Words of several ranks, added with wrapping, are the words of the whole tensor.
    ///
    /// # Panics
    /// If there are not [`WORDS`](Self::WORDS) words.
    pub fn write(&self, words: &mut [u64]) {
        assert_eq!(words.len(), Self::WORDS, "a pair of sums travels as this many words");
        for (words, norm) in words.chunks_exact_mut(ExactSum::WORDS + 1).zip([&self.params, &self.direction])
        {
            words[..ExactSum::WORDS].copy_from_slice(&norm.sum().words());
            words[ExactSum::WORDS] = norm.non_finite();
        }
    }

    /// Reads a pair from its words.
    ///
    /// # Panics
    /// If there are not [`WORDS`](Self::WORDS) words.
    pub fn read(words: &[u64]) -> Self {
        assert_eq!(words.len(), Self::WORDS, "a pair of sums travels as this many words");
        let norm = |words: &[u64]| {
            let sum = ExactSum::from_words(&words[..ExactSum::WORDS]);
            NormAccumulator::from_parts(Norm::L2, sum, 0, words[ExactSum::WORDS])
        };
        let (params, direction) = words.split_at(ExactSum::WORDS + 1);
        TensorSums { params: norm(params), direction: norm(direction) }
    }

    /// Sums the parts of all shards, each tensor's pair separately, in one fold. `words` is a buffer that the caller keeps.
    ///
    /// # Panics
    /// If there are not [`WORDS`](Self::WORDS) words for each pair.
    pub fn fold(all: &mut [TensorSums], words: &mut [u64], reduce: &dyn Reduce) -> Result<(), ReduceError> {
        assert_eq!(words.len(), all.len() * Self::WORDS, "room for every pair");
        words.chunks_exact_mut(Self::WORDS).zip(&*all).for_each(|(words, sums)| sums.write(words));
        reduce.fold(words, &mut [])?;
        all.iter_mut()
            .zip(words.chunks_exact(Self::WORDS))
            .for_each(|(sums, words)| *sums = Self::read(words));
        Ok(())
    }

    fn merge(&mut self, other: &TensorSums) {
        self.params.merge(&other.params);
        self.direction.merge(&other.direction);
    }
}

impl Default for TensorSums {
    fn default() -> Self {
        TensorSums::new()
    }
}

/// Largest ratio in use: beyond it a direction has vanished except for rounding, and f32 may overflow.
const MOST: f64 = 1e30;

/// Returns `over / under`, or 1 if the ratio is meaningless.
pub(crate) fn usable_ratio(over: f64, under: f64) -> f64 {
    let ratio = over / under;
    if over > 0.0 && under > 0.0 && under.is_finite() && ratio <= MOST { ratio } else { 1.0 }
}

/// Step with a direction to take a norm of.
pub(crate) trait Direction<T: Real, const S: usize>: Step<T, S> {
    /// True if the direction depends on the state, so that the state must be read.
    const OF_STATE: bool;

    /// Returns the direction of one element, before the learning rate. `#[inline(always)]`, without calls.
    fn direction(&self, p: T, g: T, s: [T; S]) -> T;
}

/// Elements with directions computed before their norm is taken: few enough to stay in the L1 cache.
const BLOCK: usize = norm::BLOCK_LEN / 2;

/// Elements between two prefetches of the next block, for one vector and for several: too many prefetches at once fill the processor's
/// queue, and shorter loops leave it idle at their ends.
const GROUP: usize = 256;
const GROUP_OF_SEVERAL: usize = 128;

/// Least number of elements of a part: merging the sums of two threads takes as long as measuring some thousand elements.
const PART: usize = 512 << 10;

/// Adds each segment's part to its pair of `sums`; only `sums` is written.
pub(crate) fn measure<K, const S: usize>(
    kind: &K,
    rule: &dyn Rule,
    on: Cpu<'_>,
    flat: &Flat<'_, '_>,
    segments: &[Segment],
    scalars: &Scalars,
    sums: &mut [TensorSums],
) -> Result<(), Error>
where
    K: PassKind<S>,
    K::Step<f32>: Direction<f32, S>,
    K::Step<f64>: Direction<f64, S>,
{
    pass::check(rule, on.isa, flat, segments, scalars)?;
    if sums.len() != segments.len() {
        return Err(Error::Len { what: "sums", given: sums.len(), expected: segments.len() });
    }
    let wide = flat.params.dtype() == DType::F64;
    for (segment, sums) in segments.iter().zip(sums) {
        let of = (kind, on, scalars, segment);
        if wide { add::<f64, K, S>(of, flat, sums)? } else { add::<f32, K, S>(of, flat, sums)? }
    }
    Ok(())
}

fn add<T: Real + Source<Wide = T> + Wide, K: PassKind<S>, const S: usize>(
    (kind, on, scalars, segment): (&K, Cpu<'_>, &Scalars, &Segment),
    flat: &Flat<'_, '_>,
    sums: &mut TensorSums,
) -> Result<(), Error>
where
    K::Step<T>: Direction<T, S>,
{
    let mut state: [View<'_, T>; S] = [View::Same(&[]); S];
    for (view, slot) in state.iter_mut().zip(&*flat.state) {
        *view = pass::view(slot.as_slice(), None)?;
    }
    let remainder = flat.remainder.as_ref().map(SliceMut::as_slice);
    let params = pass::view(flat.params.as_slice(), remainder)?;
    let grads = pass::view(flat.grads.as_slice(), None)?;
    let views = Views { step: kind.constants::<T>(scalars, segment), params, grads, state };
    views.part(segment.range.clone()).add(on, sums);
    Ok(())
}

/// Vectors measured together.
#[derive(Clone, Copy)]
struct Views<'a, T, C, const S: usize> {
    step: C,
    params: View<'a, T>,
    grads: View<'a, T>,
    state: [View<'a, T>; S],
}

impl<T: Real + Source<Wide = T> + Wide, C: Direction<T, S>, const S: usize> Views<'_, T, C, S> {
    fn add(self, Cpu { isa, threads }: Cpu<'_>, sums: &mut TensorSums) {
        let len = self.params.len();
        let part = threads.part_len(len, PART).next_multiple_of(BLOCK);
        let work = |sums: &mut TensorSums, start: usize| {
            let views = self.part(start..len.min(start + part));
            if isa == Isa::Reference { views.add_plainly(sums) } else { views.add_fast(isa, sums) }
        };
        let starts = (0..len.div_ceil(part)).map(|i| i * part);
        sums.merge(&threads.fold(starts, TensorSums::new, work, |sums, other| sums.merge(&other)));
    }

    /// Adds element by element: the definition.
    fn add_plainly(self, sums: &mut TensorSums) {
        for i in 0..self.params.len() {
            let (p, g) = (self.params.get_plainly(i), self.grads.get_plainly(i));
            let direction = self.step.direction(p, g, self.state.map(|s| s.get_plainly(i)));
            sums.params.add_plainly(p.exactly());
            sums.direction.add_plainly(direction.exactly());
        }
    }

    /// Processes all elements at once if the vectors need no conversion, else block by converted block.
    fn add_fast(self, isa: Isa, sums: &mut TensorSums) {
        let len = self.params.len();
        let same = self.params.is_same() && self.grads.is_same() && self.state.iter().all(|s| s.is_same());
        let block = if same { len } else { BLOCK };
        let zero = [T::from_f32(0.0); BLOCK];
        let (mut params, mut grads, mut state) = (zero, zero, [zero; S]);
        for start in (0..len).step_by(block.max(1)) {
            let views = self.part(start..len.min(start + block));
            let mut part = TensorPart {
                step: self.step,
                params: views.params.load(isa, &mut params),
                grads: views.grads.load(isa, &mut grads),
                state: [&zero[..]; S],
            };
            // State is converted only if the direction depends on it.
            if C::OF_STATE {
                for ((numbers, view), room) in part.state.iter_mut().zip(views.state).zip(&mut state) {
                    *numbers = view.load(isa, room);
                }
            }
            isa.run(Blockwise(part, sums));
        }
    }

    fn part(&self, range: Range<usize>) -> Self {
        Views {
            step: self.step,
            params: self.params.part(range.clone()),
            grads: self.grads.part(range.clone()),
            state: self.state.map(|s| s.part(range.clone())),
        }
    }
}

/// Numbers measured together.
struct TensorPart<'a, T, C, const S: usize> {
    step: C,
    params: &'a [T],
    grads: &'a [T],
    state: [&'a [T]; S],
}

/// Fast loop.
struct Blockwise<'a, 'o, T, C, const S: usize>(TensorPart<'a, T, C, S>, &'o mut TensorSums);

impl<T: Real + Source<Wide = T> + Wide, C: Direction<T, S>, const S: usize> Body
    for Blockwise<'_, '_, T, C, S>
{
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Blockwise(part, sums) = self;
        let len = part.params.len();
        let mut room = [T::from_f64(0.0); BLOCK];
        let mut of = (Adder::new(&mut sums.params), Adder::new(&mut sums.direction));
        for start in (0..len).step_by(BLOCK) {
            let range = start..len.min(start + BLOCK);
            let directions = &mut room[..range.len()];
            let (of_params, of_directions) = part.directions(range.clone(), directions);
            let next = Ahead::block(part.params.as_ptr().wrapping_add(start + BLOCK));
            of.0.add(&part.params[range], of_params, next);
            of.1.add(directions, of_directions, Ahead::NOTHING);
        }
        of.0.finish();
        of.1.finish();
    }
}

impl<T: Real + Source<Wide = T> + Wide, C: Direction<T, S>, const S: usize> TensorPart<'_, T, C, S> {
    /// Computes the directions of the elements in `range`, and the extents of parameters and directions. Prefetches the next block except
    /// for its parameters.
    #[inline(always)]
    fn directions(&self, range: Range<usize>, into: &mut [T]) -> (Extent<T>, Extent<T>) {
        let len = into.len();
        let first = |of: &[T]| of[range.clone()].as_ptr();
        let (params, grads) = (first(self.params), first(self.grads));
        let state = self.state.map(|s| if C::OF_STATE { first(s) } else { s.as_ptr() });
        let (into, step) = (into.as_mut_ptr(), self.step);
        let (mut of_params, mut of_directions) = (Extent::new(), Extent::new());
        let group = if C::OF_STATE { GROUP_OF_SEVERAL } else { GROUP };
        for start in (0..len).step_by(group) {
            fetch(grads.wrapping_add(BLOCK + start), group);
            if C::OF_STATE {
                state.iter().for_each(|s| fetch(s.wrapping_add(BLOCK + start), group));
            }
            for i in start..len.min(start + group) {
                // SAFETY: `i < len`, the length of `range` and of `into`, which nothing else can reach. State that is not used is read at
                // its first element only, and its vectors have `BLOCK` elements.
                unsafe {
                    let p = *params.add(i);
                    let direction = step.direction(
                        p,
                        *grads.add(i),
                        state.map(|s| *s.add(if C::OF_STATE { i } else { 0 })),
                    );
                    *into.add(i) = direction;
                    of_params.see(p);
                    of_directions.see(direction);
                }
            }
        }
        (of_params, of_directions)
    }
}
