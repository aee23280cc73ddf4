//! State of L-BFGS between steps, and its memory.

use super::fold::Fold;
use super::gram::Gram;
use super::here::Here;
use super::passes::Passes;
use super::rounded::RoundedHere;
use super::{History, Lbfgs, LineSearch};
use crate::Error;
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, Slice, bf16, f16};
use std::ops::Range;

/// History and progress of [`Lbfgs`] on one vector, or one shard of it.
///
/// Memory: `2 (history_len + 1) + 3` vectors, two more with a line search, and `6 (history_len + 1)` exact sums of about a kilobyte each.
/// A GPU holds `2 (history_len + 1)` more sums. A [`History`] of 16 bits has `2 (history_len + 1)` vectors of half the bytes, one more
/// vector in f32, and `10 (history_len + 1)` sums.
#[derive(Debug)]
pub struct LbfgsState {
    pub(super) len: usize,
    pub(super) dtype: DType,
    pub(super) queue: Queue,
    pub(super) passes: Box<dyn Passes>,
    pub(super) history: History,
    /// Direction of the last iteration, if the history is rounded.
    pub(super) d: Option<Buffer>,
    /// Direction of every slot, of which its `s` is a multiple. In an exact history the spare slot holds that of the last iteration.
    pub(super) ds: Vec<Buffer>,
    /// `y` of every slot.
    pub(super) ys: Vec<Buffer>,
    /// Value of `x` before an iteration moved it.
    pub(super) start: Buffer,
    /// Gradients of `start` and of the points tried.
    pub(super) grads: Vec<Buffer>,
    /// Index of the gradient of `start`.
    pub(super) before: usize,
    /// Step length of the last iteration along `d`.
    pub(super) t: f64,
    pub(super) gram: Gram,
    pub(super) fold: Fold,
    pub(super) iterations: u64,
    pub(super) evaluations: u64,
    history_len: usize,
}

impl Lbfgs {
    /// Creates the state of a new run on `len` elements of f32 or f64 in CPU memory, counted by `meter`.
    pub fn state(&self, len: usize, dtype: DType, meter: &Meter) -> Result<LbfgsState, Error> {
        self.state_on(len, dtype, &Queue::cpu(), meter)
    }

    /// Same as [`state`](Self::state), at the place of `queue`, the CPU or a GPU. [`step`](Self::step)s with this state work in the
    /// queue's order.
    pub fn state_on(
        &self,
        len: usize,
        dtype: DType,
        queue: &Queue,
        meter: &Meter,
    ) -> Result<LbfgsState, Error> {
        self.check()?;
        if !matches!(dtype, DType::F32 | DType::F64) {
            return Err(Error::DType { what: "params", given: dtype, works: "f32 or f64" });
        }
        let rows = self.history.row_type(dtype)?;
        let rounded = self.history.is_rounded();
        if rounded && queue.place() != Place::Cpu {
            let (what, works) =
                ("the history of L-BFGS on a GPU", "History::Exact there, or a queue of the CPU");
            return Err(Error::DType { what, given: rows, works });
        }
        let of = |dtype| Buffer::zeroed_on(queue, len, dtype, meter, Category::State);
        let vectors = |count, dtype| (0..count).map(|_| of(dtype)).collect::<Result<Vec<_>, _>>();
        Ok(LbfgsState {
            len,
            dtype,
            queue: queue.clone(),
            passes: passes(self, len, dtype, queue, meter)?,
            history: self.history,
            d: rounded.then(|| of(dtype)).transpose()?,
            ds: vectors(self.history_len + 1, rows)?,
            ys: vectors(self.history_len + 1, rows)?,
            start: of(dtype)?,
            grads: vectors(self.gradients(), dtype)?,
            before: 0,
            t: 0.0,
            gram: if rounded { Gram::rounded(self.history_len) } else { Gram::new(self.history_len) },
            fold: Fold::new(self.history_len, self.history, dtype),
            iterations: 0,
            evaluations: 0,
            history_len: self.history_len,
        })
    }

    /// Returns the number of gradients kept at once: of the iteration's start, the point tried, and a bracket's ends.
    fn gradients(&self) -> usize {
        match self.line_search {
            LineSearch::None => 2,
            LineSearch::StrongWolfe => 4,
        }
    }
}

/// Creates the passes for the queue's place.
fn passes(
    rule: &Lbfgs,
    len: usize,
    dtype: DType,
    queue: &Queue,
    meter: &Meter,
) -> Result<Box<dyn Passes>, Error> {
    #[cfg(feature = "cuda")]
    if let Some(stream) = queue.stream() {
        let there = super::there::There::new(rule.history_len, (len, dtype), stream, meter)?;
        return Ok(Box::new(there));
    }
    let _ = meter;
    let (threads, history_len) = (queue.threads(), rule.history_len);
    Ok(match (rule.history, dtype) {
        (History::Bf16, _) => Box::new(RoundedHere::<bf16>::new(history_len, len, threads)),
        (History::F16, _) => Box::new(RoundedHere::<f16>::new(history_len, len, threads)),
        (History::Exact, DType::F32) => Box::new(Here::<f32>::new(history_len, len, threads)),
        _ => Box::new(Here::<f64>::new(history_len, len, threads)),
    })
}

impl LbfgsState {
    /// Limits the sums over shards to the elements of `ranges`. If shards overlap, exactly one of them counts each element.
    ///
    /// # Panics
    /// If a range ends after the vector does.
    #[must_use]
    pub fn counting(mut self, ranges: Vec<Range<usize>>) -> Self {
        assert!(ranges.iter().all(|r| r.start <= r.end && r.end <= self.len), "ranges lie within the vector");
        self.passes.count(ranges);
        self
    }

    /// Returns the number of iterations of all steps.
    pub fn iterations(&self) -> u64 {
        self.iterations
    }

    /// Returns the number of evaluations of all steps.
    pub fn evaluations(&self) -> u64 {
        self.evaluations
    }

    /// Returns the maximum number of words of a step's [`fold`](crate::Reduce::fold), sums and maxima, for allocating buffers.
    pub fn fold_words(&self) -> (usize, usize) {
        self.fold.most_words()
    }

    /// Returns the type of the history.
    pub fn history(&self) -> History {
        self.history
    }

    /// Returns the number of pairs in the history.
    pub fn pairs(&self) -> usize {
        self.gram.len()
    }

    /// Resets the state to that of a new run, keeping its memory.
    pub fn reset(&mut self) {
        self.gram = self.gram.like();
        (self.iterations, self.evaluations, self.t) = (0, 0, 0.0);
    }

    /// Checks that the state belongs to this rule and this vector.
    pub(super) fn fits(&self, rule: &Lbfgs, x: Slice<'_>) -> Result<(), Error> {
        x.place().check(self.queue.place())?;
        if x.dtype() != self.dtype {
            return Err(Error::DType { what: "params", given: x.dtype(), works: "the type of the state" });
        }
        if x.len() != self.len {
            return Err(Error::Len { what: "params", given: x.len(), expected: self.len });
        }
        if rule.history_len != self.history_len {
            let (given, expected) = (rule.history_len, self.history_len);
            return Err(Error::Len { what: "the history", given, expected });
        }
        if rule.history != self.history {
            return Err(Error::History { given: rule.history, expected: self.history });
        }
        if self.grads.len() < rule.gradients() {
            let (given, expected) = (self.grads.len(), rule.gradients());
            return Err(Error::Len { what: "a state created without a line search", given, expected });
        }
        Ok(())
    }
}
