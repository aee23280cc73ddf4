//! A rank of a job that a launcher started: it meets the others in the store on rank 0, again and again if it must.

use super::communicator::Nccl;
use super::core::device_error;
use super::options::{Exchange, Options};
use super::start::join;
use crate::Error;
use crate::rendezvous::{self, Environment, Failure, Generation, Store};
use crate::sync::real::Mutex;
use meshstep_tensor::cuda::{self, Device};
use std::sync::Arc;
use std::time::Duration;

/// This process's place in a job of torchrun's or SLURM's, with the store where its ranks meet.
#[derive(Debug)]
pub struct Job {
    environment: Environment,
    store: Arc<Store>,
    device: Device,
    options: Options,
    /// The number of the next communicator.
    next: Mutex<u64>,
}

/// The communicator of all ranks that torchrun or SLURM started, by what they have set ([`Environment::from_env`]); this
/// rank's device is [`Options::device`]. To build another after a failure, keep a [`Job`].
pub fn from_env(options: Options) -> Result<Nccl, Error> {
    Job::from_env(options)?.communicator()
}

impl Job {
    /// Meets the other ranks; returns when all are there, within [`Options::deadline`].
    ///
    /// # Errors
    /// [`Error::Rendezvous`] with what the environment lacks, who is missing, or what else went wrong there.
    pub fn from_env(options: Options) -> Result<Self, Error> {
        Self::join(Environment::from_env().map_err(rendezvous::Error::from)?, options)
    }

    /// The same with an environment made by other means.
    pub fn join(environment: Environment, options: Options) -> Result<Self, Error> {
        // First what this machine lacks: the others are told by their deadline.
        let device = device_of(environment.local_rank, options.device)?;
        let patience = rendezvous::Options { deadline: options.deadline, ..rendezvous::Options::default() };
        let store = Arc::new(Store::join(&environment, &patience)?);
        let next = Mutex::new(environment.restart << 32);
        Ok(Job { environment, store, device, options, next })
    }

    /// A communicator of all ranks, each time of a new generation: after a failure every rank asks for another.
    pub fn communicator(&self) -> Result<Nccl, Error> {
        let mut next = self.next.lock();
        let number = *next;
        *next += 1;
        drop(next);
        let meeting = Meeting { generation: self.store.generation(number), _store: Arc::clone(&self.store) };
        let (rank, world_size) = (self.environment.rank, self.environment.world_size);
        join(Arc::new(meeting), number, rank, world_size, &self.device, self.options.clone())
    }

    /// This rank's device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What the launcher has set.
    pub fn environment(&self) -> &Environment {
        &self.environment
    }
}

/// Opens a rank's GPU.
fn device_of(local_rank: usize, chosen: Option<usize>) -> Result<Device, Error> {
    let visible = cuda::probe().map_err(|missing| device_error(missing.into()))?.devices;
    let ordinal = ordinal(local_rank, visible, chosen)?;
    Device::open(ordinal).map_err(device_error)
}

/// The chosen GPU, or the one of the rank's number on its machine. A launcher that shows each rank a GPU of its own, as SLURM
/// does with `--gpus-per-task=1`, leaves one visible: that one is the rank's. NCCL refuses two ranks that share a GPU.
fn ordinal(local_rank: usize, visible: usize, chosen: Option<usize>) -> Result<usize, Error> {
    let ordinal = chosen.unwrap_or(if visible == 1 { 0 } else { local_rank });
    if ordinal < visible { Ok(ordinal) } else { Err(Error::NoDevice { local_rank, ordinal, visible }) }
}

/// What one communicator's ranks say to one another beside it. It keeps the store.
#[derive(Debug)]
struct Meeting {
    generation: Generation,
    _store: Arc<Store>,
}

impl Exchange for Meeting {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        Ok(self.generation.set(key, value)?)
    }

    fn get(&self, key: &str, within: Duration) -> Result<Vec<u8>, Error> {
        Ok(self.generation.wait(key, within)?)
    }

    fn publish_failure(&self, _rank: usize, message: &str) {
        // Where it cannot be said, the store has told of this rank, or is gone with rank 0.
        let _ = self.generation.fail(message);
    }

    fn failure(&self) -> Option<(usize, String)> {
        let failure = self.generation.failure()?;
        let text = failure.to_string();
        match failure {
            Failure::Published { rank, text, .. } => Some((rank, text)),
            Failure::Lost { rank, .. } => Some((rank, text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_the_gpu_of_its_number_or_the_only_one_or_the_chosen_one() {
        assert_eq!(ordinal(3, 8, None), Ok(3));
        assert_eq!(ordinal(3, 1, None), Ok(0));
        assert_eq!(ordinal(3, 8, Some(5)), Ok(5));
        for (local_rank, visible, chosen, ordinal) in
            [(3, 2, None, 3), (0, 2, Some(2), 2), (0, 1, Some(1), 1)]
        {
            let missing = Error::NoDevice { local_rank, ordinal, visible };
            assert_eq!(super::ordinal(local_rank, visible, chosen), Err(missing));
        }
    }
}
