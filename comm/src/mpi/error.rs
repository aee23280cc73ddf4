//! Errors of the MPI backend before there is a communicator.

use super::calls::CallFault;
use super::threads::ThreadLevel;
use std::time::Duration;

/// Reason for which this process has no communicator over MPI.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library has too low a level of thread support.
    #[error(
        "MPI was initialised with {given}, and at least {} is needed; {advice} (library: {library})",
        ThreadLevel::Serialized
    )]
    ThreadLevel {
        /// Level of the library.
        given: ThreadLevel,
        /// Change that would raise the level.
        advice: &'static str,
        /// Name and version of the library.
        library: String,
    },
    /// The library's reductions need a higher level of thread support.
    #[error(
        "MPI was initialised with {given}, and Reductions::Library needs {}; use Reductions::Ours (library: {library})",
        ThreadLevel::Multiple
    )]
    LibraryReductions {
        /// Level of the library.
        given: ThreadLevel,
        /// Name and version of the library.
        library: String,
    },
    /// A call that waits for all ranks of the job did not end.
    #[error(
        "{call} had not ended after {after:?}; check that every process of the job calls mpi::world, or allow more time with \
         mpi::Options::deadline"
    )]
    Late {
        /// The call.
        call: &'static str,
        /// The deadline.
        after: Duration,
    },
    /// The launcher's variables contradict the library.
    #[error("{variable} is {says}, but MPI has {has}; {advice} (library: {library})")]
    Launcher {
        /// The variable.
        variable: &'static str,
        /// Its value.
        says: String,
        /// The library's value.
        has: usize,
        /// Change that would make them agree.
        advice: &'static str,
        /// Name and version of the library.
        library: String,
    },
    /// The process has a world already.
    #[error("this process has a communicator of all MPI ranks already; split it for further groups")]
    SecondWorld,
    /// An earlier world failed.
    #[error(
        "the MPI job has failed ({failure}) and cannot begin again: that needs ULFM, which this backend does not use; start the \
         job again, or use tcp for new generations"
    )]
    AfterFailure {
        /// The failure.
        failure: String,
    },
    /// MPI has been finalised.
    #[error(
        "MPI was finalised in this process and cannot be initialised again; keep the communicator until the end"
    )]
    Finalized,
    /// The system could not start the thread that initialises MPI.
    #[error("cannot start the thread that initialises MPI: {message}; raise the limit of threads")]
    NoThread {
        /// Message of the system.
        message: String,
    },
    /// The communicator could not be made.
    #[error(transparent)]
    Communicator(#[from] crate::Error),
    /// The library refused a call.
    #[error("{call} failed: {message}")]
    Refused {
        /// The call.
        call: &'static str,
        /// Message of the library.
        message: String,
    },
}

meshstep_tensor::debug_is_display!(Error);

impl From<CallFault> for Error {
    fn from(fault: CallFault) -> Self {
        Error::Refused { call: fault.call, message: fault.message }
    }
}
