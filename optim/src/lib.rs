//! Update rules on flat vectors, norms without rounding, clipping. This crate knows no ranks: a vector may be a shard, which makes no
//! difference here.
//!
//! A rule holds hyperparameters; the caller owns memory, state and step counts. One pass scales the gradient, updates, writes a
//! low-precision copy and resets the gradient.
//!
//! ```
//! use meshstep_optim::{AdamW, Flat, Norm, NormAccumulator, Rule, Scalars, Segment, clip_coef};
//! use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, bf16};
//!
//! let meter = Meter::new();
//! let zeros = |dtype, category| Buffer::zeroed(100, dtype, &meter, category);
//! let (mut params, mut m, mut v) = (
//!     zeros(DType::F32, Category::Params)?,
//!     zeros(DType::F32, Category::State)?,
//!     zeros(DType::F32, Category::State)?,
//! );
//! let mut low = zeros(DType::BF16, Category::Params)?; // what the model computes with
//! let mut grads = Buffer::from_slice(&[bf16::ONE; 100], &meter, Category::Grads)?;
//!
//! let mut norm = NormAccumulator::new(Norm::L2);
//! norm.add(grads.as_slice())?;
//! assert_eq!(norm.finish(), 10.0);
//!
//! // Weights decay, biases do not: two rules, each with its own segments of the same memory.
//! let decay = AdamW { weight_decay: 0.1, ..AdamW::default() };
//! let none = AdamW { weight_decay: 0.0, ..decay.clone() };
//! let scalars = Scalars { lr: 1e-3, grad_scale: clip_coef(norm.finish(), 1.0)?, zero_grads: true, ..Scalars::default() };
//! for (rule, range) in [(decay, 0..64), (none, 64..100)] {
//!     let mut state = [m.as_mut(), v.as_mut()];
//!     let (params, grads) = (params.as_mut(), grads.as_mut());
//!     let flat = Flat { params, grads, state: &mut state, copy: Some(low.as_mut()), remainder: None };
//!     rule.update(flat, &[Segment::new(range, 1)], &scalars, &Queue::cpu())?;
//! }
//! assert!((params.typed::<f32>()?[99] + 1e-3).abs() < 1e-6);
//! assert_eq!(low.typed::<bf16>()?[99], bf16::from_f32(-1e-3));
//! assert_eq!(grads.typed::<bf16>()?[99], bf16::ZERO);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | item | purpose |
//! |---|---|
//! | [`AdamW`], [`Adam`], [`Sgd`], [`RmsProp`], [`Adagrad`] | rules, with PyTorch's meaning and defaults |
//! | [`Lion`], [`Adopt`], [`QhAdopt`], [`QhAdamW`] | rules of papers, with their authors' defaults |
//! | [`ScheduleFreeAdamW`] | AdamW without a learning-rate schedule; evaluated at an average of the parameters |
//! | [`UncorrectedAdam`] | Adam as in proofs about local updates |
//! | [`Lamb`], [`Lars`], [`Muon`] | rules that see more than an element: sums over a tensor ([`TensorSums`]), a whole matrix |
//! | [`Blocks`], [`Adjust`] | Muon's matrices within a fused tensor; adjustment of its rate to their shape |
//! | [`Decay`], [`Momentum`], [`Moments`] | forms of weight decay; SGD's forms of momentum; several slow moments |
//! | [`Rule`] | hyperparameters, the names of the state, one pass over [`Flat`] memory |
//! | [`MatrixRule`] | Muon's update in phases, for a matrix in pieces |
//! | [`Segment`], [`Scalars`] | elements to update and their `t`; learning rate, gradient scale, gradient reset |
//! | [`elementwise`] | helpers for a rule outside this crate: any recipe of types, on every instruction set |
//! | [`remainder`] | f32 masters from bf16 parameters and their 16-bit remainders |
//! | [`Strided`] | elements of a tensor held by a part of it |
//! | [`Norm`], [`NormAccumulator`], [`NormSum`], [`ExactSum`] | norms with bits that do not depend on order, splits or merges |
//! | [`clip_coef`] | clipping by the global norm, as a factor into `grad_scale` |
//! | [`Lbfgs`], [`LbfgsState`], [`History`] | L-BFGS over a closure, on a vector or on shards of one; type of its pairs |
//! | [`Reduce`], [`Alone`] | sums and maxima over shards: declared here, implemented by the owner of the shards |
//! | [`accumulate`], [`scale`], [`cast`] | weighted addition of gradients; scaling and casting vectors in place |
//! | [`Merge`], [`OuterStep`], [`pack`], [`mix_zeros`] | mean of several copies of a vector, merged into one of them |
//! | [`LossScale`], [`LossScaleState`] | static and dynamic loss scaling |
//! | [`schedule`] | learning rate as a function of the step, with Hugging Face's and PyTorch's schedules |
//! | [`cuda`] | arguments of the rules' CUDA kernels; the caller launches them |
//! | [`Isa`] | instruction set in use; it affects speed, never bits |
//! | [`prelude`] | types for a glob import |
//!
//! # Same bits everywhere
//!
//! Each rule is one IEEE sequence per element, written out in its module, with every fused multiply-add marked. The slow reference, the
//! baseline, AVX2 and AVX-512 give the same bits at every length and offset, for any cut of the vector (any NaN equals any NaN). The
//! exception is [`Norm::P`], which is not exact, but gives the same bits everywhere.
//!
//! # Features
//!
//! - `cuda`: vectors in memory of NVIDIA GPUs. Kernels are embedded as PTX, which the driver compiles on first use.
//! - `cubins`: also embeds machine code for sm_80, sm_90 and sm_100, for drivers that cannot compile PTX. `cargo xtask kernels --cubins
//!   FOLDER` assembles it; set `MESHSTEP_CUBINS` to the folder's absolute path for the build.
//!
//! # Limits
//!
//! - Parameters are f32, f64 or bf16; f16 parameters are the `copy` of an f32 master.
//! - Muon orthogonalises in the type of the parameters, where published programs use bf16. Its blocks are equal groups of rows, never of columns.
//! - Vectorised loops are for x86-64; other platforms use the compiler's code for the same loops. An x86-64 machine without FMA computes
//!   each fused multiply-add in software: slow, with the same bits.
//! - Floating-point state (rounding mode, flush-to-zero) must be the default one.

pub mod cuda;
mod engine;
mod error;
mod flat;
mod lbfgs;
mod loss_scale;
mod merge;
mod norm;
mod precision;
pub mod prelude;
mod reduce;
mod rule;
mod rules;
pub mod schedule;
mod state_slot;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub use engine::decay::Decay;
pub use engine::elementwise;
pub use engine::moments::Moments;
pub use engine::strided::Strided;
pub use error::Error;
pub use flat::accumulate::{accumulate, accumulate_on};
pub use flat::norm_sum::NormSum;
pub use flat::placed::{cast, scale};
pub use lbfgs::{History, Iterate, Lbfgs, LbfgsError, LbfgsReport, LbfgsState, LineSearch, Loss, Stop};
pub use loss_scale::{DynamicLossScale, LossScale, LossScaleState};
pub use merge::{Merge, OuterStep, mix_zeros, pack};
pub use meshstep_tensor::simd::Isa;
pub use norm::clip::clip_coef;
pub use norm::tensor_sums::TensorSums;
pub use norm::{ExactSum, Norm, NormAccumulator};
pub use precision::number::power;
pub use precision::remainder;
pub use reduce::{Alone, Reduce, ReduceError, ordered, unordered};
pub use rule::{Flat, NEAREST_RETENTION, Rounding, Rule, Scalars, Sees, Segment};
pub use rules::adagrad::Adagrad;
pub use rules::adam::{Adam, AdamW};
pub use rules::adopt::{Adopt, QhAdopt};
pub use rules::lamb::Lamb;
pub use rules::lars::Lars;
pub use rules::lion::Lion;
pub use rules::matrix_rule::MatrixRule;
pub use rules::muon::{Adjust, Blocks, Muon};
pub use rules::qhadamw::QhAdamW;
pub use rules::rmsprop::RmsProp;
pub use rules::schedulefree::ScheduleFreeAdamW;
pub use rules::sgd::{Momentum, Sgd};
pub use rules::uncorrected::UncorrectedAdam;
pub use state_slot::{Carry, StateSlot};
