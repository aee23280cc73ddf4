//! Compatibility of a saved step with the vectors to load, and the source of each vector. Arithmetic only.

use super::load_options::Load;
use crate::error::CheckpointError;
use crate::format::manifest::{Manifest, SlotEntry, TensorEntry, Type};
use crate::format::mismatch::Mismatch;
use crate::format::tied_names::find;
use crate::tensors::{MASTER, Named, PARAM, SavedTensor};
use std::collections::{BTreeMap, BTreeSet};

/// Conversion of a vector that was saved as another type, or as another vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cast {
    /// Name of the parameter.
    pub tensor: String,
    /// Name of the vector here.
    pub slot: String,
    /// Name of the vector it was loaded from.
    pub from: String,
    /// Type in the checkpoint.
    pub saved: Type,
    /// Type here.
    pub here: Type,
}

/// ReadSource of every vector.
#[derive(Clone, Debug, Default)]
pub struct Fitting<'m> {
    /// Sources of each parameter's vectors, in order; `None` for a vector that stays as it is.
    pub sources: Vec<Vec<Option<&'m SlotEntry>>>,
    /// Number of updates of each parameter; `None` leaves it as it is.
    pub t: Vec<Option<u64>>,
    /// Vectors that the checkpoint lacks.
    pub missing: Vec<String>,
    /// Vectors of the checkpoint that nothing here takes.
    pub unexpected: Vec<String>,
    /// Vectors that are converted.
    pub cast: Vec<Cast>,
}

/// Counts of updates from this value on are refused.
pub(crate) const MOST_UPDATES: u64 = 1 << 53;

impl<'m> Fitting<'m> {
    /// Finds the sources of `contents` in `manifest`; `tied` maps other names of parameters to the names they denote.
    pub(crate) fn new(
        contents: &[SavedTensor],
        manifest: &'m Manifest,
        tied: &BTreeMap<String, String>,
        load: &Load,
    ) -> Result<Self, CheckpointError> {
        let mut fitting = Fitting::default();
        let mut known = BTreeSet::new();
        for content in contents {
            let found = find(&content.name, &manifest.tensors, tied);
            known.extend(found.map(|(name, _)| name));
            match found {
                Some((_, tensor)) => fitting.add(content, tensor)?,
                None => {
                    fitting.missing.push(content.name.clone());
                    fitting.sources.push(vec![None; content.vectors.len()]);
                    fitting.t.push(None);
                }
            }
        }
        let unknown = manifest.tensors.keys().filter(|name| !known.contains(&***name));
        fitting.unexpected.extend(unknown.cloned());
        if !load.partial {
            fitting.check()?;
        }
        Ok(fitting)
    }

    fn add(&mut self, content: &SavedTensor, tensor: &'m TensorEntry) -> Result<(), CheckpointError> {
        let SavedTensor { name, holding, vectors, .. } = content;
        if tensor.shape != holding.shape {
            let (tensor, saved, here) = (name.clone(), tensor.shape.clone(), holding.shape.clone());
            return Err(Mismatch::Shape { tensor, saved, here }.into());
        }
        if tensor.t >= MOST_UPDATES {
            let (what, reason) = (format!("tensor {name:?}"), format!("{} is no count of updates", tensor.t));
            return Err(CheckpointError::Contradiction { what, reason });
        }
        let (mut sources, mut used, mut whole) = (Vec::new(), BTreeSet::new(), true);
        for vector in vectors {
            let source = source(vector, tensor);
            let named = || format!("{name}:{}", vector.name);
            match source {
                Some((from, slot)) => {
                    used.insert(&*vector.name);
                    if from != vector.name && !tensor.slots.contains_key(&vector.name) {
                        self.missing.push(named());
                    }
                    if from != vector.name || slot.dtype != vector.dtype {
                        let (tensor, from) = (name.clone(), from.to_owned());
                        let (slot, saved, here) = (vector.name.clone(), slot.dtype, vector.dtype);
                        self.cast.push(Cast { tensor, slot, from, saved, here });
                    }
                }
                None => {
                    whole = false;
                    self.missing.push(named());
                }
            }
            sources.push(source.map(|(_, slot)| slot));
        }
        let unused = tensor.slots.keys().filter(|slot| !used.contains(&***slot));
        self.unexpected.extend(unused.map(|slot| format!("{name}:{slot}")));
        self.sources.push(sources);
        // If a vector is missing, `t` stays: moments without updates would otherwise be treated as those of many updates.
        self.t.push(whole.then_some(tensor.t));
        Ok(())
    }

    /// Refuses every difference.
    fn check(&self) -> Result<(), Mismatch> {
        if !self.missing.is_empty() {
            return Err(Mismatch::Missing { vectors: self.missing.clone() });
        }
        if !self.unexpected.is_empty() {
            return Err(Mismatch::Unexpected { vectors: self.unexpected.clone() });
        }
        self.cast.first().cloned().map_or(Ok(()), |Cast { tensor, slot, saved, here, .. }| {
            Err(Mismatch::Type { tensor, slot, saved, here })
        })
    }
}

/// Returns the most precise saved source of a vector: the vector itself; the master for a parameter that was saved rounded; the parameter
/// for a master that was not saved.
fn source<'m>(vector: &Named, tensor: &'m TensorEntry) -> Option<(&'m str, &'m SlotEntry)> {
    let slot = |name: &str| tensor.slots.get_key_value(name).map(|(name, slot)| (&**name, slot));
    let same = slot(&vector.name).filter(|(_, slot)| slot.dtype == vector.dtype);
    let floats = |found: &(&str, &SlotEntry)| found.1.dtype.is_float() && vector.dtype.is_float();
    let other = match &*vector.name {
        PARAM => slot(MASTER).or_else(|| slot(PARAM)),
        MASTER => slot(MASTER).or_else(|| slot(PARAM)),
        name => slot(name),
    };
    same.or(other.filter(floats))
}
