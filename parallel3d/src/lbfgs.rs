//! L-BFGS on a mesh.

use crate::mesh::site::Site;
use crate::{Coordinate, Error, Mesh, Model, Optimizer, Parameter, Piece, Plan};
use meshstep_comm::Communicator;
use meshstep_optim::{Iterate, Lbfgs, LbfgsState, Sgd};
use meshstep_shard::{LbfgsStep, MicroBatch, Minimized, Options, Verified};
use meshstep_tensor::SliceMut;
use std::sync::Arc;

type MinimizeFailed = Box<dyn std::error::Error + Send + Sync>;

/// [`Lbfgs`] for a model on a mesh: each rank holds the history of the elements that it owns.
///
/// Gradients are reduced as in an [`Optimizer`]. Every dot product counts each element of the whole parameters once, independent of its
/// placement, so all meshes and stages take the same steps if their gradients are the same. Ranks that differ along `tp` only compute the
/// same micro-batch; the loss of the first of them counts.
///
/// ```
/// use meshstep_optim::{Lbfgs, LineSearch};
/// use meshstep_parallel3d::{Axis, Error, Model, Placement, ShardedLbfgs};
/// use meshstep_shard::Options;
/// use meshstep_tensor::{DType, Slice, SliceMut};
///
/// // Four elements, two on each rank along tp. The ranks along dp pull towards 0 and 2, so their mean has its minimum at 1.
/// let model = Model::builder().param("w", &[4], DType::F64, Placement::whole().cut(Axis::Tp, 0)).build()?;
/// let ends = meshstep_comm::loopback::spawn(4, |world| -> Result<Vec<f64>, Error> {
///     let rule = Lbfgs { line_search: LineSearch::StrongWolfe, ..Lbfgs::default() };
///     let first = |_: &_, _: &[_], mut w: SliceMut<'_>| w.copy_from(Slice::from(&[9.0, -9.0][..]));
///     let mut opt = ShardedLbfgs::new(world, "tp=2,dp=2".parse()?, &model, rule, first, Options::default())?;
///     let target = 2.0 * opt.coordinate().along(Axis::Dp) as f64;
///     opt.minimize(|mb| {
///         let w = mb.param("w")?.typed::<f64>()?;
///         mb.grad("w", &w.iter().map(|w| w - target).collect::<Vec<_>>()[..])?;
/// // Ranks along tp must return the same loss, over all elements; here both halves have equal losses.
///         Ok::<_, meshstep_shard::Error>(w.iter().map(|w| (w - target).powi(2)).sum())
///     })?;
///     Ok(opt.optimizer().param("w")?.typed::<f64>()?.to_vec())
/// })?;
/// assert!(ends.into_iter().all(|w| w.is_ok_and(|w| w.iter().all(|w| (w - 1.0).abs() < 1e-6))));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ShardedLbfgs {
    pub(crate) inner: meshstep_shard::ShardedLbfgs,
    pub(crate) site: Site,
    plan: Plan,
}

impl ShardedLbfgs {
    /// Creates an optimizer for `model` on `mesh`, the arrangement of `world`. Collective: every rank passes the same arguments.
    /// `initial` works as in [`Optimizer::new`]; options are those of [`meshstep_shard::ShardedLbfgs::new`].
    pub fn new(
        world: Arc<dyn Communicator>,
        mesh: Mesh,
        model: &Model,
        rule: Lbfgs,
        initial: impl FnMut(&Parameter, &[Piece], SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
        options: Options,
    ) -> Result<Self, Error> {
        let Optimizer { inner, site, plan, .. } =
            Optimizer::new(world, mesh, model, Sgd::default(), initial, options)?;
        let inner = meshstep_shard::ShardedLbfgs::over(inner, rule).map_err(|error| site.located(error))?;
        Ok(ShardedLbfgs { inner, site, plan })
    }

    /// [`meshstep_shard::ShardedLbfgs::step`], by all ranks of the mesh together.
    pub fn step<E: Into<MinimizeFailed>>(
        &mut self,
        closure: impl FnMut(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<LbfgsStep, Error> {
        self.inner.step(closure).map_err(|error| self.site.located(error))
    }

    /// [`meshstep_shard::ShardedLbfgs::minimize`], by all ranks of the mesh together.
    pub fn minimize<E: Into<MinimizeFailed>>(
        &mut self,
        closure: impl FnMut(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Minimized, Error> {
        self.inner.minimize(closure).map_err(|error| self.site.located(error))
    }

    /// [`meshstep_shard::ShardedLbfgs::step_watched`], by all ranks of the mesh together.
    pub fn step_watched<E: Into<MinimizeFailed>>(
        &mut self,
        closure: impl FnMut(&MicroBatch<'_>) -> Result<f64, E>,
        each: impl FnMut(&Iterate<'_>),
    ) -> Result<LbfgsStep, Error> {
        self.inner.step_watched(closure, each).map_err(|error| self.site.located(error))
    }

    /// [`meshstep_shard::ShardedLbfgs::verify`], which reports a difference as [`Optimizer::verify`] does.
    pub fn verify(&mut self) -> Result<Verified, Error> {
        self.inner.verify().map_err(|error| self.site.located(error))
    }

    /// Returns the history and the progress.
    pub fn state(&self) -> &LbfgsState {
        self.inner.state()
    }

    /// Returns the optimizer that carries out the evaluations, for reading: this rank's parts of parameters, and units.
    pub fn optimizer(&self) -> &meshstep_shard::Optimizer {
        self.inner.optimizer()
    }

    /// Returns the plan of a step with a rule without state; the history comes on top.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> &Mesh {
        self.site.mesh()
    }

    /// Returns this rank's coordinate.
    pub fn coordinate(&self) -> &Coordinate {
        &self.site.coordinate
    }
}
