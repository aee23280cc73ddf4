//! Compatibility of a saved step with the vectors to load, and the source of each vector. Arithmetic only.

use super::load_options::Load;
use crate::error::CheckpointError;
use crate::format::catalog::{Catalog, SlotRef, TensorRef};
use crate::format::manifest::Type;
use crate::format::mismatch::{LISTED, Mismatch};
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
    pub sources: Vec<Vec<Option<SlotRef<'m>>>>,
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
    /// Finds the sources of `contents` in `saved`; `tied` maps other names of parameters to the names they denote.
    pub(crate) fn new(
        contents: &[SavedTensor],
        saved: &'m Catalog,
        tied: &BTreeMap<String, String>,
        load: &Load,
    ) -> Result<Self, CheckpointError> {
        let mut fitting = Fitting::default();
        // An error lists a part.
        let unlisted = if load.partial { usize::MAX } else { LISTED };
        let mut known = BTreeSet::new();
        for content in contents {
            let found = find(&content.name, |name| saved.tensor(name), tied);
            known.extend(found.map(|tensor| tensor.name));
            match found {
                Some(tensor) => fitting.add(content, &tensor, unlisted)?,
                None => {
                    fitting.missing.push(content.name.clone());
                    fitting.sources.push(vec![None; content.vectors.len()]);
                    fitting.t.push(None);
                }
            }
        }
        let unknown = || saved.tensors().map(|tensor| tensor.name).filter(|name| !known.contains(name));
        let rest = unlisted.saturating_sub(fitting.unexpected.len());
        // The names are counted first: a vector that grows would hold them twice.
        fitting.unexpected.reserve_exact(unknown().take(rest).count());
        fitting.unexpected.extend(unknown().take(rest).map(str::to_owned));
        if !load.partial {
            fitting.check()?;
        }
        Ok(fitting)
    }

    /// Adds the sources of a parameter; lists no more than `most` vectors as unexpected.
    fn add(
        &mut self,
        content: &SavedTensor,
        tensor: &TensorRef<'m>,
        most: usize,
    ) -> Result<(), CheckpointError> {
        let SavedTensor { name, holding, vectors, .. } = content;
        if tensor.shape() != holding.shape {
            let (tensor, saved, here) = (name.clone(), tensor.shape(), holding.shape.clone());
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
                    if from != vector.name && tensor.slot(&vector.name).is_none() {
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
        let unused = tensor.slots().map(|(slot, _)| slot).filter(|slot| !used.contains(slot));
        let rest = most.saturating_sub(self.unexpected.len());
        self.unexpected.extend(unused.take(rest).map(|slot| format!("{name}:{slot}")));
        self.sources.push(sources);
        // If a vector is missing, `t` stays: moments without updates would otherwise be treated as those of many updates.
        self.t.push(whole.then_some(tensor.t));
        Ok(())
    }

    /// Refuses every difference.
    fn check(&self) -> Result<(), Mismatch> {
        if !self.missing.is_empty() {
            let listed = &self.missing[..self.missing.len().min(LISTED)];
            return Err(Mismatch::Missing { vectors: listed.to_vec() });
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
fn source<'m>(vector: &Named, tensor: &TensorRef<'m>) -> Option<(&'m str, SlotRef<'m>)> {
    let slot = |name: &str| tensor.slot(name);
    let same = slot(&vector.name).filter(|(_, slot)| slot.dtype == vector.dtype);
    let floats = |found: &(&str, SlotRef<'_>)| found.1.dtype.is_float() && vector.dtype.is_float();
    let other = match &*vector.name {
        PARAM => slot(MASTER).or_else(|| slot(PARAM)),
        MASTER => slot(MASTER).or_else(|| slot(PARAM)),
        name => slot(name),
    };
    same.or(other.filter(floats))
}
