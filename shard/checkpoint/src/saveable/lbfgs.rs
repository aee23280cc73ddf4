//! Saved state of L-BFGS: its vectors are kept by rank, and saved by parameter.

use crate::collective::load_options::Load;
use crate::contents::{Contents, Saveable};
use crate::error::CheckpointError;
use crate::failure::{self, Failed};
use crate::format::catalog::Catalog;
use crate::format::manifest::Type;
use crate::format::mismatch::Mismatch;
use crate::format::placement::ModelPlacement;
use crate::format::settings::Settings;
use crate::parts::{CheckpointCall, SavedParts};
use crate::tensors::{Named, SavedTensor};
use meshstep_shard::extend::{LbfgsShard, OptimizerShard, VectorKind as Slot};
use meshstep_shard::{Error, Optimizer, ShardedLbfgs};
use meshstep_tensor::{Queue, Slice, SliceMut};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt::Write;

/// Section of L-BFGS: rule and progress.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct LbfgsSection {
    lbfgs: Option<(String, Vec<u64>)>,
}

fn rule_text(opt: &ShardedLbfgs) -> String {
    let mut text = "lbfgs".to_owned();
    for (name, value) in opt.rule().hyperparameters() {
        let _ = write!(text, " {name}={value}");
    }
    text
}

impl Saveable for ShardedLbfgs {
    fn contents(&mut self) -> Contents<'_> {
        Contents::of(self)
    }
}

/// The state vectors are those of [`LbfgsShard`]: the point, then the history.
impl SavedParts for ShardedLbfgs {
    fn queue(&self) -> Queue {
        self.optimizer().queue()
    }

    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), Error> {
        match slot {
            Slot::State(i) => self.history(param, i),
            slot => self.optimizer_mut().shard_vector(param, slot),
        }
    }

    fn optimizer(&mut self) -> &mut Optimizer {
        self.optimizer_mut()
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

    fn choose<'m>(&mut self, saved: &'m Catalog, _: &Load) -> Result<Cow<'m, Catalog>, CheckpointError> {
        // Refused here, because another history also has vectors of other names and types.
        let LbfgsSection { lbfgs } = Settings::new(saved.settings().clone()).section()?;
        if let Some((_, words)) = lbfgs
            && let Err(meshstep_optim::Error::History { given, expected }) = self.state().check(&words)
        {
            let [saved, here] = [given, expected].map(|history| format!("{history:?}"));
            return Err(Mismatch::History { saved, here }.into());
        }
        Ok(Cow::Borrowed(saved))
    }

    fn tensors(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        let mut tensors = self.optimizer().tensors(placing)?;
        for (content, _) in tensors.iter_mut().zip(self.optimizer().params()).filter(|(_, p)| !p.frozen()) {
            let history = self.state().vectors().map(|(name, vector)| (name, vector.dtype()));
            let all = std::iter::once(("x".to_owned(), self.dtype())).chain(history);
            let named = all.enumerate().filter_map(|(i, (name, dtype))| {
                Type::of(dtype).map(|dtype| Named { slot: Slot::State(i), name, dtype })
            });
            content.vectors.extend(named);
        }
        Ok(tensors)
    }

    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, Error> {
        match slot {
            Slot::State(i) => self.history_mut(param, i),
            slot => self.optimizer_mut().shard_vector_mut(param, slot),
        }
    }

    fn settings(&self) -> Settings {
        let progress = (rule_text(self), self.state().words());
        self.optimizer().settings().with(&LbfgsSection { lbfgs: Some(progress) })
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        self.optimizer().check(settings)?;
        let LbfgsSection { lbfgs: Some((_, words)) } = settings.section()? else { return Ok(()) };
        self.state().check(&words).map_err(|error| CheckpointError::Contradiction {
            what: "the progress of L-BFGS".to_owned(),
            reason: error.to_string(),
        })
    }

    fn resume(&mut self, settings: &Settings) -> Result<(), failure::Error> {
        let rank = self.optimizer().comm().rank();
        let LbfgsSection { lbfgs } = settings.section().map_err(|error| Failed { rank, error })?;
        match lbfgs {
            Some((_, words)) => self.state_mut().restore(&words).map_err(Error::from)?,
            // A history recorded at other parameter values would mislead L-BFGS.
            None => self.restart()?,
        }
        self.optimizer_mut().resume(settings)
    }
}
