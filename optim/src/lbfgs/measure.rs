//! Measurements of an iteration over all shards, one exchange each: an evaluation, or the history's products.

use super::driver::{Run, Seen, mix};
use super::fold::{Known, Scalar};
use super::history::scale_below;
use super::passes::{Asked, Measure, NewPair, Others, RoundedRow, Rows};
use super::{LbfgsError, LbfgsState, LineSearch, Loss};
use meshstep_tensor::{Slice, SliceMut};

impl<E, C: FnMut(Slice<'_>, SliceMut<'_>) -> Result<Loss, E>> Run<'_, C> {
    /// Calls the closure at `x`, with its gradient in `slot`, and exchanges the results. If `measure` is set and there is a history, also
    /// measures its products for the next direction. One exchange.
    pub(super) fn evaluate(&mut self, slot: usize, measure: bool) -> Result<(), LbfgsError<E>> {
        let told = (self.closure)(self.x.as_slice(), self.state.grads[slot].as_mut());
        self.evaluations += 1;
        self.state.evaluations += 1;
        let moved = self.state.iterations > 0;
        // A pair with scales is measured once its largest magnitudes over all shards are known.
        let measure = measure && moved && !self.state.history.has_scales();
        let without = measure.then(|| self.state.gram.leaving());
        let rows = self.begin(without);
        let brought = told.map_err(LbfgsError::Closure).and_then(|loss| {
            let kind = self.state.fold.add_loss(loss);
            self.observe(slot, without, true).map(|()| kind)
        });
        let known = self.exchange(rows, brought)?;
        self.learn(slot, &known)?;
        self.measured = rows;
        Ok(())
    }

    /// Measures the history with the current gradient, without the `without` oldest pairs. One exchange.
    pub(super) fn measure(&mut self, without: usize) -> Result<(), LbfgsError<E>> {
        let rows = self.begin(Some(without));
        let brought = self.observe(self.current, Some(without), false).map(|()| 0);
        self.exchange(rows, brought)?;
        self.measured = rows;
        Ok(())
    }

    /// Begins a measurement. If `without` is set, it includes the history's products except for those of the `without` oldest pairs.
    /// Returns the number of products.
    fn begin(&mut self, without: Option<usize>) -> usize {
        let held = self.state.gram.len();
        let rows = without.map_or(0, |without| 2 * (held - without + 1));
        let products = rows * self.state.history.products();
        self.state.fold.begin(products);
        products
    }

    /// Exchanges this shard's contribution `brought`, a kind of loss, or its failure.
    fn exchange(&mut self, rows: usize, brought: Result<u64, LbfgsError<E>>) -> Result<Known, LbfgsError<E>> {
        let (kind, failure) = brought.map_or_else(|error| (0, Some(error)), |kind| (kind, None));
        let state = &mut *self.state;
        let so_far = [kind, state.iterations, self.evaluations, state.t.to_bits()];
        let part = self.reduce.part() as u64;
        state.fold.mine.fault = if failure.is_some() { u64::MAX - part } else { 0 };
        state.fold.mine.digest = so_far.into_iter().fold(self.digest, mix);
        let known = state.fold.exchange(rows, self.reduce)?;
        state.fold.mine.bad_pairs = known.brought.bad_pairs;
        self.d_max = known.brought.d_max;
        self.folds += 1;
        match known.brought.fault {
            0 if known.same => Ok(known),
            0 => Err(LbfgsError::Parted),
            fault => Err(failure.unwrap_or(LbfgsError::Elsewhere { part: (u64::MAX - fault) as usize })),
        }
    }

    /// Adds this shard's part of the sums over the gradient in `slot`, if that is `new`. If `without` is set, also measures the new pair
    /// and the products of the history with the gradient, except for the `without` oldest pairs.
    fn observe(&mut self, slot: usize, without: Option<usize>, new: bool) -> Result<(), LbfgsError<E>> {
        let scales = self.scales(slot);
        let LbfgsState { passes, fold, grads, d, ds, ys, gram, before, iterations, history, .. } =
            &mut *self.state;
        let (d, d_row, ds) = Others::of_direction(d, ds, gram.spare());
        let (y, ys) = Others::of(ys, gram.spare());
        let before = grads[*before].as_slice();
        let change_from = (new && *iterations > 0 && history.has_scales()).then_some(before);
        let pair = without.map(|without| {
            let rows = Rows { ds, ys, gram, without };
            let rounded = d_row.map(|d| RoundedRow { d: d.as_mut(), scales });
            NewPair { y: y.as_mut(), before, rows, rounded }
        });
        let search = self.rule.line_search == LineSearch::StrongWolfe;
        let asked = Asked {
            gradient: new,
            // Only the length of the first step needs them.
            magnitudes: new && *iterations == 0,
            slope: new && self.along && search,
        };
        let (g, d) = (grads[slot].as_slice(), d.as_slice());
        Ok(passes.measure(Measure { g, d, asked, change_from, pair }, fold)?)
    }

    /// Returns the scales of a new pair's rows, whose `y` ends at the gradient in `slot`.
    pub(super) fn scales(&self, slot: usize) -> [f32; 2] {
        match self.state.history.has_scales() {
            true => [self.d_max, self.seen[slot].y_max].map(|bits| scale_below(f64::from_bits(bits))),
            false => [1.0; 2],
        }
    }

    /// Records the reduced values of the point just evaluated.
    fn learn(&mut self, slot: usize, known: &Known) -> Result<(), LbfgsError<E>> {
        let (fold, brought) = (&self.state.fold, &known.brought);
        let loss = match known.losses {
            Some((low, high)) if low.to_bits() != high.to_bits() => {
                return Err(LbfgsError::LossDiffers { low, high });
            }
            Some((loss, _)) => loss,
            None if brought.bad_losses > 0 => f64::NAN,
            None if fold.is_mean() => fold.scalar(Scalar::Loss).mean(brought.weight),
            None => fold.scalar(Scalar::Loss).to_f64(),
        };
        let squares = fold.scalar(Scalar::Squares);
        self.seen[slot] = Seen {
            loss,
            slope: fold.scalar(Scalar::Slope).to_f64(),
            squares: squares.to_f64(),
            norm: squares.sqrt(),
            grad_max: f64::from_bits(brought.grad_max),
            y_max: brought.y_max,
            magnitudes: fold.scalar(Scalar::Magnitudes).to_f64(),
            bad_grads: brought.bad_grads,
            finite: loss.is_finite() && brought.bad_grads == 0 && brought.bad_losses == 0,
        };
        Ok(())
    }
}
