//! Export of parameters and state with PyTorch's names.

use super::error::PyTorchError;
use super::file::PyTorchFile;
use super::keys::Keys;
use crate::collective::consolidate::{Sources, Window};
use crate::contents::Saveable;
use crate::error::CheckpointError;
use crate::failure::Error;
use crate::format::manifest::Type;
use crate::parts::{CheckpointCall, SavedParts};
use crate::store::shard_file::{ShardWriter, Vector};
use crate::tensors::{Named, SavedTensor};
use meshstep_shard::Optimizer;
use meshstep_shard::extend::OptimizerShard;
use meshstep_tensor::{Buffer, Category, Meter, cast};
use std::collections::BTreeSet;

/// Largest count that F32 represents exactly, together with all smaller ones.
const EXACT: u64 = 1 << 24;

/// Contents of the file in their order: vectors of parameters, then counts of updates.
#[derive(Debug, Default)]
struct ExportPlan {
    vectors: Vec<(usize, Named)>,
    steps: Vec<u64>,
    entries: Vec<Vector>,
}

/// Writes parameters and state, as if there were one rank, to one safetensors file with [PyTorch's names](super). Rank `to` writes the
/// file. Collective, between two steps; streamed like [`consolidate`](crate::consolidate). The complete file replaces an
/// existing one. An error is the same on every rank, and leaves an existing file as it was. Only a single optimizer is
/// [supported](CheckpointError::Unsupported), on a mesh too.
pub fn export_pytorch<T: Saveable + ?Sized>(
    thing: &mut T,
    file: &PyTorchFile,
    to: usize,
) -> Result<(), Error> {
    let mut contents = thing.contents();
    let (parts, placing) = contents.for_group(CheckpointCall::Export)?;
    let mut sources = Sources::of(parts, &format!("export for PyTorch on rank {to}"), to, &*placing)?;
    let writes = sources.ranks.rank() == to;
    parts.apart(|parts| {
        let plan = sources.ranks.agree(ExportPlan::new(parts.optimizer(), &sources.contents))?;
        let written = plan.carry_out(file, writes, parts, &mut sources);
        if written.is_err() && writes {
            file.discard();
        }
        written
    })
}

impl ExportPlan {
    fn new(opt: &Optimizer, contents: &[SavedTensor]) -> Result<Self, CheckpointError> {
        let mut plan = ExportPlan::default();
        let mut steps = Vec::new();
        for (param, content) in contents.iter().enumerate() {
            let Keys { dtype, value, step, state } = Keys::new(content, opt.param_shard(param).rule)?;
            let shape = &content.holding.shape;
            let mut add = |key: String, vector: Named| {
                plan.vectors.push((param, vector));
                plan.entries.push(Vector { key, dtype, shape: shape.clone() });
            };
            add(content.name.clone(), value);
            if content.t > 0 {
                state.into_iter().for_each(|(key, vector)| add(key, vector));
                steps.extend(step.map(|key| (key, content.t)));
            }
        }
        for (key, t) in steps {
            let dtype = if t <= EXACT { Type::F32 } else { Type::F64 };
            plan.entries.push(Vector { key, dtype, shape: Vec::new() });
            plan.steps.push(t);
        }
        plan.check_names()?;
        Ok(plan)
    }

    fn check_names(&self) -> Result<(), PyTorchError> {
        let mut names = BTreeSet::from(["__metadata__"]);
        let taken = self.entries.iter().find(|entry| !names.insert(&entry.key));
        taken.map_or(Ok(()), |entry| Err(PyTorchError::Name { key: entry.key.clone() }))
    }

    /// Writes the file and moves it to its place. Collective.
    fn carry_out(
        &self,
        file: &PyTorchFile,
        writes: bool,
        parts: &mut dyn SavedParts,
        sources: &mut Sources,
    ) -> Result<(), Error> {
        let begun = if writes { file.begin(&self.entries).map(Some) } else { Ok(None) };
        let mut writer = sources.ranks.agree(begun)?;
        self.write(parts, sources, writer.as_mut())?;
        sources.ranks.agree(writer.map_or(Ok(()), |writer| self.finish(writer, file)))
    }

    /// Writes all vectors. Collective.
    fn write(
        &self,
        parts: &mut dyn SavedParts,
        sources: &mut Sources,
        mut writer: Option<&mut ShardWriter>,
    ) -> Result<(), Error> {
        let meter = parts.optimizer().options().meter.clone();
        let mut wide = None;
        for ((param, vector), Vector { dtype, .. }) in self.vectors.iter().zip(&self.entries) {
            if let Some(writer) = &mut writer {
                writer.begin();
            }
            let mut write = |window: Window<'_>| match &mut writer {
                Some(writer) => write(writer, window, *dtype, &mut wide, &meter),
                None => Ok(()),
            };
            sources.hand_over(parts, *param, vector, &mut write)?;
        }
        Ok(())
    }

    fn finish(&self, mut writer: ShardWriter, file: &PyTorchFile) -> Result<(), CheckpointError> {
        for &t in &self.steps {
            writer.begin();
            match t <= EXACT {
                true => writer.write(&(t as f32).to_le_bytes())?,
                false => writer.write(&(t as f64).to_le_bytes())?,
            }
        }
        file.publish(writer)
    }
}

/// Writes a window in the file's type; converts through `wide` if the types differ.
fn write(
    writer: &mut ShardWriter,
    window: Window<'_>,
    dtype: Type,
    wide: &mut Option<Buffer>,
    meter: &Meter,
) -> Result<(), CheckpointError> {
    let memory = CheckpointError::memory::<meshstep_tensor::Error>;
    let Some(to) = dtype.dtype().filter(|_| dtype != window.dtype) else {
        return writer.write(window.values.bytes().map_err(memory)?);
    };
    let len = window.values.len();
    if wide.as_ref().is_none_or(|wide| wide.dtype() != to || wide.len() < len) {
        *wide = None;
        *wide = Some(Buffer::zeroed(len, to, meter, Category::Staging).map_err(memory)?);
    }
    let Some(wide) = wide else { return Ok(()) };
    cast(window.values, wide.as_mut().slice(0..len).map_err(memory)?).map_err(memory)?;
    writer.write(wide.as_slice().slice(0..len).and_then(|values| values.bytes()).map_err(memory)?)
}
