//! Checkpoints of L-BFGS: its vectors are kept by rank, and saved by parameter.

use super::ShardedLbfgs;
use crate::checkpoint::{
    self, CheckpointCall, CheckpointError, Contents, Failed, Fitting, ModelPlacement, Named, Read, Saveable,
    Saved, SavedParts, SavedTensor, Settings, Type, read_own,
};
use crate::update::params::ParamPlace;
use crate::update::values::VectorKind as Slot;
use crate::{Error, Optimizer};
use meshstep_tensor::{Queue, Slice, SliceMut};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::ops::Range;

/// Section of L-BFGS: rule and progress.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct LbfgsSection {
    lbfgs: Option<(String, Vec<u64>)>,
}

impl ShardedLbfgs {
    /// Returns this rank's part of a parameter, and its range in the rank's vectors.
    fn part(&self, param: usize) -> (usize, Range<usize>) {
        let ParamPlace::Bucket { bucket, range, .. } = &self.opt.params.entries[param].place else {
            return (0, 0..0);
        };
        let first = self.spread.first(*bucket);
        let part = self.opt.params.buckets[*bucket].part_of(range);
        part.map_or((0, 0..0), |(within, kept, _)| (within.start, first + kept.start..first + kept.end))
    }

    fn rule_text(&self) -> String {
        let mut text = "lbfgs".to_owned();
        for (name, value) in self.rule.hyperparameters() {
            let _ = write!(text, " {name}={value}");
        }
        text
    }
}

impl Saveable for ShardedLbfgs {
    fn contents(&mut self) -> Contents<'_> {
        Contents::of(self)
    }
}

/// Among the vectors of L-BFGS the first is the point, and the others are the history.
impl SavedParts for ShardedLbfgs {
    fn queue(&self) -> Queue {
        self.opt.queue()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error> {
        let Slot::State(i) = slot else { return self.opt.vector(param, slot) };
        let (first, part) = self.part(param);
        let vector = match i.checked_sub(1) {
            None => Some(self.x.as_slice()),
            Some(i) => self.state.vectors().nth(i).map(|(_, vector)| vector),
        };
        vector.map_or(Ok((0, Slice::from(&[] as &[f32]))), |vector| Ok((first, vector.slice(part)?)))
    }

    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.opt
    }

    fn inside(&mut self) -> &mut dyn SavedParts {
        self
    }

    fn supports(&self, call: CheckpointCall) -> Result<(), CheckpointError> {
        match call {
            CheckpointCall::Export | CheckpointCall::Import => {
                Err(call.unsupported("L-BFGS", "PyTorch's L-BFGS has other state; save a checkpoint"))
            }
            CheckpointCall::Serialize | CheckpointCall::Deserialize | CheckpointCall::Reshard => Ok(()),
        }
    }

    fn tensors(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        let mut tensors = self.opt.tensors(placing)?;
        let Some(dtype) = Type::of(self.x.dtype()) else { return Ok(tensors) };
        let trains = |param: usize| !self.opt.params.entries[param].param.frozen();
        for (_, content) in tensors.iter_mut().enumerate().filter(|(param, _)| trains(*param)) {
            let names = self.state.vectors().map(|(name, _)| name);
            let names = std::iter::once("x".to_owned()).chain(names);
            let named = names.enumerate().map(|(i, name)| Named { slot: Slot::State(i), name, dtype });
            content.vectors.extend(named);
        }
        Ok(tensors)
    }

    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, Error> {
        let Slot::State(i) = slot else { return self.opt.vector_mut(param, slot) };
        let (_, part) = self.part(param);
        let vector = match i.checked_sub(1) {
            None => Some(self.x.as_mut()),
            Some(i) => self.state.vectors_mut().nth(i).map(|(_, vector)| vector),
        };
        let nothing = SliceMut::empty(self.spread.dtype(), self.opt.params.options.queue.place());
        vector.map_or(Ok(nothing), |vector| Ok(vector.slice(part)?))
    }

    fn read(
        &mut self,
        saved: &Saved,
        tensors: &[SavedTensor],
        fitting: &Fitting<'_>,
    ) -> Result<Vec<Read>, CheckpointError> {
        read_own(self, saved, tensors, fitting)
    }

    fn settings(&self) -> Settings {
        self.opt.settings().with(&LbfgsSection { lbfgs: Some((self.rule_text(), self.state.words())) })
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        self.opt.check(settings)?;
        let LbfgsSection { lbfgs: Some((_, words)) } = settings.section()? else { return Ok(()) };
        self.state.check(&words).map_err(|error| CheckpointError::Contradiction {
            what: "the progress of L-BFGS".to_owned(),
            reason: error.to_string(),
        })
    }

    fn resume(&mut self, settings: &Settings) -> Result<(), checkpoint::Error> {
        let rank = self.opt.comm().rank();
        let LbfgsSection { lbfgs } = settings.section().map_err(|error| Failed { rank, error })?;
        match lbfgs {
            Some((_, words)) => self.state.restore(&words).map_err(Error::from)?,
            // A history recorded at other parameter values would mislead L-BFGS.
            None => {
                self.state.reset();
                self.spread.read_params(&self.opt, self.x.as_mut())?;
            }
        }
        self.opt.resume(settings)
    }
}
