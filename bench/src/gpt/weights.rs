//! candle's copy of the parameters, in memory that is freed while no rank reads it.

use std::collections::HashMap;

use anyhow::{Context as _, Result, ensure};
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Var};

use super::Param;

/// Parameters of the network as candle variables, by name.
#[derive(Debug)]
pub(crate) struct Weights {
    vars: HashMap<String, Var>,
}

impl Weights {
    /// Creates zeros in the shapes of `params`.
    pub(crate) fn zeros(params: &[Param]) -> Result<Self> {
        Self::of_shapes(params.iter().map(|param| (param.name.clone(), param.shape.clone())))
    }

    /// Creates zeros with these names and shapes.
    pub(crate) fn of_shapes(shapes: impl IntoIterator<Item = (String, Vec<usize>)>) -> Result<Self> {
        let zeros = |(name, shape): (_, Vec<usize>)| Ok((name, Var::zeros(shape, DType::F32, &Device::Cpu)?));
        Ok(Self { vars: shapes.into_iter().map(zeros).collect::<Result<_>>()? })
    }

    /// Copies `values`, in row-major order, into the parameter `name`.
    pub(crate) fn set(&self, name: &str, values: &[f32]) -> Result<()> {
        let var = self.get(name)?;
        let len = var.elem_count();
        ensure!(values.len() == len, "{name} has {len} elements, not {}", values.len());
        Ok(var.inplace_op1(&Overwrite(values))?)
    }

    /// Frees the memory of the parameter `name`; reading it before the next `set` is an error.
    pub(crate) fn free(&self, name: &str) -> Result<()> {
        Ok(self.get(name)?.inplace_op1(&Free)?)
    }

    /// Returns the variable called `name`.
    pub(crate) fn get(&self, name: &str) -> Result<&Var> {
        self.vars.get(name).with_context(|| format!("the network has no parameter {name}"))
    }
}

/// Replaces a variable's values; `Var::set` would need a tensor.
struct Overwrite<'a>(&'a [f32]);

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        if layout.contiguous_offsets() != Some((0, self.0.len())) {
            candle_core::bail!("a parameter shares its storage with another tensor")
        }
        match storage {
            CpuStorage::F32(there) if there.len() == self.0.len() => there.copy_from_slice(self.0),
            freed => *freed = CpuStorage::F32(self.0.to_vec()),
        }
        Ok(())
    }
}

/// Empties the storage and changes its type to one that candle computes nothing with, because candle would read an empty
/// f32 storage beyond its end.
struct Free;

impl InplaceOp1 for Free {
    fn name(&self) -> &'static str {
        "free"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        *storage = CpuStorage::F4(Vec::new());
        Ok(())
    }
}
