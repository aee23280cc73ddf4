//! Ranks in workers: who steps together, and who exchanges with whom.

use crate::Error;
use meshstep_comm::Communicator;
use std::sync::Arc;

/// Who exchanges with whom.
#[derive(Clone, Debug)]
pub struct Workers {
    /// All ranks of all workers: they decide together. It is aborted where a worker is lost, with all that was split from it, so no
    /// worker's own communicator may be.
    pub world: Arc<dyn Communicator>,
    /// The ranks that have the same shard, one of each worker, in the workers' order: they exchange.
    pub across: Arc<dyn Communicator>,
}

impl Workers {
    /// The communicator of this rank's worker, and those between workers: ranks of one colour are a worker, and its ranks meet
    /// those with the same place in the others. Collective over `world`, which is aborted where a rank cannot. Workers are of equal size, which
    /// [`LocalOptimizer::new`](super::LocalOptimizer::new) checks.
    pub fn split(
        world: Arc<dyn Communicator>,
        worker: u32,
    ) -> Result<(Arc<dyn Communicator>, Workers), Error> {
        // Where one rank cannot, the others go on to their next split.
        let split = |comm: &Arc<dyn Communicator>, colour: u32, key: i64| {
            let split = comm.split(Some(colour), key);
            let split = split.inspect_err(|_| [&world, comm].into_iter().for_each(|comm| comm.abort()));
            split?.ok_or(Error::NoRanks)
        };
        let inside = split(&world, worker, 0)?;
        // One of its own, as `inside` is to outlive it.
        let all = split(&world, 0, 0)?;
        let across = split(&all, inside.rank() as u32, i64::from(worker))?;
        Ok((inside, Workers { world: all, across }))
    }
}
