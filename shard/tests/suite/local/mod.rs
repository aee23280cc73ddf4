//! Workers that step alone and exchange seldom.

mod absent;
mod alignment;
mod delayed;
pub mod equal;
mod failures;
mod follow;
mod in_place;
mod limits;
mod means;
pub mod naive;
mod one_sided;
mod plan;
mod processes;
mod random;
mod regroup;
mod replicas;
mod rounds;
#[cfg(feature = "checkpoint")]
mod saving;
mod traffic;
mod trajectories;
mod verified;
mod weighted;
