//! What stays while gradients come in: the ranks, and every bucket's plan.

use crate::plan::bucket::BucketPlan;
use crate::{Among, DataPlace, Stage};
use meshstep_comm::{Communicator, Reduction};
use meshstep_optim::Norm;
use meshstep_tensor::Queue;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What does not change while gradients come in.
#[derive(Debug)]
pub(crate) struct Fixed {
    /// All ranks: they decide together.
    pub(crate) comm: Arc<dyn Communicator>,
    /// What decides a step goes this way, where it is not to wait for the buckets on their way.
    pub(crate) aside: Option<Arc<dyn Communicator>>,
    /// Theirs, that for decisions, and those that parameters are shared among, each once.
    pub(crate) comms: Vec<Arc<dyn Communicator>>,
    /// Those that sharded parameters are gathered with.
    pub(crate) gathers: Vec<Arc<dyn Communicator>>,
    /// Whose micro-batches this rank computes.
    pub(crate) place: DataPlace,
    pub(crate) queue: Queue,
    pub(crate) stage: Stage,
    pub(crate) reduction: Reduction,
    pub(crate) overlap: bool,
    /// How long a gradient waits for the other ranks'.
    pub(crate) patience: Duration,
    pub(crate) norm: Norm,
    pub(crate) buckets: Vec<Kept>,
}

impl Fixed {
    /// Every rank's words, in an order of their own where there is one.
    pub(crate) fn words(&self) -> &Arc<dyn Communicator> {
        self.aside.as_ref().unwrap_or(&self.comm)
    }
}

/// A bucket's plan, and what of it this rank adds to the norm.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) plan: BucketPlan,
    /// The parameters' names, for errors.
    pub(crate) names: Vec<String>,
    /// The ranks it is shared among.
    pub(crate) among: Arc<Among>,
    /// What this rank updates.
    pub(crate) owned: Vec<Range<usize>>,
    /// What of it this rank adds to the norm, or only watches where another adds the same.
    pub(crate) counted: Vec<Range<usize>>,
    /// What travels to everyone after the update, and from whom.
    pub(crate) gathered: Vec<(usize, Range<usize>)>,
    /// What its parameters are gathered with, where they are sharded.
    pub(crate) gathers: Option<Arc<dyn Communicator>>,
    /// The series whose memory it fills in, at stages 2 and 3.
    pub(crate) series: usize,
}
