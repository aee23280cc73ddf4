//! Checkpoints of an optimizer on a mesh: each rank saves boxes of whole parameters, so that any other mesh can load them.
//!
//! The functions of [`meshstep_checkpoint`] take the types here. All ranks of the mesh make a call together, and each element of each
//! parameter is saved once, under the parameter's own name, independent of its placement. Names of tied parameters also match, those of
//! this model and those of the saved one.

use crate::mesh::site::Site;
use crate::{Coordinate, LocalOptimizer, Mesh, Model, Optimizer, Parameter, Piece, ShardedLbfgs};
use meshstep_checkpoint::{Contents, LocalPieces, ModelPlacement, Region, Saveable};
use meshstep_tensor::Param;
use std::collections::BTreeMap;
use std::ops::Range;

/// Whole parameters and their state, which any other mesh can load.
///
/// ```
/// # use meshstep_optim::AdamW;
/// # use meshstep_parallel3d::{Axis, Error, Mesh, Model, Optimizer, Placement};
/// # use meshstep_shard::Options;
/// # use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
/// # use meshstep_tensor::DType;
/// # let dir = std::env::temp_dir().join(format!("meshstep-mesh-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// let qkv = Placement::whole().cut_in_blocks(Axis::Tp, 0, [8, 4, 4]);
/// let model = Model::builder().param("qkv", &[16, 3], DType::F32, qkv).build()?;
/// let store = Store::new(&dir);
/// let make = |world, mesh: &str| -> Result<Optimizer, Error> {
///     Optimizer::new(world, mesh.parse()?, &model, AdamW::default(), |_, _, _| Ok(()), Options::default())
/// };
/// type Failed = Box<dyn std::error::Error + Send + Sync>;
/// let saved = meshstep_comm::loopback::spawn(4, |world| -> Result<u64, Failed> {
///     Ok(checkpoint::save(&mut make(world, "tp=2,dp=2")?, &store, Save::default())?)
/// })?;
/// let loaded = meshstep_comm::loopback::spawn(4, |world| -> Result<u64, Failed> {
///     Ok(checkpoint::load(&mut make(world, "tp=4")?, &store, Load::default())?.saved.manifest().step)
/// })?;
/// let steps = saved.into_iter().chain(loaded).collect::<Result<Vec<u64>, Failed>>();
/// assert_eq!(steps.map_err(|error| error.to_string())?, [0; 8]);
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Saveable for Optimizer {
    fn contents(&mut self) -> Contents<'_> {
        self.inner.contents().placed(self.site.placement())
    }
}

/// Whole parameters and their history, which any other mesh can load.
impl Saveable for ShardedLbfgs {
    fn contents(&mut self) -> Contents<'_> {
        self.inner.contents().placed(self.site.placement())
    }
}

/// Whole parameters of each worker, which any number of workers on any other mesh can load.
impl Saveable for LocalOptimizer {
    fn contents(&mut self) -> Contents<'_> {
        self.inner.contents().placed(self.site.placement())
    }
}

impl Site {
    fn placement(&self) -> PlacedParams {
        PlacedParams { mesh: self.mesh().clone(), model: self.model.clone(), at: self.coordinate.clone() }
    }
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
