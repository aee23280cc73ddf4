//! World of ranks that are processes: its communicator, its store, and its generations.

use super::error::Error;
use super::meeting::{WorldMeeting, WorldStreams, meet};
use super::options::Options;
use crate::p2p;
use crate::rendezvous::{Environment, Generation, Store};
use crate::{Clock, Communicator, Faults};
use std::sync::Arc;
use std::time::Duration;

/// Joins the other ranks of the job: all ranks call it, and it returns when all have.
///
/// # Errors
/// [`Error::Rendezvous`] as for [`Store::join`], and if this rank's address is taken, not of this machine, or needs a token;
/// [`Error::NoInterface`] and [`Error::NoAddress`] for MESHSTEP_IFACE; [`Error::OtherVersion`] and [`Error::OtherEncryption`] if
/// ranks were started differently; [`Error::System`] if ranks of one host cannot share memory.
pub fn join(environment: &Environment, options: &Options) -> Result<World, Error> {
    World::over(meet(environment, options)?)
}

/// World of ranks that are processes, in one generation. The store and the connections end with the last of its generations and
/// groups.
#[derive(Debug)]
pub struct World {
    communicator: Arc<dyn Communicator>,
    generation: Generation,
    meeting: WorldMeeting,
}

impl World {
    /// Makes the communicator over the world's streams.
    pub(super) fn over(streams: WorldStreams) -> Result<Self, Error> {
        let WorldStreams { transport, hosts, generation, meeting } = streams;
        let timeout = meeting.options.timeout;
        let rank = p2p::communicator((transport, hosts), Clock::real(), timeout, Faults::none())?;
        Ok(World { communicator: Arc::new(rank), generation, meeting })
    }

    /// Index of this process.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Number of processes.
    pub fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    /// The communicator of all ranks, in this generation.
    pub fn communicator(&self) -> Arc<dyn Communicator> {
        Arc::clone(&self.communicator)
    }

    /// The store at which the ranks met.
    pub fn store(&self) -> &Store {
        &self.meeting.store
    }

    /// The store's values and failures of this generation.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// Returns the world of the next generation, with new streams, and aborts the communicator of this one. All ranks call it within
    /// `within`, after an operation has failed: late or aborted operations of this generation cannot reach the next one.
    ///
    /// A generation has all ranks of the world. A process that ended cannot rejoin, so after the loss of a rank no generation follows:
    /// start all ranks again.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] with the lost rank, or with the ranks that did not call it in time.
    pub fn next_generation(self, within: Duration) -> Result<World, Error> {
        let World { communicator, generation, meeting } = self;
        communicator.abort();
        drop(communicator);
        World::over(WorldStreams::next(meeting, &generation, within)?)
    }
}
