//! A communicator for each set of axes along which ranks have something to tell each other.

use crate::{Axes, Error, Mesh, MeshError};
use meshstep_comm::Communicator;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The world's communicator, and those of this rank's groups along sets of axes.
#[derive(Clone, Debug)]
pub struct Communicators {
    mesh: Mesh,
    world: Arc<dyn Communicator>,
    along: BTreeMap<Axes, Arc<dyn Communicator>>,
}

impl Communicators {
    /// Splits `world` along each of `sets`, in one order whatever theirs is; sets that the mesh makes the same are one.
    /// Collective: every rank gives the same mesh and sets. A set that spans the world is the world's communicator itself. A rank
    /// that cannot split aborts `world`, as the others go on to their next split.
    pub fn new(
        world: Arc<dyn Communicator>,
        mesh: Mesh,
        sets: impl IntoIterator<Item = Axes>,
    ) -> Result<Self, Error> {
        let mesh = mesh.of(world.world_size())?;
        let mut along: BTreeMap<Axes, Arc<dyn Communicator>> =
            sets.into_iter().map(|axes| (mesh.several(mesh.resolve(axes)), Arc::clone(&world))).collect();
        for (&axes, comm) in &mut along {
            let group = mesh.group(world.rank(), axes)?;
            if group.len() < world.world_size() {
                let colour = u32::try_from(group.rank(0)).map_err(|_| MeshError::TooManyRanks)?;
                let split = world.split(Some(colour), 0).inspect_err(|_| world.abort());
                let split = split.map_err(|source| Error::Split { axes, source })?;
                *comm = split.ok_or(Error::NotAlong { axes })?;
            }
        }
        Ok(Communicators { mesh, world, along })
    }

    /// The mesh they are of.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// All ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// Those along the sets, some of which may be all ranks.
    pub(crate) fn all_along(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        self.along.values()
    }

    /// The ranks that share this one's coordinates but those along `axes`, which were asked for at the start.
    pub fn along(&self, axes: impl Into<Axes>) -> Result<&Arc<dyn Communicator>, Error> {
        let axes = self.mesh.resolve(axes);
        self.along.get(&self.mesh.several(axes)).ok_or(Error::NotAlong { axes })
    }
}
