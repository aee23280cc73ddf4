//! Passes on CPU memory over vectors of f32 with a history of 16 bits.

use super::fold::Fold;
use super::here::{Here, Observed, Vectors};
use super::passes::{Asked, Measure, NewPair, Passes, Rows};
use super::vectors::{combine, largest_change, round_pair};
use crate::norm::{Both, PIECE, RowElement};
use crate::{Error, ExactSum, Isa};
use meshstep_tensor::{Slice, SliceMut, Threads};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Passes over vectors of f32 with rows of `R`.
#[derive(Debug)]
pub(super) struct RoundedHere<R> {
    /// Passes that touch no row.
    plain: Here<f32>,
    threads: Threads,
    counted: Vec<Range<usize>>,
    /// Products of each row with the gradient, then of each row with the new `y`; all threads add to them.
    products: Vec<Mutex<ExactSum>>,
    rows: PhantomData<R>,
}

impl<R> RoundedHere<R> {
    /// Creates passes over `len` elements, which all count, with `history_len` pairs.
    pub(super) fn new(history_len: usize, len: usize, threads: &Threads) -> Self {
        RoundedHere {
            // Its products are unused.
            plain: Here::new(0, len, threads),
            threads: threads.clone(),
            counted: std::iter::once(0..len).collect(),
            products: (0..4 * (history_len + 1)).map(|_| Mutex::new(ExactSum::new())).collect(),
            rows: PhantomData,
        }
    }
}

impl<R: RowElement> Passes for RoundedHere<R> {
    fn count(&mut self, ranges: Vec<Range<usize>>) {
        self.counted.clone_from(&ranges);
        self.plain.count(ranges);
    }

    fn walk(&mut self, x: SliceMut<'_>, start: Slice<'_>, t: f64, d: Slice<'_>) -> Result<(), Error> {
        self.plain.walk(x, start, t, d)
    }

    fn leave(&mut self, x: SliceMut<'_>, start: SliceMut<'_>, t: f64, d: Slice<'_>) -> Result<(), Error> {
        self.plain.leave(x, start, t, d)
    }

    fn combine(
        &mut self,
        mut d: SliceMut<'_>,
        (coef, g): (f64, Slice<'_>),
        rows: &Rows<'_>,
    ) -> Result<(), Error> {
        let row = |i: usize| Ok((rows.coef(i), rows.row(i).typed::<R>()?));
        let (d, g) = (d.typed_mut::<f32>()?, (coef, g.typed()?));
        self.plain.d_max = combine(&self.threads, d, g, rows.len(), &row)?;
        Ok(())
    }

    fn measure(&mut self, of: Measure<'_>, fold: &mut Fold) -> Result<(), Error> {
        let Measure { g, d, asked, change_from, pair } = of;
        if let Some(pair) = pair {
            fold.mine.d_max = self.plain.d_max;
            let vectors = Vectors { g: g.typed()?, d: d.typed()? };
            return self.measure_pair(vectors, asked, pair, fold);
        }
        self.plain.measure(Measure { g, d, asked, change_from: None, pair: None }, fold)?;
        if let Some(before) = change_from {
            let vectors = [d.typed()?, g.typed()?, before.typed()?];
            let [d_max, y_max] = largest_change(&self.threads, &self.counted, vectors);
            // The direction may be a loaded one.
            self.plain.d_max = d_max;
            (fold.mine.d_max, fold.mine.y_max) = (d_max, y_max);
        }
        Ok(())
    }
}

impl<R: RowElement> RoundedHere<R> {
    /// Rounds a new pair into its rows and measures everything about it in one pass, one piece of every vector at a time.
    fn measure_pair(
        &mut self,
        vectors: Vectors<'_, f32>,
        asked: Asked,
        NewPair { y, before, rows, rounded }: NewPair<'_>,
        fold: &mut Fold,
    ) -> Result<(), Error> {
        let Some(rounded) = rounded else {
            return Err(Error::Len { what: "the rows of a rounded pair", given: 1, expected: 2 });
        };
        // Check all rows before writing anything.
        (0..rows.len()).try_for_each(|i| rows.row(i).typed::<R>().map(|_| ()))?;
        let older = |i: usize| rows.row(i).typed::<R>().unwrap_or(&[]);
        let count = rows.len() + 2;
        let products = &mut self.products[..2 * count];
        products.iter_mut().for_each(|sum| *sum = Mutex::new(ExactSum::new()));
        let (counted, products) = (&self.counted, &*products);
        let look = |observed: &mut Observed, first: usize, [d_row, y_row]: [&[R]; 2]| {
            for range in counted {
                let [begin, end] = [range.start, range.end].map(|at| at.clamp(first, first + y_row.len()));
                if begin < end {
                    let new = [d_row, y_row].map(|row| &row[begin - first..end - first]);
                    observed.add(asked, vectors.part(&(begin..end)));
                    observed.add_rounded(new);
                    let row = |i: usize| match i.checked_sub(rows.len()) {
                        None => &older(i)[begin..end],
                        Some(i) => new[i],
                    };
                    add_products((&vectors.g[begin..end], new[1]), &row, products);
                }
            }
        };
        let (into, scales) = ([rounded.d.into_typed()?, y.into_typed()?], rounded.scales);
        let of = [vectors.d, vectors.g, before.typed()?];
        let observed = round_pair(&self.threads, into, of, scales, Observed::nothing, look, Observed::merge);
        for (into, sum) in fold.products_mut(products.len()).iter_mut().zip(products) {
            into.clone_from(&sum.lock().unwrap_or_else(PoisonError::into_inner));
        }
        observed.tell(fold);
        Ok(())
    }
}

/// Adds the products of a piece of the gradient, and of the same piece of the new `y`, with the same piece of all rows.
fn add_products<'v, R: RowElement>(
    (g, y): (&[f32], &[R]),
    row: &impl Fn(usize) -> &'v [R],
    products: &[Mutex<ExactSum>],
) {
    let (isa, mut room) = (Isa::detect(), [0.0f32; PIECE]);
    let wide = &mut room[..y.len()];
    wide.iter_mut().zip(y).for_each(|(wide, y)| *wide = y.widen());
    let both = Both::of(isa, g, wide);
    let (with_g, with_y) = products.split_at(products.len() / 2);
    for (i, sums) in with_g.iter().zip(with_y).enumerate() {
        // The piece to prefetch: that of the next row, or after the last row the next piece of the first one.
        let next = match i + 1 {
            next if next < with_g.len() => row(next).as_ptr(),
            _ => row(0).as_ptr().wrapping_add(g.len()),
        };
        let [mut of_g, mut of_y] = [ExactSum::new(), ExactSum::new()];
        both.add(row(i), next, [&mut of_g, &mut of_y]);
        for (sum, here) in [(sums.0, of_g), (sums.1, of_y)] {
            sum.lock().unwrap_or_else(PoisonError::into_inner).merge(&here);
        }
    }
}
