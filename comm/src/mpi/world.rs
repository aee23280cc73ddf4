//! World of ranks that are the processes of an MPI job.

use super::{Error, Options, start};
use crate::p2p::hosts::Hosts;
use crate::p2p::transport::Transport as _;
use crate::{Clock, Communicator, Faults, p2p};
use std::sync::Arc;

/// Joins the other processes of the job: all call it, and it returns when all have.
///
/// A process has one world in its life. After a failure a new generation would need ULFM, which this backend does not use: it is
/// refused with [`Error::AfterFailure`].
///
/// # Errors
/// [`Error::ThreadLevel`] if the library has too low a level; [`Error::Launcher`] if the launcher's variables contradict the library;
/// [`Error::Late`] if a process does not call it within [`Options::deadline`]; [`Error::SecondWorld`], [`Error::AfterFailure`] and
/// [`Error::Finalized`] if this process had a world before.
pub fn world(options: &Options) -> Result<World, Error> {
    let transport = Box::new(start::transport(options)?);
    // The library carries bytes within a host and between hosts by itself.
    let hosts = Hosts::blocks(transport.world_size(), 1);
    let rank = p2p::communicator((transport, hosts), Clock::real(), options.deadline, Faults::none())?;
    Ok(World { communicator: Arc::new(rank) })
}

/// World of ranks that are processes. MPI ends in this process when the last handle to it is dropped: the world, its communicators,
/// groups split from them, and started operations.
#[derive(Debug)]
pub struct World {
    communicator: Arc<dyn Communicator>,
}

impl World {
    /// Index of this process.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Number of processes.
    pub fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    /// The communicator of all ranks.
    pub fn communicator(&self) -> Arc<dyn Communicator> {
        Arc::clone(&self.communicator)
    }
}
