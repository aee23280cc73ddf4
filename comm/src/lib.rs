//! Ranks and the collectives between them: deterministic, with deadlines, and with a typed error on every rank if one of them
//! fails.
//!
//! ```
//! use meshstep_comm::{Op, Reduction, loopback};
//! use meshstep_tensor::{Buffer, Category, Meter, Queue};
//!
//! let sums = loopback::spawn(4, |comm| -> Result<Vec<f32>, Box<dyn std::error::Error + Send + Sync>> {
//!     let mine = [comm.rank() as f32, 1.0];
//!     let mut buffer = Buffer::from_slice(&mine, &Meter::new(), Category::Grads)?;
//!     comm.all_reduce(&mut buffer, Reduction::Sum)?; // blocking, in place
//!
//!     let queue = Queue::cpu();
//!     let op = Op::all_reduce(Reduction::Max);
//!     let started = comm.start(op, buffer, &queue).map_err(|(_buffer, error)| error)?;
//!     // ... compute here while the bytes move ...
//!     let (buffer, result) = started.wait(&queue);
//!     result?;
//!     Ok(buffer.typed::<f32>()?.to_vec())
//! })?;
//! for sum in sums {
//!     assert_eq!(sum.map_err(|e| e.to_string())?, [0.0 + 1.0 + 2.0 + 3.0, 4.0]);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | item | meaning |
//! |---|---|
//! | [`Communicator`] | one rank's handle to its group: `start` an [`Op`] on a buffer, `split`, `abort`, or block |
//! | [`InFlight`] | a started operation; owns its buffer until `wait` |
//! | [`loopback`] | backend with threads of one process as ranks |
//! | [`p2p`] | collectives over messages, and a backend of threads that exchange them |
//! | `nccl` | backend with GPUs as ranks, behind the feature `nccl` |
//! | `mpi` | backend with the processes of an MPI job as ranks, behind the feature `mpi` |
//! | [`rendezvous`] | process bootstrap: launchers' variables, a small store on rank 0, failure reports outside the backend |
//! | [`tcp`] | backend with processes as ranks: sockets between machines, shared memory within one |
//! | [`Error`] | typed error, the same on every rank |
//! | [`Stats`] | operations and bytes by [`Kind`], as a ring algorithm would send them |
//! | `conformance` | checks of a backend of your own, behind the feature `conformance` |
//! | [`Clock`], [`Faults`] | manual time and injected faults for tests |
//! | [`prelude`] | types for a glob import |
//!
//! # From one process to a cluster
//!
//! A program works on a [`Communicator`]. Where that comes from is the only difference between threads and a cluster, and every row
//! of this table gives the same bits.
//!
//! | ranks | started with | communicator |
//! |---|---|---|
//! | threads of a process | the program itself | [`loopback::spawn`] |
//! | processes of a machine | `meshstep launch -n 4 -- PROGRAM` | [`tcp::join`]: shared memory |
//! | processes of one or more machines | `torchrun --no-python --nproc-per-node 4 PROGRAM` | [`tcp::join`]: shared memory and sockets |
//! | tasks of a SLURM job | `srun PROGRAM` in a batch script | [`tcp::join`]: the same |
//! | processes of an MPI job | `mpirun -n 4 PROGRAM` | the module `mpi` |
//!
//! ```
//! use meshstep_comm::rendezvous::{Environment, EnvironmentError};
//! use meshstep_comm::{Communicator, Reduction, loopback, tcp};
//! use meshstep_tensor::{Buffer, Category, Meter};
//! use std::sync::Arc;
//!
//! fn train(comm: Arc<dyn Communicator>) -> Result<f32, Box<dyn std::error::Error + Send + Sync>> {
//!     let mut ones = Buffer::from_slice(&[1f32], &Meter::new(), Category::Grads)?;
//!     comm.all_reduce(&mut ones, Reduction::Sum)?;
//!     Ok(ones.typed::<f32>()?[0])
//! }
//!
//! let ranks = match Environment::from_env() {
//!     // Started by a launcher: this process is one rank.
//!     Ok(environment) => {
//!         let world = tcp::join(&environment, &tcp::Options::default())?;
//!         vec![train(world.communicator())]
//!     }
//!     // Started alone: the ranks are threads.
//!     Err(EnvironmentError::NoLauncher) => loopback::spawn(4, train)?,
//!     Err(contradiction) => return Err(contradiction.into()),
//! };
//! # assert_eq!(ranks.len(), 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - **One machine**: nothing is to be set. Ranks of one machine exchange bytes through shared memory, if they have the same user and
//!   network namespace and Linux 5.1; each rank needs two descriptors for each other rank of each group. A buffer from
//!   [`Communicator::zeroed_on`] that is [registered](Communicator::register) is read in place by the others: the fastest way.
//! - **Another launcher** sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun does.
//! - **Several machines**: all ranks need the same token, in MESHSTEP_TOKEN or in a file of mode 0600 named by
//!   MESHSTEP_TOKEN_FILE. Sockets between machines are then encrypted. MESHSTEP_IFACE names the interface or the address of a
//!   machine's ranks where it has several.
//! - **torchrun** sets the address of the first machine; the store takes the port after MASTER_PORT, or MESHSTEP_PORT. It needs a
//!   `--` before a program with an option that could be its own, such as `train --local`:
//!
//!   ```text
//!   $ (umask 077; openssl rand -hex 32 > token); export MESHSTEP_TOKEN_FILE=$PWD/token
//!   $ torchrun --no-python --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -- PROGRAM
//!   ```
//! - **SLURM**: `comm/examples/slurm/train.sbatch` is a batch script that makes a token and starts one rank for each task. The store
//!   runs on the first node of the step, at a port between 20000 and 29999 that follows from the job's number.
//!
//! Tried, with the parameters of the same training on threads, to the bit: launch; torchrun of PyTorch 2.11.0; the batch script and
//! srun of SLURM 22.05.8, with slurmctld, one slurmd and up to eight tasks on one machine. Several machines are untried.
//!
//! # Guarantees
//!
//! Loopback gives these guarantees; the docs of `nccl` list the differences.
//!
//! - Every rank gets the same bits in every run: sums go in the order of the ranks ([`Reduction`] documents the accumulator
//!   types), in whatever order the ranks arrive.
//! - No operation hangs. It waits for other ranks until its deadline (ten minutes, or [`Op::within`]), and less if the failure is
//!   already certain: ranks that call different operations, a rank that left or panicked. Only a writer of
//!   [`Communicator::all_gather_written`] must not wait for its own communicator.
//! - The buffer always comes back, and only when no rank accesses it any more.
//! - Starting and waiting do not allocate, after the first few operations.
//!
//! # Limits
//!
//! - Loopback is one process.
//! - A deadline bounds the wait for other ranks; once all have arrived, the transfer runs to its end. On loopback the deadline of a
//!   small operation that was started is noticed when its rank waits for it, asks for it, or has a large operation behind it.
//! - A barrier does not wait for operations that other ranks started before it.
//! - f64 and u64 have no wider accumulator. An f64 sum carries its rounding error in a second f64, which is itself rounded; a u64
//!   sum wraps. Sums of f64, and of bf16 in f32, overflow where their accumulators do, so the mean of values near the largest is
//!   infinite.
//! - `send` returns when its `recv` has copied the bytes; two ranks that both send first are a mismatch, not a queue.
//! - Every rank of every communicator has a thread; the rank count is meant to be small.
//!
//! # Features
//!
//! `nccl` is the backend for NVIDIA GPUs. It builds without CUDA and NCCL, which are loaded on first use.
//!
//! `mpi` builds against the system's MPI library (`apt-get install libopenmpi-dev openmpi-bin libclang-dev`).
//!
//! `conformance` is a suite that checks a backend of your own: the module `conformance`, and the example `custom_backend`.
//!
//! `shuttle` is for this crate's own tests: inside a shuttle execution the crate's locks and threads are shuttle's.

mod clock;
mod communicator;
mod error;
mod group;
pub mod loopback;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod op;
pub mod p2p;
pub mod prelude;
mod reduce;
pub mod rendezvous;
#[cfg_attr(not(unix), expect(dead_code, reason = "ranks over sockets are its callers"))]
mod shared_memory;
mod sync;
#[cfg(unix)]
pub mod tcp;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

// For crates that know this one and not meshstep-tensor.
pub use clock::{Clock, Wake};
pub use communicator::Communicator;
pub use communicator::call_name::{CallName, name_calls};
#[cfg(feature = "conformance")]
pub use communicator::conformance;
pub use communicator::in_flight::{InFlight, Tickets};
pub use communicator::observing::ReduceObserver;
pub use communicator::stats::{Kind, Stats, Traffic};
pub use communicator::writing::{WriteChunk, WriteReduced};
pub use error::{Called, Error};
pub use group::faults::Faults;
#[doc(hidden)]
pub use meshstep_tensor::debug_is_display;
pub use op::{Action, Op, Reduction};
