//! MPI backend: the ranks are the processes of a job that `mpirun` or `srun` has started.
//!
//! Bytes travel by MPI; sums are this crate's, so every result has loopback's bits, unless [`Reductions::Library`] gives them to MPI.
//! Every message lies in memory of the transport, so MPI never has a caller's buffer: after a failure that memory is leaked until the
//! end of the process, as MPI may still write it.
//!
//! | item | meaning |
//! |---|---|
//! | [`world`] | joins the other processes of the job |
//! | [`World`] | this process's rank, and the communicator of all ranks |
//! | [`Options`] | deadlines, the arithmetic of reductions, and the thread level to ask the library for |
//! | [`Reductions`] | this crate's reductions with loopback's bits, or the library's with its own |
//! | [`ThreadLevel`] | MPI's levels; the lowest two are refused |
//! | [`Error`] | reason for which a process cannot be a rank |
//!
//! ```no_run
//! use meshstep_comm::{Communicator, Reduction, mpi};
//! use meshstep_tensor::{Buffer, Category, Meter};
//!
//! let options = mpi::Options {
//!     reductions: mpi::Reductions::Library, // for tuned algorithms; the default has loopback's bits
//!     threads: mpi::ThreadLevel::Multiple,
//!     ..mpi::Options::default()
//! };
//! let comm = mpi::world(&options)?.communicator();
//! let mut buffer = Buffer::from_slice(&[comm.rank() as f32], &Meter::new(), Category::Grads)?;
//! comm.all_reduce(&mut buffer, Reduction::Sum)?;
//! drop(comm); // the last handle: the processes meet, and MPI ends
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Requirements
//!
//! Open MPI 4 or MPICH 4 with its C compiler, and libclang, which reads the library's header: `apt-get install libopenmpi-dev
//! openmpi-bin libclang-dev`. MPICC names another compiler. The program has to be started by the `mpirun` of the same library, as in
//! `mpirun -n 4 program`: without a launcher the world has one rank, and another library's variables are an error.
//!
//! MPI is asked for `MPI_THREAD_MULTIPLE`. At `MPI_THREAD_SERIALIZED` a lock makes the calls one at a time; less is refused with
//! [`Error::ThreadLevel`], as each group has a thread of its own.
//!
//! # Start and end
//!
//! MPI starts once in a process, on a thread of its own, unless the program has initialised it. The drop of the last handle (the
//! world, its communicators, groups split from them, started operations) waits for the other ranks and finalises MPI. So drop all
//! handles before the process ends: `std::process::exit` drops nothing, and `mpirun` then ends the job.
//!
//! # Failures
//!
//! An operation fails as on loopback: a mismatch, a deadline, a rank that left, panicked or aborted is one typed error on every rank.
//! After a failure of the world the last handle waits for [`Options::abort_within`] only; if a rank does not come, MPI_Abort ends the
//! job, so that no process stays behind: handle the error before the drop. A smaller group may fail and the world go on; if it
//! does not, abort the world. `mpirun` ends the job when a process is killed.
//!
//! A process that failed gets no second world, as that needs ULFM: [`Error::AfterFailure`].
//!
//! # Groups
//!
//! Groups are split without a message and without a communicator of MPI: its creation would wait for late members. The writer of
//! a stream chooses its tag and announces it to the reader with the identity of the group.
//!
//! [`Reductions::Library`] does need a communicator of MPI for a group, and creates it from MPI_COMM_WORLD at the group's first
//! reduction. Rank 0 of the group chooses the tag of the creation and announces it with its streams. No two groups of a job have
//! the same tag, so overlapping groups can be created at the same time.
//!
//! # Limits
//!
//! - A program that initialises MPI itself at MPI_THREAD_SERIALIZED must not call it while this backend runs: its calls do not
//!   take this backend's lock.
//! - Each stream in use has half a MiB at each end. A message has at most 128 KiB, so no count comes near MPI's limit of 2^31.
//! - With [`Reductions::Library`] a process can be rank 0 of (MPI_TAG_UB + 1) / ranks groups in its life. MPI promises 32,767 for
//!   MPI_TAG_UB; Open MPI has 2,147,483,647. The first reduction of a further group is an error.
//! - With [`Reductions::Library`] the program must not receive from MPI_COMM_WORLD under MPI_ANY_TAG, or call MPI_Comm_create_group
//!   on it.
//! - The ranks of a job run on machines with one byte order.

mod announcements;
mod calls;
mod error;
mod identity;
mod incoming;
mod job;
mod launcher;
mod library;
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
pub use options::{Options, Reductions};
pub use threads::ThreadLevel;
pub use world::{World, world};
