//! Errors of slots.

use crate::config::stage::Stage;
use meshstep_tensor::DType;
use std::ops::Range;

/// Error in the division of a step into slots, or in their order ([`SlotRuns`](crate::SlotRuns)).
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// A rank would compute no slot, or there is no rank.
    #[error(
        "{slots} slots for {ranks} ranks: each rank computes at least one; use at least as many slots as ranks"
    )]
    TooFew {
        /// Slots of a step.
        slots: usize,
        /// Ranks that divide them.
        ranks: usize,
    },
    /// There are more slots than can be counted.
    #[error("a step of {slots} slots; at most {max} can be counted: let a slot have more samples")]
    TooMany {
        /// Slots of a step.
        slots: usize,
        /// Maximum number.
        max: usize,
    },
    /// The slots are divided among another number of ranks than the gradients.
    #[error(
        "slots are divided among {runs} ranks, and {ranks} ranks reduce gradients; pass one run for each of them"
    )]
    Ranks {
        /// Ranks that the slots are divided among.
        runs: usize,
        /// Ranks that reduce gradients together.
        ranks: usize,
    },
    /// Steps with slots would depend on the number of ranks with an option or a group of ranks.
    #[error("{what} would make steps with slots depend on the number of ranks; use {works}")]
    Dependent {
        /// The option or the groups.
        what: &'static str,
        /// An alternative that works.
        works: &'static str,
    },
    /// Gradients of slots are added before the step.
    #[error("sums over slots are reduced as buckets fill; set Options::reduce_in_step to false")]
    InStep,
    /// The stage assigns whole parameters to ranks.
    #[error("{stage:?} does not sum over slots; use Replicated, Zero1, Zero2 or Zero3")]
    Stage {
        /// The stage.
        stage: Stage,
    },
    /// Sums would be rounded to 16 bits at each node of the tree.
    #[error("gradients of {dtype} would round each sum of slots to 16 bits; set Options::grads to f32")]
    Narrow {
        /// Type of the gradients.
        dtype: DType,
    },
    /// A rank begins another micro-batch than its next slot. Nothing has changed.
    #[error(
        "micro-batch {} of a run of {} slots (slots {run:?} of the step) began as {}; begin the last one with \
         Optimizer::micro_batch and those before it with Optimizer::accumulate",
        made + 1, run.len(), if *last { "the step's last" } else { "one before the last" }
    )]
    Order {
        /// Slots of this rank.
        run: Range<usize>,
        /// Micro-batches of this step before it.
        made: u64,
        /// True if it began as the step's last.
        last: bool,
    },
}

meshstep_tensor::debug_is_display!(SlotError);
