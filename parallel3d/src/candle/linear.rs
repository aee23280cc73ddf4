//! Linear layers of which each rank has a part.

use super::Residual;
use crate::{Axis, Placement};
use candle_core::{D, Module, Result, Tensor};

/// `y = x W'` with W `[outputs, inputs]` cut by its outputs: from the whole residual stream to a part of the outputs.
#[derive(Clone, Debug)]
pub struct ColumnLinear {
    weight: Tensor,
    residual: Residual,
}

/// `y = x W'` with W `[outputs, inputs]` cut by its inputs: from a part of the inputs to the residual stream.
#[derive(Clone, Debug)]
pub struct RowLinear {
    weight: Tensor,
    residual: Residual,
}

impl ColumnLinear {
    /// The layer of this rank's rows, `[outputs / tp, inputs]`.
    pub fn new(weight: Tensor, residual: Residual) -> Self {
        ColumnLinear { weight, residual }
    }

    /// Where the weight lies.
    pub fn placement() -> Placement {
        Placement::whole().cut(Axis::Tp, 0)
    }

    /// Where the weight lies if it is several matrices on top of each other, `blocks` rows each, such as queries, keys and values:
    /// a rank has its part of each, and its outputs are these parts after each other.
    pub fn stacked(blocks: impl IntoIterator<Item = usize>) -> Placement {
        Placement::whole().cut_in_blocks(Axis::Tp, 0, blocks)
    }
}

impl RowLinear {
    /// The layer of this rank's columns, `[outputs, inputs / tp]`.
    pub fn new(weight: Tensor, residual: Residual) -> Self {
        RowLinear { weight, residual }
    }

    /// Where the weight lies.
    pub fn placement() -> Placement {
        Placement::whole().cut(Axis::Tp, 1)
    }
}

impl Module for ColumnLinear {
    /// `[.., inputs]`, as the residual stream lies, to `[.., outputs / tp]` of the whole sequence.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        project(&self.residual.enter(x)?, &self.weight)
    }
}

impl Module for RowLinear {
    /// `[.., inputs / tp]` of the whole sequence to `[.., outputs]`, as the residual stream lies.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.residual.leave(&project(x, &self.weight)?)
    }
}

/// `x W'` for any number of leading dimensions.
fn project(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let rows = x.reshape(((), x.dim(D::Minus1)?))?;
    let y = rows.matmul(&weight.t()?)?;
    if let Some(last) = shape.last_mut() {
        *last = y.dim(1)?;
    }
    y.reshape(shape)
}
