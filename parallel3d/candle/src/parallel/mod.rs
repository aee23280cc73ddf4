//! Candle layers of a network that is distributed over a mesh: their communication, and their gradients.
//!
//! | item | along | forward | backward |
//! |---|---|---|---|
//! | [`Collectives`] | any | `all_gather`, `reduce_scatter`, `all_reduce`, `copy` | the reverse collective |
//! | [`Residual`] | `tp` | layout of activations between layers: whole, or cut along the sequence | |
//! | [`ColumnLinear`] | `tp` | reads the whole residual stream, returns a part of the outputs | sums the input's gradient |
//! | [`RowLinear`] | `tp` | reads a part of the inputs, sums the ranks' results | makes the output's gradient whole |
//! | [`VocabEmbedding`] | `tp` | looks up the rank's own tokens, sums over ranks | gradients of the rank's own rows |
//! | [`cross_entropy`] | `tp` | loss from parts of the logits: one maximum and one sum on the wire | none |
//! | [`causal_attention`] | `cp` | own queries, keys and values of all ranks | sums the gradients of keys and values |
//! | [`rms_norm`] | none | normalises each token on its own | the weight's gradient covers the rank's own tokens |
//!
//! Placements state the further reduction of the parameters' gradients: `ColumnLinear::placement` and its siblings, and
//! [`Gradient::PartialSum`](meshstep_parallel3d::Gradient::PartialSum) for parameters that act on a residual stream cut along `tp`.
//!
//! ```
//! use candle_core::{Device, Module, Tensor, Var};
//! use meshstep_candle::parallel::{Collectives, ColumnLinear, Residual, RowLinear};
//!
//! // An MLP with two hidden channels, one on each rank.
//! let ranks = meshstep_comm::loopback::spawn(2, |tp| -> candle_core::Result<Vec<f32>> {
//!     let (rank, stream) = (tp.rank() as f32, Residual::whole(Collectives::new(tp)));
//!     let up = Var::new(&[[1.0 + rank, 0.0]], &Device::Cpu)?; // its row of [[1, 0], [2, 0]]
//!     let down = Var::new(&[[1f32], [2.0]], &Device::Cpu)?; // its column of [[1, 1], [2, 2]]
//!     let up = ColumnLinear::new(up.as_tensor().clone(), stream.clone());
//!     let down = RowLinear::new(down.as_tensor().clone(), stream);
//!     let x = Tensor::new(&[[1f32, 1.0]], &Device::Cpu)?;
//!     down.forward(&up.forward(&x)?)?.flatten_all()?.to_vec1()
//! })?;
//! for y in ranks {
//!     assert_eq!(y?, [3.0, 6.0]);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Same calls on every rank
//!
//! Each collective waits for all ranks of its group: in the forward pass when a layer is called, in the backward pass when candle reaches
//! it. `Tensor::backward` visits operations in an order determined by the graph alone (the reverse of a walk along the operands, first
//! operand first). Ranks that call the same layers in the same order, with tensors of the same shapes and variables in the same places,
//! therefore communicate in the same order. A layer that only some ranks of a group call, or an input that needs a gradient on only some
//! of them, is a mismatch, which `meshstep_comm` reports on every rank.
//!
//! # Scale of the loss
//!
//! Under context parallelism a token's loss reaches the keys and values of other ranks, so gradients of different ranks' tokens are mixed
//! before the optimizer sees them. Each rank's loss must then have the same scale: the sum over its tokens divided by the number of
//! tokens of *all* ranks, with `Combine::Sum` of `meshstep_shard`. A mean over a rank's own tokens, weighted afterwards
//! (`Combine::Weighted`), is wrong if ranks along `cp` have different numbers of tokens.
//!
//! # Limits
//!
//! - Tensors on the CPU, of f32, f64, bf16 or f16. On other devices candle reports that there is no implementation.
//! - Collectives block and do not overlap computation.
//! - A sequence is cut into contiguous parts: with a causal mask, later ranks along `cp` have more work.
//! - Linear layers have no bias, and attention has as many key heads as query heads.

mod attention;
mod collectives;
mod error;
mod exchange;
mod linear;
mod norm;
mod residual;
mod vocabulary;

pub use attention::causal_attention;
pub use collectives::Collectives;
pub use error::{LayerError, cause};
pub use linear::{ColumnLinear, RowLinear};
pub use norm::rms_norm;
pub use residual::Residual;
pub use vocabulary::{VocabEmbedding, cross_entropy};
