//! L-BFGS over a closure, with PyTorch's meaning and defaults, on a vector or on shards of one.
//!
//! Every dot product is exact and every decision depends on reduced values only, so shards never diverge and the bits do not depend on
//! the cuts of the vector. `driver.rs` has the algorithm, `measure.rs` its measurements over all shards, `gram.rs` the direction,
//! `line_search.rs` the step length. None of them touches an element: `passes.rs` declares the operations on vectors, `here.rs`
//! implements them on the CPU, `rounded.rs` for a history of 16 bits, and `there.rs` on a GPU.

mod cubic;
mod driver;
mod error;
mod fold;
mod gram;
mod here;
mod history;
#[cfg(feature = "cuda")]
mod launches;
mod line_search;
mod measure;
mod passes;
mod report;
mod rounded;
mod saving;
mod state;
#[cfg(feature = "cuda")]
mod there;
mod vectors;

use crate::engine::check::Check;
use crate::{Error, Reduce};
use meshstep_tensor::{Slice, SliceMut};

pub use error::LbfgsError;
pub use history::History;
pub use report::{Iterate, LbfgsReport, Loss, Stop};
pub use state::LbfgsState;

/// Limited-memory BFGS with the semantics of `torch.optim.LBFGS`: Nocedal, *Updating quasi-Newton matrices with limited
/// storage* (1980), in the Gram form of Chen, Wang and Zhou, *Large-scale L-BFGS using MapReduce* (2014).
///
/// `d = -H g`, `x += t d`; `H` from the last `history_len` pairs `s = t d`, `y = g - g_before` with `y . s > 1e-10`, its
/// initial diagonal `y . s / y . y`. The first step is `min(1, 1 / sum |g|) lr d`.
///
/// Unlike PyTorch, it does not continue with values that are not finite. A first loss or gradient that is not finite is an error. A trial
/// point with a loss or gradient that is not finite counts as infinitely high: the line search brackets it, and a fixed step is halved
/// until both are finite, at the cost of one evaluation each time. A NaN `lr` is refused.
#[derive(Clone, Debug, PartialEq)]
pub struct Lbfgs {
    /// Step length, or the first trial of a line search.
    pub lr: f64,
    /// Maximum number of iterations of one [`step`](Lbfgs::step).
    pub max_iter: u64,
    /// Number of evaluations of one step after which no iteration begins; `None`: `max_iter * 5 / 4`.
    pub max_eval: Option<u64>,
    /// A step ends once no gradient element is larger.
    pub tolerance_grad: f64,
    /// A step ends once neither the loss nor any parameter changes by more.
    pub tolerance_change: f64,
    /// Number of pairs `s`, `y` kept.
    pub history_len: usize,
    /// Choice of the step length along a direction.
    pub line_search: LineSearch,
    /// Type in which the pairs are kept. 16 bits need vectors of f32 in CPU memory: [`state_on`](Lbfgs::state_on) returns
    /// [`Error::DType`] otherwise.
    pub history: History,
}

/// Choice of the step length of [`Lbfgs`] along a direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LineSearch {
    /// Step length `lr`: one evaluation for each iteration.
    #[default]
    None,
    /// Search until the strong Wolfe conditions hold (decrease 1e-4, curvature 0.9): several evaluations for each iteration.
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
            history: History::Exact,
        }
    }
}

/// Maximum history length: older pairs would carry no information about the local curvature.
const MAX_HISTORY: usize = 10_000;

impl Lbfgs {
    /// Checks that the hyperparameters are in range.
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

    /// Returns the hyperparameters by name, for comparison between ranks and for reports; a switch is 0 or 1. A history of 16 bits is a
    /// switch that an exact one lacks.
    pub fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        let history = match self.history {
            History::Exact => None,
            History::Bf16 => Some(("history_bf16", 1.0)),
            History::F16 => Some(("history_f16", 1.0)),
        };
        let all = [
            ("lr", self.lr),
            ("max_iter", self.max_iter as f64),
            ("max_eval", self.evaluations() as f64),
            ("tolerance_grad", self.tolerance_grad),
            ("tolerance_change", self.tolerance_change),
            ("history_len", self.history_len as f64),
            ("strong_wolfe", f64::from(u8::from(self.line_search == LineSearch::StrongWolfe))),
        ];
        all.into_iter().chain(history).collect()
    }

    /// Returns the number of evaluations after which no iteration begins.
    pub(crate) fn evaluations(&self) -> u64 {
        self.max_eval.unwrap_or_else(|| self.max_iter.saturating_mul(5) / 4)
    }

    /// Runs up to `max_iter` iterations on `x`, this shard's part of the vector: f32 or f64, of any length, including 0.
    ///
    /// `closure(x, grad)` writes the gradient of this shard at `x` and returns the [`Loss`]. Every shard calls it equally often, at most
    /// `max_eval` times plus the rest of the line search. With a fixed step every evaluation costs one [`fold`](Reduce::fold); with a
    /// line search every evaluation and every iteration cost one. A pair that is refused while the history is full costs one more, and a
    /// second pass over the history.
    ///
    /// If the state is on a GPU ([`state_on`](Self::state_on)), `x` and the arguments of the closure are there too, and the closure works
    /// in the queue's order. The host takes the algorithm's decisions, so it waits once for each fold, until the measured values have
    /// arrived. Iterates have the CPU's bits.
    ///
    /// An error leaves the last accepted point in `x`, so that another step can continue from there. An error of the closure is returned
    /// as [`LbfgsError::Closure`] on its own shard and as [`LbfgsError::Elsewhere`] on the others.
    pub fn step<E>(
        &self,
        x: SliceMut<'_>,
        closure: impl FnMut(Slice<'_>, SliceMut<'_>) -> Result<Loss, E>,
        reduce: &dyn Reduce,
        state: &mut LbfgsState,
    ) -> Result<LbfgsReport, LbfgsError<E>> {
        self.step_with(x, closure, reduce, state, |_| ())
    }

    /// Same as [`step`](Self::step), and calls `each` with every iterate once it is accepted and evaluated.
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
