//! Two norms of each tensor, summed over its parts: what layer-wise rules scale their steps by.

use crate::fetch::fetch;
use crate::norm::{self, Blocks, Source};
use crate::number::{Real, Stored};
use crate::pass::{self, Kind};
use crate::sweep::Step;
use crate::{Error, ExactSum, Flat, Isa, Norm, NormAccumulator, Scalars, Segment};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{DType, bf16, f16};
use std::ops::Range;

/// The norms of a tensor's parameters and of the direction its step would take, on their way: integers, so that adding the
/// parts of a tensor in any order, on any number of ranks, gives the same bits.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSums {
    params: NormAccumulator,
    direction: NormAccumulator,
}

impl TensorSums {
    /// u64 words of one pair.
    pub const WORDS: usize = 2 * (ExactSum::WORDS + 1);

    /// The sums of nothing.
    pub fn new() -> Self {
        let zero = NormAccumulator::new(Norm::L2);
        TensorSums { params: zero.clone(), direction: zero }
    }

    /// Forgets what was added.
    pub fn reset(&mut self) {
        self.params.reset();
        self.direction.reset();
    }

    /// The norms of the parameters and of the direction; infinite where an element was not finite.
    pub fn norms(&self) -> (f64, f64) {
        let finish =
            |norm: &NormAccumulator| if norm.non_finite() > 0 { f64::INFINITY } else { norm.finish() };
        (finish(&self.params), finish(&self.direction))
    }

    /// Writes the pair as words; those of several ranks, added with wrapping, are the words of the whole tensor's.
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

    /// The pair that words stand for.
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

/// A step whose direction has a norm that matters.
pub(crate) trait Direction<T: Real, const S: usize>: Step<T, S> {
    /// Whether the direction depends on the state, so that it is worth asking for.
    const OF_STATE: bool;

    /// Where one element would go, before the learning rate. `#[inline(always)]`, without calls.
    fn direction(&self, p: T, g: T, s: [T; S]) -> T;
}

/// Elements whose directions are computed before their norm is taken: they are still in the first-level cache then.
const BLOCK: usize = norm::BLOCK_LEN;

/// Above this many elements work is split in two.
const SPLIT_FROM: usize = 64 << 10;

/// Adds each segment's part to its `sums`; writes nothing else.
pub(crate) fn measure<K, const S: usize>(
    kind: &K,
    about: pass::About,
    isa: Isa,
    flat: &Flat<'_, '_>,
    segments: &[Segment],
    scalars: &Scalars,
    sums: &mut [TensorSums],
) -> Result<(), Error>
where
    K: Kind<S>,
    K::Step<f32>: Direction<f32, S>,
    K::Step<f64>: Direction<f64, S>,
{
    pass::check(about, isa, flat, segments)?;
    if sums.len() != segments.len() {
        return Err(Error::Len { what: "sums", given: sums.len(), expected: segments.len() });
    }
    for (segment, sums) in segments.iter().zip(sums) {
        let (range, of) = (segment.range.clone(), (kind, isa, scalars, segment));
        match (flat.params.dtype(), flat.grads.dtype()) {
            (DType::F32, DType::F32) => add::<f32, f32, K, S>(of, flat, range, sums)?,
            (DType::F32, DType::BF16) => add::<f32, bf16, K, S>(of, flat, range, sums)?,
            (DType::F32, _) => add::<f32, f16, K, S>(of, flat, range, sums)?,
            _ => add::<f64, f64, K, S>(of, flat, range, sums)?,
        }
    }
    Ok(())
}

fn add<T: Real + Source, G: Stored<T>, K: Kind<S>, const S: usize>(
    (kind, isa, scalars, segment): (&K, Isa, &Scalars, &Segment),
    flat: &Flat<'_, '_>,
    range: Range<usize>,
    sums: &mut TensorSums,
) -> Result<(), Error>
where
    K::Step<T>: Direction<T, S>,
{
    let mut state: [&[T]; S] = [&[]; S];
    for (typed, slot) in state.iter_mut().zip(&*flat.state) {
        *typed = &slot.as_slice().typed()?[range.clone()];
    }
    let params = &flat.params.as_slice().typed::<T>()?[range.clone()];
    let grads = &flat.grads.as_slice().typed::<G>()?[range];
    let step = kind.constants::<T>(scalars, segment);
    Part { step, params, grads, state }.add(isa, sums);
    Ok(())
}

/// What is measured together.
#[derive(Clone, Copy)]
struct Part<'a, T, G, C, const S: usize> {
    step: C,
    params: &'a [T],
    grads: &'a [G],
    state: [&'a [T]; S],
}

impl<T: Real + Source, G: Stored<T>, C: Direction<T, S>, const S: usize> Part<'_, T, G, C, S> {
    fn add(self, isa: Isa, sums: &mut TensorSums) {
        let len = self.params.len();
        if len > SPLIT_FROM && rayon::current_num_threads() > 1 {
            let half = (len / 2).next_multiple_of(BLOCK);
            let mut other = TensorSums::new();
            let (left, right) = (self.part(0..half), self.part(half..len));
            rayon::join(|| left.add(isa, sums), || right.add(isa, &mut other));
            sums.merge(&other);
        } else if isa == Isa::Reference {
            self.add_plainly(sums);
        } else {
            isa.run(Blockwise(self, sums));
        }
    }

    /// The definition.
    fn add_plainly(&self, sums: &mut TensorSums) {
        for (i, &p) in self.params.iter().enumerate() {
            let direction = self.step.direction(p, self.grads[i].widen_plainly(), self.state.map(|s| s[i]));
            sums.params.add_plainly(p.exactly());
            sums.direction.add_plainly(direction.exactly());
        }
    }

    #[inline(always)]
    fn each(self, directions: &mut [T]) {
        for (i, direction) in directions.iter_mut().enumerate() {
            let state = self.state.map(|s| s[i]);
            *direction = self.step.direction(self.params[i], self.grads[i].widen(), state);
        }
    }

    /// Asks for the block after this one.
    #[inline(always)]
    fn fetch_next(&self) {
        let len = self.params.len();
        fetch(self.params.as_ptr().wrapping_add(len), len);
        fetch(self.grads.as_ptr().wrapping_add(len), len);
        if C::OF_STATE {
            self.state.iter().for_each(|s| fetch(s.as_ptr().wrapping_add(len), len));
        }
    }

    #[inline(always)]
    fn part(&self, range: Range<usize>) -> Self {
        let state = self.state.map(|s| &s[range.clone()]);
        Part { step: self.step, params: &self.params[range.clone()], grads: &self.grads[range], state }
    }
}

/// The fast loop.
struct Blockwise<'a, 'o, T, G, C, const S: usize>(Part<'a, T, G, C, S>, &'o mut TensorSums);

impl<T: Real + Source, G: Stored<T>, C: Direction<T, S>, const S: usize> Body
    for Blockwise<'_, '_, T, G, C, S>
{
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Blockwise(part, sums) = self;
        let len = part.params.len();
        let mut room = [T::from_f64(0.0); BLOCK];
        for start in (0..len).step_by(BLOCK) {
            let part = part.part(start..len.min(start + BLOCK));
            let directions = &mut room[..part.params.len()];
            part.fetch_next();
            part.each(directions);
            Blocks { values: part.params, into: &mut sums.params }.run();
            Blocks { values: directions, into: &mut sums.direction }.run();
        }
    }
}
