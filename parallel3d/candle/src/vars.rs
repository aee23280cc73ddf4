//! Named variables, in one order on every rank.

use crate::{Error, memory};
use candle_core::{TensorId, Var};
use meshstep_shard::{MicroBatch, Optimizer};
use meshstep_tensor::{Layout, Slice};
use std::collections::HashMap;

#[cfg(feature = "nn")]
mod var_map;

/// Variables with their names, the same names in the same order on every rank.
///
/// The order of a list is kept. List variables in the order in which the forward pass uses them: gradients then arrive bucket by
/// bucket. A `VarMap` of candle-nn (feature `nn`) has no order; its names are sorted, with numbers by their value: `h.2` before `h.10`.
/// Variables that are added to the map later do not train.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use meshstep_candle::NamedVars;
///
/// let w = Var::zeros((2, 3), DType::F32, &Device::Cpu)?;
/// let b = Var::zeros(2, DType::F32, &Device::Cpu)?;
/// let names: Vec<String> = [("w", w), ("b", b)].named_vars().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["w", "b"]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait NamedVars {
    /// Returns the variables. Clones of a variable share its memory.
    fn named_vars(self) -> Vec<(String, Var)>;
}

impl<N: Into<String>> NamedVars for Vec<(N, Var)> {
    fn named_vars(self) -> Vec<(String, Var)> {
        self.into_iter().map(|(name, var)| (name.into(), var)).collect()
    }
}

impl<N: Into<String>, const LEN: usize> NamedVars for [(N, Var); LEN] {
    fn named_vars(self) -> Vec<(String, Var)> {
        Vec::from(self).named_vars()
    }
}

impl<N: AsRef<str>> NamedVars for &[(N, Var)] {
    fn named_vars(self) -> Vec<(String, Var)> {
        self.iter().map(|(name, var)| (name.as_ref().to_owned(), var.clone())).collect()
    }
}

/// Variables of a model, by name and by identity.
#[derive(Debug)]
pub(crate) struct Vars {
    pub(crate) list: Vec<(String, Var)>,
    by_id: HashMap<TensorId, usize>,
}

impl Vars {
    /// Collects variables that can be trained, each once.
    pub(crate) fn new(vars: impl NamedVars) -> Result<Self, Error> {
        let list = vars.named_vars();
        let mut by_id = HashMap::with_capacity(list.len());
        for (idx, (name, var)) in list.iter().enumerate() {
            if let Some(first) = by_id.insert(var.id(), idx) {
                let first = list[first].0.clone();
                return Err(Error::SameVariable { first, second: name.clone() });
            }
        }
        Ok(Self { list, by_id })
    }

    /// Returns the layout of the variables.
    pub(crate) fn layout(&self) -> Result<Layout, Error> {
        let mut builder = Layout::builder();
        for (name, var) in &self.list {
            builder = builder.param(name, var.dims(), memory::check(name, var)?);
        }
        Ok(builder.build()?)
    }

    /// Checks that variables and parameters of an optimizer are the same.
    pub(crate) fn check_params(&self, optimizer: &Optimizer) -> Result<(), Error> {
        let layout = self.layout()?;
        for param in optimizer.params() {
            let name = param.name().to_owned();
            let Some(own) = layout.get(&name) else { return Err(Error::NoVariable { name }) };
            if (own.dtype(), own.shape()) != (param.dtype(), param.shape()) {
                let (shape, expected_shape) = (own.shape().to_vec(), param.shape().to_vec());
                return Err(Error::Differs {
                    name,
                    dtype: own.dtype(),
                    shape,
                    expected: param.dtype(),
                    expected_shape,
                });
            }
        }
        // Every other name is one that the optimizer does not know.
        self.list.iter().try_for_each(|(name, _)| Ok(optimizer.is_frozen(name).map(drop)?))
    }

    /// Checks a few elements of each variable: values written after the last step would be lost at the next.
    pub(crate) fn check_unwritten(&self, micro_batch: &MicroBatch<'_>) -> Result<(), Error> {
        self.list.iter().try_for_each(|(name, var)| {
            let held = micro_batch.param(name)?;
            let same = memory::with_values(name, var, |values| sampled_alike(values, held))??;
            if same { Ok(()) } else { Err(Error::Written { name: name.clone() }) }
        })
    }

    /// Returns the bytes of memory that candle holds for the variables.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = |(_, var): &(String, Var)| var.elem_count() * var.dtype().size_in_bytes();
        self.list.iter().map(bytes).sum::<usize>() as u64
    }

    /// Returns the index of the variable with this identity.
    pub(crate) fn index(&self, id: TensorId) -> Option<usize> {
        self.by_id.get(&id).copied()
    }
}

/// Number of elements of a variable that are compared.
const SAMPLES: usize = 8;

/// Compares evenly spread elements of two vectors, the first and the last among them, bit for bit.
fn sampled_alike(a: Slice<'_>, b: Slice<'_>) -> Result<bool, meshstep_tensor::Error> {
    if (a.dtype(), a.len()) != (b.dtype(), b.len()) {
        return Ok(false);
    }
    let (a, b, size) = (a.bytes()?, b.bytes()?, a.dtype().size());
    let last = (a.len() / size).saturating_sub(1);
    let starts = (0..SAMPLES).map(|i| last * i / (SAMPLES - 1) * size);
    Ok(starts.into_iter().all(|at| a.get(at..at + size) == b.get(at..at + size)))
}
