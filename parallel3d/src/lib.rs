//! Meshes of tensor-, context- and data-parallel ranks, the placement of a model on them, and the sharded optimizer step.
//!
//! ```
//! use meshstep_parallel3d::prelude::*;
//!
//! // Two ranks along tp each hold half of `up`; gradients are summed along dp, which divides the optimizer state.
//! let up = Placement::whole().cut(Axis::Tp, 0);
//! let model = Model::builder().param("up", &[16, 4], DType::F32, up).build()?;
//! let mesh: Mesh = "tp=2,dp=2".parse()?;
//! let ranks = loopback::spawn(4, |world| {
//!     let options = Options { stage: Stage::Zero1, ..Options::default() };
//!     let mut opt = Optimizer::new(world, mesh.clone(), &model, AdamW::default(), |_, _, _| Ok(()), options)?;
//!     let mb = opt.micro_batch(1)?;
//!     mb.grad("up", &[1f32; 8 * 4][..])?;
//!     mb.finish()?;
//!     opt.step(StepArgs { lr: 0.1, max_norm: Some(1.0), ..StepArgs::default() })?.outcome()?;
//!     Ok::<(), meshstep_parallel3d::Error>(())
//! })?;
//! assert!(ranks.into_iter().all(|rank| rank.is_ok()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | type | purpose |
//! |---|---|
//! | [`Mesh`] | ranks along named axes: coordinates, groups along any set of axes |
//! | [`Placement`] | placement of a parameter: its cuts along axes, and the reduction of its gradient |
//! | [`Model`] | parameters and their placements; the part held by each rank, by [`Family`] |
//! | [`Plan`] | storage, updates and traffic of every rank in bytes, before any rank starts; [`Plan::search`] finds plans that fit |
//! | [`Optimizer`] | sharded step on a mesh, decided by all its ranks together |
//! | [`ShardedLbfgs`] | L-BFGS on a mesh |
//! | [`LocalOptimizer`], [`replicas`] | replicas of a mesh that step alone and exchange seldom |
//! | [`Verified`], [`Differs`] | result of a verification: replicas compared by bits |
//! | [`Communicators`] | one communicator for each set of axes in use |
//! | [`elements`] | elements of a parameter held by a rank |
//! | `meshstep_checkpoint` (feature `checkpoint`) | saves, loads and moves of the optimizers here, from any mesh to any other |
//! | [`prelude`] | names of a training loop, for a glob import |

#[cfg(feature = "checkpoint")]
mod checkpoint;
mod elements;
mod error;
mod lbfgs;
mod local;
mod mesh;
mod model;
pub mod models;
mod optimizer;
mod placement;
mod plan;
pub mod prelude;
mod step;
mod verify;

pub use elements::elements;
pub use error::{Error, MeshError};
pub use lbfgs::ShardedLbfgs;
pub use local::{LocalOptimizer, replicas};
pub use mesh::axis::{Axes, Axis, UnknownAxis};
pub use mesh::communicators::Communicators;
pub use mesh::differs::Differs;
pub use mesh::{Coordinate, Group, Mesh};
pub use model::{Family, Model, ModelBuilder, Parameter};
pub use optimizer::Optimizer;
pub use placement::{Gradient, Piece, Placement, Sharing};
pub use plan::{
    Cluster, Found, Holds, PipelineStage, Plan, Purpose, RankPlan, Recipe, Sends, Space, TotalKind, Totals,
};
pub use verify::{Alike, Verified};

/// Keeps README.md true.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
