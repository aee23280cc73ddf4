//! Rank of a launched job: it joins the others in the store on rank 0, again after each failure.

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

/// This process's membership in a job of torchrun or SLURM, with the store of its ranks.
#[derive(Debug)]
pub struct Job {
    environment: Environment,
    store: Arc<Store>,
    device: Device,
    options: Options,
    /// Generation of the next communicator.
    next: Mutex<u64>,
}

/// Creates the communicator of all ranks that torchrun or SLURM started, from their variables ([`Environment::from_env`]); the
/// rank's device is [`Options::device`]. To build another one after a failure, keep a [`Job`].
pub fn from_env(options: Options) -> Result<Nccl, Error> {
    Job::from_env(options)?.communicator()
}

impl Job {
    /// Joins the other ranks; returns when all have joined, within [`Options::deadline`].
    ///
    /// # Errors
    /// [`Error::Rendezvous`] with the missing variables, the missing ranks, or another failure of the rendezvous.
    pub fn from_env(options: Options) -> Result<Self, Error> {
        Self::join(Environment::from_env().map_err(rendezvous::Error::from)?, options)
    }

    /// Like [`from_env`](Self::from_env), with an environment from another source.
    pub fn join(environment: Environment, options: Options) -> Result<Self, Error> {
        // Faults of this machine come first: the other ranks see them as their deadline.
        let device = device_of(environment.local_rank, options.device)?;
        let patience = rendezvous::Options { deadline: options.deadline, ..rendezvous::Options::default() };
        let store = Arc::new(Store::join(&environment, &patience)?);
        let next = Mutex::new(environment.restart << 32);
        Ok(Job { environment, store, device, options, next })
    }

    /// Creates a communicator of all ranks, each time of a new generation: after a failure every rank calls this again.
    pub fn communicator(&self) -> Result<Nccl, Error> {
        let mut next = self.next.lock();
        let number = *next;
        *next += 1;
        drop(next);
        let meeting = Meeting { generation: self.store.generation(number), _store: Arc::clone(&self.store) };
        let (rank, world_size) = (self.environment.rank, self.environment.world_size);
        join(Arc::new(meeting), number, rank, world_size, &self.device, self.options.clone())
    }

    /// Device of this rank.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Settings of the launcher.
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

/// Returns the chosen GPU, or that of the rank's index on its machine. If only one is visible, it is the rank's: a launcher may
/// show each rank its own GPU, as SLURM does with `--gpus-per-task=1`. NCCL refuses two ranks on one GPU.
fn ordinal(local_rank: usize, visible: usize, chosen: Option<usize>) -> Result<usize, Error> {
    let ordinal = chosen.unwrap_or(if visible == 1 { 0 } else { local_rank });
    if ordinal < visible { Ok(ordinal) } else { Err(Error::NoDevice { local_rank, ordinal, visible }) }
}

/// Rendezvous of one communicator's ranks. It keeps the store alive.
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
        // If the send fails, the store has reported this rank as lost, or has ended with rank 0.
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
