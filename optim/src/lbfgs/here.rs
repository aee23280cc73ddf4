//! The passes on memory of the CPU: the definition.

use super::fold::{Fold, Scalar};
use super::passes::{Measure, Passes, Rows};
use super::vectors::{Number, combine, pair, walk};
use crate::norm::add_dots;
use crate::{Error, ExactSum, Isa, Norm, NormAccumulator};
use meshstep_tensor::{Slice, SliceMut};
use std::marker::PhantomData;
use std::ops::Range;

/// Passes over vectors of `T`.
#[derive(Debug)]
pub(super) struct Here<T> {
    counted: Vec<Range<usize>>,
    /// Bits of the direction's largest magnitude.
    d_max: u64,
    of: PhantomData<T>,
}

impl<T> Here<T> {
    /// Of `len` elements, which all count.
    pub(super) fn new(len: usize) -> Self {
        Here { counted: std::iter::once(0..len).collect(), d_max: 0, of: PhantomData }
    }
}

impl<T: Number> Passes for Here<T> {
    fn count(&mut self, ranges: Vec<Range<usize>>) {
        self.counted = ranges;
    }

    fn walk(&mut self, x: SliceMut<'_>, start: Slice<'_>, t: f64, d: Slice<'_>) -> Result<(), Error> {
        walk::<T>(x.into_typed()?, start.typed()?, t, d.typed()?);
        Ok(())
    }

    fn pair(
        &mut self,
        [s, y]: [SliceMut<'_>; 2],
        t: f64,
        d: Slice<'_>,
        [g, before]: [Slice<'_>; 2],
    ) -> Result<(), Error> {
        pair::<T>((s.into_typed()?, y.into_typed()?), t, d.typed()?, (g.typed()?, before.typed()?));
        Ok(())
    }

    fn combine(
        &mut self,
        mut d: SliceMut<'_>,
        (coef, g): (f64, Slice<'_>),
        rows: &Rows<'_>,
    ) -> Result<(), Error> {
        let row = |i: usize| Ok((rows.coef(i), rows.row(i).typed::<T>()?));
        combine(d.typed_mut::<T>()?, (coef, g.typed()?), rows.len(), &row)?;
        self.d_max = largest(d.as_slice())?;
        Ok(())
    }

    fn measure(&mut self, of: &Measure<'_>, fold: &mut Fold) -> Result<(), Error> {
        fold.mine.d_max = self.d_max;
        for range in &self.counted {
            observe(of, range, fold)?;
            if of.rows.len() > 0 {
                products::<T>(of, range, fold)?;
            }
        }
        Ok(())
    }
}

/// What a gradient brings in a range.
fn observe(of: &Measure<'_>, range: &Range<usize>, fold: &mut Fold) -> Result<(), Error> {
    let g = of.g.slice(range.clone())?;
    if of.gradient {
        let mut norm = NormAccumulator::new(Norm::L2);
        norm.add(g)?;
        fold.add(Scalar::Squares, norm.sum());
        fold.mine.grad_max = fold.mine.grad_max.max(norm.max_bits());
        fold.mine.bad_grads += norm.non_finite();
    }
    if of.magnitudes {
        let mut sum = NormAccumulator::new(Norm::L1);
        sum.add(g)?;
        fold.add(Scalar::Magnitudes, sum.sum());
    }
    if of.slope {
        let mut slope = ExactSum::new();
        slope.add_dot(g, of.d.slice(range.clone())?)?;
        fold.add(Scalar::Slope, &slope);
    }
    Ok(())
}

/// Products of rows with the gradient and the newest `y` in a range.
fn products<T: Number>(of: &Measure<'_>, range: &Range<usize>, fold: &mut Fold) -> Result<(), Error> {
    let rows = &of.rows;
    for new in rows.newest() {
        let mut bad = NormAccumulator::new(Norm::Inf);
        bad.add(new.as_slice().slice(range.clone())?)?;
        fold.mine.bad_pairs += bad.non_finite();
    }
    let [_, y] = rows.newest();
    let news = [of.g.typed::<T>()?, y.typed()?].map(|new| &new[range.clone()]);
    let row = |i: usize| Ok(&rows.row(i).typed::<T>()?[range.clone()]);
    add_dots(Isa::detect(), news, rows.len(), &row, fold.products_mut(rows.len()))
}

/// Bits of the largest magnitude; those of infinity where one is not finite.
fn largest(vector: Slice<'_>) -> Result<u64, Error> {
    let mut norm = NormAccumulator::new(Norm::Inf);
    norm.add(vector)?;
    Ok(if norm.non_finite() > 0 { f64::INFINITY.to_bits() } else { norm.max_bits() })
}
