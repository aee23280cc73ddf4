//! What an iteration asks of all shards: an evaluation, the history's products. One exchange each.

use super::driver::{Run, Seen, mix};
use super::fold::{Known, Scalar};
use super::vectors::{Number, pair};
use super::{LbfgsError, LbfgsState, LineSearch, Loss};
use crate::norm::add_dots;
use crate::{ExactSum, Isa, Norm, NormAccumulator};
use meshstep_tensor::{Slice, SliceMut};

impl<T: Number, E, C: FnMut(Slice<'_>, SliceMut<'_>) -> Result<Loss, E>> Run<'_, T, C> {
    /// Calls the closure at `x`, its gradient into `slot`, and tells the other shards; with everything about the history
    /// that the next direction needs, where `measure` asks and there is one. One exchange.
    pub(super) fn evaluate(&mut self, slot: usize, measure: bool) -> Result<(), LbfgsError<E>> {
        let loss = (self.closure)(Slice::from(&*self.x), self.state.grads[slot].as_mut());
        self.evaluations += 1;
        self.state.evaluations += 1;
        let measure = measure && self.state.iterations > 0;
        let rows = if measure { self.state.gram.rows() } else { 0 };
        self.state.fold.begin(rows);
        let (kind, failure) = match loss {
            Ok(loss) => (self.state.fold.add_loss(loss), None),
            Err(error) => (0, Some(error)),
        };
        if failure.is_none() {
            self.observe(slot)?;
        }
        if measure && failure.is_none() {
            self.pair(slot)?;
        }
        let part = self.reduce.part() as u64;
        self.state.fold.mine.fault = if failure.is_some() { u64::MAX - part } else { 0 };
        let known = self.exchange(rows, kind)?;
        if known.brought.fault != 0 {
            let part = (u64::MAX - known.brought.fault) as usize;
            return Err(failure.map_or(LbfgsError::Elsewhere { part }, LbfgsError::Closure));
        }
        self.learn(slot, &known)?;
        self.measured = rows;
        Ok(())
    }

    /// Measures the history with the current gradient. One exchange.
    pub(super) fn measure(&mut self) -> Result<(), LbfgsError<E>> {
        let rows = self.state.gram.rows();
        self.state.fold.begin(rows);
        self.pair(self.current)?;
        let known = self.exchange(rows, 0)?;
        if !known.same {
            return Err(LbfgsError::Parted);
        }
        self.measured = rows;
        Ok(())
    }

    fn exchange(&mut self, rows: usize, kind: u64) -> Result<Known, LbfgsError<E>> {
        let state = &mut *self.state;
        let so_far = [kind, state.iterations, self.evaluations, state.t.to_bits()];
        state.fold.mine.d_max = self.d_max.0;
        state.fold.mine.digest = so_far.into_iter().fold(self.digest, mix);
        let known = state.fold.exchange(rows, self.reduce)?;
        state.fold.mine.bad_pairs = known.brought.bad_pairs;
        self.d_max.1 = known.brought.d_max;
        self.folds += 1;
        Ok(known)
    }

    /// Adds what this shard's gradient brings.
    fn observe(&mut self, slot: usize) -> Result<(), LbfgsError<E>> {
        let LbfgsState { counted, grads, fold, d, iterations, .. } = &mut *self.state;
        for range in counted {
            let g = grads[slot].as_slice().slice(range.clone())?;
            let mut norm = NormAccumulator::new(Norm::L2);
            norm.add(g)?;
            fold.add(Scalar::Squares, norm.sum());
            fold.mine.grad_max = fold.mine.grad_max.max(norm.max_bits());
            fold.mine.bad_grads += norm.non_finite();
            // Only the first step's length asks for it.
            if *iterations == 0 {
                let mut sum = NormAccumulator::new(Norm::L1);
                sum.add(g)?;
                fold.add(Scalar::Magnitudes, sum.sum());
            }
            if self.along && self.rule.line_search == LineSearch::StrongWolfe {
                let mut slope = ExactSum::new();
                slope.add_dot(g, d.as_slice().slice(range.clone())?)?;
                fold.add(Scalar::Slope, &slope);
            }
        }
        Ok(())
    }

    /// Writes the pair that leads to the gradient in `slot`, and adds its and the gradient's products with the history.
    fn pair(&mut self, slot: usize) -> Result<(), LbfgsError<E>> {
        let LbfgsState { counted, grads, fold, d, gram, history, before, t, .. } = &mut *self.state;
        let at = [gram.spare(), gram.y(gram.spare())];
        let g = grads[slot].typed::<T>()?;
        if let Ok([s, y]) = history.get_disjoint_mut(at) {
            let new = (s.typed_mut::<T>()?, y.typed_mut::<T>()?);
            pair(new, *t, d.typed::<T>()?, (g, grads[*before].typed::<T>()?));
        }
        let [s, y] = at.map(|row| &history[row]);
        for range in counted {
            for new in [s, y] {
                let mut bad = NormAccumulator::new(Norm::Inf);
                bad.add(new.as_slice().slice(range.clone())?)?;
                fold.mine.bad_pairs += bad.non_finite();
            }
            let news = [g, s.typed::<T>()?, y.typed::<T>()?].map(|new| &new[range.clone()]);
            let row = |i: usize| Ok(&history[gram.row(i)].typed::<T>()?[range.clone()]);
            add_dots(Isa::detect(), news, gram.rows(), &row, fold.products_mut(gram.rows()))?;
        }
        Ok(())
    }

    /// What all shards know of the point just evaluated.
    fn learn(&mut self, slot: usize, known: &Known) -> Result<(), LbfgsError<E>> {
        if !known.same {
            return Err(LbfgsError::Parted);
        }
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
            magnitudes: fold.scalar(Scalar::Magnitudes).to_f64(),
            bad_grads: brought.bad_grads,
            finite: loss.is_finite() && brought.bad_grads == 0 && brought.bad_losses == 0,
        };
        Ok(())
    }
}
