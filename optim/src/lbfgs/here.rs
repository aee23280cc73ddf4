//! Passes on CPU memory: the definition.

use super::fold::{Fold, Scalar};
use super::passes::{Asked, Measure, NewPair, Passes, Rows};
use super::vectors::{Number, PART, combine, difference, leave, walk};
use crate::norm::{CHUNK, Chunk, Source, add_dot};
use crate::{Error, ExactSum, Isa, Norm, NormAccumulator};
use meshstep_tensor::{Slice, SliceMut, Threads};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Passes over vectors of `T`.
#[derive(Debug)]
pub(super) struct Here<T> {
    threads: Threads,
    counted: Vec<Range<usize>>,
    /// Bits of the direction's largest magnitude.
    pub(super) d_max: u64,
    /// Product of each row with the gradient; all threads add to it.
    products: Vec<Mutex<ExactSum>>,
    of: PhantomData<T>,
}

impl<T> Here<T> {
    /// Creates passes over `len` elements, which all count, with `history_len` pairs.
    pub(super) fn new(history_len: usize, len: usize, threads: &Threads) -> Self {
        let counted = std::iter::once(0..len).collect();
        let products = (0..2 * (history_len + 1)).map(|_| Mutex::new(ExactSum::new())).collect();
        Here { threads: threads.clone(), counted, d_max: 0, products, of: PhantomData }
    }
}

impl<T: Number> Passes for Here<T> {
    fn count(&mut self, ranges: Vec<Range<usize>>) {
        self.counted = ranges;
    }

    fn walk(&mut self, x: SliceMut<'_>, start: Slice<'_>, t: f64, d: Slice<'_>) -> Result<(), Error> {
        walk::<T>(&self.threads, x.into_typed()?, start.typed()?, t, d.typed()?);
        Ok(())
    }

    fn leave(&mut self, x: SliceMut<'_>, start: SliceMut<'_>, t: f64, d: Slice<'_>) -> Result<(), Error> {
        leave::<T>(&self.threads, x.into_typed()?, start.into_typed()?, t, d.typed()?);
        Ok(())
    }

    fn combine(
        &mut self,
        mut d: SliceMut<'_>,
        (coef, g): (f64, Slice<'_>),
        rows: &Rows<'_>,
    ) -> Result<(), Error> {
        let row = |i: usize| Ok((rows.coef(i), rows.row(i).typed::<T>()?));
        self.d_max = combine(&self.threads, d.typed_mut::<T>()?, (coef, g.typed()?), rows.len(), &row)?;
        Ok(())
    }

    fn measure(
        &mut self,
        Measure { g, d, asked, pair, .. }: Measure<'_>,
        fold: &mut Fold,
    ) -> Result<(), Error> {
        fold.mine.d_max = self.d_max;
        let vectors = Vectors { g: g.typed::<T>()?, d: d.typed()? };
        let observed = match pair {
            Some(pair) => self.measure_pair(vectors, asked, pair, fold)?,
            None => {
                let mut observed = Observed::nothing();
                let parts =
                    self.counted.iter().map(|range| observe(&self.threads, asked, vectors.part(range)));
                parts.for_each(|part| observed.merge(part));
                observed
            }
        };
        observed.tell(fold);
        Ok(())
    }
}

impl<T: Number> Here<T> {
    /// Measures everything about a new pair in one pass, one chunk of every vector at a time.
    fn measure_pair(
        &mut self,
        vectors: Vectors<'_, T>,
        asked: Asked,
        NewPair { y, before, rows, .. }: NewPair<'_>,
        fold: &mut Fold,
    ) -> Result<Observed, Error> {
        // Check all rows before writing anything.
        (0..rows.len()).try_for_each(|i| rows.row(i).typed::<T>().map(|_| ()))?;
        let older = |i: usize| rows.row(i).typed::<T>().unwrap_or(&[]);
        let products = &mut self.products[..rows.len() + 2];
        products.iter_mut().for_each(|sum| *sum = Mutex::new(ExactSum::new()));
        let (counted, products) = (&self.counted, &*products);
        let look = |observed: &mut Observed, first: usize, y: &[T]| {
            for range in counted {
                let [begin, end] = [range.start, range.end].map(|at| at.clamp(first, first + y.len()));
                if begin < end {
                    let (vectors, y) = (vectors.part(&(begin..end)), &y[begin - first..end - first]);
                    observed.add(asked, vectors);
                    observed.add_pair(vectors.d, y);
                    let new = [vectors.d, y];
                    let row = |i: usize| match i.checked_sub(rows.len()) {
                        None => &older(i)[begin..end],
                        Some(i) => new[i],
                    };
                    add_products(vectors.g, &row, products);
                }
            }
        };
        let (y, grads) = (y.into_typed()?, (vectors.g, before.typed()?));
        let observed = difference(&self.threads, y, grads, Observed::nothing, look, Observed::merge);
        for (into, sum) in fold.products_mut(products.len()).iter_mut().zip(products) {
            into.clone_from(&sum.lock().unwrap_or_else(PoisonError::into_inner));
        }
        Ok(observed)
    }
}

/// Adds the products of a chunk of the gradient with the same chunk of all rows.
fn add_products<'v, T: Number>(g: &[T], row: &impl Fn(usize) -> &'v [T], products: &[Mutex<ExactSum>]) {
    let chunk = Chunk::of(Isa::detect(), g);
    for (i, sum) in products.iter().enumerate() {
        // The chunk to prefetch: that of the next row, or after the last row the next chunk of the first one.
        let next = match i + 1 {
            next if next < products.len() => row(next).as_ptr(),
            _ => row(0).as_ptr().wrapping_add(g.len()),
        };
        let mut here = ExactSum::new();
        chunk.add(row(i), next, &mut here);
        sum.lock().unwrap_or_else(PoisonError::into_inner).merge(&here);
    }
}

/// Measures the requested sums in chunks, on several threads if the vectors are long.
fn observe<T: Number>(threads: &Threads, asked: Asked, vectors: Vectors<'_, T>) -> Observed {
    let len = vectors.g.len();
    let part = threads.part_len(len, PART).next_multiple_of(CHUNK);
    let work = |observed: &mut Observed, start: usize| {
        let end = len.min(start + part);
        (start..end)
            .step_by(CHUNK)
            .for_each(|at| observed.add(asked, vectors.part(&(at..end.min(at + CHUNK)))));
    };
    let starts = (0..len.div_ceil(part)).map(|i| i * part);
    threads.fold(starts, Observed::nothing, work, Observed::merge)
}

/// Gradient and direction.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'a, T> {
    pub(super) g: &'a [T],
    pub(super) d: &'a [T],
}

impl<T> Vectors<'_, T> {
    pub(super) fn part(&self, range: &Range<usize>) -> Self {
        Vectors { g: &self.g[range.clone()], d: &self.d[range.clone()] }
    }
}

/// Measured values except the rows' products.
pub(super) struct Observed {
    /// Norms of the gradient, and its slope along the direction.
    squares: NormAccumulator,
    magnitudes: NormAccumulator,
    slope: ExactSum,
    /// Norms and product of a new pair.
    of_d: NormAccumulator,
    of_y: NormAccumulator,
    d_y: ExactSum,
}

impl Observed {
    pub(super) fn nothing() -> Self {
        let [squares, of_y] = [(); 2].map(|()| NormAccumulator::new(Norm::L2));
        let (magnitudes, of_d) = (NormAccumulator::new(Norm::L1), NormAccumulator::new(Norm::Inf));
        Observed { squares, magnitudes, slope: ExactSum::new(), of_d, of_y, d_y: ExactSum::new() }
    }

    /// Adds the requested sums of a part.
    pub(super) fn add<T: Number>(&mut self, asked: Asked, Vectors { g, d }: Vectors<'_, T>) {
        let isa = Isa::detect();
        if asked.gradient {
            self.squares.inline(isa, g);
        }
        if asked.magnitudes {
            self.magnitudes.inline(isa, g);
        }
        if asked.slope {
            add_dot(isa, g, d, &mut self.slope);
        }
    }

    /// Adds a part of a new pair.
    fn add_pair<T: Number>(&mut self, d: &[T], y: &[T]) {
        let isa = Isa::detect();
        self.of_d.inline(isa, d);
        self.of_y.inline(isa, y);
        add_dot(isa, d, y, &mut self.d_y);
    }

    /// Adds the non-finite elements of a part of a rounded pair. Its products are those of rows.
    pub(super) fn add_rounded<R: Source>(&mut self, rows: [&[R]; 2]) {
        rows.into_iter().for_each(|row| self.of_d.inline(Isa::detect(), row));
    }

    pub(super) fn merge(&mut self, other: Observed) {
        self.squares.merge(&other.squares);
        self.magnitudes.merge(&other.magnitudes);
        self.slope.merge(&other.slope);
        self.of_d.merge(&other.of_d);
        self.of_y.merge(&other.of_y);
        self.d_y.merge(&other.d_y);
    }

    pub(super) fn tell(&self, fold: &mut Fold) {
        fold.mine.grad_max = self.squares.max_bits();
        fold.mine.bad_grads = self.squares.non_finite();
        fold.mine.bad_pairs = self.of_d.non_finite() + self.of_y.non_finite();
        for (scalar, sum) in [
            (Scalar::Squares, self.squares.sum()),
            (Scalar::Magnitudes, self.magnitudes.sum()),
            (Scalar::Slope, &self.slope),
            (Scalar::Curvature, &self.d_y),
            (Scalar::NewSquares, self.of_y.sum()),
        ] {
            fold.add(scalar, sum);
        }
    }
}
