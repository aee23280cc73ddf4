//! ZeRO-sharded data-parallel training of candle variables: the adapter between a candle training loop and the sharded step.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use meshstep_candle::Sharded;
//! use meshstep_shard::prelude::*;
//!
//! let losses = loopback::spawn(4, |comm| -> Result<f32, meshstep_candle::Error> {
//!     let w = Var::new(&[1f32, -2.0], &Device::Cpu)?;
//!     let batch = Tensor::new(&[comm.rank() as f32, 1.0], &Device::Cpu)?; // each rank has its own
//!     let options = Options { stage: Stage::Zero2, ..Options::default() };
//!     let mut opt = Sharded::new(comm, [("w", w.clone())], AdamW::default(), options)?;
//!     for _ in 0..10 {
//!         let loss = w.mul(&batch)?.sqr()?.mean_all()?;
//!         opt.backward_step(&loss, StepArgs { lr: 0.1, max_norm: Some(1.0), ..StepArgs::default() })?;
//!     }
//!     Ok(w.mul(&batch)?.sqr()?.mean_all()?.to_scalar()?)
//! })?;
//! assert!(losses.into_iter().all(|loss| loss.is_ok()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | item | purpose |
//! |---|---|
//! | [`Sharded`] | variables of a rank with the optimizer of all ranks, or a wrapper: backward pass, step, new parameters in place |
//! | [`BackwardPass`] | a loss to differentiate: its cuts, the weight of its micro-batch |
//! | [`Tape`] | cuts in the graph, so that gradients travel during the backward pass |
//! | [`NamedVars`] | variables with names: a `VarMap`, or a list |
//! | [`hand_over`] | one gradient to a micro-batch, for loops of your own |
//! | `parallel` (feature) | layers of a network that is distributed over a mesh |
//! | [`Error`] | errors, with their values |
//!
//! # Limits
//! - Variables and gradients on the CPU, of f32, f64, bf16 or f16.
//! - Stages 0, 1 and 2, and whole-parameter ownership: candle keeps each variable whole on every rank.
//! - Parameters exist twice: in the optimizer and in candle, which [`Category::Framework`](meshstep_tensor::Category::Framework)
//!   counts. Activations and gradients in candle's memory are not counted.
//! - Buffers that are not trained, such as running means of a batch norm, are the rank's own.

#[cfg(feature = "checkpoint")]
mod checkpoint;
mod error;
mod memory;
#[cfg(feature = "parallel")]
pub mod parallel;
mod pass;
mod sharded;
mod step;
mod tape;
mod vars;

pub use error::Error;
pub use memory::hand_over;
pub use pass::BackwardPass;
pub use sharded::Sharded;
pub use tape::Tape;
pub use vars::NamedVars;

/// Keeps README.md true.
#[cfg(doctest)]
#[cfg(feature = "nn")]
#[doc = include_str!("../README.md")]
struct Readme;
