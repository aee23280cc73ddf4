//! Reads a trace file, with all checks that do not need a replay.

use std::collections::{BTreeMap, BTreeSet};

use meshstep_tensor::{DType, bf16, f16};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, tensor::Metadata};

use super::key::Key;
use super::reason::Reason;
use super::spec::{Reduction, Spec};

/// A tensor of a trace; f64 holds every value of every type exactly.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f64>,
}

/// A recorded run of some program.
#[derive(Debug)]
pub(super) struct Trace {
    pub(super) spec: Spec,
    pub(super) tensors: BTreeMap<Key, Tensor>,
}

impl Trace {
    /// Parses the `bytes` of a trace file.
    pub(super) fn parse(bytes: &[u8]) -> Result<Trace, Reason> {
        let file = SafeTensors::deserialize(bytes)?;
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        metadata(&header, "format", Some("meshstep-trace"))?;
        metadata(&header, "version", Some("1"))?;
        let spec = Spec::parse(metadata(&header, "spec", None)?)?;
        let params: BTreeSet<&str> =
            file.names().iter().filter_map(|name| name.strip_prefix("param/")).collect();
        let mut tensors = BTreeMap::new();
        for (name, view) in file.iter() {
            let key = Key::parse(name, |param| params.contains(param))?;
            if key.to_string() != name {
                // Otherwise two tensors could have the same key.
                let why = format!("write numbers without leading zeros or signs: {key}");
                return Err(Reason::StrayTensor { name: name.to_owned(), why });
            }
            tensors.insert(key, Tensor::read(name, &view)?);
        }
        let trace = Trace { spec, tensors };
        trace.tensors.iter().try_for_each(|(key, tensor)| trace.check(key, tensor))?;
        trace.check_whole()?;
        Ok(trace)
    }

    /// Returns the parameters' initial values by name.
    pub(super) fn params(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().filter_map(|(key, tensor)| match key {
            Key::Param { name } => Some((name.as_str(), tensor)),
            _ => None,
        })
    }

    /// Returns the expected results.
    pub(super) fn expected(&self) -> impl Iterator<Item = (&Key, &Tensor)> {
        self.tensors.iter().filter(|(key, _)| key.is_expected())
    }

    /// Returns the gradient of a parameter on one rank in step `t`, if there is one.
    pub(super) fn grad(&self, t: u64, rank: usize, name: &str) -> Option<&Tensor> {
        let name = || name.to_owned();
        let own = || self.tensors.get(&Key::Grad { t, rank: Some(rank), name: name() });
        self.tensors.get(&Key::Grad { t, rank: None, name: name() }).or_else(own)
    }

    /// Checks one tensor against the spec and the other tensors.
    fn check(&self, key: &Key, tensor: &Tensor) -> Result<(), Reason> {
        let Spec { steps, ranks, reduce, ref problem, .. } = self.spec;
        let stray = |why: String| Err(Reason::StrayTensor { name: key.to_string(), why });
        if let Some(t) = key.t().filter(|t| !(1..=steps).contains(t)) {
            return stray(format!("step {t} is not between 1 and {steps}"));
        }
        if let Some(index) = tensor.values.iter().position(|value| !value.is_finite()) {
            return Err(Reason::NotFinite { key: key.clone(), index, value: tensor.values[index] });
        }
        match key {
            Key::Param { .. } => Ok(()),
            Key::Data { .. } if problem.is_none() => stray("the spec names no problem with data".to_owned()),
            Key::Data { .. } => Ok(()),
            Key::Grad { .. } if problem.is_some() => {
                stray("the spec names a problem, for which gradients are computed".to_owned())
            }
            Key::Grad { rank: Some(rank), .. } if *rank >= ranks => {
                stray(format!("rank {rank} is not between 0 and {}", ranks - 1))
            }
            Key::Grad { t, rank: Some(_), name }
                if self.tensors.contains_key(&Key::Grad { t: *t, rank: None, name: name.clone() }) =>
            {
                stray(format!("grad/{t}/{name} exists too, for all ranks"))
            }
            Key::Grad { name, .. } => self.like_param(key, tensor, name, false),
            Key::Expect { name, .. } | Key::Eval { name, .. } => self.like_param(key, tensor, name, true),
            Key::State { name, .. } => self.like_param(key, tensor, name, false),
            Key::Weight { .. } if reduce != Reduction::Weighted => {
                stray("the spec's reduce is not weighted".to_owned())
            }
            Key::Weight { .. } => {
                check_f64(key, tensor, &[ranks])?;
                check_weights(key, tensor)
            }
            Key::Norm { .. } | Key::Loss { .. } | Key::Evals { .. } => check_f64(key, tensor, &[]),
        }
    }

    /// Checks that a tensor has the shape of its parameter, and with `typed` also the type.
    fn like_param(&self, key: &Key, tensor: &Tensor, name: &str, typed: bool) -> Result<(), Reason> {
        let Some(param) = self.tensors.get(&Key::Param { name: name.to_owned() }) else { return Ok(()) };
        if tensor.shape != param.shape {
            let (given, wanted) = (tensor.shape.clone(), param.shape.clone());
            return Err(Reason::Shape { key: key.clone(), given, wanted });
        }
        if typed && tensor.dtype != param.dtype {
            return Err(Reason::DType { key: key.clone(), given: tensor.dtype, wanted: param.dtype });
        }
        Ok(())
    }

    /// Checks that all required tensors exist.
    fn check_whole(&self) -> Result<(), Reason> {
        let missing = |name: String, why| Err(Reason::MissingTensor { name, why });
        if self.params().next().is_none() {
            return missing("param/<name>".to_owned(), "a trace has at least one parameter");
        }
        if self.expected().next().is_none() {
            return Err(Reason::NothingExpected);
        }
        let with_grads: BTreeSet<u64> = self.tensors.keys().filter_map(grad_step).collect();
        if self.spec.problem.is_none()
            && let Some(t) = (1..=self.spec.steps).find(|t| !with_grads.contains(t))
        {
            return missing(format!("grad/{t}/<name>"), "every step needs the gradient of some parameter");
        }
        let weight = |t: &u64| self.tensors.contains_key(&Key::Weight { t: *t });
        if self.spec.reduce == Reduction::Weighted
            && let Some(t) = (1..=self.spec.steps).find(|t| !weight(t))
        {
            return missing(Key::Weight { t }.to_string(), "the spec's reduce is weighted");
        }
        Ok(())
    }
}

impl Tensor {
    fn read(name: &str, view: &TensorView<'_>) -> Result<Self, Reason> {
        let bytes = view.data();
        let (dtype, values) = match view.dtype() {
            Dtype::F32 => (DType::F32, each(bytes, |b| f32::from_le_bytes(b).into())),
            Dtype::F64 => (DType::F64, each(bytes, f64::from_le_bytes)),
            Dtype::BF16 => (DType::BF16, each(bytes, |b| bf16::from_le_bytes(b).to_f64())),
            Dtype::F16 => (DType::F16, each(bytes, |b| f16::from_le_bytes(b).to_f64())),
            other => {
                return Err(Reason::NotFloat { name: name.to_owned(), given: format!("{other:?}") });
            }
        };
        Ok(Tensor { dtype, shape: view.shape().to_vec(), values })
    }
}

/// Converts every element of little-endian `bytes`.
fn each<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|chunk| value(*chunk)).collect()
}

fn metadata<'a>(
    header: &'a Metadata,
    key: &'static str,
    wanted: Option<&'static str>,
) -> Result<&'a str, Reason> {
    let found = header.metadata().as_ref().and_then(|map| map.get(key));
    match found {
        Some(found) if wanted.is_none_or(|wanted| wanted == found) => Ok(found),
        _ => Err(Reason::Metadata { key, wanted: wanted.unwrap_or("a JSON object"), found: found.cloned() }),
    }
}

fn check_f64(key: &Key, tensor: &Tensor, shape: &[usize]) -> Result<(), Reason> {
    if tensor.dtype != DType::F64 {
        return Err(Reason::DType { key: key.clone(), given: tensor.dtype, wanted: DType::F64 });
    }
    if tensor.shape != shape {
        let (given, wanted) = (tensor.shape.clone(), shape.to_vec());
        return Err(Reason::Shape { key: key.clone(), given, wanted });
    }
    Ok(())
}

fn check_weights(key: &Key, tensor: &Tensor) -> Result<(), Reason> {
    let good = |value: f64| value.fract() == 0.0 && (0.0..=f64::from(1 << 24)).contains(&value);
    let bad = tensor.values.iter().enumerate().find(|(_, value)| !good(**value));
    bad.map_or(Ok(()), |(rank, &value)| Err(Reason::Weight { key: key.clone(), rank, value }))
}

fn grad_step(key: &Key) -> Option<u64> {
    match key {
        Key::Grad { t, .. } => Some(*t),
        _ => None,
    }
}
