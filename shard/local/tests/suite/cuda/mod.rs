//! Workers on GPUs, through NCCL, with the bits of loopback: on real GPUs, or on the stand-ins (`cargo xtask ci --only standin`).

mod exchanges;
mod failing;
#[cfg(feature = "checkpoint")]
mod moving;
