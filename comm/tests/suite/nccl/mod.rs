//! Ranks on NCCL, or on the stand-ins for NCCL and the driver (`cargo xtask ci --only standin`).

mod bench;
mod collectives;
mod failures;
mod graphs;
mod misuse;
mod overlap;
mod pair;
mod processes;
mod programs;
mod rebuild;
mod windows;
