//! The GPU code gives the CPU's bits: on a real device, or on the stand-in (`cargo xtask ci --only standin`).

mod blocks;
mod flat;
mod gpu;
mod grids;
mod lbfgs;
mod matrices;
mod merge;
mod norm;
mod step;
mod tables;
mod update;
