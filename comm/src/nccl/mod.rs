//! NCCL backend: ranks on NVIDIA GPUs, each a process or a thread with its own device.
//!
//! | item | meaning |
//! |---|---|
//! | [`probe`] | check for a usable NCCL library, with its version and abilities |
//! | [`from_env`], [`Job`] | a rank started by torchrun or SLURM: its communicator, and new ones after a failure |
//! | [`init`], [`join`], [`spawn`] | a rank's communicator: by an id, through another rendezvous, or all ranks as threads |
//! | [`Nccl`] | the communicator; adds groups of calls and a flight record to the trait |
//! | [`Captured`] | operations in a CUDA graph: [`Nccl::capture`] |
//! | [`Options`] | deadlines, the clock, checks, and the last resort |
//!
//! ```
//! use meshstep_comm::{Communicator, Op, Reduction, nccl};
//! use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, cuda::Stream};
//!
//! if let Err(missing) = nccl::probe() {
//!     println!("no NCCL here: {missing}");
//!     return Ok(());
//! }
//! // Two threads, each with a device; processes call `init` or `join`.
//! let sums = nccl::spawn(&[0, 1], nccl::Options::default(), |comm| -> Result<_, meshstep_comm::Error> {
//!     let queue = Queue::cuda(Stream::new(comm.device()).map_err(meshstep_tensor::Error::from)?);
//!     let mut grads = Buffer::zeroed_on(&queue, 2, DType::F32, &Meter::new(), Category::Grads)?;
//!     queue.upload([comm.rank() as f32, 1.0][..].into(), grads.as_mut())?;
//!     // After the queue's work so far; does not block the host.
//!     let started = comm.start(Op::all_reduce(Reduction::Sum), grads, &queue).map_err(|(_grads, error)| error)?;
//!     let (grads, result) = started.wait(&queue); // later work on the queue sees the sum
//!     result?;
//!     let mut sums = [0f32; 2];
//!     queue.download(grads.as_slice(), (&mut sums[..]).into())?;
//!     Ok(sums)
//! })?;
//! for sum in sums {
//!     assert_eq!(sum?, [1.0, 2.0]);
//! }
//! # Ok::<(), meshstep_comm::Error>(())
//! ```
//!
//! # Order
//!
//! Each communicator has its own high-priority stream. An operation begins there after the work on `after`, and
//! [`InFlight::wait`](crate::InFlight::wait) makes the given queue wait for its end: neither blocks the host. With
//! [`Queue::cpu`](meshstep_tensor::Queue::cpu) the host waits; so do the blocking calls, which begin at once and expect that
//! earlier work on their buffer is done. The communicators of a device launch one after the other, so ranks with one order of
//! calls cannot deadlock.
//!
//! # Failures
//!
//! A watchdog thread watches every operation in flight; a deadline counts from the end of the work before the operation. An
//! operation past its deadline, an error of NCCL or of the device, or a failure reported by another rank ends every communicator
//! of the process: first all are marked as failed, then NCCL aborts them, and operations in flight return the error once their
//! stream is empty. A buffer handed over to a queue before that has undefined contents; the next call returns the error. After a
//! failure create a new communicator with a new id. If even the abort hangs, [`Options::last_resort`] ends the process.
//!
//! # Graphs
//!
//! [`Nccl::capture`] is [`Stream::capture`](meshstep_tensor::cuda::Stream::capture) with operations in the captured work: a whole
//! step is one launch. Captured events cannot be queried, and a graph's launch does not signal its start; so [`Captured::launch`]
//! launches graphs on the communicator's stream, between two events that are watched like any operation's. NCCL recommends one
//! device for each process with graph launches: a launch may block the calling thread.
//!
//! # Windows
//!
//! With [`Options::windows`] the communicator's [`zeroed_on`](crate::Communicator::zeroed_on) allocates with NCCL's own
//! allocator, and [`register`](crate::Communicator::register) makes a symmetric window of a buffer, from which newer versions
//! reduce and gather without a copy. Ranks compare sizes first, so that a difference is
//! [`Error::UnlikeMemory`](crate::Error::UnlikeMemory) and not a hang. A window ends before its memory is freed, and before its
//! communicator ends.
//!
//! # Differences from loopback
//!
//! - NCCL chooses the order of sums and rounds more often: expect n roundings in the buffer's type instead of one. A mean
//!   multiplies by 1/n before the sum. A factor and each of its products are rounded to the buffer's type, so shares need not add
//!   up to 1: in bf16 three times 1/3 is 1.00195. Factors need NCCL 2.11. NCCL does not specify if the maximum with a NaN is NaN.
//! - NCCL detects neither ranks with different calls nor a rank that left: such an operation ends at its deadline as
//!   [`Error::Stuck`](crate::Error::Stuck). With MESHSTEP_COMM_CHECK=1 ranks compare their calls before each.
//! - [`Stats`](crate::Stats) count an operation once its end has been observed.
//! - `all_to_all` keeps a copy as large as its buffer. Starting an operation allocates.
//! - NCCL's traffic is neither authenticated nor encrypted: use a network reserved for it.

mod capture;
mod communicator;
mod control_words;
mod core;
mod id;
mod issue;
mod job;
mod last_call;
mod launch;
mod ledger;
mod options;
mod pace;
mod raw;
mod recorder;
mod split;
mod start;
mod table;
mod watchdog;
mod windows;
mod with_deadline;

pub use capture::Captured;
pub use communicator::Nccl;
pub use id::UniqueId;
pub use job::{Job, from_env};
pub use options::{Exchange, LastResort, Options};
pub use start::{init, join, spawn};
pub use table::{Ability, FoundLibrary, Unavailable, probe};
