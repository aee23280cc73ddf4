//! Checkpoints: those of the optimizer; a load writes the parameters into the module.

use crate::{Error, Sharded};
use burn::module::Module;
use meshstep_checkpoint::extend::{SavedParts, SavedTensor, Settings};
use meshstep_checkpoint::{CheckpointError, Contents, ModelPlacement, Saveable};
use meshstep_shard::Optimizer;
use meshstep_shard::extend::VectorKind;
use meshstep_tensor::{Queue, Slice, SliceMut};

/// A [`Sharded`] with its module, which checkpoints save and load.
///
/// A checkpoint has parameters and state under the module's paths, and any number of ranks loads it at any stage, with this type or
/// another. Frozen parameters and running means are not in it: save them with burn's records.
///
/// ```
/// # use burn::tensor::Device;
/// # use burn_nn::{Linear, LinearConfig};
/// # use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
/// # use meshstep_optim::AdamW;
/// # use meshstep_shard::Options;
/// # let dir = std::env::temp_dir().join(format!("meshstep-burn-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// let store = Store::new(&dir);
/// let make = |comm| -> Result<(Linear, meshstep_burn::Sharded), meshstep_burn::Error> {
///     let mut model = LinearConfig::new(3, 1).init(&Device::flex().autodiff());
///     let opt = meshstep_burn::Sharded::new(comm, &mut model, AdamW::default(), Options::default())?;
///     Ok((model, opt))
/// };
/// type Failed = Box<dyn std::error::Error + Send + Sync>;
/// let saved = meshstep_comm::loopback::spawn(2, |comm| -> Result<Vec<f32>, Failed> {
///     let (mut model, mut opt) = make(comm)?;
///     checkpoint::save(&mut opt.with_model(&mut model), &store, Save::default())?;
///     Ok(model.weight.val().into_data().try_into_vec()?)
/// })?;
/// let loaded = meshstep_comm::loopback::spawn(4, |comm| -> Result<Vec<f32>, Failed> {
///     let (mut model, mut opt) = make(comm)?;
///     let mut both: meshstep_burn::WithModel<'_, Linear> = opt.with_model(&mut model);
///     checkpoint::load(&mut both, &store, Load::default())?;
///     Ok(model.weight.val().into_data().try_into_vec()?)
/// })?;
/// let saved = saved.into_iter().collect::<Result<Vec<_>, _>>().unwrap();
/// assert!(loaded.into_iter().all(|weight| weight.unwrap() == saved[0]));
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct WithModel<'a, M> {
    sharded: &'a mut Sharded,
    model: &'a mut M,
}

impl Sharded {
    /// Joins the optimizer with the module of its parameters, for a save or a load.
    pub fn with_model<'a, M: Module>(&'a mut self, model: &'a mut M) -> WithModel<'a, M> {
        WithModel { sharded: self, model }
    }
}

impl<M: Module> Saveable for WithModel<'_, M> {
    fn contents(&mut self) -> Contents<'_> {
        Contents::of(self)
    }
}

/// The optimizer's parts; [`resume`](SavedParts::resume), the last call of a load, refreshes the module.
impl<M: Module> SavedParts for WithModel<'_, M> {
    fn optimizer(&mut self) -> &mut Optimizer {
        &mut self.sharded.optimizer
    }

    fn inside(&mut self) -> &mut dyn SavedParts {
        self
    }

    fn tensors(&self, placing: &dyn ModelPlacement) -> Result<Vec<SavedTensor>, CheckpointError> {
        self.sharded.optimizer.tensors(placing)
    }

    fn queue(&self) -> Queue {
        self.sharded.optimizer.queue()
    }

    fn vector(
        &mut self,
        param: usize,
        slot: VectorKind,
    ) -> Result<(usize, Slice<'_>), meshstep_shard::Error> {
        self.sharded.optimizer.vector(param, slot)
    }

    fn vector_mut(&mut self, param: usize, slot: VectorKind) -> Result<SliceMut<'_>, meshstep_shard::Error> {
        self.sharded.optimizer.vector_mut(param, slot)
    }

    fn settings(&self) -> Settings {
        self.sharded.optimizer.settings()
    }

    fn check(&self, settings: &Settings) -> Result<(), CheckpointError> {
        self.sharded.optimizer.check(settings)
    }

    fn resume(&mut self, settings: &Settings) -> Result<(), meshstep_checkpoint::Error> {
        self.sharded.optimizer.resume(settings)?;
        self.sharded.refresh(self.model).map_err(|error| self.sharded.failed(error))
    }
}

impl Sharded {
    /// Returns the error of this rank's module as one of a load.
    fn failed(&self, error: Error) -> meshstep_checkpoint::Error {
        let (what, reason) = ("a parameter".to_owned(), error.to_string());
        let error = CheckpointError::Contradiction { what, reason };
        meshstep_checkpoint::Failed { rank: self.optimizer.comm().rank(), error }.into()
    }
}
