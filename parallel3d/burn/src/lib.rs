//! ZeRO-sharded data-parallel training of burn modules: the adapter between a burn training loop and the sharded step.
//!
//! | item | purpose |
//! |---|---|
//! | [`Sharded`] | optimizer of all ranks, or a wrapper, for the parameters of a module: backward pass, step, new parameters |
//! | [`BackwardPass`] | a loss to differentiate, the weight of its micro-batch |
//! | [`hand_over`] | one gradient to a micro-batch, for loops of your own |
//! | `WithModel` (feature `checkpoint`) | optimizer and module together, for checkpoints |
//! | [`Error`] | errors, with their values |
//!
//! # Names
//! A parameter's name is its path in the module, as burn's records have it: fields and indices, joined by dots (`layers.0.weight`). Names
//! are the same on every rank and in every process; burn's `ParamId` is random.
//!
//! # Which parameters train
//! - Float parameters that require gradients at [`Sharded::new`], of f32, f64, bf16 or f16.
//! - Other float tensors (frozen parameters, running means) take no memory in the optimizer and are not in checkpoints. They have rank
//!   0's values after [`Sharded::new`], and are the rank's own from then on.
//! - Places with the same `ParamId`, such as clones of a parameter, are one parameter under the path of the first. Its gradient is the
//!   sum over the places, and all places get the new values.
//!
//! # Copies
//! A step copies each gradient once, into its bucket, and each new parameter once, out of the optimizer; burn's CPU backend flex takes
//! and gives the memory itself. Where burn shares a gradient's memory with another tensor, or its elements are not in order, it makes a
//! copy of its own first.
//!
//! # GPUs
//! The feature `cuda` is for a module on `Device::cuda(i)` with the optimizer on the same GPU: `Options::queue` is a stream of it, and
//! the communicator NCCL's. Gradients and new parameters are copied on the device, and never pass through the host's memory. Burn's
//! streams are its own, so the host waits twice for burn and twice for the copies in each step.
//!
//! **It has not run on a GPU yet.** It compiles; the kernels that burn's device compiler wrote for it pass `ptxas`; and training loops ran to
//! their end on stand-ins for the driver and NCCL (those of the repository, with more functions), where burn's kernels do nothing, so the
//! trained values were not checked.
//! `examples/cuda.rs` is a whole program, and the check to run on a GPU:
//! `cargo run --release -p meshstep-burn --features cuda --example cuda` compares the losses with those of burn's AdamW.
//!
//! - Burn's feature `fusion` must be off, because a tensor that is still to be computed has no memory; with it, the crate does not
//!   compile. It is among the defaults of `burn`: take it with `default-features = false`.
//! - Burn 0.22 compiles its kernels with LLVM, which the build of burn downloads, and needs `libdevice.10.bc` of a CUDA toolkit at run time.
//! - A queue on a GPU and a module elsewhere are [`Error::Device`]. A module on a GPU and a queue on the CPU work together; tensors then pass
//!   through the host's memory.
//!
//! # Limits
//! - Stages 0, 1 and 2, and whole-parameter ownership: a burn module keeps each parameter whole on every rank.
//! - Burn returns all gradients at the end of the backward pass, so they travel after it.
//! - Parameters exist twice, in the optimizer and in burn, and a third time while a step replaces burn's;
//!   [`Category::Framework`](meshstep_tensor::Category::Framework) counts burn's. Activations and gradients in burn's memory are not
//!   counted.

#[cfg(feature = "checkpoint")]
mod checkpoint;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod memory;
mod pass;
mod sharded;
mod values;
mod walk;

#[cfg(feature = "checkpoint")]
pub use checkpoint::WithModel;
pub use error::Error;
pub use memory::hand_over;
pub use pass::BackwardPass;
pub use sharded::Sharded;

/// Keeps README.md true.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
