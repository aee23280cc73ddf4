//! Saved state of the types of `meshstep-shard`: optimizers, L-BFGS, and replicas in groups.

mod cross_shard;
mod lbfgs;
mod optimizer;
