//! Interface between saved state and the calls of checkpoints: every parameter's vectors, and the elements of them on this rank.

use crate::collective::compatibility::Fitting;
use crate::collective::load::read_own;
use crate::collective::load_options::Load;
use crate::collective::ranks::Ranks;
use crate::error::CheckpointError;
use crate::failure::Error;
use crate::format::catalog::Catalog;
use crate::format::placement::ModelPlacement;
use crate::format::rules::SavedRules;
use crate::format::settings::{Settings, TiedNames};
use crate::store::reader::Saved;
use crate::tensors::{Read, ReadSource, SavedTensor, Take, Wanted};
use meshstep_comm::Communicator;
use meshstep_shard::Optimizer;
use meshstep_shard::extend::{OptimizerShard, VectorKind as Slot};
use meshstep_tensor::{Queue, Slice, SliceMut};
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// ReadSource of live vectors.
pub(crate) struct Live<'a>(pub(crate) &'a mut dyn SavedParts);

/// Calls that some types do not support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointCall {
    /// [`serialize`](crate::serialize).
    Serialize,
    /// [`deserialize`](crate::deserialize).
    Deserialize,
    /// [`export_pytorch`](crate::export_pytorch).
    Export,
    /// [`import_pytorch`](crate::import_pytorch).
    Import,
    /// [`reshard`](crate::reshard).
    Reshard,
}

/// State on this rank, of an optimizer or of a wrapper with state of its own. It is made anew for each call, and has the state of that call.
///
/// Calls of all ranks use the communicator of [`ranks`](Self::ranks), which several groups or workers may share. Calls of one group or
/// worker use [`inside`](Self::inside).
pub trait SavedParts {
    /// Returns the optimizer of this rank's group.
    fn optimizer(&mut self) -> &mut Optimizer;

    /// Returns the state of this rank's group alone.
    fn inside(&mut self) -> &mut dyn SavedParts;

    /// Returns the placement of all ranks, given that of this rank's group.
    fn placement<'p>(&self, inside: Box<dyn ModelPlacement + 'p>) -> Box<dyn ModelPlacement + 'p> {
        inside
    }

    /// Returns an error for a call that this type does not support.
    fn supports(&self, _: CheckpointCall) -> Result<(), CheckpointError> {
        Ok(())
    }

    /// Prepares a save. Collective.
    fn begin_save(&mut self) -> Result<(), meshstep_shard::Error> {
        Ok(())
    }

    /// Prepares a load. Collective.
    fn begin_load(&mut self) -> Result<(), meshstep_shard::Error> {
        Ok(())
    }

    /// Returns the communicator of the ranks that save and load together.
    fn ranks(&mut self) -> Arc<dyn Communicator> {
        Arc::clone(self.optimizer().comm())
    }

    /// Returns the ranks that save and load together, with their exchanges.
    fn group(&mut self) -> Ranks {
        Ranks::new(&self.ranks(), self.optimizer().options())
    }

    /// Returns the default name of a checkpoint: the number of steps so far.
    fn name_by_steps(&mut self) -> u64 {
        self.optimizer().steps()
    }

    /// [`OptimizerShard::call_together`] on all ranks of [`ranks`](Self::ranks).
    fn call_all(
        &mut self,
        what: &str,
        ready: Result<(), meshstep_shard::Error>,
    ) -> Result<(), meshstep_shard::Error> {
        self.optimizer().call_together(what, ready)
    }

    /// Checks that ranks with copies of the same state agree on it. Collective.
    fn compare_all(&mut self) -> Result<(), Error> {
        Ok(compare_counters(self.optimizer())?)
    }

    /// Ends the run if this rank alone cannot continue after `error`.
    fn end_all(&mut self, error: &meshstep_shard::Error) {
        self.optimizer().end_if_alone(error);
    }

    /// Selects the part of a saved step to load; [`tensors`](Self::tensors) describes that part from then on.
    fn choose<'m>(&mut self, saved: &'m Catalog, _: &Load) -> Result<Cow<'m, Catalog>, CheckpointError> {
        Ok(Cow::Borrowed(saved))
    }

    /// Returns every parameter, in the same order on all ranks.
    fn tensors(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError>;

    /// Returns the queue of the memory with the vectors.
    fn queue(&self) -> Queue;

    /// Returns the local elements of a vector of parameter `param`, and the index of the first of them in the rank's local part.
    fn vector(&mut self, param: usize, slot: Slot) -> Result<(usize, Slice<'_>), meshstep_shard::Error>;

    /// Returns the memory of [`vector`](Self::vector) for writing.
    fn vector_mut(&mut self, param: usize, slot: Slot) -> Result<SliceMut<'_>, meshstep_shard::Error>;

    /// Reads everything that this rank needs of a saved step; by default its elements of every vector.
    fn read(
        &mut self,
        saved: &Saved,
        tensors: &[SavedTensor],
        fitting: &Fitting<'_>,
    ) -> Result<Vec<Read>, CheckpointError> {
        read_own(self, saved, tensors, fitting)
    }

    /// Sets the number of updates of each parameter; `None` leaves it as it is.
    fn set_updates(&mut self, t: &[Option<u64>]) {
        self.optimizer().set_t(t);
    }

    /// Returns the sections of settings of this type.
    fn settings(&self) -> Settings;

    /// Returns all sections of settings.
    fn all_settings(&self, placing: &dyn ModelPlacement) -> Settings {
        self.settings().with(&TiedNames { tied: placing.tied() })
    }

    /// Returns an error for the first setting that steps depend on and that differs.
    fn compare_settings(&self, saved: &Settings, here: &Settings) -> Result<(), CheckpointError> {
        SavedRules::compare(saved, here)
    }

    /// Checks that [`resume`](Self::resume) accepts these settings.
    fn check(&self, settings: &Settings) -> Result<(), CheckpointError>;

    /// Resumes from `settings`, after the vectors have been written.
    fn resume(&mut self, settings: &Settings) -> Result<(), Error>;
}

impl dyn SavedParts + '_ {
    /// Runs `call` between two steps, which do not count the bytes it sends. An error of this rank alone ends the run.
    pub(crate) fn apart<T>(&mut self, call: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        let before = self.optimizer().bytes_sent();
        let called = call(self);
        self.optimizer().exclude_sent_since(before);
        called.inspect_err(|error| {
            if let Error::Shard(error) = error {
                self.end_all(error);
            }
        })
    }
}

/// Checks that all ranks have the same counts and hyperparameters. Collective.
pub(crate) fn compare_counters(opt: &mut Optimizer) -> Result<(), meshstep_shard::Error> {
    let counters = opt.describe_counters()?;
    meshstep_shard::same_everywhere(&**opt.comm(), opt.options(), &counters)
}

impl ReadSource for Live<'_> {
    fn place(&self) -> Queue {
        self.0.queue()
    }

    fn values(&mut self, wanted: &Wanted<'_>, take: Take<'_>) -> Result<(), CheckpointError> {
        let (first, values) = self.0.vector(wanted.param, wanted.slot).map_err(CheckpointError::memory)?;
        for run in wanted.part.local.runs(wanted.held) {
            let start = (run.to as usize) - first;
            take(values.slice(start..start + run.len as usize).map_err(CheckpointError::memory)?)?;
        }
        Ok(())
    }
}

impl CheckpointCall {
    /// Returns the error of a call that is not supported; `works` is one that is.
    pub fn unsupported(self, of: &str, works: &str) -> CheckpointError {
        let [call, of, works] = [self.to_string(), of.to_owned(), works.to_owned()];
        CheckpointError::Unsupported { call, of, works }
    }
}

impl fmt::Display for CheckpointCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CheckpointCall::Serialize => "serialize",
            CheckpointCall::Deserialize => "deserialize",
            CheckpointCall::Export => "export_pytorch",
            CheckpointCall::Import => "import_pytorch",
            CheckpointCall::Reshard => "reshard",
        })
    }
}
