//! Elementwise passes over whole vectors, each element by one fixed sequence, with measurements of results while they are in the cache.

use crate::norm::{CHUNK, Source, Wide};
use crate::precision::number::Real;
use crate::{Isa, Norm, NormAccumulator};
use meshstep_tensor::simd::Body;
use std::array::from_fn;

/// Number type of vectors: f32 or f64.
pub(super) trait Number: Real + Wide + Source {}

impl<T: Real + Wide + Source> Number for T {}

/// Elements of a block in which a direction is summed: long enough to read each row at full memory bandwidth.
const BLOCK: usize = 8192;

/// Rows added to a block at a time.
const TOGETHER: usize = 4;

/// Above this number of elements a pass is split in two; below, starting a second thread costs more than it saves.
pub(super) const SPLIT_FROM: usize = 128 << 10;

/// Computes `x = fma(t, d, start)`.
pub(super) fn walk<T: Number>(x: &mut [T], start: &[T], t: f64, d: &[T]) {
    let t = T::from_f64(t);
    let along = |first: usize, [x]: [&mut [T]; 1]| {
        let (start, d) = (&start[first..], &d[first..]);
        Isa::detect().run(Each { out: x, value: |i| t.fma(d[i], start[i]) });
    };
    spread(0, [x], SPLIT_FROM, &along, &|(), ()| ());
}

/// Computes `start = x` and `x = fma(t, d, start)`.
pub(super) fn leave<T: Number>(x: &mut [T], start: &mut [T], t: f64, d: &[T]) {
    let t = T::from_f64(t);
    let along = |first: usize, [x, start]: [&mut [T]; 2]| {
        for (b, (x, start)) in x.chunks_mut(BLOCK).zip(start.chunks_mut(BLOCK)).enumerate() {
            start.copy_from_slice(x);
            let d = &d[first + b * BLOCK..];
            Isa::detect().run(Each { out: x, value: |i| t.fma(d[i], start[i]) });
        }
    };
    spread(0, [x, start], SPLIT_FROM, &along, &|(), ()| ());
}

/// Computes `y = g - before`. Calls `work` with pieces of at most [`CHUNK`] elements and their start index, while they are in the cache.
pub(super) fn difference<T: Number, S: Send>(
    y: &mut [T],
    (g, before): (&[T], &[T]),
    work: &(impl Fn(usize, &[T]) -> S + Sync),
    merge: &(impl Fn(S, S) -> S + Sync),
) -> S {
    let part = |first: usize, [y]: [&mut [T]; 1]| {
        let (g, before) = (&g[first..], &before[first..]);
        Isa::detect().run(Each { out: y, value: |i| g[i] - before[i] });
        work(first, y)
    };
    spread(0, [y], CHUNK, &part, merge)
}

/// Computes `d = coef g + sum over i of coef_i row_i`, each element in f64 by fused multiply-adds in that order, rounded once. Returns
/// the bits of the largest magnitude, or of infinity if an element is not finite.
pub(super) fn combine<'r, T: Number>(
    d: &mut [T],
    (coef, g): (f64, &[T]),
    rows: usize,
    row: &(impl Fn(usize) -> Result<(f64, &'r [T]), meshstep_tensor::Error> + Sync),
) -> Result<u64, meshstep_tensor::Error> {
    // Check all rows before writing anything.
    (0..rows).try_for_each(|i| row(i).map(|_| ()))?;
    let of_row = |i: usize| row(i).unwrap_or((0.0, &[]));
    let part = |first: usize, [d]: [&mut [T]; 1]| combine_part(first, d, (coef, g), rows, &of_row);
    Ok(spread(0, [d], SPLIT_FROM, &part, &u64::max))
}

/// Computes the elements from `first` on. Not inlined, so that the stack holds its block once, not at every halving.
#[inline(never)]
fn combine_part<'r, T: Number>(
    first: usize,
    d: &mut [T],
    (coef, g): (f64, &[T]),
    rows: usize,
    row: &impl Fn(usize) -> (f64, &'r [T]),
) -> u64 {
    let mut room = [0.0; BLOCK];
    let mut largest = NormAccumulator::new(Norm::Inf);
    for (b, d) in d.chunks_mut(BLOCK).enumerate() {
        let block = first + b * BLOCK..first + b * BLOCK + d.len();
        let sum = &mut room[..d.len()];
        Isa::detect().run(Scaled { sum, coef, of: &g[block.clone()] });
        let at = |i: usize| {
            let (coef, of) = row(i);
            (coef, &of[block.clone()])
        };
        let mut i = 0;
        while i + TOGETHER <= rows {
            Isa::detect().run(Added { sum, rows: from_fn::<_, TOGETHER, _>(|k| at(i + k)) });
            i += TOGETHER;
        }
        (i..rows).for_each(|i| Isa::detect().run(Added { sum, rows: [at(i)] }));
        Isa::detect().run(Each { out: d, value: |i| T::from_f64(room[i]) });
        largest.spread(Isa::detect(), d);
    }
    if largest.non_finite() > 0 { f64::INFINITY.to_bits() } else { largest.max_bits() }
}

/// Halves vectors of one length until they have `most` elements; the halves run in parallel. `work` receives the start index of its part,
/// and `merge` combines the results of two parts.
fn spread<T: Number, S: Send, const N: usize>(
    first: usize,
    vectors: [&mut [T]; N],
    most: usize,
    work: &(impl Fn(usize, [&mut [T]; N]) -> S + Sync),
    merge: &(impl Fn(S, S) -> S + Sync),
) -> S {
    let len = vectors.first().map_or(0, |vector| vector.len());
    if len <= most {
        return work(first, vectors);
    }
    let half = len / 2;
    let mut halves = vectors.map(|vector| vector.split_at_mut(half));
    let right = halves.each_mut().map(|(_, right)| std::mem::take(right));
    let left = halves.map(|(left, _)| left);
    let (left, right) = rayon::join(
        || spread(first, left, most, work, merge),
        || spread(first + half, right, most, work, merge),
    );
    merge(left, right)
}

struct Each<'a, T, F> {
    out: &'a mut [T],
    value: F,
}

impl<T, F: Fn(usize) -> T> Body for Each<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.out.iter_mut().enumerate().for_each(|(i, out)| *out = (self.value)(i));
    }
}

struct Scaled<'a, T> {
    sum: &'a mut [f64],
    coef: f64,
    of: &'a [T],
}

impl<T: Number> Body for Scaled<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.sum.iter_mut().zip(self.of).for_each(|(sum, x)| *sum = self.coef * (*x).into());
    }
}

struct Added<'a, T, const N: usize> {
    sum: &'a mut [f64],
    rows: [(f64, &'a [T]); N],
}

impl<T: Number, const N: usize> Body for Added<'_, T, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rows = self.rows.map(|(coef, of)| (coef, &of[..self.sum.len()]));
        for (i, sum) in self.sum.iter_mut().enumerate() {
            *sum = rows.iter().fold(*sum, |sum, (coef, of)| coef.mul_add(of[i].into(), sum));
        }
    }
}
