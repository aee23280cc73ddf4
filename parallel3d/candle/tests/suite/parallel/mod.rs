//! Layers distributed over ranks against the same layers on one rank: results and gradients.

mod collectives;
mod common;
mod failures;
mod layers;
mod network;
mod training;
