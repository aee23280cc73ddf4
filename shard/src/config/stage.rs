//! Sharding stages, and the rule that assigns whole parameters to owners.

/// Rule that assigns whole parameters to owners.
///
/// ```
/// use meshstep_shard::Owners;
///
/// assert_eq!(Owners::SortedGreedy.assign(&[10, 60, 30, 20], 2), [1, 0, 1, 1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owners {
    /// Parameter `i` belongs to rank `i` modulo the world size.
    RoundRobin,
    /// Largest first, each to the rank with the fewest elements so far (the lowest such rank): the rule of PyTorch's
    /// `ZeroRedundancyOptimizer`.
    SortedGreedy,
}

/// Sharding stage: the data that is divided among the ranks.
///
/// | stage | parameters | gradients | state | sent per step and rank, parameters P, ranks n |
/// |---|---|---|---|---|
/// | `Replicated` | all | all | all | all-reduce: 2(n-1)/n P |
/// | `Zero1` | all | all | 1/n | reduce-scatter + all-gather: 2(n-1)/n P |
/// | `Zero2` | all | 1/n, and two buckets of each part and type | 1/n | the same; (k+1)(n-1)/n P with k micro-batches |
/// | `Zero3` | 1/n, and two units | as `Zero2` | 1/n | two all-gathers + reduce-scatter for each of k micro-batches: 3k(n-1)/n P |
/// | `WholeParams` | all | all | by whole parameters | all-reduce + broadcasts: 2(n-1)/n P + at most P |
///
/// Stages 0 to 3 are those of Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (2020).
/// On the loopback backend all of them end with the same bits if a step has one micro-batch. With several micro-batches, stages 2
/// and 3 round after each reduction and the others once, so that they agree only where sums and means are exact.
///
/// Rules that see whole matrices add to `Zero3` about 2/n of the matrices' bytes per step and rank ([`MatrixExchange`](crate::MatrixExchange)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Stage {
    /// Stage 0: nothing is divided; all ranks update all parameters.
    Replicated,
    /// Optimizer state is sharded.
    #[default]
    Zero1,
    /// Optimizer state and gradients are sharded; the memory of a bucket of gradients is reused once it is reduced. No parameter is
    /// cut by a bucket's end, so a model with one parameter of about half its elements, or on 1 or 2 ranks, can take more memory than at
    /// stage 1; [`Plan::memory`](crate::Plan::memory) gives both.
    Zero2,
    /// Parameters are sharded too, as in ZeRO-3 and FSDP: a reader gathers their unit
    /// ([`Optimizer::gather`](crate::Optimizer::gather)) and drops it afterwards; a step gathers nothing. Every rank holds the
    /// frozen parameters.
    Zero3,
    /// The classic sharded optimizer: each parameter has one owner, which updates and broadcasts it.
    WholeParams(Owners),
}

impl Stage {
    /// Returns true if each rank updates its chunk of every bucket, even where that cuts parameters.
    pub(crate) fn cuts_state(self) -> bool {
        matches!(self, Stage::Zero1) || self.cuts_grads()
    }

    /// Returns true if a rank keeps only its chunks of the reduced gradients.
    pub(crate) fn cuts_grads(self) -> bool {
        matches!(self, Stage::Zero2) || self.cuts_params()
    }

    /// Returns true if a rank keeps only its chunks of the parameters.
    pub fn cuts_params(self) -> bool {
        matches!(self, Stage::Zero3)
    }
}
