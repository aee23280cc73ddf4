//! Names of a training loop on a mesh, for a glob import in place of `meshstep_shard::prelude`, which it contains: [`Optimizer`]
//! and [`ShardedLbfgs`] are those of this crate. It exports no `Error`: that of this crate is `meshstep_parallel3d::Error`.

pub use crate::{
    Axes, Axis, Communicators, Coordinate, Gradient, Mesh, Model, ModelBuilder, Optimizer, Placement, Plan,
    ShardedLbfgs,
};
pub use meshstep_shard::prelude::*;
