//! Roles of the ranks that share parameters, and how their gradients are combined.

use crate::Error;
use meshstep_comm::{Communicator, Reduction};
use meshstep_optim::Strided;
use meshstep_tensor::{Layout, Param};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Elements of a whole tensor that a rank holds: consecutive ranges of its own elements, and the place of each in the tensor.
pub type Parts = Vec<(Range<usize>, Strided)>;

/// Ranks that share a set of parameters. On one group of ranks every role has all ranks; on a mesh each role may have another group.
#[derive(Clone)]
pub struct RankRoles {
    /// Ranks that divide the state: gradients are reduced over them, and updated parameters gathered from them.
    pub shards: Arc<dyn Communicator>,
    /// Further reductions of this rank's reduced gradient, in order: along an axis that replicates the state, or along one on
    /// which each rank has a part of every gradient.
    pub extra_reductions: Vec<(Arc<dyn Communicator>, Reduction)>,
    /// Ranks that hold the same parameters: the first one's initial values go to all of them.
    pub replicas: Arc<dyn Communicator>,
    /// True if the range this rank owns counts in the norm; among ranks that own the same range one counts.
    pub counts_in_norm: bool,
    /// Parameters that are cut, by name: the elements of the whole tensor that this rank holds, in order. Stochastic rounding is
    /// keyed by them, so that a cut does not change results; parameters without an entry are whole.
    pub parts: HashMap<String, Parts>,
    /// Ranks that hold cut tensors together, for a part with [cuts](crate::Part::with_cuts).
    pub tensors: Option<Arc<dyn Communicator>>,
}

impl RankRoles {
    /// Assigns all ranks of `comm` to every role.
    pub fn all(comm: Arc<dyn Communicator>) -> Self {
        RankRoles {
            shards: Arc::clone(&comm),
            extra_reductions: Vec::new(),
            replicas: comm,
            counts_in_norm: true,
            parts: HashMap::new(),
            tensors: None,
        }
    }

    /// Refuses parts that do not cover their parameter, each element once.
    pub(crate) fn check_parts(&self, layout: &Layout) -> Result<(), Error> {
        let joined = |param: &&Param| {
            let Some(parts) = self.parts.get(param.name()) else { return true };
            let mut end = 0;
            let mut follows = |part: &Range<usize>| std::mem::replace(&mut end, part.end) == part.start;
            let follow = parts.iter().all(|(part, by)| by.run > 0 && follows(part));
            follow && end == param.len()
        };
        let apart = layout.params().iter().find(|param| !joined(param));
        apart.map_or(Ok(()), |param| Err(Error::Parts { name: param.name().to_owned(), len: param.len() }))
    }

    /// Returns the communicators of all roles.
    pub(crate) fn comms(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        let extra_reductions = self.extra_reductions.iter().map(|(comm, _)| comm);
        [&self.shards, &self.replicas].into_iter().chain(extra_reductions).chain(&self.tensors)
    }
}

/// Adds `comm` unless it is in the list.
pub(crate) fn know(comms: &mut Vec<Arc<dyn Communicator>>, comm: &Arc<dyn Communicator>) {
    if !comms.iter().any(|known| Arc::ptr_eq(known, comm)) {
        comms.push(Arc::clone(comm));
    }
}

impl fmt::Debug for RankRoles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let extra_reductions: Vec<(usize, Reduction)> =
            self.extra_reductions.iter().map(|(comm, reduction)| (comm.world_size(), *reduction)).collect();
        f.debug_struct("Among")
            .field("shards", &self.shards.world_size())
            .field("further", &extra_reductions)
            .field("copies", &self.replicas.world_size())
            .field("counts", &self.counts_in_norm)
            .field("parts", &self.parts)
            .field("tensors", &self.tensors.as_ref().map(|comm| comm.world_size()))
            .finish()
    }
}
