//! Layers of a network that is spread over a mesh, for candle: what they exchange, and their gradients.
//!
//! | item | along | forward | backward |
//! |---|---|---|---|
//! | [`Collectives`] | any | `all_gather`, `reduce_scatter`, `all_reduce`, `copy` | each the reverse of another |
//! | [`Residual`] | `tp` | how activations between layers lie: whole, or cut along the sequence | |
//! | [`ColumnLinear`] | `tp` | reads the whole residual stream, gives a part of the outputs | the input's gradient summed |
//! | [`RowLinear`] | `tp` | reads a part of the inputs, adds the ranks' results up | the output's gradient whole |
//! | [`VocabEmbedding`] | `tp` | rows of the tokens a rank has, added up | the rows' gradients, on the rank that has them |
//! | [`cross_entropy`] | `tp` | loss from parts of the logits: one maximum and one sum on the wire | none |
//! | [`causal_attention`] | `cp` | own queries, everybody's keys and values | the keys' and values' gradients summed |
//! | [`rms_norm`] | none | of each token on its own | the weight's gradient is of the rank's own tokens |
//!
//! What the parameters' gradients need after this is said by their placements: `ColumnLinear::placement` and its like, and
//! [`Gradient::PartialSum`](crate::Gradient::PartialSum) for what works on a residual stream that is cut along `tp`.
//!
//! ```
//! use candle_core::{Device, Module, Tensor, Var};
//! use meshstep_parallel3d::candle::{Collectives, ColumnLinear, Residual, RowLinear};
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
//! # What ranks must do alike
//!
//! Each collective waits for all ranks of its group, in the forward pass where a layer is called and in the backward pass where
//! candle reaches it. `Tensor::backward` visits operations in an order that the graph alone decides (the reverse of a walk along
//! the operands, first operand first), so ranks that call the same layers in the same order, with tensors of the same shapes and
//! variables in the same places, exchange in the same order. A layer that only some ranks of a group call, or whose
//! input needs a gradient on some of them only, is a mismatch, which `meshstep_comm` tells every rank.
//!
//! # How losses add up
//!
//! Under context parallelism a token's loss reaches the keys and values of other ranks, so gradients of different ranks' tokens
//! are mixed before the optimizer sees them. Each rank's loss must then have one scale: the sum over its tokens divided by the
//! number of tokens of *all* ranks, with `Combine::Sum` of `meshstep_shard`. A mean over a rank's own tokens, weighted afterwards
//! (`Combine::Weighted`), is wrong where ranks along `cp` have different numbers of them.
//!
//! # Limits
//!
//! - Tensors on the CPU, of f32, f64, bf16 or f16. Elsewhere candle says that there is no implementation.
//! - Collectives block; none is hidden behind computation.
//! - A sequence is cut into contiguous parts: with a causal mask later ranks along `cp` have more to look at.
//! - Linear layers have no bias, attention as many heads of keys as of queries.

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
pub use error::{Error, cause};
pub use linear::{ColumnLinear, RowLinear};
pub use norm::rms_norm;
pub use residual::Residual;
pub use vocabulary::{VocabEmbedding, cross_entropy};
