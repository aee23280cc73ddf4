//! Checkpoints: those of the optimizer; a load writes the parameters into the variables.

use crate::{Error, Sharded};
use meshstep_checkpoint::extend::{SavedParts, SavedTensor, Settings};
use meshstep_checkpoint::{CheckpointError, Contents, ModelPlacement, Saveable};
use meshstep_shard::Optimizer;
use meshstep_shard::extend::VectorKind;
use meshstep_tensor::{Queue, Slice, SliceMut};

/// Parameters and state under the variables' names, which any number of ranks loads at any stage, with this type or another.
///
/// ```
/// # use candle_core::{Device, Var};
/// # use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
/// # use meshstep_optim::AdamW;
/// # use meshstep_shard::Options;
/// # let dir = std::env::temp_dir().join(format!("meshstep-candle-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// let store = Store::new(&dir);
/// let make = |comm, value: f32| -> Result<(Var, meshstep_candle::Sharded), meshstep_candle::Error> {
///     let w = Var::new(&[value; 3], &Device::Cpu)?;
///     let opt = meshstep_candle::Sharded::new(comm, [("w", w.clone())], AdamW::default(), Options::default())?;
///     Ok((w, opt))
/// };
/// type Failed = Box<dyn std::error::Error + Send + Sync>;
/// let saved = meshstep_comm::loopback::spawn(2, |comm| -> Result<u64, Failed> {
///     Ok(checkpoint::save(&mut make(comm, 5.0)?.1, &store, Save::default())?)
/// })?;
/// let loaded = meshstep_comm::loopback::spawn(4, |comm| -> Result<Vec<f32>, Failed> {
///     let (w, mut opt) = make(comm, 0.0)?;
///     checkpoint::load(&mut opt, &store, Load::default())?;
///     Ok(w.to_vec1()?)
/// })?;
/// assert!(saved.iter().all(|step| step.is_ok()));
/// assert!(loaded.into_iter().all(|w| w.is_ok_and(|w| w == [5.0; 3])));
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Saveable for Sharded {
    fn contents(&mut self) -> Contents<'_> {
        Contents::of(self)
    }
}

/// The optimizer's parts; [`resume`](SavedParts::resume), the last call of a load, refreshes the variables.
impl SavedParts for Sharded {
    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    fn inside(&mut self) -> &mut dyn SavedParts {
        self
    }

    fn tensors(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        self.optimizer.tensors(placing)
    }

    fn queue(&self) -> Queue {
        self.optimizer.queue()
    }

    fn vector(
        &mut self,
        param: usize,
        slot: VectorKind,
    ) -> Result<(usize, Slice<'_>), meshstep_shard::Error> {
        self.optimizer.vector(param, slot)
    }

    fn vector_mut(&mut self, param: usize, slot: VectorKind) -> Result<SliceMut<'_>, meshstep_shard::Error> {
        self.optimizer.vector_mut(param, slot)
    }

    fn settings(&self) -> Settings {
        self.optimizer.settings()
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        self.optimizer.check(settings)
    }

    fn resume(&mut self, settings: &Settings) -> Result<(), meshstep_checkpoint::Error> {
        self.optimizer.resume(settings)?;
        self.refresh().map_err(|error| self.failed(error))
    }
}

impl Sharded {
    /// Returns the error of this rank's variables as one of a load.
    fn failed(&self, error: Error) -> meshstep_checkpoint::Error {
        let (what, reason) = ("a variable".to_owned(), error.to_string());
        let error = CheckpointError::Contradiction { what, reason };
        meshstep_checkpoint::Failed { rank: self.optimizer.comm().rank(), error }.into()
    }
}
