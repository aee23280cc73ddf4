//! What L-BFGS remembers from step to step, and the memory it needs.

use super::fold::Fold;
use super::gram::Gram;
use super::here::Here;
use super::passes::Passes;
use super::{Lbfgs, LineSearch};
use crate::Error;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice};
use std::ops::Range;

/// History and progress of [`Lbfgs`] on one vector, or one shard of it.
///
/// Memory: `2 (history_len + 1) + 3` vectors, two more with a line search. And `6 (history_len + 1)` exact sums of
/// about a kilobyte each; on a GPU `2 (history_len + 1)` more there.
#[derive(Debug)]
pub struct LbfgsState {
    pub(super) len: usize,
    pub(super) dtype: DType,
    pub(super) queue: Queue,
    pub(super) passes: Box<dyn Passes>,
    /// The direction of every slot, of which its `s` is a multiple; in the spare one that of the last iteration.
    pub(super) ds: Vec<Buffer>,
    /// `y` of every slot.
    pub(super) ys: Vec<Buffer>,
    /// Where `x` was before an iteration moved it.
    pub(super) start: Buffer,
    /// Gradients: of `start`, and of the points tried.
    pub(super) grads: Vec<Buffer>,
    /// Which of them is that of `start`.
    pub(super) before: usize,
    /// How far along `d` the last iteration went.
    pub(super) t: f64,
    pub(super) gram: Gram,
    pub(super) fold: Fold,
    pub(super) iterations: u64,
    pub(super) evaluations: u64,
    history_len: usize,
}

impl Lbfgs {
    /// The state of a fresh run on `len` elements of f32 or f64 in memory of the CPU, counted by `meter`.
    pub fn state(&self, len: usize, dtype: DType, meter: &Meter) -> Result<LbfgsState, Error> {
        self.state_on(len, dtype, &Queue::cpu(), meter)
    }

    /// The same where `queue` works, on the CPU or a GPU: [`step`](Self::step)s from this state work in its order.
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
        let vector = || Buffer::zeroed_on(queue, len, dtype, meter, Category::State);
        let vectors = |count| (0..count).map(|_| vector()).collect::<Result<Vec<_>, _>>();
        Ok(LbfgsState {
            len,
            dtype,
            queue: queue.clone(),
            passes: passes(self.history_len, len, dtype, queue, meter)?,
            ds: vectors(self.history_len + 1)?,
            ys: vectors(self.history_len + 1)?,
            start: vector()?,
            grads: vectors(self.gradients())?,
            before: 0,
            t: 0.0,
            gram: Gram::new(self.history_len),
            fold: Fold::new(self.history_len, dtype),
            iterations: 0,
            evaluations: 0,
            history_len: self.history_len,
        })
    }

    /// Gradients kept at once: where an iteration began, the point tried, and a bracket's ends.
    fn gradients(&self) -> usize {
        match self.line_search {
            LineSearch::None => 2,
            LineSearch::StrongWolfe => 4,
        }
    }
}

/// The passes over vectors at the queue's place.
fn passes(
    history_len: usize,
    len: usize,
    dtype: DType,
    queue: &Queue,
    meter: &Meter,
) -> Result<Box<dyn Passes>, Error> {
    #[cfg(feature = "cuda")]
    if let Some(stream) = queue.stream() {
        let there = super::there::There::new(history_len, (len, dtype), stream, meter)?;
        return Ok(Box::new(there));
    }
    let _ = (queue, meter);
    Ok(match dtype {
        DType::F32 => Box::new(Here::<f32>::new(history_len, len)),
        _ => Box::new(Here::<f64>::new(history_len, len)),
    })
}

impl LbfgsState {
    /// The same, adding only the elements of `ranges` to what shards sum up: those that no other shard counts, where shards
    /// overlap.
    ///
    /// # Panics
    /// If a range ends after the vector does.
    #[must_use]
    pub fn counting(mut self, ranges: Vec<Range<usize>>) -> Self {
        assert!(ranges.iter().all(|r| r.start <= r.end && r.end <= self.len), "ranges lie within the vector");
        self.passes.count(ranges);
        self
    }

    /// Iterations of all steps.
    pub fn iterations(&self) -> u64 {
        self.iterations
    }

    /// Evaluations of all steps.
    pub fn evaluations(&self) -> u64 {
        self.evaluations
    }

    /// The most words a step's [`fold`](crate::Reduce::fold) can have, sums and maxima: for whoever keeps room for them.
    pub fn fold_words(&self) -> (usize, usize) {
        self.fold.most_words()
    }

    /// Pairs in the history.
    pub fn pairs(&self) -> usize {
        self.gram.len()
    }

    /// Forgets everything but its memory.
    pub fn reset(&mut self) {
        self.gram = Gram::new(self.history_len);
        (self.iterations, self.evaluations, self.t) = (0, 0, 0.0);
    }

    /// Whether this is the state of such a rule on such a vector.
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
        if self.grads.len() < rule.gradients() {
            let (given, expected) = (self.grads.len(), rule.gradients());
            return Err(Error::Len { what: "a state made without a line search", given, expected });
        }
        Ok(())
    }
}
