//! L-BFGS over a closure, with PyTorch's meaning and defaults, on a vector or on shards of one.
//!
//! Every dot product is exact and every decision is taken from reduced values, so shards never part and the bits do not
//! depend on how the vector is cut. `driver.rs` is the algorithm, `measure.rs` what it asks of all shards, `gram.rs` its
//! direction, `line_search.rs` its step. None of them touches an element: `passes.rs` says what is done to vectors, `here.rs`
//! does it on the CPU, `there.rs` on a GPU.

mod cubic;
mod driver;
mod error;
mod fold;
mod gram;
mod here;
#[cfg(feature = "cuda")]
mod launches;
mod line_search;
mod measure;
mod passes;
mod report;
mod saving;
mod state;
#[cfg(feature = "cuda")]
mod there;
mod vectors;

use crate::check::Check;
use crate::{Error, Reduce};
use meshstep_tensor::{Slice, SliceMut};

pub use error::LbfgsError;
pub use report::{Iterate, LbfgsReport, Loss, Stop};
pub use state::LbfgsState;

/// Limited-memory BFGS with the semantics of `torch.optim.LBFGS`: Nocedal, *Updating quasi-Newton matrices with limited
/// storage* (1980), in the Gram form of Chen, Wang and Zhou, *Large-scale L-BFGS using MapReduce* (2014).
///
/// `d = -H g`, `x += t d`; `H` from the last `history_len` pairs `s = t d`, `y = g - g_before` with `y . s > 1e-10`, its
/// initial diagonal `y . s / y . y`. The first step is `min(1, 1 / sum |g|) lr d`.
///
/// It differs from PyTorch where that would go on with what is not finite: a first loss or gradient that is not finite is an
/// error, and a trial point where loss or gradient is not finite counts as infinitely high: the line search brackets it, a
/// fixed step is halved until both are finite, each time at the price of an evaluation. And a NaN `lr` is refused.
#[derive(Clone, Debug, PartialEq)]
pub struct Lbfgs {
    /// The step length that is taken, or tried first by a line search.
    pub lr: f64,
    /// Iterations of one [`step`](Lbfgs::step) at most.
    pub max_iter: u64,
    /// Evaluations of one step after which no iteration begins; `None`: `max_iter * 5 / 4`.
    pub max_eval: Option<u64>,
    /// A step ends where no gradient element is larger.
    pub tolerance_grad: f64,
    /// A step ends where neither the loss nor any parameter changes by more.
    pub tolerance_change: f64,
    /// Pairs `s`, `y` that are kept.
    pub history_len: usize,
    /// How far to go along a direction.
    pub line_search: LineSearch,
}

/// How far [`Lbfgs`] goes along a direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LineSearch {
    /// `lr`: one evaluation an iteration.
    #[default]
    None,
    /// Until the strong Wolfe conditions hold (decrease 1e-4, curvature 0.9): several evaluations.
    StrongWolfe,
}

impl Default for Lbfgs {
    fn default() -> Self {
        Lbfgs {
            lr: 1.0,
            max_iter: 20,
            max_eval: None,
            tolerance_grad: 1e-7,
            tolerance_change: 1e-9,
            history_len: 100,
            line_search: LineSearch::None,
        }
    }
}

/// The longest history: of more pairs than this the oldest say nothing of the curvature here.
const MAX_HISTORY: usize = 10_000;

impl Lbfgs {
    /// Whether the hyperparameters are in range.
    pub fn check(&self) -> Result<(), Error> {
        let check = Check { rule: "lbfgs" };
        check.at_least_zero("lr", self.lr)?;
        check.at_least_zero("tolerance_grad", self.tolerance_grad)?;
        check.at_least_zero("tolerance_change", self.tolerance_change)?;
        for (name, count) in [("max_iter", self.max_iter), ("max_eval", self.evaluations())] {
            check.range(name, count as f64, count > 0, "at least 1")?;
        }
        // A pair is two whole vectors, and the products of all pairs with all `y` are kept.
        let few = (1..=MAX_HISTORY).contains(&self.history_len);
        check.range("history_len", self.history_len as f64, few, "1 to 10000")
    }

    /// Hyperparameters by name, for ranks to compare and reports to print; a switch is 0 or 1.
    pub fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("lr", self.lr),
            ("max_iter", self.max_iter as f64),
            ("max_eval", self.evaluations() as f64),
            ("tolerance_grad", self.tolerance_grad),
            ("tolerance_change", self.tolerance_change),
            ("history_len", self.history_len as f64),
            ("strong_wolfe", f64::from(u8::from(self.line_search == LineSearch::StrongWolfe))),
        ]
    }

    /// Evaluations after which no iteration begins.
    pub(crate) fn evaluations(&self) -> u64 {
        self.max_eval.unwrap_or_else(|| self.max_iter.saturating_mul(5) / 4)
    }

    /// Up to `max_iter` iterations on `x`, this shard's part of the vector: f32 or f64, of any length, also 0.
    ///
    /// `closure(x, grad)` writes the gradient of this shard at `x` and returns the [`Loss`]. It is called equally often on
    /// every shard, at most `max_eval` times and what is left of the line search. With a fixed step every evaluation costs
    /// one [`fold`](Reduce::fold); with a line search every evaluation and every iteration do. A pair that is refused while the history is
    /// full costs one more, and a second pass over the history.
    ///
    /// Where the state is on a GPU ([`state_on`](Self::state_on)), so are `x` and what the closure is handed: it finds the point
    /// there in the queue's order, and leaves the gradient there in that order. The algorithm's decisions are the host's, so
    /// that it waits once for each fold, until what was measured has arrived. Iterates have the CPU's bits.
    ///
    /// An error leaves the last accepted point in `x`, so that another step can go on from there. An error of the closure
    /// comes back as [`LbfgsError::Closure`] on its own shard and as [`LbfgsError::Elsewhere`] on the others.
    pub fn step<E>(
        &self,
        x: SliceMut<'_>,
        closure: impl FnMut(Slice<'_>, SliceMut<'_>) -> Result<Loss, E>,
        reduce: &dyn Reduce,
        state: &mut LbfgsState,
    ) -> Result<LbfgsReport, LbfgsError<E>> {
        self.step_with(x, closure, reduce, state, |_| ())
    }

    /// [`step`](Self::step), telling `each` every iterate as it is accepted and evaluated.
    pub fn step_with<E>(
        &self,
        x: SliceMut<'_>,
        closure: impl FnMut(Slice<'_>, SliceMut<'_>) -> Result<Loss, E>,
        reduce: &dyn Reduce,
        state: &mut LbfgsState,
        each: impl FnMut(&Iterate<'_>),
    ) -> Result<LbfgsReport, LbfgsError<E>> {
        self.check()?;
        state.fits(self, x.as_slice())?;
        driver::run(self, x, closure, reduce, state, each)
    }
}
