//! A collective as a candle operation: its buffer layout, and the collective of its gradient.

use super::LayerError;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType};
use meshstep_comm::{Communicator, Reduction};
use meshstep_tensor::{Buffer, Category, Element, Meter};
use std::sync::Arc;

/// Kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerExchangeKind {
    AllGather,
    ReduceScatter,
    AllReduce,
    Copy,
    Max,
}

/// Elements of a rank after a collective, and their shape.
type Moved<T> = std::result::Result<(Vec<T>, Vec<usize>), LayerError>;

/// Collective of `comm`'s ranks, along `dim` if it changes the shape.
#[derive(Clone, Debug)]
pub(super) struct LayerExchange {
    pub(super) comm: Arc<dyn Communicator>,
    pub(super) kind: LayerExchangeKind,
    pub(super) dim: usize,
}

impl LayerExchangeKind {
    /// Returns the collective of the gradient.
    fn reverse(self) -> Option<LayerExchangeKind> {
        match self {
            LayerExchangeKind::AllGather => Some(LayerExchangeKind::ReduceScatter),
            LayerExchangeKind::ReduceScatter => Some(LayerExchangeKind::AllGather),
            LayerExchangeKind::AllReduce => Some(LayerExchangeKind::Copy),
            LayerExchangeKind::Copy => Some(LayerExchangeKind::AllReduce),
            LayerExchangeKind::Max => None,
        }
    }
}

impl CustomOp1 for LayerExchange {
    fn name(&self) -> &'static str {
        match self.kind {
            LayerExchangeKind::AllGather => "all_gather",
            LayerExchangeKind::ReduceScatter => "reduce_scatter",
            LayerExchangeKind::AllReduce => "all_reduce",
            LayerExchangeKind::Copy => "copy",
            LayerExchangeKind::Max => "max",
        }
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        match storage {
            CpuStorage::F32(values) => self.of(values, layout),
            CpuStorage::F64(values) => self.of(values, layout),
            CpuStorage::BF16(values) => self.of(values, layout),
            CpuStorage::F16(values) => self.of(values, layout),
            other => Err(LayerError::Unsupported { dtype: other.dtype() }.into()),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        match self.kind.reverse() {
            // The gradient of a sum is that of each term.
            Some(LayerExchangeKind::Copy) => Ok(Some(grad.clone())),
            Some(kind) => {
                grad.contiguous()?.apply_op1_no_bwd(&LayerExchange { kind, ..self.clone() }).map(Some)
            }
            None => Ok(None),
        }
    }
}

impl LayerExchange {
    fn of<T: WithDType + Element>(&self, storage: &[T], layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("{} of a tensor that is not contiguous", self.name())
        };
        let (values, shape) = self.run(&storage[start..end], layout.dims())?;
        Ok((T::to_cpu_storage_owned(values), shape.into()))
    }

    /// Runs the collective on this rank's elements of a tensor of `shape`; returns the resulting elements and their shape.
    fn run<T: Element>(&self, values: &[T], shape: &[usize]) -> Moved<T> {
        match self.kind {
            LayerExchangeKind::Copy => Ok((values.to_vec(), shape.to_vec())),
            LayerExchangeKind::AllReduce => Ok((self.reduce(values, Reduction::Sum)?, shape.to_vec())),
            LayerExchangeKind::Max => Ok((self.reduce(values, Reduction::Max)?, shape.to_vec())),
            LayerExchangeKind::AllGather => self.all_gather(values, shape),
            LayerExchangeKind::ReduceScatter => self.reduce_scatter(values, shape),
        }
    }

    fn reduce<T: Element>(&self, values: &[T], by: Reduction) -> std::result::Result<Vec<T>, LayerError> {
        let mut buffer = Buffer::from_slice(values, &Meter::new(), Category::Staging)?;
        self.comm.all_reduce(&mut buffer, by)?;
        Ok(buffer.typed()?.to_vec())
    }

    fn all_gather<T: Element>(&self, values: &[T], shape: &[usize]) -> Moved<T> {
        let (ranks, len) = (self.comm.world_size(), values.len());
        let mut buffer = Buffer::zeroed(ranks * len, T::DTYPE, &Meter::new(), Category::Staging)?;
        buffer.typed_mut()?[self.comm.rank() * len..][..len].copy_from_slice(values);
        self.comm.all_gather(&mut buffer)?;
        let mut whole = shape.to_vec();
        whole[self.dim] *= ranks;
        Ok((together(buffer.typed()?, ranks, inner(shape, self.dim)), whole))
    }

    fn reduce_scatter<T: Element>(&self, values: &[T], shape: &[usize]) -> Moved<T> {
        let ranks = self.comm.world_size();
        let mut part = shape.to_vec();
        if !part[self.dim].is_multiple_of(ranks) {
            return Err(LayerError::Uneven { shape: part, dim: self.dim, ranks });
        }
        part[self.dim] /= ranks;
        let parts = apart(values, ranks, inner(&part, self.dim));
        let mut buffer = Buffer::from_slice(&parts, &Meter::new(), Category::Staging)?;
        self.comm.reduce_scatter(&mut buffer, Reduction::Sum)?;
        let len = values.len() / ranks;
        Ok((buffer.typed()?[self.comm.rank() * len..][..len].to_vec(), part))
    }
}

/// Returns the number of contiguous elements per index of the dimensions before `dim`.
fn inner(shape: &[usize], dim: usize) -> usize {
    shape[dim..].iter().product()
}

/// Interleaves consecutive parts in runs of `inner` elements.
fn together<T: Copy>(parts: &[T], ranks: usize, inner: usize) -> Vec<T> {
    let len = parts.len() / ranks;
    let runs = (0..len).step_by(inner.max(1)).flat_map(|at| (0..ranks).map(move |rank| rank * len + at));
    runs.flat_map(|start| &parts[start..start + inner]).copied().collect()
}

/// Separates interleaved runs into consecutive parts, the reverse of [`together`].
fn apart<T: Copy>(whole: &[T], ranks: usize, inner: usize) -> Vec<T> {
    let rows = (ranks * inner).max(1);
    let runs = (0..ranks).flat_map(|rank| (0..whole.len()).step_by(rows).map(move |row| row + rank * inner));
    runs.flat_map(|start| &whole[start..start + inner]).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks' parts of shape [2, 1, 3], gathered along the dimension in the middle.
    #[test]
    fn runs_of_the_parts_alternate_and_come_apart_again() {
        let parts = [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15];
        let whole = [0, 1, 2, 10, 11, 12, 3, 4, 5, 13, 14, 15];
        assert_eq!(together(&parts, 2, inner(&[2, 1, 3], 1)), whole);
        assert_eq!(apart(&whole, 2, inner(&[2, 1, 3], 1)), parts);
    }

    #[test]
    fn along_the_first_dimension_nothing_moves_and_nothing_stays_nothing() {
        let values = [1, 2, 3, 4, 5, 6];
        assert_eq!(together(&values, 3, 2), values);
        assert_eq!(apart(&values, 3, 2), values);
        assert_eq!(together::<u8>(&[], 3, 0).len(), 0);
        assert_eq!(apart::<u8>(&[], 3, 0).len(), 0);
    }
}
