//! Import of parameters and state from a file with PyTorch's names.

use super::error::PyTorchError;
use super::file::PyTorchFile;
use super::keys::Keys;
use super::plain::Plain;
use crate::collective::load::take_in;
use crate::collective::read::Target;
use crate::contents::Saveable;
use crate::error::CheckpointError;
use crate::failure::Error;
use crate::format::header::Entry;
use crate::format::manifest::Type;
use crate::format::placement::ModelPlacement;
use crate::format::progress::SavedProgress;
use crate::format::settings::Settings;
use crate::parts::{CheckpointCall, SavedParts};
use crate::tensors::{MASTER, Named, PARAM, SavedTensor};
use meshstep_shard::Optimizer;
use meshstep_shard::extend::{OptimizerShard, VectorKind as Slot};
use meshstep_tensor::{Buffer, Category};
use std::collections::{BTreeMap, BTreeSet};

/// Options of an import, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Import {
    /// Lets parameters without state in the file begin anew, as in PyTorch; without it a missing state is an error.
    pub fresh: bool,
    /// Number of steps so far, which schedules use. `None` takes the largest count of updates in the file, or the present number of steps
    /// if the file has no counts.
    pub steps: Option<u64>,
}

/// Result of an import.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Imported {
    /// Parameters that begin anew, as the file has no state for them.
    pub fresh: Vec<String>,
    /// Number of steps so far.
    pub steps: u64,
}

/// Counts of updates from this value on are refused.
const MOST: f64 = (1u64 << 53) as f64;

/// Entries of the file for one parameter.
struct FoundTensors {
    value: Entry,
    /// Entry of each state vector; `None` if the parameter begins anew.
    state: Option<Vec<Entry>>,
    keys: Keys,
    /// Number of updates; `None` leaves it as it is.
    t: Option<u64>,
}

/// Everything that is taken in once all ranks have read.
struct Staged {
    vectors: Vec<(usize, Slot, Buffer)>,
    t: Vec<Option<u64>>,
    settings: Settings,
    imported: Imported,
}

/// Takes in parameters and state from a safetensors file with [PyTorch's names](super), written by [`export_pytorch`](super::export_pytorch)
/// or by PyTorch. Collective, between two steps.
///
/// Each rank reads the bytes it needs, and keeps them beside the present values until every rank has its own. PyTorch does not count
/// updates of SGD and Muon; their counts stay as they are here, but at least 1. Hyperparameters, schedule and loss scale stay as they
/// are. Types in the file must be those of [an export](super), or narrower. An error is the same on every rank, and has changed nothing
/// on any. The file has no checksums: damage that leaves its length unchanged is not detected. The ranks compare that they all read the
/// same bytes; for this rank 0 reads the whole file once.
pub fn import_pytorch<T: Saveable + ?Sized>(
    thing: &mut T,
    file: &PyTorchFile,
    import: Import,
) -> Result<Imported, Error> {
    let mut contents = thing.contents();
    let (parts, placing) = contents.for_group(CheckpointCall::Import)?;
    let opt = parts.optimizer();
    opt.healthy()?;
    let ready = opt.between_two_steps();
    opt.call_together(&format!("import from PyTorch\nwhat to import = {import:?}"), ready)?;
    let ranks = parts.group();
    parts.apart(|parts| {
        let mut plain = ranks.agree(Plain::open(file))?;
        let opt = parts.optimizer();
        meshstep_shard::same_everywhere(
            &**opt.comm(),
            opt.options(),
            &format!("file to import = {}\n", plain.digest),
        )?;
        // The host has the counts, and may not have read those of the last steps on a GPU yet.
        opt.describe_counters()?;
        let staged = ranks.agree(stage(parts, &mut plain, import, &*placing))?;
        plain.grains.agree(&ranks)?;
        take_in(parts, &staged.vectors, &staged.t, &staged.settings)?;
        Ok(staged.imported)
    })
}

/// Reads this rank's vectors.
fn stage(
    parts: &mut dyn SavedParts,
    plain: &mut Plain,
    import: Import,
    placing: &dyn ModelPlacement,
) -> Result<Staged, CheckpointError> {
    let tensors = parts.tensors(placing)?;
    let (found, fresh) = find(parts.optimizer(), plain, &tensors, (import, &placing.tied()))?;
    let mut progress = SavedProgress::of(parts.optimizer());
    let counted = found.iter().filter(|found| found.keys.step.is_some()).filter_map(|found| found.t);
    progress.steps = import.steps.or(counted.max()).or(progress.steps);
    let imported = Imported { fresh, steps: progress.steps.unwrap_or_default() };
    let settings = parts.settings().with(&progress);
    let t = found.iter().map(|found| found.t).collect();
    let (mut vectors, meter) = (Vec::new(), parts.optimizer().options().meter.clone());
    for (param, (content, found)) in tensors.iter().zip(&found).enumerate() {
        for vector in &content.vectors {
            let (first, values) = parts.vector(param, vector.slot).map_err(CheckpointError::memory)?;
            let range = first..first + values.len();
            let room = Buffer::zeroed(values.len(), values.dtype(), &meter, Category::Staging);
            let mut room = room.map_err(CheckpointError::memory)?;
            if let Some((entry, saved)) = found.source(vector) {
                let mut target = Target::new(room.as_mut(), first as u64, saved, &meter)?;
                plain.vector(entry, saved.size(), content, range, &mut target)?;
            }
            vectors.push((param, vector.slot, room));
        }
    }
    Ok(Staged { vectors, t, settings, imported })
}

/// Finds the entries of each parameter, and the names of the parameters that begin anew.
fn find(
    opt: &Optimizer,
    plain: &mut Plain,
    tensors: &[SavedTensor],
    (import, tied): (Import, &BTreeMap<String, String>),
) -> Result<(Vec<FoundTensors>, Vec<String>), CheckpointError> {
    let (mut all, mut fresh, mut known) = (Vec::new(), Vec::new(), BTreeSet::new());
    for (param, content) in tensors.iter().enumerate() {
        let own = tied.get(&content.name).unwrap_or(&content.name);
        let others = tied.iter().filter(|(_, to)| *to == own).map(|(name, _)| name);
        let mut names = [&content.name, own].into_iter().chain(others);
        let name = names.find(|name| plain.get(name).is_some()).unwrap_or(&content.name);
        let keys =
            Keys::new(&SavedTensor { name: name.clone(), ..content.clone() }, opt.param_shard(param).rule)?;
        let found = FoundTensors::new(plain, content, name, keys, import)?;
        known.insert(name.clone());
        if found.state.is_some() {
            known.extend(found.keys.state.iter().map(|(key, _)| key.clone()));
            known.extend(found.keys.step.clone());
        } else {
            fresh.push(content.name.clone());
        }
        all.push(found);
    }
    match plain.keys().find(|key| !known.contains(*key)) {
        Some(key) => Err(PyTorchError::Unexpected { key: key.to_owned() }.into()),
        None => Ok((all, fresh)),
    }
}

impl FoundTensors {
    fn new(
        plain: &mut Plain,
        content: &SavedTensor,
        name: &str,
        keys: Keys,
        import: Import,
    ) -> Result<Self, CheckpointError> {
        let get = |key: &str| vector(plain, key, content, keys.dtype);
        let value = get(name)?;
        let mut all = keys.state.iter().map(|(key, _)| key).chain(&keys.step);
        let none = !keys.state.is_empty() && all.all(|key| plain.get(key).is_none());
        if none && import.fresh {
            return Ok(FoundTensors { value, state: None, keys, t: Some(0) });
        }
        let state = keys.state.iter().map(|(key, _)| get(key)).collect::<Result<_, _>>()?;
        let t = match &keys.step {
            Some(key) => Some(updates(plain, key)?),
            None if keys.state.is_empty() => None,
            None => Some(content.t.max(1)),
        };
        Ok(FoundTensors { value, state: Some(state), keys, t })
    }

    /// Returns the source of one of the parameter's vectors; `None` if it becomes zeros.
    fn source(&self, vector: &Named) -> Option<(&Entry, Type)> {
        let entry = if [PARAM, MASTER].contains(&&*vector.name) {
            &self.value
        } else {
            let i = self.keys.state.iter().position(|(_, named)| named.slot == vector.slot)?;
            self.state.as_ref()?.get(i)?
        };
        Some((entry, entry.dtype()?))
    }
}

/// Returns the file's entry of a vector of this parameter; its type must not be wider than `here`.
fn vector(plain: &Plain, key: &str, content: &SavedTensor, here: Type) -> Result<Entry, PyTorchError> {
    let key = key.to_owned();
    let Some(entry) = plain.get(&key) else { return Err(PyTorchError::Missing { key }) };
    if entry.shape != content.holding.shape {
        let (found, here) = (entry.shape.clone(), content.holding.shape.clone());
        return Err(PyTorchError::Shape { key, found, here });
    }
    let fits = entry.dtype().is_some_and(|dtype| dtype == here || dtype.size() < here.size());
    if fits { Ok(entry.clone()) } else { Err(PyTorchError::Type { key, found: entry.dtype.clone(), here }) }
}

fn updates(plain: &mut Plain, key: &str) -> Result<u64, CheckpointError> {
    let entry = plain.get(key).cloned().ok_or_else(|| PyTorchError::Missing { key: key.to_owned() })?;
    let value = plain.scalar(key, &entry)?;
    match (0.0..MOST).contains(&value) && value.fract() == 0.0 {
        true => Ok(value as u64),
        false => Err(PyTorchError::Step { key: key.to_owned(), value: value.to_string() }.into()),
    }
}
