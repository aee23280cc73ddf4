//! Launched ranks meet, distribute a value and receive a failure report: `torchrun --nproc-per-node 3 --no-python
//! target/debug/examples/rendezvous`.
//!
//! With `FAIL_ONCE=<rank>` that rank fails in the run's first start and every rank ends with an error, so that `torchrun
//! --max-restarts 1` starts them again.

#![allow(clippy::print_stdout)] // a program

use meshstep_comm::rendezvous::{Environment, Failure, Options, Store};
use std::error::Error;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(30);

/// Meets the other ranks, and returns a line about it.
pub(crate) fn run() -> Result<String, Box<dyn Error>> {
    let environment = Environment::from_env()?;
    let store = Store::join(&environment, &Options { deadline: SOON, ..Options::default() })?;
    let generation = store.generation(environment.restart);
    if store.rank() == 0 {
        generation.set("unique id", &std::process::id().to_le_bytes().repeat(32))?;
    }
    let id = generation.wait("unique id", SOON)?;
    let local_ranks = generation.all_gather("local ranks", &[environment.local_rank as u8], SOON)?;
    if let Some(failure) = rehearse(&environment, &store)? {
        return Err(failure.into());
    }
    generation.barrier("end", SOON)?;
    Ok(format!(
        "rank {} of {}, start {}: met at port {}, an id of {} bytes, local ranks {:?}\n",
        store.rank(),
        store.world_size(),
        environment.restart,
        store.addr().port(),
        id.len(),
        local_ranks.concat()
    ))
}

/// The requested failure, as every rank receives it.
fn rehearse(environment: &Environment, store: &Store) -> Result<Option<Failure>, Box<dyn Error>> {
    let generation = store.generation(environment.restart);
    let Ok(rank) = std::env::var("FAIL_ONCE") else { return Ok(None) };
    if environment.restart > 0 {
        return Ok(None);
    }
    if environment.rank == rank.parse()? {
        generation.fail("asked to fail once")?;
    }
    let failure = generation.wait_failure(SOON);
    // Rank 0's store stays until all ranks have the failure: a failed generation has no barriers, so the next one is used.
    store.generation(environment.restart + 1).barrier("heard", SOON)?;
    Ok(failure)
}

fn main() -> Result<(), Box<dyn Error>> {
    print!("{}", run()?);
    Ok(())
}
