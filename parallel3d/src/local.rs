//! Replicas of a mesh that step alone and exchange seldom. Each replica is a worker; its ranks divide the parameters.

use crate::mesh::site::Site;
use crate::{Axis, Coordinate, Error, Mesh, Model, Optimizer, RankPlan};
use meshstep_comm::Communicator;
use meshstep_local::{LocalError, LocalPlan, LocalTraffic, Ring, Select, Shares, Workers};
use meshstep_membership::{Digest, Error as MembershipError, Membership, Round};
use meshstep_shard::Options;
use std::ops::Range;
use std::sync::Arc;

type Inner = meshstep_local::LocalOptimizer;

/// Splits `world` into workers, one for each index along `dp_replicate`.
///
/// Returns to each rank the communicator of its worker, the worker's mesh (`mesh` without `dp_replicate`), and its exchange group: the
/// ranks that differ along `dp_replicate` only. Collective over `world`; every rank gets the same error.
pub fn replicas(
    world: Arc<dyn Communicator>,
    mesh: &Mesh,
) -> Result<(Arc<dyn Communicator>, Mesh, Workers), Error> {
    let fits = mesh.clone().of(world.world_size());
    let text = fits
        .as_ref()
        .map_or_else(|error| format!("this call = {error}\n"), |mesh| format!("mesh = {mesh}\n"));
    let same = meshstep_shard::same_everywhere(&*world, &Options::default(), &text);
    let mesh = fits?;
    same?;
    let worker = mesh.seat(world.rank(), Axis::DpReplicate.into());
    let (inside, workers) = Workers::split(world, worker as u32)?;
    Ok((inside, mesh.replica(), workers))
}

/// Worker on a mesh of its own that exchanges with other workers by a plan: [`meshstep_local::LocalOptimizer`] over an
/// [`Optimizer`].
///
/// A plan selects elements of the model, so a selection covers the same parameters independent of their cuts. Each rank exchanges its
/// owned elements with the ranks at the same coordinate in other workers; values that are equal on all ranks along `tp` stay equal.
///
/// ```
/// use meshstep_optim::AdamW;
/// use meshstep_local::LocalPlan;
/// use meshstep_parallel3d::{Axis, LocalOptimizer, Mesh, Model, Optimizer, Placement, replicas};
/// use meshstep_shard::{Options, Step, StepArgs};
/// use meshstep_tensor::DType::F32;
///
/// let model = Model::builder().param("up", &[16, 4], F32, Placement::whole().cut(Axis::Tp, 0)).build()?;
/// let mesh: Mesh = "dp_replicate=2,tp=2".parse()?; // two workers of two ranks
/// let finals = meshstep_comm::loopback::spawn(4, |world| -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
///     let own = (world.rank() / 2) as f32; // worker w's gradient is w + 1
///     let (comm, mesh, workers) = replicas(world, &mesh)?;
///     let optimizer = Optimizer::new(comm, mesh, &model, AdamW::default(), |_, _, _| Ok(()), Options::default())?;
///     let mut local = LocalOptimizer::new(optimizer, workers, LocalPlan::des_loc(2, 4, 8))?;
///     for _ in 0..2 {
///         let mb = local.micro_batch(1)?;
///         mb.grad("up", &[own + 1.0; 8 * 4][..])?;
///         mb.finish()?;
///         local.step(StepArgs::default())?;
///     }
///     Ok(local.param("up")?.typed::<f32>()?[0])
/// })?;
/// let finals: Vec<f32> = finals.into_iter().collect::<Result<_, _>>().unwrap();
/// assert!(finals.iter().all(|up| *up == finals[0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LocalOptimizer {
    pub(crate) inner: Inner,
    pub(crate) site: Site,
}

impl LocalOptimizer {
    /// [`meshstep_local::LocalOptimizer::new`] over an optimizer on the worker's ranks. Collective over all ranks of all workers.
    pub fn new(inner: Optimizer, workers: Workers, plan: LocalPlan) -> Result<Self, LocalError> {
        let plan = first_names(&plan, &inner.site.model);
        Self::of(inner, |inner| Inner::new(inner, workers, plan))
    }

    /// [`meshstep_local::LocalOptimizer::join`], called by rank 0 of a worker of an elastic run.
    pub fn join(
        inner: Optimizer,
        plan: LocalPlan,
        member: Arc<dyn Membership>,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Self, LocalError> {
        let plan = first_names(&plan, &inner.site.model);
        Self::of(inner, |inner| Inner::join(inner, plan, member, connect))
    }

    /// [`meshstep_local::LocalOptimizer::join_through_rank0`], called by the worker's other ranks.
    pub fn join_through_rank0(
        inner: Optimizer,
        plan: LocalPlan,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Self, LocalError> {
        let plan = first_names(&plan, &inner.site.model);
        Self::of(inner, |inner| Inner::join_through_rank0(inner, plan, connect))
    }

    fn of(
        optimizer: Optimizer,
        make: impl FnOnce(meshstep_shard::Optimizer) -> Result<Inner, LocalError>,
    ) -> Result<Self, LocalError> {
        let Optimizer { inner, site, .. } = optimizer;
        Ok(LocalOptimizer { inner: make(inner)?, site })
    }

    /// Returns the worker's mesh.
    pub fn mesh(&self) -> &Mesh {
        self.site.mesh()
    }

    /// Returns this rank's coordinate in the worker's mesh.
    pub fn coordinate(&self) -> &Coordinate {
        &self.site.coordinate
    }

    /// Returns the model.
    pub fn model(&self) -> &Model {
        &self.site.model
    }

    /// Returns the worker without its mesh, for reading: its plan, steps, warnings and outer parameters.
    pub fn local(&self) -> &meshstep_local::LocalOptimizer {
        &self.inner
    }

    /// [`meshstep_local::LocalOptimizer::enter`].
    pub fn enter(&mut self) {
        self.inner.enter();
    }

    /// [`meshstep_local::LocalOptimizer::regroup`].
    pub fn regroup(&mut self, workers: Workers) -> Result<(), LocalError> {
        self.inner.regroup(workers)
    }

    /// [`meshstep_local::LocalOptimizer::follow`].
    pub fn follow(
        &mut self,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Option<&Round>, LocalError> {
        self.inner.follow(connect)
    }
}

/// Returns the plan with each tied name replaced by the parameter's first name.
fn first_names(plan: &LocalPlan, model: &Model) -> LocalPlan {
    let first = |name: &mut String| {
        if let Some(parameter) = model.get(name) {
            name.clone_from(&parameter.name);
        }
    };
    plan.clone().with(|fragment| match &mut fragment.params {
        Select::Names(names) => names.iter_mut().for_each(first),
        Select::Elements { name, .. } => first(name),
        Select::All | Select::Part { .. } => {}
    })
}

impl Optimizer {
    /// Returns the digest that a worker with this optimizer presents when it joins ([`LocalPlan::digest`]).
    pub fn digest(&self, plan: &LocalPlan) -> Digest {
        first_names(plan, &self.site.model).digest(&self.inner)
    }
}

impl RankPlan<'_> {
    /// Returns the bytes that this rank of a worker sends to other workers by `plan` in `steps`. `across` is its position among the ranks
    /// at its coordinate, one of each worker; `world` its position among all ranks of all workers. The result equals the counts of its
    /// communicators.
    pub fn local_traffic(
        &self,
        plan: &LocalPlan,
        across: Ring,
        world: Ring,
        steps: Range<u64>,
    ) -> Result<LocalTraffic, LocalError> {
        let shares: Vec<Shares<'_>> = self.shares().collect();
        first_names(plan, self.model()).traffic_of(&shares, across, world, steps)
    }
}
