//! Import of parameters and state from a file with PyTorch's names.

use super::error::PyTorchError;
use super::file::PyTorchFile;
use super::keys::Keys;
use super::plain::Plain;
use crate::checkpoint::collective::load::take_in;
use crate::checkpoint::collective::ranks::Ranks;
use crate::checkpoint::collective::read::Target;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::format::header::Entry;
use crate::checkpoint::format::manifest::Type;
use crate::checkpoint::format::placement::{ModelPlacement, Unsharded};
use crate::checkpoint::format::settings::Settings;
use crate::checkpoint::saveable::{MASTER, Named, PARAM, Saveable, SavedTensor, Vectors};
use crate::update::values::VectorKind as Slot;
use crate::{Error, Optimizer};
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

impl Optimizer {
    /// Takes in parameters and state from a safetensors file with [PyTorch's names](super), written by this crate or by PyTorch.
    /// Collective, between two steps.
    /// Each rank reads the bytes it needs, and keeps them beside the present values until every rank has its own. PyTorch does not count
    /// updates of SGD and Muon; their counts stay as they are here, but at least 1. Hyperparameters, schedule and loss scale stay as they
    /// are. Types in the file must be those of [an export](super), or narrower. An error is the same on every rank, and has changed nothing
    /// on any. The file has no checksums: damage that leaves its length unchanged is not detected. The ranks compare that they all read the
    /// same bytes; for this rank 0 reads the whole file once.
    pub fn import_pytorch(&mut self, file: &PyTorchFile, import: Import) -> Result<Imported, Error> {
        let ranks = self.comm().world_size();
        self.import_pytorch_placed(file, import, &Unsharded { ranks })
    }

    /// [`import_pytorch`](Self::import_pytorch) with parameters cut as `placing` describes.
    pub fn import_pytorch_placed(
        &mut self,
        file: &PyTorchFile,
        import: Import,
        placing: &dyn ModelPlacement,
    ) -> Result<Imported, Error> {
        self.reducer.healthy()?;
        let ready = self.between_two_steps();
        self.reducer.call_together(&format!("import from PyTorch\nwhat to import = {import:?}"), ready)?;
        let ranks = Ranks::of(self);
        let imported = self.apart_from_steps(|all| {
            let mut plain = ranks.agree(Plain::open(file))?;
            let text = format!("file to import = {}\n", plain.digest);
            crate::same_everywhere(&**all.comm(), &all.params.options, &text)?;
            all.count_launched()?;
            let Staged { vectors, t, settings, imported } =
                ranks.agree(all.stage_pytorch(&mut plain, import, placing))?;
            plain.grains.agree(&ranks)?;
            take_in(all, &vectors, &t, &settings)?;
            Ok(imported)
        });
        imported.map(|(imported, _)| imported)
    }

    fn stage_pytorch(
        &mut self,
        plain: &mut Plain,
        import: Import,
        placing: &dyn ModelPlacement,
    ) -> Result<Staged, CheckpointError> {
        let contents = self.contents(placing)?;
        let (found, fresh) = self.find(plain, &contents, import, &placing.tied())?;
        let mut settings = self.settings(placing.tied());
        let counted = found.iter().filter(|found| found.keys.step.is_some()).filter_map(|found| found.t);
        settings.steps = import.steps.or(counted.max()).or(settings.steps);
        let imported = Imported { fresh, steps: settings.steps.unwrap_or_default() };
        let t = found.iter().map(|found| found.t).collect();
        let (mut vectors, meter) = (Vec::new(), self.params.options.meter.clone());
        for (param, (content, found)) in contents.iter().zip(&found).enumerate() {
            for vector in &content.vectors {
                let (first, values) = self.vector(param, vector.slot).map_err(CheckpointError::memory)?;
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
        &self,
        plain: &mut Plain,
        contents: &[SavedTensor],
        import: Import,
        tied: &BTreeMap<String, String>,
    ) -> Result<(Vec<FoundTensors>, Vec<String>), CheckpointError> {
        let (mut all, mut fresh, mut known) = (Vec::new(), Vec::new(), BTreeSet::new());
        for (param, content) in contents.iter().enumerate() {
            let own = tied.get(&content.name).unwrap_or(&content.name);
            let others = tied.iter().filter(|(_, to)| *to == own).map(|(name, _)| name);
            let mut names = [&content.name, own].into_iter().chain(others);
            let name = names.find(|name| plain.get(name).is_some()).unwrap_or(&content.name);
            let keys = Keys::new(&SavedTensor { name: name.clone(), ..content.clone() }, self.rule(param))?;
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
