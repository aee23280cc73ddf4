//! Ranks as real processes: the table of all operations ends with loopback's bits, and a new generation follows an abort.

use crate::backends::{WAYS, Way};
use crate::equality::{run_steps, table};
use meshstep_cases::process::{launched, role};
use meshstep_comm::rendezvous::Environment;
use meshstep_comm::{Communicator, Error, Reduction, loopback, tcp};
use meshstep_tensor::{Buffer, Category, Meter};
use std::sync::Arc;
use std::time::Duration;

const SEED: u64 = 11;

/// Returns a hash of the results of each step.
fn hashes(comm: &Arc<dyn Communicator>) -> Vec<String> {
    let results = run_steps(comm, &table(comm.world_size()), SEED);
    let words = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).collect::<Vec<_>>();
    results.iter().map(|bytes| format!("{:016x}", meshstep_cases::hash(&words(bytes)))).collect()
}

/// A rank of the tests below. The test does nothing in the parent process.
#[test]
fn rank() {
    let Some(role) = role() else { return };
    let way = WAYS.into_iter().find(|way| format!("{way:?}") == role).unwrap();
    let environment = Environment::from_env().unwrap();
    let world = tcp::join(&environment, &way.options(environment.rank, environment.world_size)).unwrap();
    for hash in hashes(&world.communicator()) {
        println!("\nresult {hash}");
    }
    generations(world);
    println!("\nend");
}

/// An abort of one rank is an error on all, and the next generation works.
fn generations(world: tcp::World) {
    let comm = world.communicator();
    comm.barrier().unwrap();
    if comm.rank() == 1 {
        comm.abort();
    }
    assert!(matches!(comm.barrier().unwrap_err(), Error::Aborted { rank: 1 }));
    drop(comm);
    let next = world.next_generation(Duration::from_secs(30)).unwrap();
    let comm = next.communicator();
    let mut sum = Buffer::from_slice(&[comm.rank() as f32; 5], &Meter::new(), Category::Grads).unwrap();
    comm.all_reduce(&mut sum, Reduction::Sum).unwrap();
    let n = comm.world_size();
    assert_eq!(sum.typed::<f32>().unwrap(), [(n * (n - 1) / 2) as f32; 5]);
    comm.barrier().unwrap();
}

/// Runs the table on `n` processes and compares each rank's hashes.
fn check(way: Way, n: usize) {
    let expected = loopback::spawn(n, |comm| hashes(&comm)).unwrap();
    let found = launched("processes::rank", n, &format!("{way:?}"));
    assert_eq!(found.len(), n);
    for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let steps = table(n).into_iter().zip(found.iter().zip(expected));
        let differing: Vec<_> =
            steps.filter(|(_, (found, expected))| found != expected).map(|(step, _)| step).collect();
        assert!(
            found.len() == expected.len() && differing.is_empty(),
            "{way:?}, rank {rank} of {n}: {differing:?}"
        );
    }
}

#[test]
fn processes_have_the_bits_of_loopback() {
    for (w, way) in WAYS.into_iter().enumerate() {
        // Two, three and four processes, each with one or two ways.
        check(way, 2 + w % 3);
        if meshstep_cases::long() {
            (2..=8).for_each(|n| check(way, n));
        }
    }
}
