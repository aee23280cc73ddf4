//! Meshes of tensor-, context- and data-parallel ranks, and what of a model and its optimizer lives where on them.
//!
//! | type | what it is |
//! |---|---|
//! | [`Mesh`] | ranks along named axes: coordinates, groups of any set of axes |
//! | [`Placement`] | where a parameter lies: cut along axes or whole, and how its gradient becomes whole |
//! | [`Model`] | parameters and their placements; what of them a rank holds, by [`Family`] |
//! | [`Plan`] | who stores, updates and sends what, in bytes, before there is a rank; [`Plan::search`] finds the ones that fit |
//! | [`Optimizer`] | the sharded step on a mesh, decided by all its ranks together |
//! | [`ShardedLbfgs`] | L-BFGS on a mesh |
//! | [`LocalOptimizer`], [`replicas`] | replicas of a mesh that step alone and meet seldom |
//! | [`Verified`], [`Differs`] | what a verification came to: replicas compared by bits |
//! | [`Communicators`] | one communicator for each set of axes that is needed |
//! | [`elements`] | which elements of a parameter a rank holds |
//! | `reshard` (of the feature `checkpoint`) | from one mesh to another without a file |
//! | `candle` (a feature) | layers of a network that is spread over a mesh |

mod axis;
#[cfg(feature = "candle")]
pub mod candle;
#[cfg(feature = "checkpoint")]
mod checkpoint;
mod communicators;
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
mod site;
mod step;
mod verify;

pub use axis::{Axes, Axis, UnknownAxis};
#[cfg(feature = "checkpoint")]
pub use checkpoint::reshard;
pub use communicators::Communicators;
pub use elements::elements;
pub use error::{Error, MeshError};
pub use lbfgs::ShardedLbfgs;
pub use local::{LocalOptimizer, replicas};
pub use mesh::{Coordinate, Group, Mesh};
pub use model::{Family, Model, ModelBuilder, Parameter};
pub use optimizer::Optimizer;
pub use placement::{Gradient, Piece, Placement, Sharing};
pub use plan::{
    Cluster, Found, Holds, Kind, PipelineStage, Plan, Purpose, RankPlan, Recipe, Sends, Space, Totals,
};
pub use verify::{Alike, Differs, Verified};

/// Keeps README.md true.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
