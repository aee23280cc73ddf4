//! Checkpoints of an optimizer on a mesh: each rank saves boxes of whole parameters, so that any other mesh can load them.

use crate::mesh::site::Site;
use crate::{Coordinate, LocalOptimizer, Mesh, Model, Optimizer, Parameter, Piece, ShardedLbfgs};
use meshstep_comm::Communicator;
use meshstep_shard::Error;
use meshstep_shard::checkpoint::pytorch::{Import, Imported, PyTorchFile};
use meshstep_shard::checkpoint::{
    Load, Loaded, LocalPieces, ModelPlacement, Moved, Region, Save, Saving, Sink, Store, reshard_placed,
};
use meshstep_shard::local::LocalError;
use meshstep_tensor::Param;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

impl Optimizer {
    /// [`meshstep_shard::Optimizer::save`], by all ranks of the mesh together. Each element of each parameter is saved once, under the
    /// parameter's own name, independent of its placement.
    ///
    /// ```
    /// # use meshstep_optim::AdamW;
    /// # use meshstep_parallel3d::{Axis, Error, Mesh, Model, Optimizer, Placement};
    /// # use meshstep_shard::{Options, checkpoint::{Load, Save, Store}};
    /// # use meshstep_tensor::DType;
    /// # let dir = std::env::temp_dir().join(format!("meshstep-mesh-doc-{}", std::process::id()));
    /// # std::fs::create_dir_all(&dir)?;
    /// let qkv = Placement::whole().cut_in_blocks(Axis::Tp, 0, [8, 4, 4]);
    /// let model = Model::builder().param("qkv", &[16, 3], DType::F32, qkv).build()?;
    /// let store = Store::new(&dir);
    /// let make = |world, mesh: &str| -> Result<Optimizer, Error> {
    ///     Optimizer::new(world, mesh.parse()?, &model, AdamW::default(), |_, _, _| Ok(()), Options::default())
    /// };
    /// let saved = meshstep_comm::loopback::spawn(4, |world| Ok(make(world, "tp=2,dp=2")?.save(&store, Save::default())?))?;
    /// saved.into_iter().collect::<Result<Vec<u64>, Error>>()?;
    /// let loaded = meshstep_comm::loopback::spawn(4, |world| {
    ///     Ok(make(world, "tp=4")?.load(&store, Load::default()).map(drop)?)
    /// })?;
    /// loaded.into_iter().collect::<Result<(), Error>>()?;
    /// # std::fs::remove_dir_all(&dir)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save(&mut self, store: &Store, save: Save<'_>) -> Result<u64, Error> {
        let placing = self.placing();
        self.inner.save_placed(store, save, &placing)
    }

    /// [`meshstep_shard::Optimizer::save_async`], by all ranks of the mesh together.
    pub fn save_async(&mut self, store: &Store, save: Save<'_>) -> Result<Saving, Error> {
        let placing = self.placing();
        self.inner.save_async_placed(store, save, &placing)
    }

    /// [`meshstep_shard::Optimizer::release_snapshot`].
    pub fn release_snapshot(&mut self) {
        self.inner.release_snapshot();
    }

    /// [`meshstep_shard::Optimizer::load`], by all ranks of the mesh together, from a checkpoint of any other mesh. Names of tied
    /// parameters also match, those of this model and those of the saved one.
    pub fn load(&mut self, store: &Store, load: Load) -> Result<Loaded, Error> {
        let placing = self.placing();
        self.inner.load_placed(store, load, &placing)
    }

    /// [`meshstep_shard::Optimizer::consolidate`], by all ranks of the mesh together: writes whole parameters, independent of their cuts.
    pub fn consolidate(&mut self, to: usize, sink: Sink<'_>) -> Result<(), Error> {
        let placing = self.placing();
        self.inner.consolidate_placed(to, sink, &placing)
    }

    /// [`meshstep_shard::Optimizer::export_pytorch`], by all ranks of the mesh together, of whole parameters.
    pub fn export_pytorch(&mut self, file: &PyTorchFile, to: usize) -> Result<(), Error> {
        let placing = self.placing();
        self.inner.export_pytorch_placed(file, to, &placing)
    }

    /// [`meshstep_shard::Optimizer::import_pytorch`], by all ranks of the mesh together. Names of tied parameters also match.
    pub fn import_pytorch(&mut self, file: &PyTorchFile, import: Import) -> Result<Imported, Error> {
        let placing = self.placing();
        self.inner.import_pytorch_placed(file, import, &placing)
    }

    /// [`meshstep_shard::Optimizer::serialize`], by all ranks of the mesh together.
    pub fn serialize(&mut self) -> Result<Vec<u8>, Error> {
        let placing = self.placing();
        self.inner.serialize_placed(&placing)
    }

    /// [`meshstep_shard::Optimizer::deserialize`], by all ranks of the same mesh together.
    pub fn deserialize(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let placing = self.placing();
        self.inner.deserialize_placed(bytes, &placing)
    }

    fn placing(&self) -> PlacedParams {
        self.site.placing()
    }
}

/// Checkpoints of whole parameters and of their history vectors, by all ranks of the mesh together; any other mesh can load them.
impl ShardedLbfgs {
    /// [`meshstep_shard::ShardedLbfgs::save`].
    pub fn save(&mut self, store: &Store, save: Save<'_>) -> Result<u64, Error> {
        self.inner.save_placed(store, save, &self.site.placing())
    }

    /// [`meshstep_shard::ShardedLbfgs::save_async`].
    pub fn save_async(&mut self, store: &Store, save: Save<'_>) -> Result<Saving, Error> {
        self.inner.save_async_placed(store, save, &self.site.placing())
    }

    /// [`meshstep_shard::ShardedLbfgs::load`].
    pub fn load(&mut self, store: &Store, load: Load) -> Result<Loaded, Error> {
        self.inner.load_placed(store, load, &self.site.placing())
    }

    /// [`meshstep_shard::ShardedLbfgs::serialize`].
    pub fn serialize(&mut self) -> Result<Vec<u8>, Error> {
        self.inner.serialize_placed(&self.site.placing())
    }

    /// [`meshstep_shard::ShardedLbfgs::deserialize`].
    pub fn deserialize(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.inner.deserialize_placed(bytes, &self.site.placing())
    }

    /// [`meshstep_shard::ShardedLbfgs::consolidate`].
    pub fn consolidate(&mut self, to: usize, sink: Sink<'_>) -> Result<(), Error> {
        self.inner.consolidate_placed(to, sink, &self.site.placing())
    }
}

impl Site {
    fn placing(&self) -> PlacedParams {
        PlacedParams { mesh: self.mesh().clone(), model: self.model.clone(), at: self.coordinate.clone() }
    }
}

impl LocalOptimizer {
    /// [`meshstep_shard::local::LocalOptimizer::save`] for workers on meshes: saves whole parameters of each worker, independent of their
    /// cuts.
    pub fn save(&mut self, store: &Store, save: Save<'_>) -> Result<u64, LocalError> {
        let placing = self.placing();
        self.inner.save_placed(store, save, &placing)
    }

    /// [`meshstep_shard::local::LocalOptimizer::save_async`] for workers on meshes.
    pub fn save_async(&mut self, store: &Store, save: Save<'_>) -> Result<Saving, LocalError> {
        let placing = self.placing();
        self.inner.save_async_placed(store, save, &placing)
    }

    /// [`meshstep_shard::local::LocalOptimizer::release_snapshot`].
    pub fn release_snapshot(&mut self) {
        self.inner.release_snapshot();
    }

    /// [`meshstep_shard::local::LocalOptimizer::consolidate`], of whole parameters.
    pub fn consolidate(&mut self, to: usize, sink: Sink<'_>) -> Result<(), Error> {
        let placing = self.placing();
        self.inner.consolidate_placed(to, sink, &placing)
    }

    /// [`meshstep_shard::local::LocalOptimizer::load`], into any number of workers on any other mesh.
    pub fn load(&mut self, store: &Store, load: Load) -> Result<Loaded, LocalError> {
        let placing = self.placing();
        self.inner.load_placed(store, load, &placing)
    }

    fn placing(&self) -> PlacedParams {
        self.site.placing()
    }
}

/// [`meshstep_shard::checkpoint::reshard`], from an optimizer on one mesh to an optimizer of the same model on another.
pub fn reshard(
    via: &Arc<dyn Communicator>,
    from: Option<&mut Optimizer>,
    to: Option<&mut Optimizer>,
) -> Result<Moved, Error> {
    let (old, new) = (from.as_deref().map(Optimizer::placing), to.as_deref().map(Optimizer::placing));
    let from = from.zip(old.as_ref()).map(|(opt, placing)| (&mut opt.inner, placing as &dyn ModelPlacement));
    let to = to.zip(new.as_ref()).map(|(opt, placing)| (&mut opt.inner, placing as &dyn ModelPlacement));
    reshard_placed(via, from, to)
}

/// Placement of a model on one rank of a mesh.
struct PlacedParams {
    mesh: Mesh,
    model: Model,
    at: Coordinate,
}

impl ModelPlacement for PlacedParams {
    fn mesh(&self) -> String {
        self.mesh.to_string()
    }

    fn holding(&self, param: &Param) -> LocalPieces {
        let own: Vec<u64> = param.shape().iter().map(|&extent| extent as u64).collect();
        let Some(Parameter { name, shape, placement, .. }) = self.model.get(param.name()) else {
            return LocalPieces::whole(&own);
        };
        let pieces = placement.pieces(name, shape, &self.mesh, &self.at).unwrap_or_default();
        let boxes = pieces.iter().map(|Piece { global, local }| (region(global), region(local)));
        LocalPieces {
            shape: shape.iter().map(|&extent| extent as u64).collect(),
            local: own,
            boxes: boxes.collect(),
        }
    }

    fn tied(&self) -> BTreeMap<String, String> {
        self.model.tied().into_iter().map(|(name, to)| (name.to_owned(), to.to_owned())).collect()
    }
}

fn region(ranges: &[Range<usize>]) -> Region {
    let offsets = ranges.iter().map(|range| range.start as u64).collect();
    Region { offsets, extents: ranges.iter().map(|range| range.len() as u64).collect() }
}
