//! Reducer configuration: the ranks and every bucket's plan, constant while gradients come in.

use crate::config::options::{Combine, Options};
use crate::config::stage::Stage;
use crate::plan::bucket::BucketPlan;
use crate::plan::slot_tree::SlotTree;
use crate::ranks::data_rank::DataRank;
use crate::ranks::roles::{RankRoles, know};
use crate::reduce::chunk_norm::ChunkNorm;
use meshstep_comm::{Communicator, InFlight, Op, Reduction};
use meshstep_tensor::{Buffer, Queue};
use std::ops::Range;
use std::sync::Arc;

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
    /// Queue of the options.
    pub(crate) queue: Queue,
    pub(crate) options: Options,
    /// Sums over slots, if the step has slots.
    pub(crate) slots: Option<SlotTree>,
    pub(crate) buckets: Vec<BucketInfo>,
}

impl ReducerConfig {
    /// Returns the configuration of a reducer without buckets.
    pub(crate) fn new(comm: Arc<dyn Communicator>, place: DataRank, options: Options) -> Self {
        ReducerConfig {
            comms: vec![Arc::clone(&comm)],
            gathers: Vec::new(),
            comm,
            decision_comm: None,
            place,
            queue: options.queue.clone(),
            slots: options.slots.clone().map(|runs| SlotTree::new(runs, options.combine)),
            options,
            buckets: Vec::new(),
        }
    }

    /// Returns the communicator for words that all ranks exchange: the one for decisions if there is one.
    pub(crate) fn words(&self) -> &Arc<dyn Communicator> {
        self.decision_comm.as_ref().unwrap_or(&self.comm)
    }

    /// Returns the reduction of gradients over the ranks.
    pub(crate) fn reduction(&self) -> Reduction {
        match self.options.combine {
            _ if self.slots.is_some() => Reduction::Pairwise,
            Combine::Sum | Combine::Weighted => Reduction::Sum,
            Combine::Mean => Reduction::Mean,
        }
    }

    /// Returns true if chunks of sums over slots are exchanged and added here: their tree is not pairwise over the ranks, or the backend
    /// has no such reduction. The same on every rank.
    pub(crate) fn adds_up(&self) -> bool {
        self.slots.as_ref().is_some_and(|tree| !(tree.is_pairwise() && self.comm.reduces_pairwise()))
    }

    /// Returns true if a reduction leaves the sums of a whole bucket on each rank, and not of its chunk alone.
    pub(crate) fn reduces_whole(&self) -> bool {
        match self.options.stage {
            Stage::Replicated => !self.adds_up(),
            Stage::WholeParams(_) => true,
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 => false,
        }
    }

    /// Returns the operation that reduces a bucket.
    pub(crate) fn op(&self) -> Op {
        match self.options.stage {
            _ if self.adds_up() => Op::all_to_all(),
            Stage::Replicated | Stage::WholeParams(_) => Op::all_reduce(self.reduction()),
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 => Op::reduce_scatter(self.reduction()),
        }
    }

    /// Returns each communicator once that a step or a gather uses before that of all ranks, and that of all ranks first.
    pub(crate) fn all_in_order(&self) -> Vec<Arc<dyn Communicator>> {
        let mut all = vec![Arc::clone(&self.comm)];
        self.decision_comm.iter().for_each(|comm| know(&mut all, comm));
        for kept in &self.buckets {
            let extra_reductions = kept.among.extra_reductions.iter().map(|(comm, _)| comm);
            for comm in [&kept.among.shards].into_iter().chain(extra_reductions).chain(kept.gathers.iter()) {
                know(&mut all, comm);
            }
        }
        all
    }
}

/// A bucket's plan, and the roles of ranks in it.
#[derive(Debug)]
pub(crate) struct BucketInfo {
    pub(crate) plan: BucketPlan,
    /// Names of the parameters, for errors.
    pub(crate) names: Vec<Arc<str>>,
    /// Ranks that share the bucket.
    pub(crate) among: Arc<RankRoles>,
    /// Ranges of the bucket that this rank updates.
    pub(crate) owned: Vec<Range<usize>>,
    /// Ranges that this rank adds to the norm, or only checks for non-finite values if another rank adds the same.
    pub(crate) counted: Vec<Range<usize>>,
    /// Observer that takes the norm of these ranges while they are reduced, if it is complete then.
    pub(crate) chunk_norm: Option<Arc<ChunkNorm>>,
    /// True if the ranks can reduce, update and gather the bucket in one pass over memory; the same on every rank.
    pub(crate) one_pass: bool,
    /// Ranges that travel to all ranks after the update, and their owners.
    pub(crate) gathered: Vec<(usize, Range<usize>)>,
    /// Communicator that gathers the parameters, if they are sharded.
    pub(crate) gathers: Option<Arc<dyn Communicator>>,
    /// Series that provides the bucket's memory, at stages 2 and 3.
    pub(crate) series: usize,
}

impl BucketInfo {
    /// Starts a reduction of the bucket among the ranks that share it, the `last` of the step or an earlier one.
    pub(crate) fn start(
        &self,
        op: Op,
        whole: Buffer,
        queue: &Queue,
        last: bool,
    ) -> Result<InFlight, (Buffer, meshstep_comm::Error)> {
        match &self.chunk_norm {
            Some(norm) if last => {
                norm.reset();
                self.among.shards.start_observed(op, whole, queue, Arc::clone(norm) as _)
            }
            _ => self.among.shards.start(op, whole, queue),
        }
    }
}
