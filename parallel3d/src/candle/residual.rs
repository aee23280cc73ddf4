//! How the residual stream lies along `tp`: what column-parallel layers read from it, and row-parallel layers add to it.

use super::Collectives;
use candle_core::{Result, Tensor};

/// The activations between tensor-parallel layers: whole on each rank, or cut along the sequence (sequence parallelism,
/// Korthikanti et al., *Reducing activation recomputation in large transformer models*, 2022).
///
/// | | whole | cut |
/// |---|---|---|
/// | `enter` | `copy` | `all_gather` |
/// | `leave` | `all_reduce` | `reduce_scatter` |
/// | gradient of what works on the stream itself: norms, positions | `Gradient::Same` | `Gradient::PartialSum` |
///
/// Both move the same bytes. Cut, a rank keeps and normalises 1/tp of the stream.
#[derive(Clone, Debug)]
pub struct Residual {
    tp: Collectives,
    cut: Option<usize>,
}

impl Residual {
    /// Every rank has all of it.
    pub fn whole(tp: Collectives) -> Self {
        Residual { tp, cut: None }
    }

    /// Each rank has its part of the sequence, which is dimension `dim` of activations.
    pub fn cut(tp: Collectives, dim: usize) -> Self {
        Residual { tp, cut: Some(dim) }
    }

    /// The ranks along `tp`.
    pub fn tp(&self) -> &Collectives {
        &self.tp
    }

    /// From the stream to what each rank computes its part of something from: whole.
    pub fn enter(&self, x: &Tensor) -> Result<Tensor> {
        match self.cut {
            None => self.tp.copy(x),
            Some(dim) => self.tp.all_gather(x, dim),
        }
    }

    /// From the ranks' terms to their sum, as it lies in the stream.
    pub fn leave(&self, x: &Tensor) -> Result<Tensor> {
        match self.cut {
            None => self.tp.all_reduce(x),
            Some(dim) => self.tp.reduce_scatter(x, dim),
        }
    }

    /// Of something that every rank has whole, such as the embeddings of positions, what belongs to this rank's part of the stream;
    /// `dim` is the dimension of the sequence.
    pub fn own(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        let (ranks, extent) = (self.tp.world_size(), x.dim(dim)?);
        match self.cut {
            None => Ok(x.clone()),
            Some(_) if !extent.is_multiple_of(ranks) => {
                Err(super::Error::Uneven { shape: x.dims().to_vec(), dim, ranks }.into())
            }
            Some(_) => x.narrow(dim, self.tp.rank() * (extent / ranks), extent / ranks),
        }
    }
}
