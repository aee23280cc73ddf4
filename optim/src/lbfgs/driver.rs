//! One step of L-BFGS: evaluate, measure, find a direction, move, until a stopping rule applies. Every branch depends on reduced values
//! only.

use super::cubic::Point;
use super::fold::Scalar;
use super::line_search::{Line, Trial, strong_wolfe};
use super::passes::{Others, Rows};
use super::{Iterate, Lbfgs, LbfgsError, LbfgsReport, LbfgsState, LineSearch, Loss, Stop};
use crate::{Error, Reduce};
use meshstep_tensor::{Slice, SliceMut};

/// Maximum number of halvings of a fixed step.
const HALVINGS: u32 = 30;

/// Maximum number of gradients kept at once.
const SLOTS: usize = 4;

/// Step in progress.
pub(super) struct Run<'a, C> {
    pub(super) rule: &'a Lbfgs,
    pub(super) x: SliceMut<'a>,
    pub(super) closure: C,
    pub(super) reduce: &'a dyn Reduce,
    pub(super) state: &'a mut LbfgsState,
    /// Values of the point that belongs to each gradient slot.
    pub(super) seen: [Seen; SLOTS],
    /// Slot of the current point's gradient.
    pub(super) current: usize,
    /// Number of products measured with the current gradient.
    pub(super) measured: usize,
    /// Bits of the direction's largest magnitude over all shards.
    pub(super) d_max: u64,
    /// True if a direction exists, so that slopes along it can be measured.
    pub(super) along: bool,
    /// True if `x` has left the point at which the direction was computed.
    pub(super) left: bool,
    pub(super) iterations: u64,
    pub(super) evaluations: u64,
    pub(super) folds: u64,
    pub(super) digest: u64,
}

/// Reduced values of a point.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    pub(super) loss: f64,
    pub(super) slope: f64,
    pub(super) squares: f64,
    pub(super) norm: f64,
    pub(super) grad_max: f64,
    /// Bits of the largest change of a gradient element from the start of the iteration, if the history has scales.
    pub(super) y_max: u64,
    pub(super) magnitudes: f64,
    pub(super) bad_grads: u64,
    pub(super) finite: bool,
}

/// Runs one step of `rule`.
pub(super) fn run<E>(
    rule: &Lbfgs,
    x: SliceMut<'_>,
    closure: impl FnMut(Slice<'_>, SliceMut<'_>) -> Result<Loss, E>,
    reduce: &dyn Reduce,
    state: &mut LbfgsState,
    mut each: impl FnMut(&Iterate<'_>),
) -> Result<LbfgsReport, LbfgsError<E>> {
    let mut run = Run {
        rule,
        x,
        closure,
        reduce,
        current: (state.before + 1) % state.grads.len(),
        state,
        seen: [Seen::default(); SLOTS],
        measured: 0,
        d_max: 0,
        along: false,
        left: false,
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

impl<E, C: FnMut(Slice<'_>, SliceMut<'_>) -> Result<Loss, E>> Run<'_, C> {
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
            x: self.x.as_slice(),
        });
    }

    /// Runs one iteration; returns the reason if the step ends.
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

    /// Applies PyTorch's stopping rules, in its order.
    fn judge(&self, before: &Seen) -> Option<Stop> {
        let (rule, now) = (self.rule, self.now());
        let moved = self.state.t * f64::from_bits(self.d_max);
        match () {
            () if self.iterations == rule.max_iter => Some(Stop::Iterations),
            () if self.evaluations >= rule.evaluations() => Some(Stop::Evaluations),
            () if now.grad_max <= rule.tolerance_grad => Some(Stop::Gradient),
            () if moved <= rule.tolerance_change => Some(Stop::Parameters),
            () if (now.loss - before.loss).abs() < rule.tolerance_change => Some(Stop::Loss),
            () => None,
        }
    }

    /// Accepts or refuses the pair measured last and writes the next direction. Returns `g . d`.
    fn turn(&mut self) -> Result<f64, LbfgsError<E>> {
        if self.measured == 0 && self.state.iterations > 1 {
            self.measure(self.state.gram.leaving())?;
        }
        let refused = self.measured > 0 && !self.take_in();
        // Until the next direction is written, the next pair is empty and will be refused.
        (self.state.before, self.state.t) = (self.current, 0.0);
        if refused && self.state.gram.leaving() > 0 {
            // The pair that an accepted one would have pushed out stays, so measure it too.
            self.measure(0)?;
            let _nothing = self.take_in();
        }
        let LbfgsState { gram, d, ds, ys, grads, passes, .. } = &mut *self.state;
        let slope = gram.solve(self.seen[self.current].squares);
        let g = (gram.coef_of_g(), grads[self.current].as_slice());
        let (d, _, ds) = Others::of_direction(d, ds, gram.spare());
        let (_, ys) = Others::of(ys, gram.spare());
        passes.combine(d.as_mut(), g, &Rows { ds, ys, gram, without: 0 }).map_err(LbfgsError::Alone)?;
        self.d_max = 0;
        self.along = true;
        self.left = false;
        Ok(slope)
    }

    /// Takes over the measured products. Returns true if the pair is accepted.
    fn take_in(&mut self) -> bool {
        let scales = self.scales(self.current).map(f64::from);
        let LbfgsState { gram, fold, t, history, .. } = &mut *self.state;
        let products = fold.products(self.measured);
        if history.is_rounded() {
            let (with_g, with_y) = products.split_at(products.len() / 2);
            gram.measured_rounded([*t / scales[0], 1.0 / scales[1]], with_g, with_y);
        } else {
            let of_pair = [Scalar::Curvature, Scalar::NewSquares].map(|scalar| fold.scalar(scalar).to_f64());
            gram.measured(*t, of_pair, products);
        }
        self.measured = 0;
        fold.mine.bad_pairs == 0 && gram.accept()
    }

    /// Moves to `t d` from the start of the iteration.
    fn walk(&mut self, t: f64) -> Result<(), LbfgsError<E>> {
        self.state.t = t;
        let LbfgsState { start, d, ds, gram, passes, queue, .. } = &mut *self.state;
        let d = d.as_ref().unwrap_or(&ds[gram.spare()]);
        let x = self.x.reborrow();
        let walked = match (self.left, t == 0.0) {
            (false, true) => Ok(()),
            (false, false) => passes.leave(x, start.as_mut(), t, d.as_slice()),
            (true, true) => queue.copy(start.as_slice(), x).map_err(Error::from),
            (true, false) => passes.walk(x, start.as_slice(), t, d.as_slice()),
        };
        self.left |= walked.is_ok() && t != 0.0;
        walked.map_err(LbfgsError::Alone)
    }

    /// Returns to the start of the iteration and does not count it.
    fn retreat(&mut self) -> Result<(), LbfgsError<E>> {
        self.walk(0.0)?;
        self.current = self.state.before;
        self.iterations -= 1;
        self.state.iterations -= 1;
        Ok(())
    }

    /// Moves `t` along the direction and evaluates, halving `t` until loss and gradient are finite. Returns false if they never were.
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

    /// Searches along the direction, first at `t`, and moves to the best point. Returns true if any trial was finite.
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
        let found = strong_wolfe(self, line, eval, |run| f64::from_bits(run.d_max))?;
        self.walk(found.at.t)?;
        self.current = found.slot;
        Ok(any_finite.get())
    }
}

/// Returns the digest of the values that must be equal on every shard before a step.
fn digest_of(rule: &Lbfgs) -> u64 {
    let counts = [
        rule.max_iter,
        rule.evaluations(),
        rule.history_len as u64,
        rule.line_search as u64,
        rule.history as u64,
    ];
    let scalars = [rule.lr, rule.tolerance_grad, rule.tolerance_change].map(f64::to_bits);
    counts.into_iter().chain(scalars).fold(0, mix)
}

/// Mixes one more word into a digest (a multiply and a rotation, as in FxHash: cheap, and order counts).
pub(super) fn mix(so_far: u64, word: u64) -> u64 {
    (so_far.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
}
