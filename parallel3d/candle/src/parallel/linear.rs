//! Tensor-parallel linear layers: each rank holds a part of the weight.

use super::Residual;
use candle_core::{D, Module, Result, Tensor};
use meshstep_parallel3d::{Axis, Placement};

/// Layer `y = x W'` with W `[outputs, inputs]` cut by its outputs: from the whole residual stream to a part of the outputs.
#[derive(Clone, Debug)]
pub struct ColumnLinear {
    weight: Tensor,
    residual: Residual,
}

/// Layer `y = x W'` with W `[outputs, inputs]` cut by its inputs: from a part of the inputs to the residual stream.
#[derive(Clone, Debug)]
pub struct RowLinear {
    weight: Tensor,
    residual: Residual,
}

impl ColumnLinear {
    /// Creates the layer from this rank's rows of the weight, `[outputs / tp, inputs]`.
    pub fn new(weight: Tensor, residual: Residual) -> Self {
        ColumnLinear { weight, residual }
    }

    /// Returns the placement of the weight.
    pub fn placement() -> Placement {
        Placement::whole().cut(Axis::Tp, 0)
    }

    /// Returns the placement of a weight that stacks several matrices with `blocks` rows each, such as queries, keys and values. A rank
    /// holds its part of every matrix, and its outputs are these parts, concatenated.
    pub fn stacked(blocks: impl IntoIterator<Item = usize>) -> Placement {
        Placement::whole().cut_in_blocks(Axis::Tp, 0, blocks)
    }
}

impl RowLinear {
    /// Creates the layer from this rank's columns of the weight, `[outputs, inputs / tp]`.
    pub fn new(weight: Tensor, residual: Residual) -> Self {
        RowLinear { weight, residual }
    }

    /// Returns the placement of the weight.
    pub fn placement() -> Placement {
        Placement::whole().cut(Axis::Tp, 1)
    }
}

impl Module for ColumnLinear {
    /// Maps `[.., inputs]`, in the layout of the residual stream, to `[.., outputs / tp]` of the whole sequence.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        project(&self.residual.enter(x)?, &self.weight)
    }
}

impl Module for RowLinear {
    /// Maps `[.., inputs / tp]` of the whole sequence to `[.., outputs]`, in the layout of the residual stream.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.residual.leave(&project(x, &self.weight)?)
    }
}

/// Returns `x W'` for any number of leading dimensions.
fn project(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let rows = x.reshape(((), x.dim(D::Minus1)?))?;
    let y = rows.matmul(&weight.t()?)?;
    if let Some(last) = shape.last_mut() {
        *last = y.dim(1)?;
    }
    y.reshape(shape)
}
