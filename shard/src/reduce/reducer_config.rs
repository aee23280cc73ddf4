//! Reducer configuration: the ranks and every bucket's plan, constant while gradients come in.

use crate::plan::bucket::BucketPlan;
use crate::{DataRank, RankRoles, Stage};
use meshstep_comm::{Communicator, Reduction};
use meshstep_optim::Norm;
use meshstep_tensor::Queue;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Configuration that does not change while gradients come in.
#[derive(Debug)]
pub(crate) struct ReducerConfig {
    /// Communicator of all ranks, which decide together.
    pub(crate) comm: Arc<dyn Communicator>,
    /// Communicator for decisions that must not wait for the buckets in flight.
    pub(crate) decision_comm: Option<Arc<dyn Communicator>>,
    /// All communicators, each once: for all ranks, for decisions, and for the groups that share parameters.
    pub(crate) comms: Vec<Arc<dyn Communicator>>,
    /// Communicators that gather sharded parameters.
    pub(crate) gathers: Vec<Arc<dyn Communicator>>,
    /// Data place of this rank.
    pub(crate) place: DataRank,
    pub(crate) queue: Queue,
    pub(crate) stage: Stage,
    pub(crate) reduction: Reduction,
    pub(crate) overlap: bool,
    /// Wait budget of a gradient for the other ranks'.
    pub(crate) wait_budget: Duration,
    pub(crate) norm: Norm,
    pub(crate) buckets: Vec<BucketInfo>,
}

impl ReducerConfig {
    /// Returns the communicator for words that all ranks exchange: the one for decisions if there is one.
    pub(crate) fn words(&self) -> &Arc<dyn Communicator> {
        self.decision_comm.as_ref().unwrap_or(&self.comm)
    }
}

/// A bucket's plan, and the roles of ranks in it.
#[derive(Debug)]
pub(crate) struct BucketInfo {
    pub(crate) plan: BucketPlan,
    /// Names of the parameters, for errors.
    pub(crate) names: Vec<String>,
    /// Ranks that share the bucket.
    pub(crate) among: Arc<RankRoles>,
    /// Ranges of the bucket that this rank updates.
    pub(crate) owned: Vec<Range<usize>>,
    /// Ranges that this rank adds to the norm, or only checks for non-finite values if another rank adds the same.
    pub(crate) counted: Vec<Range<usize>>,
    /// Ranges that travel to all ranks after the update, and their owners.
    pub(crate) gathered: Vec<(usize, Range<usize>)>,
    /// Communicator that gathers the parameters, if they are sharded.
    pub(crate) gathers: Option<Arc<dyn Communicator>>,
    /// Series that provides the bucket's memory, at stages 2 and 3.
    pub(crate) series: usize,
}
