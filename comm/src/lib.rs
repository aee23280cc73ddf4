//! Ranks and the collectives between them: deterministic, with deadlines, and with a typed error on every rank when one
//! of them fails.
//!
//! | item | what it is |
//! |---|---|
//! | [`Communicator`] | a rank's place in its group: `start` an [`Op`] on a buffer, `split`, `abort`, or block |
//! | [`InFlight`] | a started operation; owns its buffer until waited for |
//! | [`loopback`] | the backend whose ranks are threads of one process |
//! | `nccl` | with the feature of that name: the backend whose ranks are GPUs |
//! | [`rendezvous`] | how processes meet: launchers' variables, a small store on rank 0, failures heard of beside a backend |
//! | [`Error`] | what went wrong, the same on every rank |
//! | [`Stats`] | operations and bytes by [`Kind`], as a ring algorithm would send them |
//! | [`Clock`], [`Faults`] | time and trouble for tests |
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
//! # What is promised
//!
//! By loopback; `nccl` says where it differs.
//!
//! - The same bits on every rank and in every run: sums go in the order of the ranks ([`Reduction`] says in which
//!   type), whoever comes first.
//! - Nothing hangs. An operation waits for others until its deadline (ten minutes, or [`Op::within`]) and not that long
//!   where the failure is already certain: ranks that call different things, a rank that left or panicked.
//! - The buffer always comes back, and only when no rank touches it any more.
//! - Starting and waiting allocate nothing, after the first few operations.
//!
//! # Limits
//!
//! - Loopback is one process.
//! - A deadline bounds the wait for other ranks; once all have come, the bytes are moved to the end.
//! - f64 and u64 have no wider accumulator: an f64 sum keeps what it rounds off beside it, which is itself rounded, and a u64
//!   sum wraps. f64, and bf16 in f32, reach as far as their accumulators, so the mean of values near the largest is infinite.
//! - `send` returns when its `recv` has taken the bytes; two ranks that both send first are a mismatch, not a queue.
//! - Every rank of every communicator has a thread; ranks are meant to be few.
//!
//! # Features
//!
//! `nccl` is the backend for NVIDIA GPUs. It builds without CUDA and NCCL, which are loaded when first used.
//!
//! `shuttle` is for this crate's own tests: inside a shuttle execution its locks and threads are shuttle's.

mod clock;
mod colours;
mod communicator;
mod error;
mod faults;
mod in_flight;
pub mod loopback;
#[cfg(feature = "nccl")]
pub mod nccl;
mod op;
mod reduce;
pub mod rendezvous;
mod stats;
mod sync;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub use clock::{Clock, Wake};
pub use communicator::Communicator;
pub use error::{Called, Error};
pub use faults::Faults;
pub use in_flight::{InFlight, Tickets};
pub use op::{Action, Op, Reduction};
pub use stats::{Kind, Stats, Traffic};
