//! What an iteration does to whole vectors: three elementwise passes, each element by one fixed sequence.

use crate::Isa;
use crate::norm::Wide;
use crate::number::Real;
use meshstep_tensor::simd::Body;
use std::array::from_fn;

/// f32 or f64.
pub(super) trait Number: Real + Wide {}

impl<T: Real + Wide> Number for T {}

/// Elements of a block that a direction is summed up in: long enough for memory to give each row's without a start from rest.
const BLOCK: usize = 8192;

/// Rows that are added to it at a time.
const TOGETHER: usize = 4;

/// Above this many elements a pass is split in two; below, starting a second thread costs more than it saves.
const SPLIT_FROM: usize = 128 << 10;

/// `x = fma(t, d, start)`.
pub(super) fn walk<T: Number>(x: &mut [T], start: &[T], t: f64, d: &[T]) {
    let t = T::from_f64(t);
    spread(0, x, &|first, x| {
        let (start, d) = (&start[first..], &d[first..]);
        Isa::detect().run(Each { out: x, value: |i| t.fma(d[i], start[i]) });
    });
}

/// `s = t d` and `y = g - before`.
pub(super) fn pair<T: Number>((s, y): (&mut [T], &mut [T]), t: f64, d: &[T], (g, before): (&[T], &[T])) {
    let t = T::from_f64(t);
    spread(0, s, &|first, s| {
        let d = &d[first..];
        Isa::detect().run(Each { out: s, value: |i| t * d[i] });
    });
    spread(0, y, &|first, y| {
        let (g, before) = (&g[first..], &before[first..]);
        Isa::detect().run(Each { out: y, value: |i| g[i] - before[i] });
    });
}

/// `d = coef g + sum over i of coef_i row_i`, each element in f64 by fused multiply-adds in that order, rounded once.
pub(super) fn combine<'r, T: Number>(
    d: &mut [T],
    (coef, g): (f64, &[T]),
    rows: usize,
    row: &(impl Fn(usize) -> Result<(f64, &'r [T]), meshstep_tensor::Error> + Sync),
) -> Result<(), meshstep_tensor::Error> {
    // Whatever is wrong with a row is found before anything is written.
    (0..rows).try_for_each(|i| row(i).map(|_| ()))?;
    let of_row = |i: usize| row(i).unwrap_or((0.0, &[]));
    spread(0, d, &|first, d| combine_part(first, d, (coef, g), rows, &of_row));
    Ok(())
}

/// Elements from `first` on. A call of its own, so that its room is on the stack once, not at every halving.
#[inline(never)]
fn combine_part<'r, T: Number>(
    first: usize,
    d: &mut [T],
    (coef, g): (f64, &[T]),
    rows: usize,
    row: &impl Fn(usize) -> (f64, &'r [T]),
) {
    let mut room = [0.0; BLOCK];
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
    }
}

/// Halves `out` until it is short, the halves side by side; `work` is told where its part begins.
fn spread<T: Number>(first: usize, out: &mut [T], work: &(impl Fn(usize, &mut [T]) + Sync)) {
    if out.len() <= SPLIT_FROM || rayon::current_num_threads() == 1 {
        return work(first, out);
    }
    let half = out.len() / 2;
    let (left, right) = out.split_at_mut(half);
    rayon::join(|| spread(first, left, work), || spread(first + half, right, work));
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
