//! Communicators between processes: the only place that names their backends.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use meshstep_comm::{Communicator, loopback, tcp};

use super::{Launch, Ranks};

/// Joins the other processes, and returns the ranks of this program.
pub(crate) fn join(launch: &Launch) -> Result<Ranks> {
    match launch {
        Launch::Alone => Ok(Ranks::Threads),
        _ => Ok(Ranks::Process(communicator(launch)?)),
    }
}

/// Returns this process's communicator among those that its launcher started.
pub(crate) fn communicator(launch: &Launch) -> Result<Arc<dyn Communicator>> {
    match launch {
        Launch::Rendezvous { environment, .. } => {
            let world =
                tcp::join(environment, &tcp::Options::default()).context("cannot join the other ranks")?;
            Ok(world.communicator())
        }
        Launch::Alone => Ok(alone()?),
        Launch::Mpi { world_size, .. } => over_mpi(*world_size),
    }
}

#[cfg(feature = "mpi")]
fn over_mpi(_world_size: usize) -> Result<Arc<dyn Communicator>> {
    use meshstep_comm::mpi;
    let world = mpi::world(&mpi::Options::default()).context("cannot join the other ranks")?;
    Ok(world.communicator())
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(world_size: usize) -> Result<Arc<dyn Communicator>> {
    anyhow::bail!(
        "this program was built without MPI; build it with `cargo build --profile train -p meshstep-bench --features mpi`, or start \
         {world_size} processes with `cargo xtask launch`, torchrun or srun"
    )
}

/// Returns the communicator of a single rank.
pub(crate) fn alone() -> Result<Arc<dyn Communicator>, meshstep_comm::Error> {
    let mut world = loopback::world(loopback::Config::new(1))?;
    world.pop().ok_or(meshstep_comm::Error::ZeroRanks)
}
