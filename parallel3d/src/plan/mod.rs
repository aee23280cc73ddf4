//! What every rank of a mesh holds, owns and sends, before there is a rank: arithmetic, no memory, no communicator.

mod json;
mod rank;
mod search;
mod table;
mod totals;

pub use rank::{Holds, Purpose, RankPlan, Sends};
pub use search::{Cluster, Found, Recipe, Space};
pub use totals::{Kind, Totals};

use crate::{Axes, Axis, Error, Family, Mesh, Model, Sharing};
use meshstep_shard::{Combine, Groups, Options, Part, Seat, Seats, Sizes, Stage, UnitError};

/// A model's parameters, gradients and optimizer state on a mesh: who stores what, who updates what of it, who sends how much to
/// whom. An [`Optimizer`](crate::Optimizer) allocates what its plan says.
///
/// ```
/// use meshstep_optim::AdamW;
/// use meshstep_parallel3d::{Axis, Mesh, Plan, models::Llama3};
/// use meshstep_shard::{Master, Options, Precision, Stage};
/// use meshstep_tensor::DType::BF16;
///
/// let model = Llama3::B405.model(BF16, 16).build()?;
/// let mesh: Mesh = "pp=16,dp=128,tp=8".parse()?;
/// let precision = Precision { master: Master::F32, ..Precision::default() };
/// let plan = Plan::new(&mesh, &model, AdamW::default(), &Options { stage: Stage::Zero1, precision, ..Options::default() })?;
/// println!("{plan}");
/// let totals = plan.totals();
/// assert_eq!(totals.ranks, 16_384);
/// // Whoever holds most, in detail.
/// let rank = plan.rank(totals.most_held.0)?;
/// assert_eq!(rank.memory(), totals.most_held.1);
/// assert_eq!(rank.holds().count(), 73); // of 1,137 tensors: those of its pipeline stage
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    mesh: Mesh,
    model: Model,
    rules: Groups,
    stage: Stage,
    pipeline: Vec<PipelineStage>,
}

/// What the ranks of one pipeline stage hold: the same for all of them, but for their places in groups.
#[derive(Clone, Debug)]
pub struct PipelineStage {
    sharings: Vec<Sharing>,
    plan: meshstep_shard::Plan,
}

impl Plan {
    /// The plan for `model` on `mesh`, updated by `rules`, or what in them contradicts it.
    pub fn new(
        mesh: &Mesh,
        model: &Model,
        rules: impl Into<Groups>,
        options: &Options,
    ) -> Result<Plan, Error> {
        Plan::placed(mesh, model, families(mesh, model)?, &rules.into(), options)
    }

    /// The same for what the ranks of each pipeline stage hold.
    fn placed(
        mesh: &Mesh,
        model: &Model,
        families: Vec<Vec<Family>>,
        rules: &Groups,
        options: &Options,
    ) -> Result<Plan, Error> {
        let rules = &rules.renamed(|name| model.get(name).map(|p| p.name.as_str()));
        if let Some(name) = rules.names().find(|name| model.get(name).is_none()) {
            return Err(Error::UnknownParam { name: name.to_owned() });
        }
        if let Some(name) = model.gathered_twice().filter(|_| options.stage == Stage::Zero3) {
            let name = name.to_owned();
            return Err(meshstep_shard::Error::from(UnitError::TwoOfOneName { name }).into());
        }
        let of = |families| PipelineStage::new(mesh, model, families, rules, options);
        let pipeline: Vec<PipelineStage> = families.into_iter().map(of).collect::<Result<_, Error>>()?;
        let dtypes = pipeline.iter().flat_map(|stage| stage.plan.buckets()).map(|bucket| bucket.dtype);
        options.precision.check_used(dtypes)?;
        let (mesh, model, rules) = (mesh.clone(), model.clone(), rules.clone());
        Ok(Plan { mesh, model, rules, stage: options.stage, pipeline })
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// How parameters are updated.
    pub fn rules(&self) -> &Groups {
        &self.rules
    }

    /// What is divided among ranks.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// What the ranks of each pipeline stage hold.
    pub fn pipeline(&self) -> &[PipelineStage] {
        &self.pipeline
    }

    /// One rank in detail.
    pub fn rank(&self, rank: usize) -> Result<RankPlan<'_>, Error> {
        RankPlan::new(self, rank)
    }

    /// The pipeline stage of a rank of the mesh, and its seats there.
    fn seats(&self, rank: usize) -> (usize, Seats) {
        let stage = self.mesh.seat(rank, Axis::Pp.into());
        (stage, self.pipeline[stage].seats(&self.mesh, rank))
    }
}

impl PipelineStage {
    /// Who shares what, by parts.
    pub fn families(&self) -> impl Iterator<Item = (Sharing, &Part)> {
        self.sharings.iter().copied().zip(self.plan.parts())
    }

    /// Where everything goes.
    pub fn plan(&self) -> &meshstep_shard::Plan {
        &self.plan
    }

    fn seats(&self, mesh: &Mesh, rank: usize) -> Seats {
        let seat = |sharing: &Sharing| Seat {
            shard: mesh.seat(rank, sharing.shards()),
            extra_reductions: sharing
                .extra_reductions(mesh)
                .into_iter()
                .map(|axes| mesh.seat(rank, axes))
                .collect(),
        };
        Seats { world: mesh.seat(rank, deciding(mesh)), parts: self.sharings.iter().map(seat).collect() }
    }
}

/// Along which axes ranks decide a step together: all but `pp`.
pub(crate) fn deciding(mesh: &Mesh) -> Axes {
    mesh.all().without(Axis::Pp)
}

/// What the ranks of each pipeline stage hold, by the ways they share it.
fn families(mesh: &Mesh, model: &Model) -> Result<Vec<Vec<Family>>, Error> {
    let first = mesh.coordinate(0)?;
    let of = |stage| Ok(model.families(mesh, &first.clone().with(Axis::Pp, stage))?);
    (0..mesh.degree(Axis::Pp)).map(of).collect()
}

impl PipelineStage {
    fn new(
        mesh: &Mesh,
        model: &Model,
        families: Vec<Family>,
        rules: &Groups,
        options: &Options,
    ) -> Result<Self, Error> {
        check_data(mesh, &families, options.combine)?;
        let ranks = mesh.degree(deciding(mesh));
        let (mut sharings, mut parts): (Vec<Sharing>, Vec<Part>) = (Vec::new(), Vec::new());
        for Family { sharing, layout, positions } in families {
            let shards = sharing.shards();
            let along = |other: &Sharing| mesh.several(other.shards()) == mesh.several(shards);
            let earlier: Vec<&Part> =
                sharings.iter().zip(&parts).filter(|(other, _)| along(other)).map(|(_, part)| part).collect();
            let extra_reductions: Vec<usize> =
                sharing.extra_reductions(mesh).into_iter().map(|axes| mesh.degree(axes)).collect();
            let sizes = Sizes { shards: mesh.degree(shards), extra_reductions };
            let alike = sizes == Sizes::all(ranks) && mesh.degree(sharing.replicas) == ranks;
            rules.within(&layout).check(&layout, alike, options)?;
            let whole = |&i: &usize| {
                model.parameters()[i].shape.iter().fold(1, |len: usize, &n| len.saturating_mul(n))
            };
            let wholes = positions.iter().map(whole).collect();
            let part = Part::new(layout, sizes, earlier, options)?.at(positions)?.cut_from(wholes)?;
            sharings.push(sharing);
            parts.push(part);
        }
        let plan = meshstep_shard::Plan::of(ranks, parts, options)?;
        Ok(PipelineStage { sharings, plan })
    }
}

/// Means or weights over different ranks do not add up to one norm, nor to one gradient.
fn check_data(mesh: &Mesh, families: &[Family], combine: Combine) -> Result<(), Error> {
    let data = mesh.resolve(Axis::Dp | Axis::Cp);
    let ranks = |axes: Axes| mesh.degree(axes);
    let differs = |&axes: &Axes| mesh.several(axes) != mesh.several(data);
    let other = families.iter().map(|family| family.sharing.reduced).find(differs);
    match other.filter(|_| combine != Combine::Sum) {
        Some(axes) => Err(Error::Unequal { axes, ranks: ranks(axes), data: ranks(data) }),
        None => Ok(()),
    }
}
