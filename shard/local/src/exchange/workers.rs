//! Communicators of a worker: the ranks that step together, and the ranks that exchange with each other.

use meshstep_comm::Communicator;
use meshstep_shard::Error;
use std::sync::Arc;

/// Communicators between workers.
#[derive(Clone, Debug)]
pub struct Workers {
    /// Communicator of the ranks of all workers, which decide together. It is aborted, with all communicators split from it, if a
    /// worker is lost, so no worker's own communicator may be split from it.
    pub world: Arc<dyn Communicator>,
    /// The ranks with the same shard, one of each worker, in the workers' order; they exchange values.
    pub across: Arc<dyn Communicator>,
}

impl Workers {
    /// Splits `world` into the communicator of this rank's worker and those between workers: ranks with the same `worker` form a
    /// worker, and each exchanges with the ranks of the same index in the other workers. Collective over `world`, which is aborted
    /// if a rank fails. Workers must be of equal size, which [`LocalOptimizer::new`](crate::LocalOptimizer::new) checks.
    pub fn split(
        world: Arc<dyn Communicator>,
        worker: u32,
    ) -> Result<(Arc<dyn Communicator>, Workers), Error> {
        // If one rank fails, the others would wait in their next split: the abort ends that wait.
        let split = |comm: &Arc<dyn Communicator>, colour: u32, key: i64| {
            let split = comm.split(Some(colour), key);
            let split = split.inspect_err(|_| [&world, comm].into_iter().for_each(|comm| comm.abort()));
            split?.ok_or(Error::NoRanks)
        };
        let inside = split(&world, worker, 0)?;
        // A communicator separate from `inside`, which must outlive it.
        let all = split(&world, 0, 0)?;
        let across = split(&all, inside.rank() as u32, i64::from(worker))?;
        Ok((inside, Workers { world: all, across }))
    }
}
