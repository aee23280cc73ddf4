//! Replicas of a mesh that step alone and exchange seldom equal workers of one rank each, bit for bit.

#[cfg(feature = "checkpoint")]
mod checkpoint;
mod elastic;
mod equal;
mod refused;
mod worker;
