//! The sharded step on a mesh: each parameter's gradient made whole along its own axes, all decided together.

use crate::{
    Axes, Axis, Communicators, Coordinate, Error, Family, Gradient, Mesh, Model, Parameter, Piece, Sharing,
};
use meshstep_comm::{Communicator, Reduction};
use meshstep_optim::Rounding;
use meshstep_shard::{Among, Combine, Groups, Options};
use meshstep_tensor::SliceMut;
use std::fmt::Write;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A model's parameters, gradients and optimizer state on one rank of a mesh. Steps are taken as with
/// [`meshstep_shard::Optimizer`], with the parts of parameters and gradients that this rank holds.
///
/// | gradients | along |
/// |---|---|
/// | become one, and divide the state (and, under `Stage::Zero3`, parameters) | `reduced_over` of the placement (`dp`, `cp`) but `dp_replicate` |
/// | are reduced once more | `dp_replicate`; `tp`, where each rank has a part of the gradient |
/// | count in the norm | once, wherever they are held |
///
/// Under [`Combine::Mean`] a gradient is the mean over the ranks it is reduced over, which must be the same for all
/// parameters; [`Combine::Weighted`], by tokens, is the one that does not depend on the mesh.
#[derive(Debug)]
pub struct Optimizer {
    inner: meshstep_shard::Optimizer,
    comms: Communicators,
    coordinate: Coordinate,
}

impl Optimizer {
    /// An optimizer for `model` on `mesh`, which `world` is arranged as. Collective: every rank passes the same.
    ///
    /// `initial` is asked for the first value of what this rank holds of each parameter, on the first rank of those that hold the
    /// same, or on all of them to compare.
    pub fn new(
        world: Arc<dyn Communicator>,
        mesh: Mesh,
        model: &Model,
        rules: impl Into<Groups>,
        mut initial: impl FnMut(&Parameter, &[Piece], SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
        options: Options,
    ) -> Result<Self, Error> {
        let groups = rules.into();
        let checked = check(&world, &mesh, model, &groups, &options);
        let text = match &checked {
            Ok(_) => describe(&mesh, model),
            Err(error) => format!("this call = {error}\n"),
        };
        let same = meshstep_shard::same_everywhere(&*world, &options, &text);
        let (coordinate, families) = checked?;
        same?;
        let sets = families.iter().flat_map(|family| roles(family.sharing));
        let comms = Communicators::new(Arc::clone(&world), mesh, sets)?;
        let weighs =
            coordinate.is_first(all(comms.mesh()).without(comms.mesh().resolve(Axis::Dp | Axis::Cp)));
        let combine = options.combine;
        let mut inner = meshstep_shard::Optimizer::empty(world, weighs, options)?;
        for Family { sharing, layout } in families {
            let among = among(&comms, sharing, &coordinate, combine)?;
            let rules = groups.within(&layout);
            inner.add_shared(layout, rules, among, |param, values| {
                let Some(parameter) = model.get(param.name()) else { return Ok(()) };
                let Parameter { name, shape, placement, .. } = parameter;
                let pieces = placement.pieces(name, shape, comms.mesh(), &coordinate).unwrap_or_default();
                initial(parameter, &pieces, values)
            })?;
        }
        Ok(Optimizer { inner, comms, coordinate })
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        self.comms.mesh()
    }

    /// Where this rank sits on it.
    pub fn coordinate(&self) -> &Coordinate {
        &self.coordinate
    }

    /// The communicators along the axes that gradients take.
    pub fn communicators(&self) -> &Communicators {
        &self.comms
    }
}

impl Deref for Optimizer {
    type Target = meshstep_shard::Optimizer;

    fn deref(&self) -> &Self::Target {
        &self.inner
    }
}

impl DerefMut for Optimizer {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.inner
    }
}

fn all(mesh: &Mesh) -> Axes {
    mesh.axes().iter().map(|&(axis, _)| axis).collect()
}

/// The axes along which gradients divide the state, are reduced again over replicas, and over parts; and along which values are
/// the same.
fn roles(sharing: Sharing) -> [Axes; 4] {
    let replicas =
        if sharing.reduced.contains(Axis::DpReplicate) { Axis::DpReplicate.into() } else { Axes::NONE };
    [sharing.reduced.without(replicas), replicas, sharing.partial, sharing.copies]
}

fn among(
    comms: &Communicators,
    sharing: Sharing,
    coordinate: &Coordinate,
    combine: Combine,
) -> Result<Among, Error> {
    let [shards, replicas, partial, copies] = roles(sharing);
    let of_data = if combine == Combine::Mean { Reduction::Mean } else { Reduction::Sum };
    let of_parts = if sharing.gradient == Gradient::PartialMean { Reduction::Mean } else { Reduction::Sum };
    let several = |(axes, _): &(Axes, Reduction)| comms.mesh().degree(*axes) > 1;
    let further = [(replicas, of_data), (partial, of_parts)].into_iter().filter(several);
    let further = further.map(|(axes, by)| Ok((Arc::clone(comms.along(axes)?), by)));
    Ok(Among {
        shards: Arc::clone(comms.along(shards)?),
        further: further.collect::<Result<_, Error>>()?,
        copies: Arc::clone(comms.along(copies)?),
        counts: coordinate.is_first(sharing.copies.without(shards)),
    })
}

/// Where this rank sits and what it holds, or what is wrong.
fn check(
    world: &Arc<dyn Communicator>,
    mesh: &Mesh,
    model: &Model,
    groups: &Groups,
    options: &Options,
) -> Result<(Coordinate, Vec<Family>), Error> {
    let mesh = mesh.clone().of(world.world_size())?;
    let coordinate = mesh.coordinate(world.rank())?;
    if mesh.degree(Axis::Pp) > 1 {
        return Err(Error::Stages { stages: mesh.degree(Axis::Pp) });
    }
    if let Some(name) = groups.names().find(|name| model.parameters().iter().all(|p| p.name != **name)) {
        return Err(Error::UnknownParam { name: name.to_owned() });
    }
    let families = model.families(&mesh, &coordinate)?;
    check_data(&mesh, &families, options.combine)?;
    let cut =
        |p: &&Parameter| p.placement.local_shape(&p.name, &p.shape, &mesh).is_ok_and(|own| own != p.shape);
    match model.parameters().iter().find(cut) {
        Some(p) if options.precision.rounding == Rounding::Stochastic => {
            Err(Error::StochasticCut { name: p.name.clone() })
        }
        _ => Ok((coordinate, families)),
    }
}

/// What all ranks must have alike.
fn describe(mesh: &Mesh, model: &Model) -> String {
    let mut text = format!("mesh = {mesh}\n");
    for (i, p) in model.parameters().iter().enumerate() {
        let Parameter { name, shape, dtype, placement, unit, .. } = p;
        let _ = writeln!(text, "parameter {i} = {name:?} {shape:?} {dtype} {placement:?} {unit:?}");
    }
    text
}

/// Means or weights over different ranks do not add up to one norm, nor to one gradient.
fn check_data(mesh: &Mesh, families: &[Family], combine: Combine) -> Result<(), Error> {
    let data = mesh.resolve(Axis::Dp | Axis::Cp);
    let ranks = |axes: Axes| axes.iter().map(|axis| mesh.degree(axis)).product();
    // Axes of one rank make no difference.
    let own = |axes: Axes| -> Axes { axes.iter().filter(|&axis| mesh.degree(axis) > 1).collect() };
    let other = families.iter().map(|family| family.sharing.reduced).find(|&axes| own(axes) != own(data));
    match other.filter(|_| combine != Combine::Sum) {
        Some(axes) => Err(Error::Unequal { axes, ranks: ranks(axes), data: ranks(data) }),
        None => Ok(()),
    }
}
