//! Ranks on NVIDIA GPUs, each a process or a thread with a device of its own, exchanging buffers through NCCL.
//!
//! | item | what it is |
//! |---|---|
//! | [`probe`] | whether NCCL can be used here, and what its version is able to do |
//! | [`from_env`], [`Job`] | a rank of torchrun's or SLURM's: its communicator, and others after a failure |
//! | [`init`], [`join`], [`spawn`] | a rank's communicator: by an id, through another rendezvous, or all ranks as threads |
//! | [`Nccl`] | the communicator; beside the trait's it has groups of calls and a flight record |
//! | [`Captured`] | operations as part of a CUDA graph: [`Nccl::capture`] |
//! | [`Options`] | deadlines, the clock, checks, and what is done when nothing helps |
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
//!     // After what is on the queue so far; the host goes on.
//!     let started = comm.start(Op::all_reduce(Reduction::Sum), grads, &queue).map_err(|(_grads, error)| error)?;
//!     let (grads, result) = started.wait(&queue); // what follows on the queue sees the sum
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
//! Each communicator has a stream of its own, whose work goes before that of others. An operation begins there when what is on
//! `after` is done, and [`InFlight::wait`](crate::InFlight::wait) has the given queue wait for its end: the host waits for
//! neither. With [`Queue::cpu`](meshstep_tensor::Queue::cpu) the host is the one who waits; so do the blocking calls, which
//! begin at once, and expect that the work on their buffer is done. All communicators of a device launch one after the other,
//! so ranks that call them in one order cannot block one another.
//!
//! # Trouble
//!
//! A thread of the process watches every operation under way: its deadline counts from when the work before it is done. An
//! operation past it, an error that NCCL or the device tells of, or a rank elsewhere that says it failed, ends every
//! communicator of the process: first all are marked as failed, then NCCL aborts them, and what was in flight returns with the
//! error once its stream is empty. A buffer handed over to a queue before that holds rubbish; the next call tells. After that
//! make a new communicator, with a new id. If NCCL does not even abort, [`Options::last_resort`] ends the process.
//!
//! # Graphs
//!
//! [`Nccl::capture`] is [`Stream::capture`](meshstep_tensor::cuda::Stream::capture) with operations among what is captured: a whole
//! step is one launch. Captured events cannot be asked how far they are, and a graph's launch tells nobody that it has begun; so
//! graphs are launched by [`Captured::launch`], on the communicator's stream, between two events that are watched as for any
//! operation. NCCL advises one device for each process where graphs are launched: a launch may block the thread that makes it.
//!
//! # Windows
//!
//! With [`Options::windows`] the communicator's [`zeroed_on`](crate::Communicator::zeroed_on) allocates with NCCL's own allocator,
//! and [`register`](crate::Communicator::register) makes a symmetric window of a buffer, from which newer versions reduce and
//! gather without a copy. Ranks compare sizes first, so that a difference is [`Error::UnlikeMemory`](crate::Error::UnlikeMemory)
//! and not a hang. Windows end before their memory is freed, and before the communicator is.
//!
//! # Where it differs from loopback
//!
//! - NCCL orders sums as it likes and rounds more often: expect n roundings of the buffer's type instead of one. A mean is taken
//!   by multiplying with 1/n before the sum. A factor and each of its products are rounded to the buffer's type, so that shares
//!   need not add up to 1: in bf16 three times 1/3 are 1.00195. NCCL has factors since 2.11. Whether the maximum with a NaN is
//!   NaN, it does not say.
//! - It cannot see that ranks call different things or that one has left: such an operation ends at its deadline as
//!   [`Error::Stuck`](crate::Error::Stuck). MESHSTEP_COMM_CHECK=1 makes ranks compare their calls before each.
//! - [`Stats`](crate::Stats) count an operation when its end has been seen.
//! - `all_to_all` keeps a copy as large as its buffer. Starting an operation allocates.
//! - Its traffic is neither authenticated nor encrypted: it belongs on a network of its own.

mod capture;
mod communicator;
mod control_words;
mod core;
mod id;
mod issue;
mod job;
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
pub use table::{Ability, Found, Unavailable, probe};
