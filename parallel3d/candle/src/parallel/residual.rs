//! Layout of the residual stream along `tp`: input of column-parallel layers, output of row-parallel layers.

use super::Collectives;
use candle_core::{Result, Tensor};

/// The activations between tensor-parallel layers: whole on each rank, or cut along the sequence (sequence parallelism,
/// Korthikanti et al., *Reducing activation recomputation in large transformer models*, 2022).
///
/// | | whole | cut |
/// |---|---|---|
/// | `enter` | `copy` | `all_gather` |
/// | `leave` | `all_reduce` | `reduce_scatter` |
/// | gradient of parameters on the stream itself: norms, positions | `Gradient::Same` | `Gradient::PartialSum` |
///
/// Both layouts move the same bytes. With the cut one, a rank holds and normalises 1/tp of the stream.
#[derive(Clone, Debug)]
pub struct Residual {
    tp: Collectives,
    cut: Option<usize>,
}

impl Residual {
    /// Creates a stream that every rank holds whole.
    pub fn whole(tp: Collectives) -> Self {
        Residual { tp, cut: None }
    }

    /// Creates a stream cut along the sequence, which is dimension `dim` of activations.
    pub fn cut(tp: Collectives, dim: usize) -> Self {
        Residual { tp, cut: Some(dim) }
    }

    /// Returns the collectives along `tp`.
    pub fn tp(&self) -> &Collectives {
        &self.tp
    }

    /// Makes the stream whole, as the input of a section in which each rank computes its own part.
    pub fn enter(&self, x: &Tensor) -> Result<Tensor> {
        match self.cut {
            None => self.tp.copy(x),
            Some(dim) => self.tp.all_gather(x, dim),
        }
    }

    /// Sums the ranks' terms, in the layout of the stream.
    pub fn leave(&self, x: &Tensor) -> Result<Tensor> {
        match self.cut {
            None => self.tp.all_reduce(x),
            Some(dim) => self.tp.reduce_scatter(x, dim),
        }
    }

    /// Returns this rank's part of a tensor that every rank holds whole, such as position embeddings, in the layout of the stream. `dim`
    /// is the dimension of the sequence.
    pub fn own(&self, x: &Tensor, dim: usize) -> Result<Tensor> {
        let (ranks, extent) = (self.tp.world_size(), x.dim(dim)?);
        match self.cut {
            None => Ok(x.clone()),
            Some(_) if !extent.is_multiple_of(ranks) => {
                Err(super::LayerError::Uneven { shape: x.dims().to_vec(), dim, ranks }.into())
            }
            Some(_) => x.narrow(dim, self.tp.rank() * (extent / ranks), extent / ranks),
        }
    }
}
