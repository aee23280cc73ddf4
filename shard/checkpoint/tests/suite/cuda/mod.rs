//! Checkpoints of optimizers on GPUs, with loopback's bits: on real GPUs, or on the stand-ins (`cargo xtask ci --only standin`).

mod consolidate;
mod files;
mod pair;
