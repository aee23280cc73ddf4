//! Settings that are refused: too low a thread level, contradictory variables, a second world.

use meshstep_comm::mpi::testing::streams;
use meshstep_comm::mpi::{Error, Options, ThreadLevel};

/// Asks for a level at which calls run under the backend's lock.
pub(crate) fn locked(options: Options) -> Options {
    Options { threads: ThreadLevel::Serialized, ..options }
}

pub(crate) fn too_few_threads(options: Options) {
    let error = streams(&Options { threads: ThreadLevel::Funneled, ..options }).unwrap_err();
    assert!(matches!(error, Error::ThreadLevel { given: ThreadLevel::Funneled, .. }), "{error}");
    assert!(error.to_string().contains("at least MPI_THREAD_SERIALIZED is needed"), "{error}");
}

pub(crate) fn second_world(options: Options) {
    let first = streams(&options).unwrap();
    assert_eq!(streams(&options).unwrap_err(), Error::SecondWorld);
    drop(first);
    assert_eq!(streams(&options).unwrap_err(), Error::Finalized);
}

pub(crate) fn contradiction(options: Options) {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("WORLD_SIZE", "4") };
    let error = streams(&options).unwrap_err();
    assert!(matches!(error, Error::Launcher { variable: "WORLD_SIZE", has: 1, .. }), "{error}");
}
