//! Settings: the lower of the two thread levels, and those that are refused.

use crate::{bytes, collectives, groups};
use meshstep_comm::mpi::testing::streams;
use meshstep_comm::mpi::{Error, Options, ThreadLevel, world};

/// Asks for a level at which calls run under the backend's lock.
fn locked(options: Options) -> Options {
    Options { threads: ThreadLevel::Serialized, ..options }
}

pub(crate) fn locked_bytes(options: Options) {
    bytes::exchange(&mut streams(&locked(options)).unwrap());
}

pub(crate) fn locked_threads(options: Options) {
    groups::threads(streams(&locked(options)).unwrap());
}

pub(crate) fn locked_collectives(options: Options) {
    let world = world(&locked(options)).unwrap();
    collectives::groups_of(&world.communicator());
    collectives::started(world);
}

pub(crate) fn too_few_threads(options: Options) {
    let error = world(&Options { threads: ThreadLevel::Funneled, ..options }).unwrap_err();
    assert!(matches!(error, Error::ThreadLevel { given: ThreadLevel::Funneled, .. }), "{error}");
    assert!(error.to_string().contains("at least MPI_THREAD_SERIALIZED is needed"), "{error}");
}

pub(crate) fn second_world(options: Options) {
    let first = world(&options).unwrap();
    assert_eq!(world(&options).unwrap_err(), Error::SecondWorld);
    drop(first);
    assert_eq!(world(&options).unwrap_err(), Error::Finalized);
}

/// Variables of a launcher that started fewer or more ranks than the library has.
pub(crate) fn contradiction(options: Options) {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("WORLD_SIZE", "5") };
    let error = world(&options).unwrap_err();
    assert!(matches!(error, Error::Launcher { variable: "WORLD_SIZE", has: 1 | 2, .. }), "{error}");
    assert!(error.to_string().contains("WORLD_SIZE is 5, but MPI has"), "{error}");
}
