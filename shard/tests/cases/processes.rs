//! Ranks that are processes, started by [`launched`] in the role of one way.
#![cfg(unix)]
#![allow(clippy::print_stdout, reason = "a rank prints its results")]

use meshstep_comm::rendezvous::Environment;
use meshstep_comm::tcp::{self, Encrypt, Options};
use meshstep_comm::{Communicator, loopback};
use std::sync::Arc;

pub use meshstep_cases::process::{launched, role};

/// Ways of bytes between processes, which are their roles.
pub const WAYS: [&str; 3] = ["sockets", "shared memory", "two hosts"];

/// Prints the results of this process, as a rank of the given role. Call it from a test of its own.
pub fn serve(role: &str, results: impl Fn(Arc<dyn Communicator>) -> Vec<String>) {
    let environment = Environment::from_env().unwrap();
    let (encrypt, shared_memory, hosts) = match role {
        "sockets" => (Encrypt::Never, false, 1),
        "shared memory" => (Encrypt::Remote, true, 1),
        "two hosts" => (Encrypt::Remote, true, 2),
        other => panic!("{other:?} is none of {WAYS:?}"),
    };
    let host_id = Some((environment.rank * hosts / environment.world_size) as u64);
    let options = Options { encrypt, shared_memory, host_id, ..Options::default() };
    let comm = tcp::join(&environment, &options).unwrap().communicator();
    for result in results(comm) {
        println!("\nresult {result}");
    }
    println!("\nend");
}

/// Runs the test `test`, which calls [`serve`], on `ranks` processes, and compares every rank's results with those of loopback's
/// ranks. `name` names a result.
pub fn compare(
    test: &str,
    way: &str,
    ranks: usize,
    results: impl Fn(Arc<dyn Communicator>) -> Vec<String> + Sync,
    name: impl Fn(usize) -> String,
) {
    let expected = loopback::spawn(ranks, results).unwrap();
    let found = launched(test, ranks, way);
    for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found.len(), expected.len(), "{way}, rank {rank} of {ranks}");
        let differing: Vec<String> =
            (0..found.len()).filter(|i| found[*i] != expected[*i]).map(&name).collect();
        assert!(differing.is_empty(), "{way}, rank {rank} of {ranks}: {differing:?}");
    }
}

/// Returns a short text of a result, equal for equal results.
pub fn digest(result: &impl std::fmt::Debug) -> String {
    let text = format!("{result:?}");
    let words: Vec<u64> = text.bytes().map(u64::from).collect();
    format!("{:016x}", meshstep_cases::hash(&words))
}
