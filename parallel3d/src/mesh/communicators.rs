//! Communicators of a mesh: one for each set of axes along which ranks exchange data.

use crate::{Axes, Error, Mesh, MeshError};
use meshstep_comm::Communicator;
use std::collections::BTreeMap;
use std::sync::Arc;

/// World communicator, and the communicators of this rank's groups along sets of axes.
///
/// ```
/// use meshstep_comm::Communicator;
/// use meshstep_parallel3d::{Axis, Communicators, Mesh};
///
/// let mesh: Mesh = "tp=2,dp=2".parse()?;
/// let sizes = meshstep_comm::loopback::spawn(4, |world| -> Result<usize, meshstep_parallel3d::Error> {
///     let comms = Communicators::new(world, mesh.clone(), [Axis::Tp.into()])?;
///     Ok(comms.along(Axis::Tp)?.world_size())
/// })?;
/// assert!(sizes.into_iter().all(|size| size.is_ok_and(|size| size == 2)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Communicators {
    mesh: Mesh,
    world: Arc<dyn Communicator>,
    along: BTreeMap<Axes, Arc<dyn Communicator>>,
}

impl Communicators {
    /// Splits `world` along each of `sets`, in an order that does not depend on the order of `sets`. Sets that span the same ranks of the
    /// mesh share one communicator; a set that spans all ranks uses `world` itself.
    /// Collective: every rank passes the same mesh and sets. A rank with a failed split aborts `world`, because the other ranks go on to
    /// their next split.
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

    /// Returns the mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the communicator of all ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// Iterates over the communicators of all sets; some may be `world`.
    pub(crate) fn all_along(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        self.along.values()
    }

    /// Returns the communicator of the ranks that differ from this rank along `axes` only. [`new`](Self::new) must have been given that
    /// set.
    pub fn along(&self, axes: impl Into<Axes>) -> Result<&Arc<dyn Communicator>, Error> {
        let axes = self.mesh.resolve(axes);
        self.along.get(&self.mesh.several(axes)).ok_or(Error::NotAlong { axes })
    }
}
