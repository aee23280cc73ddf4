//! One step of L-BFGS: evaluate, measure, turn, walk, until something says stop. Every branch is taken on reduced values.

use super::cubic::Point;
use super::fold::{Known, Scalar};
use super::line_search::{Line, Trial, strong_wolfe};
use super::vectors::{Number, combine, pair, walk};
use super::{Iterate, Lbfgs, LbfgsError, LbfgsReport, LbfgsState, LineSearch, Loss, Stop};
use crate::norm::add_dots;
use crate::{ExactSum, Isa, Norm, NormAccumulator, Reduce};
use meshstep_tensor::{Buffer, Slice, SliceMut};

/// A fixed step is halved at most this often.
const HALVINGS: u32 = 30;

/// Gradients that are kept at once, at most.
const SLOTS: usize = 4;

/// A step under way.
struct Run<'a, T, C> {
    rule: &'a Lbfgs,
    x: &'a mut [T],
    closure: C,
    reduce: &'a dyn Reduce,
    state: &'a mut LbfgsState,
    /// What is known of the point whose gradient is in each slot.
    seen: [Seen; SLOTS],
    /// The slot of the current point's gradient.
    current: usize,
    /// Rows of the history that were measured with the current gradient.
    measured: usize,
    /// Bits of the direction's largest magnitude: here, and on all shards.
    d_max: (u64, u64),
    /// Whether there is a direction to take slopes along.
    along: bool,
    iterations: u64,
    evaluations: u64,
    folds: u64,
    digest: u64,
}

/// What all shards know of a point.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    loss: f64,
    slope: f64,
    squares: f64,
    norm: f64,
    grad_max: f64,
    magnitudes: f64,
    bad_grads: u64,
    finite: bool,
}

/// A step of `rule` on vectors of `T`.
pub(super) fn run<T: Number, E>(
    rule: &Lbfgs,
    x: SliceMut<'_>,
    closure: impl FnMut(Slice<'_>, SliceMut<'_>) -> Result<Loss, E>,
    reduce: &dyn Reduce,
    state: &mut LbfgsState,
    mut each: impl FnMut(&Iterate<'_>),
) -> Result<LbfgsReport, LbfgsError<E>> {
    let mut run = Run {
        rule,
        x: x.into_typed::<T>()?,
        closure,
        reduce,
        current: (state.before + 1) % state.grads.len(),
        state,
        seen: [Seen::default(); SLOTS],
        measured: 0,
        d_max: (0, 0),
        along: false,
        iterations: 0,
        evaluations: 0,
        folds: 0,
        digest: digest_of(rule),
    };
    run.evaluate(run.current, true)?;
    let first = run.now();
    if !first.finite {
        return Err(LbfgsError::NotFinite { loss: first.loss, non_finite: first.bad_grads });
    }
    run.tell(&mut each);
    let mut stop = (first.grad_max <= rule.tolerance_grad).then_some(Stop::Gradient);
    while stop.is_none() {
        let before = run.iterations;
        stop = run.iterate()?;
        if run.iterations > before && run.state.before != run.current {
            run.tell(&mut each);
        }
    }
    let Seen { loss, norm, grad_max, .. } = run.now();
    Ok(LbfgsReport {
        first_loss: first.loss,
        loss,
        grad_norm: norm,
        grad_max,
        iterations: run.iterations,
        evaluations: run.evaluations,
        folds: run.folds,
        stop: stop.unwrap_or(Stop::Iterations),
    })
}

impl<T: Number, E, C: FnMut(Slice<'_>, SliceMut<'_>) -> Result<Loss, E>> Run<'_, T, C> {
    fn now(&self) -> Seen {
        self.seen[self.current]
    }

    fn tell(&self, each: &mut impl FnMut(&Iterate<'_>)) {
        let Seen { loss, norm, grad_max, .. } = self.now();
        each(&Iterate {
            iteration: self.iterations,
            evaluations: self.evaluations,
            loss,
            grad_norm: norm,
            grad_max,
            x: Slice::from(&*self.x),
        });
    }

    /// One iteration; why the step ends, if it does.
    fn iterate(&mut self) -> Result<Option<Stop>, LbfgsError<E>> {
        self.iterations += 1;
        self.state.iterations += 1;
        let (rule, before) = (self.rule, self.now());
        let slope = self.turn()?;
        let first = self.state.iterations == 1;
        let t = if first { (1.0f64).min(1.0 / before.magnitudes) * rule.lr } else { rule.lr };
        self.state.t = t;
        if slope > -rule.tolerance_change {
            return Ok(Some(Stop::Direction));
        }
        let walked = match rule.line_search {
            LineSearch::StrongWolfe => self.search(t, slope),
            LineSearch::None if self.iterations == rule.max_iter => self.walk(t).map(|()| true),
            LineSearch::None => self.fixed(t),
        };
        if !matches!(walked, Ok(true)) {
            self.retreat()?;
            return walked.map(|_| Some(Stop::NotFinite));
        }
        Ok(self.judge(&before))
    }

    /// PyTorch's reasons to stop, in its order.
    fn judge(&self, before: &Seen) -> Option<Stop> {
        let (rule, now) = (self.rule, self.now());
        let moved = self.state.t * f64::from_bits(self.d_max.1);
        match () {
            () if self.iterations == rule.max_iter => Some(Stop::Iterations),
            () if self.evaluations >= rule.evaluations() => Some(Stop::Evaluations),
            () if now.grad_max <= rule.tolerance_grad => Some(Stop::Gradient),
            () if moved <= rule.tolerance_change => Some(Stop::Parameters),
            () if (now.loss - before.loss).abs() < rule.tolerance_change => Some(Stop::Loss),
            () => None,
        }
    }

    /// Takes in the pair measured last, writes the next direction, and remembers where it begins. Returns `g . d`.
    fn turn(&mut self) -> Result<f64, LbfgsError<E>> {
        if self.measured == 0 && self.state.iterations > 1 {
            self.measure()?;
        }
        let LbfgsState { gram, fold, history, grads, d, start, .. } = &mut *self.state;
        if self.measured > 0 {
            (0..self.measured).for_each(|i| gram.measured(i, fold.products(i)));
            if fold.mine.bad_pairs == 0 {
                gram.accept();
            }
        }
        self.measured = 0;
        let slope = gram.solve(self.seen[self.current].squares);
        let used = 2 * gram.len();
        let row = |i: usize| {
            let row = gram.row(i);
            Ok((gram.coef(row), history[row].typed::<T>()?))
        };
        let g = grads[self.current].typed::<T>()?;
        combine(d.typed_mut::<T>()?, (gram.coef_of_g(), g), used, &row)?;
        start.typed_mut::<T>()?.copy_from_slice(self.x);
        self.state.before = self.current;
        self.d_max = (largest(&self.state.d)?, 0);
        self.along = true;
        Ok(slope)
    }

    /// `t d` from where the iteration began.
    fn walk(&mut self, t: f64) -> Result<(), LbfgsError<E>> {
        self.state.t = t;
        let (start, d) = (self.state.start.typed::<T>()?, self.state.d.typed::<T>()?);
        if t == 0.0 {
            self.x.copy_from_slice(start);
        } else {
            walk(self.x, start, t, d);
        }
        Ok(())
    }

    /// Back to where the iteration began, as if it had not.
    fn retreat(&mut self) -> Result<(), LbfgsError<E>> {
        self.walk(0.0)?;
        self.current = self.state.before;
        self.iterations -= 1;
        self.state.iterations -= 1;
        Ok(())
    }

    /// Goes `t` along the direction and evaluates, halving `t` until loss and gradient are finite. Whether they ever were.
    fn fixed(&mut self, mut t: f64) -> Result<bool, LbfgsError<E>> {
        let slot = (self.state.before + 1) % self.state.grads.len();
        for _ in 0..=HALVINGS {
            self.walk(t)?;
            self.evaluate(slot, true)?;
            self.current = slot;
            if self.now().finite {
                return Ok(true);
            }
            if self.evaluations >= self.rule.evaluations() {
                break;
            }
            t /= 2.0;
        }
        Ok(false)
    }

    /// Searches along the direction, first at `t`, and goes to the best point. Whether any trial was finite.
    fn search(&mut self, t: f64, slope: f64) -> Result<bool, LbfgsError<E>> {
        let start = Trial { at: Point { t: 0.0, f: self.now().loss, gtd: slope }, slot: self.current };
        let max_trials = self.rule.evaluations().saturating_sub(self.evaluations);
        let any_finite = std::cell::Cell::new(false);
        let eval = |run: &mut Self, t: f64, slot: usize| {
            run.walk(t)?;
            run.evaluate(slot, false)?;
            let Seen { loss, slope, finite, .. } = run.seen[slot];
            any_finite.set(any_finite.get() | finite);
            let (f, gtd) = if finite { (loss, slope) } else { (f64::INFINITY, 0.0) };
            Ok::<_, LbfgsError<E>>(Point { t, f, gtd })
        };
        let line = Line { start, t, max_trials };
        let found = strong_wolfe(self, line, eval, |run| f64::from_bits(run.d_max.1))?;
        self.walk(found.at.t)?;
        self.current = found.slot;
        Ok(any_finite.get())
    }

    /// Calls the closure at `x`, its gradient into `slot`, and tells the other shards; with everything about the history
    /// that the next direction needs, where `measure` asks and there is one. One exchange.
    fn evaluate(&mut self, slot: usize, measure: bool) -> Result<(), LbfgsError<E>> {
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
    fn measure(&mut self) -> Result<(), LbfgsError<E>> {
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

/// Bits of the largest magnitude; those of infinity where one is not finite.
fn largest(vector: &Buffer) -> Result<u64, crate::Error> {
    let mut norm = NormAccumulator::new(Norm::Inf);
    norm.add(vector.as_slice())?;
    Ok(if norm.non_finite() > 0 { f64::INFINITY.to_bits() } else { norm.max_bits() })
}

/// What must be the same on every shard before anything else is.
fn digest_of(rule: &Lbfgs) -> u64 {
    let counts = [rule.max_iter, rule.evaluations(), rule.history_len as u64, rule.line_search as u64];
    let scalars = [rule.lr, rule.tolerance_grad, rule.tolerance_change].map(f64::to_bits);
    counts.into_iter().chain(scalars).fold(0, mix)
}

/// Mixes one more word into a digest (a multiply and a rotation, as in FxHash: cheap, and order counts).
fn mix(so_far: u64, word: u64) -> u64 {
    (so_far.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
}
