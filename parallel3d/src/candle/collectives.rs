//! Collectives between the ranks of a group as operations on tensors, with gradients.

use super::exchange::{Exchange, Kind};
use candle_core::{Result, Tensor};
use meshstep_comm::Communicator;
use std::sync::Arc;

/// Ranks that have parts of the same tensors.
///
/// | forward | backward |
/// |---|---|
/// | `all_gather`: the ranks' parts after each other | `reduce_scatter`: each rank's part of the summed gradient |
/// | `reduce_scatter`: each rank's part of the sum | `all_gather`: the whole gradient |
/// | `all_reduce`: the sum | nothing moves: the gradient of a sum is that of each term |
/// | `copy`: nothing moves | `all_reduce`: the sum of what the ranks' uses give |
///
/// `all_gather` and `copy` begin what each rank then does for itself, with its own part of a layer: the gradient is the sum of
/// theirs. `reduce_scatter` and `all_reduce` end it: what follows is the same on all ranks, or its own part on each. All
/// of them block, and are called by all ranks in the same order (see the module). Among one rank they are nothing.
#[derive(Clone, Debug)]
pub struct Collectives {
    comm: Arc<dyn Communicator>,
}

impl Collectives {
    /// Among the ranks of `comm`.
    pub fn new(comm: Arc<dyn Communicator>) -> Self {
        Collectives { comm }
    }

    /// This rank among them.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// How many there are.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// What carries them.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// The ranks' tensors after each other along `dim`, in the order of the ranks: `[.., n, ..]` to `[.., ranks * n, ..]`.
    pub fn all_gather(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        self.exchange(x, Kind::AllGather, dim)
    }

    /// This rank's part along `dim` of the sum of the ranks' tensors: `[.., ranks * n, ..]` to `[.., n, ..]`.
    pub fn reduce_scatter(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        self.exchange(x, Kind::ReduceScatter, dim)
    }

    /// The sum of the ranks' tensors, the same bits on all of them.
    pub fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(x, Kind::AllReduce, 0)
    }

    /// The tensor itself, which is the same on all ranks and which each will use for its own part of something.
    pub fn copy(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(x, Kind::Copy, 0)
    }

    /// The largest of the ranks' elements, without a gradient.
    pub fn max(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(&x.detach(), Kind::Max, 0)
    }

    fn exchange(&self, x: &Tensor, kind: Kind, dim: usize) -> Result<Tensor> {
        if matches!(kind, Kind::AllGather | Kind::ReduceScatter) {
            x.dim(dim)?; // an error where there is no such dimension
        }
        if self.world_size() == 1 {
            return Ok(x.clone());
        }
        x.contiguous()?.apply_op1(Exchange { comm: Arc::clone(&self.comm), kind, dim })
    }
}
