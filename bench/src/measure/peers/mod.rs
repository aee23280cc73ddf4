//! Other systems that run one round per command: candle in this process, the others as separate programs.

mod candle;
mod group;
mod malloc;
mod mpi;
mod pair;
mod torch;
#[cfg(feature = "cuda")]
mod torch_on_gpu;

pub(crate) use candle::Candle;
pub(crate) use group::Group;
pub(crate) use mpi::Mpi;
pub(crate) use pair::{TorchPair, TorchTimes};
pub(crate) use torch::start as torch;
#[cfg(feature = "cuda")]
pub(crate) use torch_on_gpu::TorchOnGpu;
