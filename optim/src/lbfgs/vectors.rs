//! Elementwise passes over whole vectors, each element by one fixed sequence, with measurements of results while they are in the cache.

use crate::norm::{CHUNK, PIECE, Source, Wide};
use crate::precision::number::{Real, Stored};
use crate::{Isa, Norm, NormAccumulator};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{SplitParts, Threads};
use std::array::from_fn;
use std::marker::PhantomData;
use std::ops::Range;

/// Number type of vectors: f32 or f64.
pub(super) trait Number: Real + Wide + Source + Stored<Self> {}

impl<T: Real + Wide + Source + Stored<Self>> Number for T {}

/// Elements of a block in which a direction is summed: long enough to read each row at full memory bandwidth.
const BLOCK: usize = 8192;

/// Rows added to a block at a time.
const TOGETHER: usize = 4;

/// Least number of elements of a part: waking a second thread costs more than shorter ones save.
pub(super) const PART: usize = 64 << 10;

/// Computes `x = fma(t, d, start)`.
pub(super) fn walk<T: Number>(threads: &Threads, x: &mut [T], start: &[T], t: f64, d: &[T]) {
    let t = T::from_f64(t);
    let along = |(first, [x]): (usize, [&mut [T]; 1])| {
        let (start, d) = (&start[first..], &d[first..]);
        Isa::detect().run(Each { out: x, value: |i| t.fma(d[i], start[i]) });
    };
    spread(threads, [x], PART, || (), |(), part| along(part), |(), ()| ());
}

/// Computes `start = x` and `x = fma(t, d, start)`.
pub(super) fn leave<T: Number>(threads: &Threads, x: &mut [T], start: &mut [T], t: f64, d: &[T]) {
    let t = T::from_f64(t);
    let along = |(first, [x, start]): (usize, [&mut [T]; 2])| {
        for (b, (x, start)) in x.chunks_mut(BLOCK).zip(start.chunks_mut(BLOCK)).enumerate() {
            start.copy_from_slice(x);
            let d = &d[first + b * BLOCK..];
            Isa::detect().run(Each { out: x, value: |i| t.fma(d[i], start[i]) });
        }
    };
    spread(threads, [x, start], PART, || (), |(), part| along(part), |(), ()| ());
}

/// Computes `y = g - before`. Calls `work` with pieces of at most [`CHUNK`] elements and their start index, while they are in the cache.
pub(super) fn difference<T: Number, S: Send>(
    threads: &Threads,
    y: &mut [T],
    (g, before): (&[T], &[T]),
    zero: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize, &[T]) + Sync,
    merge: impl Fn(&mut S, S) + Sync,
) -> S {
    let part = |sum: &mut S, (first, [y]): (usize, [&mut [T]; 1])| {
        for (first, y) in (first..).step_by(CHUNK).zip(y.chunks_mut(CHUNK)) {
            let (g, before) = (&g[first..], &before[first..]);
            Isa::detect().run(Each { out: y, value: |i| g[i] - before[i] });
            work(sum, first, y);
        }
    };
    spread(threads, [y], CHUNK, zero, part, merge)
}

/// Computes `d = coef g + sum over i of coef_i row_i`, each element in f64 by fused multiply-adds in that order, rounded once. Rows may
/// have elements of another type `R`. Returns the bits of the largest magnitude, or of infinity if an element is not finite.
pub(super) fn combine<'r, T: Number, R: Stored<T>>(
    threads: &Threads,
    d: &mut [T],
    (coef, g): (f64, &[T]),
    rows: usize,
    row: &(impl Fn(usize) -> Result<(f64, &'r [R]), meshstep_tensor::Error> + Sync),
) -> Result<u64, meshstep_tensor::Error> {
    // Check all rows before writing anything.
    (0..rows).try_for_each(|i| row(i).map(|_| ()))?;
    let of_row = |i: usize| row(i).unwrap_or((0.0, &[]));
    let part = |largest: &mut u64, (first, [d]): (usize, [&mut [T]; 1])| {
        *largest = combine_part(first, d, (coef, g), rows, &of_row).max(*largest);
    };
    Ok(spread(threads, [d], PART, || 0, part, |largest, other| *largest = other.max(*largest)))
}

/// Computes the elements from `first` on.
fn combine_part<'r, T: Number, R: Stored<T>>(
    first: usize,
    d: &mut [T],
    (coef, g): (f64, &[T]),
    rows: usize,
    row: &impl Fn(usize) -> (f64, &'r [R]),
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
            Isa::detect().run(Added::<T, R, TOGETHER>::new(sum, from_fn(|k| at(i + k))));
            i += TOGETHER;
        }
        (i..rows).for_each(|i| Isa::detect().run(Added::<T, R, 1>::new(sum, [at(i)])));
        Isa::detect().run(Each { out: d, value: |i| T::from_f64(room[i]) });
        largest.inline(Isa::detect(), d);
    }
    bits_of(&largest)
}

/// Returns the bits of the largest magnitude, or of infinity if an element is not finite.
fn bits_of(largest: &NormAccumulator) -> u64 {
    if largest.non_finite() > 0 { f64::INFINITY.to_bits() } else { largest.max_bits() }
}

/// Rounds a new pair into its rows: `d_row = scale_d d` and `y_row = scale_y (g - before)`, each rounded to nearest even once. Calls `work`
/// with pieces of both rows of at most [`PIECE`] elements and their start index, while they are in the cache.
pub(super) fn round_pair<R: Stored<f32>, S: Send>(
    threads: &Threads,
    rows: [&mut [R]; 2],
    [d, g, before]: [&[f32]; 3],
    [of_d, of_y]: [f32; 2],
    zero: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize, [&[R]; 2]) + Sync,
    merge: impl Fn(&mut S, S) + Sync,
) -> S {
    let part = |sum: &mut S, (first, [d_row, y_row]): (usize, [&mut [R]; 2])| {
        let pieces = d_row.chunks_mut(PIECE).zip(y_row.chunks_mut(PIECE));
        for (first, (d_row, y_row)) in (first..).step_by(PIECE).zip(pieces) {
            let (d, g, before) = (&d[first..], &g[first..], &before[first..]);
            Isa::detect().run(Each { out: &mut *d_row, value: |i| R::narrow(of_d * d[i]) });
            Isa::detect().run(Each { out: &mut *y_row, value: |i| R::narrow(of_y * (g[i] - before[i])) });
            work(sum, first, [d_row, y_row]);
        }
    };
    spread(threads, rows, CHUNK, zero, part, merge)
}

/// Returns the bits of the largest magnitudes of `d` and of `g - before` in some ranges, or of infinity if an element is not finite.
pub(super) fn largest_change(
    threads: &Threads,
    ranges: &[Range<usize>],
    [d, g, before]: [&[f32]; 3],
) -> [u64; 2] {
    let nothing = || [(); 2].map(|()| NormAccumulator::new(Norm::Inf));
    let merge = |all: &mut [NormAccumulator; 2], other: [NormAccumulator; 2]| {
        all.iter_mut().zip(&other).for_each(|(all, other)| all.merge(other));
    };
    let mut all = nothing();
    for range in ranges {
        let work = |[of_d, of_y]: &mut [NormAccumulator; 2], start: usize| {
            let mut room = [0.0; BLOCK];
            let end = range.end.min(start + PART);
            for first in (start..end).step_by(BLOCK) {
                let y = &mut room[..BLOCK.min(end - first)];
                let (g, before) = (&g[first..], &before[first..]);
                Isa::detect().run(Each { out: &mut *y, value: |i| g[i] - before[i] });
                of_d.inline(Isa::detect(), &d[first..first + y.len()]);
                of_y.inline(Isa::detect(), y);
            }
        };
        merge(&mut all, threads.fold(range.clone().step_by(PART), nothing, work, merge));
    }
    all.each_ref().map(bits_of)
}

/// Folds parts of vectors of one length, each with the index of its first element, on several threads if they are long.
fn spread<T: Send, S: Send, const N: usize>(
    threads: &Threads,
    vectors: [&mut [T]; N],
    least: usize,
    zero: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, (usize, [&mut [T]; N])) + Sync,
    merge: impl Fn(&mut S, S) + Sync,
) -> S {
    let len = vectors.first().map_or(0, |vector| vector.len());
    let part = threads.part_len(len, least).next_multiple_of(CHUNK);
    threads.fold(SplitParts::new(vectors, len, part, split), zero, work, merge)
}

fn split<T, const N: usize>(vectors: [&mut [T]; N], at: usize) -> ([&mut [T]; N], [&mut [T]; N]) {
    let mut halves = vectors.map(|vector| vector.split_at_mut(at));
    let right = halves.each_mut().map(|(_, right)| std::mem::take(right));
    (halves.map(|(left, _)| left), right)
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

/// Rows of `R`, each element read as `T`, added to a sum.
struct Added<'a, T, R, const N: usize> {
    sum: &'a mut [f64],
    rows: [(f64, &'a [R]); N],
    read_as: PhantomData<T>,
}

impl<'a, T, R, const N: usize> Added<'a, T, R, N> {
    fn new(sum: &'a mut [f64], rows: [(f64, &'a [R]); N]) -> Self {
        Added { sum, rows, read_as: PhantomData }
    }
}

impl<T: Number, R: Stored<T>, const N: usize> Body for Added<'_, T, R, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rows = self.rows.map(|(coef, of)| (coef, &of[..self.sum.len()]));
        for (i, sum) in self.sum.iter_mut().enumerate() {
            *sum = rows.iter().fold(*sum, |sum, (coef, of)| coef.mul_add(of[i].widen().into(), sum));
        }
    }
}
