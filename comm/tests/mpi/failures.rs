//! Jobs that fail: a rank dies, comes too late, or does not come to the end.

use crate::bytes::exchange_len;
use crate::ranks::launched_rank;
use meshstep_cases::mpirun::Ended;
use meshstep_comm::mpi::testing::{TestStreams, streams};
use meshstep_comm::mpi::{Error, Options};
use std::time::Duration;

/// Rank 1 kills itself while the others wait for it.
pub(crate) fn die(world: &mut TestStreams) {
    exchange_len(world, 100_000, 1);
    if world.rank() == 1 {
        let kill = std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
        panic!("kill returned {kill:?}");
    }
    exchange_len(world, 100_000, 2);
}

/// `mpirun` ends the job.
pub(crate) fn killed(ended: &Ended) {
    assert!(!ended.success && ended.took < Duration::from_secs(30), "{:?}\n{}", ended.took, ended.output);
    assert!(!ended.output.contains("hangs"), "{}", ended.output);
}

/// Rank 1 starts MPI long after the others' deadline.
pub(crate) fn start_late(options: Options) {
    if launched_rank() == 1 {
        std::thread::sleep(Duration::from_secs(60));
    }
    let error = streams(&Options { deadline: Duration::from_secs(1), ..options }).unwrap_err();
    assert!(matches!(error, Error::Late { call: "MPI_Init_thread", .. }), "{error}");
    println!("{error}");
    let again = streams(&Options::default()).unwrap_err();
    assert!(matches!(again, Error::AfterFailure { .. }), "{again}");
    std::process::exit(3);
}

/// The others have a typed error, and their exit ends the job.
pub(crate) fn late_start(ended: &Ended) {
    assert!(!ended.success && ended.took < Duration::from_secs(30), "{:?}\n{}", ended.took, ended.output);
    assert!(ended.output.contains("MPI_Init_thread had not ended after 1s"), "{}", ended.output);
}

/// Rank 1 stays away from the end of a failed world.
pub(crate) fn end_late(world: TestStreams) {
    if world.rank() == 1 {
        std::thread::sleep(Duration::from_secs(60));
    }
    world.fail("operation 7 was late");
    drop(world);
    println!("a rank survived MPI_Abort");
}

/// MPI_Abort ends all ranks, also the one that is away.
pub(crate) fn late_end(ended: &Ended) {
    assert!(!ended.success && ended.took < Duration::from_secs(30), "{:?}\n{}", ended.took, ended.output);
    assert!(ended.output.contains("after a failure: operation 7 was late"), "{}", ended.output);
    assert!(!ended.output.contains("survived"), "{}", ended.output);
}
