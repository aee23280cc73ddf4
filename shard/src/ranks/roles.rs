//! Which ranks share parameters, and how their gradients become one.

use crate::Error;
use meshstep_comm::{Communicator, Reduction};
use meshstep_optim::Strided;
use meshstep_tensor::{Layout, Param};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Which elements of a whole tensor a rank holds: ranges of what it holds, one after another, and where those lie.
pub type Parts = Vec<(Range<usize>, Strided)>;

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
    /// Of parameters that are cut, by name: which elements of the whole tensor this rank holds, in their order. Stochastic
    /// rounding draws by them, so that a cut does not show; what is not named is whole.
    pub parts: HashMap<String, Parts>,
}

impl Among {
    /// All ranks of `comm`, for everything.
    pub fn all(comm: Arc<dyn Communicator>) -> Self {
        let (further, parts) = (Vec::new(), HashMap::new());
        Among { shards: Arc::clone(&comm), further, copies: comm, counts: true, parts }
    }

    /// Which elements of a whole tensor `param` has.
    pub(crate) fn parts_of(&self, param: &Param) -> Parts {
        match self.parts.get(param.name()) {
            Some(parts) => parts.clone(),
            None => vec![(0..param.len(), Strided::WHOLE)],
        }
    }

    /// Refuses parts that are not all of their parameter, each element once.
    pub(crate) fn check_parts(&self, layout: &Layout) -> Result<(), Error> {
        let joined = |param: &&Param| {
            let mut end = 0;
            let mut follows = |part: &Range<usize>| std::mem::replace(&mut end, part.end) == part.start;
            let follow = self.parts_of(param).iter().all(|(part, by)| by.run > 0 && follows(part));
            follow && end == param.len()
        };
        let apart = layout.params().iter().find(|param| !joined(param));
        apart.map_or(Ok(()), |param| Err(Error::Parts { name: param.name().to_owned(), len: param.len() }))
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
            .field("parts", &self.parts)
            .finish()
    }
}
