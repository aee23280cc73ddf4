//! MPI backend: the ranks are the processes of a job that `mpirun` or `srun` has started.
//!
//! Bytes travel by MPI; sums are this crate's. Every message lies in memory of the transport, so MPI never has a caller's buffer:
//! after a failure that memory is leaked until the end of the process, as MPI may still write it.
//!
//! | item | meaning |
//! |---|---|
//! | [`world`] | joins the other processes of the job |
//! | [`World`] | this process's rank, and the communicator of all ranks |
//! | [`Options`] | deadlines, and the thread level to ask the library for |
//! | [`ThreadLevel`] | MPI's levels; the lowest two are refused |
//! | [`Error`] | reason for which a process cannot be a rank |
//!
//! # Start and end
//!
//! MPI starts once in a process, on a thread of its own, unless the program has initialised it. The drop of the last handle waits
//! for the other ranks and finalises MPI. A job that failed waits for [`Options::abort_within`] only; if a rank does not come,
//! MPI_Abort ends the job, so that no process stays behind: handle the error before the drop. A process that failed gets no second
//! world, as that needs ULFM. Without a launcher the world has one rank.
//!
//! # Groups
//!
//! Groups are split without a message and without a communicator of MPI, whose creation would wait for late members. The writer of
//! a stream chooses its tag and announces it to the reader with the identity of the group.
//!
//! # Limits
//!
//! - The library's own reductions are not offered.
//! - A program that initialises MPI itself at MPI_THREAD_SERIALIZED must not call it while this backend runs: its calls do not
//!   take this backend's lock.
//! - Each stream in use has half a MiB at each end.
//! - The ranks of a job run on machines with one byte order.

mod announcements;
mod calls;
mod error;
mod identity;
mod incoming;
mod job;
mod launcher;
mod options;
mod outgoing;
mod pause;
mod process;
mod start;
mod streams;
#[doc(hidden)]
pub mod testing;
mod threads;
mod tiles;
mod transport;
mod world;

pub use error::Error;
pub use options::Options;
pub use threads::ThreadLevel;
pub use world::{World, world};
