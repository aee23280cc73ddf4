//! Collectives of a group as tensor operations with gradients.

use super::exchange::{LayerExchange, LayerExchangeKind};
use candle_core::{Result, Tensor};
use meshstep_comm::Communicator;
use std::sync::Arc;

/// Group of ranks that hold parts of the same tensors.
///
/// | forward | backward |
/// |---|---|
/// | `all_gather`: concatenates the ranks' parts | `reduce_scatter`: each rank's part of the summed gradient |
/// | `reduce_scatter`: each rank's part of the sum | `all_gather`: the whole gradient |
/// | `all_reduce`: the sum | no communication: the gradient of a sum is that of each term |
/// | `copy`: no communication | `all_reduce`: the sum of the gradients of all ranks' uses |
///
/// `all_gather` and `copy` begin a section in which each rank computes with its own part of a layer, so the gradient is the sum over
/// ranks. `reduce_scatter` and `all_reduce` end such a section: the result is the same on all ranks, or each rank's part. All of them
/// block, and all ranks call them in the same order (see the module). In a group of one rank they do nothing.
#[derive(Clone, Debug)]
pub struct Collectives {
    comm: Arc<dyn Communicator>,
}

impl Collectives {
    /// Wraps the collectives of `comm`.
    pub fn new(comm: Arc<dyn Communicator>) -> Self {
        Collectives { comm }
    }

    /// Returns this rank's index in the group.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Returns the number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Returns the communicator.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// Concatenates the ranks' tensors along `dim`, in rank order: `[.., n, ..]` to `[.., ranks * n, ..]`.
    pub fn all_gather(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        self.exchange(x, LayerExchangeKind::AllGather, dim)
    }

    /// Returns this rank's part along `dim` of the sum of the ranks' tensors: `[.., ranks * n, ..]` to `[.., n, ..]`.
    pub fn reduce_scatter(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        self.exchange(x, LayerExchangeKind::ReduceScatter, dim)
    }

    /// Returns the sum of the ranks' tensors, with the same bits on all ranks.
    pub fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(x, LayerExchangeKind::AllReduce, 0)
    }

    /// Returns the tensor itself. It is the same on all ranks, and each rank uses it for its own part of a layer.
    pub fn copy(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(x, LayerExchangeKind::Copy, 0)
    }

    /// Returns the elementwise maximum over ranks, without a gradient.
    pub fn max(&self, x: &Tensor) -> Result<Tensor> {
        self.exchange(&x.detach(), LayerExchangeKind::Max, 0)
    }

    fn exchange(&self, x: &Tensor, kind: LayerExchangeKind, dim: usize) -> Result<Tensor> {
        if matches!(kind, LayerExchangeKind::AllGather | LayerExchangeKind::ReduceScatter) {
            x.dim(dim)?; // an error where there is no such dimension
        }
        if self.world_size() == 1 {
            return Ok(x.clone());
        }
        x.contiguous()?.apply_op1(LayerExchange { comm: Arc::clone(&self.comm), kind, dim })
    }
}
