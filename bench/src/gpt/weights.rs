//! candle's own copy of the parameters, and the two doors through which numbers pass without another copy.

use std::collections::HashMap;

use anyhow::{Context as _, Result, ensure};
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor, Var};

use super::Param;

/// The network's parameters as candle variables, by name.
#[derive(Debug)]
pub(crate) struct Weights {
    vars: HashMap<String, Var>,
}

impl Weights {
    /// Zeros in the shapes of `params`.
    pub(crate) fn zeros(params: &[Param]) -> Result<Self> {
        Self::of_shapes(params.iter().map(|param| (param.name.clone(), param.shape.clone())))
    }

    /// Zeros of these names and shapes.
    pub(crate) fn of_shapes(shapes: impl IntoIterator<Item = (String, Vec<usize>)>) -> Result<Self> {
        let zeros = |(name, shape): (_, Vec<usize>)| Ok((name, Var::zeros(shape, DType::F32, &Device::Cpu)?));
        Ok(Self { vars: shapes.into_iter().map(zeros).collect::<Result<_>>()? })
    }

    /// Bytes candle holds for them.
    pub(crate) fn bytes(&self) -> usize {
        self.vars.values().map(|var| var.elem_count() * size_of::<f32>()).sum()
    }

    /// Copies `values`, in row-major order, over the parameter `name`.
    pub(crate) fn set(&self, name: &str, values: &[f32]) -> Result<()> {
        let var = self.get(name)?;
        let len = var.elem_count();
        ensure!(values.len() == len, "{name} has {len} elements, not {}", values.len());
        Ok(var.inplace_op1(&Overwrite(values))?)
    }

    /// Frees the memory of the parameter `name`; until it is set again, reading it is an error.
    pub(crate) fn free(&self, name: &str) -> Result<()> {
        Ok(self.get(name)?.inplace_op1(&Free)?)
    }

    /// The variable called `name`.
    pub(crate) fn get(&self, name: &str) -> Result<&Var> {
        self.vars.get(name).with_context(|| format!("the network has no parameter {name}"))
    }
}

/// Hands the numbers of a contiguous f32 tensor to `read`, in row-major order, where they lie.
pub(crate) fn with_values<T>(tensor: &Tensor, read: impl FnOnce(&[f32]) -> T) -> Result<T> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { anyhow::bail!("a tensor is on {:?}", tensor.device()) };
    let (start, end) = layout.contiguous_offsets().context("a contiguous tensor has gaps")?;
    Ok(read(&storage.as_slice::<f32>()?[start..end]))
}

/// Replaces a variable's numbers; `Var::set` would need them in a tensor first.
struct Overwrite<'a>(&'a [f32]);

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        if layout.contiguous_offsets() != Some((0, self.0.len())) {
            candle_core::bail!("a parameter is not alone in its memory")
        }
        match storage {
            CpuStorage::F32(there) if there.len() == self.0.len() => there.copy_from_slice(self.0),
            freed => *freed = CpuStorage::F32(self.0.to_vec()),
        }
        Ok(())
    }
}

/// Leaves nothing, of a type that candle computes nothing with: it would read f32 beyond their end.
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
