//! Which ranks share parameters, and how their gradients become one.

use meshstep_comm::{Communicator, Reduction};
use std::fmt;
use std::sync::Arc;

/// The ranks that some parameters are shared among. On one group of ranks that is all of them, for everything; on a mesh
/// each role may be another group's.
#[derive(Clone)]
pub struct Among {
    /// They divide the state: gradients are reduced over them, updated parameters gathered from them.
    pub shards: Arc<dyn Communicator>,
    /// What a rank has of the reduced gradient is reduced over each of these in turn: along an axis on which state is replicated,
    /// or on which each rank has a part of every gradient.
    pub further: Vec<(Arc<dyn Communicator>, Reduction)>,
    /// They hold the same parameters: all get the first one's first values.
    pub copies: Arc<dyn Communicator>,
    /// Whether what this rank owns counts in the norm: where other ranks own the same, one of them does.
    pub counts: bool,
}

impl Among {
    /// All ranks of `comm`, for everything.
    pub fn all(comm: Arc<dyn Communicator>) -> Self {
        Among { shards: Arc::clone(&comm), further: Vec::new(), copies: comm, counts: true }
    }

    /// Every communicator of these.
    pub(crate) fn comms(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        [&self.shards, &self.copies].into_iter().chain(self.further.iter().map(|(comm, _)| comm))
    }
}

/// Adds `comm` unless it is known.
pub(crate) fn know(comms: &mut Vec<Arc<dyn Communicator>>, comm: &Arc<dyn Communicator>) {
    if !comms.iter().any(|known| Arc::ptr_eq(known, comm)) {
        comms.push(Arc::clone(comm));
    }
}

impl fmt::Debug for Among {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let further: Vec<(usize, Reduction)> =
            self.further.iter().map(|(comm, reduction)| (comm.world_size(), *reduction)).collect();
        f.debug_struct("Among")
            .field("shards", &self.shards.world_size())
            .field("further", &further)
            .field("copies", &self.copies.world_size())
            .field("counts", &self.counts)
            .finish()
    }
}
