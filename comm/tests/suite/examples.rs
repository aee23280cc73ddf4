//! The crate's examples and the texts that they print; `mpi` runs in the program of the MPI tests.

#![allow(dead_code, reason = "tests call `run`, and nothing calls `main`")]

#[cfg(feature = "conformance")]
#[path = "../../examples/custom_backend.rs"]
mod custom_backend;
#[path = "../../examples/rendezvous.rs"]
mod rendezvous;

use meshstep_cases::process::{Process, free_addr, launched, role};

#[cfg(feature = "conformance")]
#[test]
fn custom_backend() {
    let text = custom_backend::run().unwrap();
    print!("{text}");
    assert!(text.starts_with("conforms on 1, 2, 3, 4 ranks:\n"), "{text}");
    assert!(text.ends_with("more than a million bytes were handed over: true\n"), "{text}");
}

/// A rank of the tests below. The test does nothing in the parent process.
#[test]
fn rendezvous_rank() {
    if role().is_some() {
        let text = rendezvous::run().unwrap_or_else(|error| format!("Error: {error:?}"));
        print!("\nresult {}\nend\n", text.trim_end());
    }
}

#[test]
fn rendezvous() {
    let ranks = launched("examples::rendezvous_rank", 3, "rank");
    assert_eq!(ranks.len(), 3);
    for (rank, lines) in ranks.iter().enumerate() {
        let text = lines.concat();
        assert!(text.starts_with(&format!("rank {rank} of 3, start 0: met at port ")), "{text}");
        assert!(text.ends_with("an id of 128 bytes, local ranks [0, 1, 2]"), "{text}");
    }
}

#[test]
fn rendezvous_with_a_failure() {
    let addr = free_addr();
    let (ip, port) = (addr.ip().to_string(), addr.port().to_string());
    let start = |rank: &&str| {
        let place = [("RANK", *rank), ("LOCAL_RANK", *rank), ("WORLD_SIZE", "2")];
        let job = [("MASTER_ADDR", &*ip), ("MESHSTEP_PORT", &*port), ("FAIL_ONCE", "1")];
        let variables = [&place[..], &job[..], &[("MESHSTEP_TEST_ROLE", "rank")]].concat();
        Process::start("examples::rendezvous_rank", &variables)
    };
    let mut ranks: Vec<Process> = ["0", "1"].iter().map(start).collect();
    for rank in &mut ranks {
        let line = rank.says("result ");
        assert_eq!(line, "result Error: rank 1 failed in generation 0: asked to fail once");
    }
}
