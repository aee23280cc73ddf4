//! Whether what was saved is what there is to load, and where each vector comes from. Arithmetic only.

use super::contents::{Content, MASTER, Named, PARAM};
use super::error::CheckpointError;
use super::load::Load;
use super::manifest::{Manifest, SlotEntry, TensorEntry, Type};
use super::mismatch::Mismatch;
use std::collections::{BTreeMap, BTreeSet};

/// A vector that was saved in another type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cast {
    /// The parameter.
    pub tensor: String,
    /// Its vector here.
    pub slot: String,
    /// The vector it was loaded from.
    pub from: String,
    /// What was saved.
    pub saved: Type,
    /// What it is here.
    pub here: Type,
}

/// Where everything comes from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fitting<'m> {
    /// Of each parameter's vectors, in order; of those that stay as they are there is none.
    pub(crate) sources: Vec<Vec<Option<&'m SlotEntry>>>,
    /// The updates each parameter has seen; `None`: as many as it has.
    pub(super) t: Vec<Option<u64>>,
    pub(super) missing: Vec<String>,
    pub(super) unexpected: Vec<String>,
    pub(super) cast: Vec<Cast>,
}

/// Counts from here on are no counts of updates.
pub(super) const MOST_UPDATES: u64 = 1 << 53;

impl<'m> Fitting<'m> {
    /// Where `contents` come from in `manifest`; `tied` are other names of parameters.
    pub(super) fn new(
        contents: &[Content],
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

    fn add(&mut self, content: &Content, tensor: &'m TensorEntry) -> Result<(), CheckpointError> {
        let Content { name, holding, vectors, .. } = content;
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
        // Moments of no update would be taken for those of many.
        self.t.push(whole.then_some(tensor.t));
        Ok(())
    }

    /// Refuses whatever is not alike.
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

/// What there is of a parameter, under its name or another one it has.
pub(super) fn find<'m, T>(
    name: &str,
    tensors: &'m BTreeMap<String, T>,
    tied: &BTreeMap<String, String>,
) -> Option<(&'m str, &'m T)> {
    if let Some((name, entry)) = tensors.get_key_value(name) {
        return Some((name, entry));
    }
    let (whose, bare) = name.split_at(of_whom(name));
    let own = tied.get(bare).map_or(bare, |to| to);
    let others = tied.iter().filter(|(_, to)| *to == own).map(|(other, _)| &**other);
    let mut names = std::iter::once(own).chain(others);
    names
        .find_map(|bare| tensors.get_key_value(&format!("{whose}{bare}")))
        .map(|(name, entry)| (&**name, entry))
}

/// Where a parameter's own name begins in that of a tensor, which may say first whose of workers it is.
fn of_whom(name: &str) -> usize {
    let whose = ["worker.", "fragment.", "sent."].iter().any(|whose| name.starts_with(whose));
    name.find('/').filter(|_| whose).map_or(0, |slash| slash + 1)
}

/// What was saved that says most of a vector: itself; of a parameter that was rounded to save, what it was rounded from; of a master
/// that was not kept, the parameter.
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
