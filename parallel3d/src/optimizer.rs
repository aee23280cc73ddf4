//! Sharded optimizer step on a mesh: each gradient is reduced along its own axes, and all ranks decide the step together.

use crate::mesh::site::Site;
use crate::{
    Axis, Communicators, Coordinate, Error, Gradient, Mesh, Model, Parameter, Piece, PipelineStage, Plan,
    Sharing,
};
use meshstep_comm::{Communicator, Reduction};
use meshstep_optim::Rounding;
use meshstep_shard::{Combine, DataRank, Groups, Options, ParamGroup, Part, Parts, RankRoles};
use meshstep_tensor::{Layout, SliceMut};
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

/// A model's parameters, gradients and optimizer state on one rank of a mesh. Steps work as in [`meshstep_shard::Optimizer`], on this
/// rank's parts of parameters and gradients; the calls are those of [`Step`](meshstep_shard::Step).
///
/// | gradients | axes |
/// |---|---|
/// | are reduced over the ranks that divide the state (and, under `Stage::Zero3`, parameters) | `reduced_over` of the placement (`dp`,
/// `cp`) without `dp_replicate` |
/// | are reduced once more | `dp_replicate`; `tp` if each rank has a partial gradient |
/// | count in the norm | once, independent of placement |
///
/// Rules that see whole matrices, such as Muon, update whole tensors: the ranks of one replica that hold a cut tensor together exchange it
/// along `tp` and the axes that divide the state ([`Sharing::tensors`]).
///
/// Under [`Combine::Mean`] a gradient is the mean over the ranks it is reduced over, which must be the same for all parameters.
/// [`Combine::Weighted`], by tokens, does not depend on the mesh as long as ranks along `cp` have equally many tokens: attention mixes
/// their gradients before the weights apply. If their token counts differ, use [`Combine::Sum`] of losses divided by all ranks' tokens,
/// which does not depend on the mesh either.
#[derive(Debug)]
pub struct Optimizer {
    pub(crate) inner: meshstep_shard::Optimizer,
    pub(crate) site: Site,
    /// Communicators along the axes that cut parameters; made by the first comparison of cut parts.
    pub(crate) across_cuts: Option<Communicators>,
    pub(crate) plan: Plan,
}

impl Optimizer {
    /// Creates an optimizer for `model` on `mesh`, the arrangement of `world`. Collective: every rank passes the same arguments.
    ///
    /// `initial` sets the first value of this rank's part of each parameter. It is called on the first of the ranks that hold the same
    /// part, or on all of them to compare their values.
    pub fn new(
        world: Arc<dyn Communicator>,
        mesh: Mesh,
        model: &Model,
        rules: impl Into<Groups>,
        mut initial: impl FnMut(&Parameter, &[Piece], SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
        options: Options,
    ) -> Result<Self, Error> {
        let groups = rules.into();
        let checked = check(&world, &mesh, model, groups, &options);
        // Errors in the options are reported only after the models are known to be the same.
        let text = match &checked {
            Ok(_) | Err(Error::Shard(_)) => describe(&mesh, model),
            Err(error) => objection(Some(error)),
        };
        let same = meshstep_shard::same_everywhere(&*world, &options, &text);
        let planned = match checked {
            Err(error) if !matches!(error, Error::Shard(_)) => return Err(error),
            planned => planned,
        };
        same.map_err(|error| along(error, &mesh))?;
        let same = meshstep_shard::same_everywhere(&*world, &options, &objection(planned.as_ref().err()));
        let (coordinate, plan) = planned?;
        same?;
        let families = || plan.pipeline().iter().flat_map(PipelineStage::families);
        let stage = options.stage;
        let sets = families().flat_map(|(sharing, part)| {
            let tensors = part.cuts().map(|_| sharing.tensors(&mesh, stage));
            let roles = [sharing.shards(), sharing.replicas].into_iter().chain(tensors);
            sharing.extra_reductions(&mesh).into_iter().chain(roles)
        });
        let comms = Communicators::new(Arc::clone(&world), mesh.clone(), sets)?;
        let place = data_place(&mesh, &coordinate);
        let (combine, stochastic) = (options.combine, options.precision.rounding == Rounding::Stochastic);
        let shared = |(sharing, part): (Sharing, &Part)| {
            let mut among = among(&comms, sharing, &coordinate, combine)?;
            if part.cuts().is_some() {
                among.tensors = Some(Arc::clone(comms.along(sharing.tensors(&mesh, stage))?));
            }
            if stochastic {
                among.parts = parts(model, part.layout(), &mesh, &coordinate)?;
            }
            Ok(ParamGroup { part: part.clone(), rules: plan.rules().within(part.layout()), among })
        };
        let parts: Vec<ParamGroup> = families().map(shared).collect::<Result<_, Error>>()?;
        let mut inner = meshstep_shard::Optimizer::empty(world, place, options)?;
        inner.add_parts(parts, |param, values| {
            let Some(parameter) = model.get(param.name()) else { return Ok(()) };
            let Parameter { name, shape, placement, .. } = parameter;
            let pieces = placement.pieces(name, shape, &mesh, &coordinate).unwrap_or_default();
            initial(parameter, &pieces, values)
        })?;
        model.tied().into_iter().try_for_each(|(alias, name)| inner.also_called(alias, name))?;
        inner.arranged(text);
        let site = Site { comms, coordinate, model: model.clone() };
        Ok(Optimizer { inner, site, across_cuts: None, plan })
    }

    /// Returns the plan of all ranks.
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

    /// Returns the communicators along the axes over which gradients are reduced.
    pub fn communicators(&self) -> &Communicators {
        &self.site.comms
    }
}

/// Returns the rank's data index. Ranks with the same index along dp and cp compute the same micro-batches.
fn data_place(mesh: &Mesh, coordinate: &Coordinate) -> DataRank {
    let data = mesh.resolve(Axis::Dp | Axis::Cp);
    let others = mesh.all().without(data);
    let index = mesh.seat(mesh.rank(coordinate), data) as u64;
    DataRank { index, ranks: mesh.degree(others) as u64, first: coordinate.is_first(others) }
}

fn among(
    comms: &Communicators,
    sharing: Sharing,
    coordinate: &Coordinate,
    combine: Combine,
) -> Result<RankRoles, Error> {
    let of_data = if combine == Combine::Mean { Reduction::Mean } else { Reduction::Sum };
    let of_parts = if sharing.gradient == Gradient::PartialMean { Reduction::Mean } else { Reduction::Sum };
    let extra_reductions = sharing.extra_reductions(comms.mesh()).into_iter();
    let extra_reductions = extra_reductions.map(|axes| {
        let by = if axes == sharing.partial { of_parts } else { of_data };
        Ok((Arc::clone(comms.along(axes)?), by))
    });
    Ok(RankRoles {
        shards: Arc::clone(comms.along(sharing.shards())?),
        extra_reductions: extra_reductions.collect::<Result<_, Error>>()?,
        replicas: Arc::clone(comms.along(sharing.replicas)?),
        counts_in_norm: coordinate.is_first(sharing.replicas.without(sharing.shards())),
        parts: HashMap::new(),
        tensors: None,
    })
}

/// Returns this rank's elements of each cut parameter in `layout`, so that its stochastic rounding uses the random bits of the whole
/// parameter.
fn parts(
    model: &Model,
    layout: &Layout,
    mesh: &Mesh,
    coordinate: &Coordinate,
) -> Result<HashMap<String, Parts>, Error> {
    let parameters = layout.params().iter().filter_map(|param| Some((model.get(param.name())?, param)));
    let cut = parameters.filter(|(whole, own)| whole.shape != own.shape());
    cut.map(|(Parameter { name, shape, placement, .. }, _)| {
        Ok((name.clone(), placement.parts(name, shape, mesh, coordinate)?))
    })
    .collect()
}

/// Returns this rank's coordinate and the plan of all ranks, or the first error.
fn check(
    world: &Arc<dyn Communicator>,
    mesh: &Mesh,
    model: &Model,
    groups: Groups,
    options: &Options,
) -> Result<(Coordinate, Plan), Error> {
    let mesh = mesh.clone().of(world.world_size())?;
    let coordinate = mesh.coordinate(world.rank())?;
    if mesh.degree(Axis::Pp) > 1 {
        return Err(Error::Stages { stages: mesh.degree(Axis::Pp) });
    }
    Ok((coordinate, Plan::new(&mesh, model, groups, options)?))
}

fn objection(error: Option<&Error>) -> String {
    error.map_or("this call = no objection\n".to_owned(), |error| format!("this call = {error}\n"))
}

/// Describes the mesh and the model; all ranks must have the same text.
fn describe(mesh: &Mesh, model: &Model) -> String {
    let mut text = format!("mesh = {mesh}\n");
    for (i, p) in model.parameters().iter().enumerate() {
        let Parameter { name, shape, dtype, placement, unit, .. } = p;
        let _ = writeln!(text, "parameter {i} = {name:?} {shape:?} {dtype} {placement:?} {unit:?}");
    }
    for (alias, name) in model.tied() {
        let _ = writeln!(text, "tied parameter {alias:?} = {name:?}");
    }
    text
}

/// Turns a difference of models into an error with the axes along which the ranks differ.
fn along(error: meshstep_shard::Error, mesh: &Mesh) -> Error {
    match error {
        // If the meshes differ, no coordinate is valid on all ranks.
        meshstep_shard::Error::Disagree { what, rank0, rank, theirs } if what != "mesh" => {
            let at = match mesh.coordinate(rank) {
                Ok(at) => at,
                Err(error) => return error.into(),
            };
            let axes = mesh.all().iter().filter(|&axis| at.along(axis) > 0).collect();
            Error::Models { what, rank0, rank, at, axes, theirs }
        }
        other => other.into(),
    }
}
