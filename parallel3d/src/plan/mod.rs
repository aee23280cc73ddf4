//! Plan of a mesh before any rank starts: storage, ownership and traffic of every rank. Arithmetic only: no memory, no communicator.

mod json;
mod rank;
mod search;
mod table;
mod totals;

pub use rank::{Holds, Purpose, RankPlan, Sends};
pub use search::{Cluster, Found, Recipe, Space};
pub use totals::{TotalKind, Totals};

use crate::{Axes, Axis, Coordinate, Error, Family, Mesh, MeshError, Model, Parameter, Placement, Sharing};
use meshstep_shard::{
    Combine, CutRank, Groups, Options, Part, Parts, RulePart, Seat, Seats, Sizes, Stage, TensorCuts,
    UnitError,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Plan of a model's parameters, gradients and optimizer state on a mesh: for every rank the stored and updated parts and the bytes sent,
/// by group. An [`Optimizer`](crate::Optimizer) allocates exactly its plan.
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
/// // The rank with the highest memory use, in detail.
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

/// Plan of one pipeline stage. All its ranks share it and differ only in their positions within groups.
#[derive(Clone, Debug)]
pub struct PipelineStage {
    sharings: Vec<Sharing>,
    plan: meshstep_shard::Plan,
}

impl Plan {
    /// Returns the plan for `model` on `mesh` with update rules `rules` (one rule, or [`Groups`]), or an error if they contradict each
    /// other.
    pub fn new(
        mesh: &Mesh,
        model: &Model,
        rules: impl Into<Groups>,
        options: &Options,
    ) -> Result<Plan, Error> {
        Plan::placed(mesh, model, families(mesh, model)?, &rules.into(), options)
    }

    /// Builds the plan from the families of each pipeline stage.
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

    /// Returns the mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the update rules.
    pub fn rules(&self) -> &Groups {
        &self.rules
    }

    /// Returns the ZeRO stage: the data divided among ranks.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Returns the plans of the pipeline stages, in order.
    pub fn pipeline(&self) -> &[PipelineStage] {
        &self.pipeline
    }

    /// Returns the plan of one rank in detail.
    pub fn rank(&self, rank: usize) -> Result<RankPlan<'_>, Error> {
        RankPlan::new(self, rank)
    }

    /// Returns the pipeline stage of a rank of the mesh, and its seats in the groups of that stage.
    fn seats(&self, rank: usize) -> (usize, Seats) {
        let stage = self.mesh.seat(rank, Axis::Pp.into());
        (stage, self.pipeline[stage].seats(&self.mesh, rank))
    }
}

impl PipelineStage {
    /// Iterates over the parts of the stage, each with the sharing of its parameters. Parameters of one sharing with different rules are
    /// several parts.
    pub fn families(&self) -> impl Iterator<Item = (Sharing, &Part)> {
        self.sharings.iter().copied().zip(self.plan.parts())
    }

    /// Returns the bucket plan of the stage.
    pub fn plan(&self) -> &meshstep_shard::Plan {
        &self.plan
    }

    fn seats(&self, mesh: &Mesh, rank: usize) -> Seats {
        let seat = |(sharing, part): (Sharing, &Part)| Seat {
            shard: mesh.seat(rank, sharing.shards()),
            tensors: part.cuts().map_or(0, |_| mesh.seat(rank, sharing.tensors(mesh, part.stage()))),
            extra_reductions: sharing
                .extra_reductions(mesh)
                .into_iter()
                .map(|axes| mesh.seat(rank, axes))
                .collect(),
        };
        Seats { world: mesh.seat(rank, deciding(mesh)), parts: self.families().map(seat).collect() }
    }
}

/// Returns the axes along which ranks decide a step together: all but `pp`.
pub(crate) fn deciding(mesh: &Mesh) -> Axes {
    mesh.all().without(Axis::Pp)
}

/// Returns the families of each pipeline stage: its parameters grouped by sharing.
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
            let extra_reductions: Vec<usize> =
                sharing.extra_reductions(mesh).into_iter().map(|axes| mesh.degree(axes)).collect();
            let sizes = Sizes { shards: mesh.degree(sharing.shards()), extra_reductions };
            let alike = sizes == Sizes::all(ranks) && mesh.degree(sharing.replicas) == ranks;
            let along = |other: &Sharing| mesh.several(other.shards()) == mesh.several(sharing.shards());
            let groups = rules.within(&layout);
            for RulePart { layout, rules, indices } in RulePart::split(layout, groups)? {
                let earlier = sharings.iter().zip(&parts).filter(|(other, _)| along(other));
                let earlier: Vec<&Part> = earlier.map(|(_, part)| part).collect();
                let positions: Vec<usize> = indices.into_iter().map(|i| positions[i]).collect();
                let mut part = Part::new(layout, sizes.clone(), earlier, options)?;
                if rules.see_matrices() && mesh.degree(sharing.cut(mesh)) > 1 {
                    part = part.with_cuts(tensor_cuts(mesh, model, (sharing, &positions), options.stage)?)?;
                }
                let wholes = positions.iter().map(|&i| whole_len(model, i)).collect();
                let part = part.for_rules(&rules, options)?.at(positions)?.cut_from(wholes)?;
                rules.check(&part, alike, options)?;
                sharings.push(sharing);
                parts.push(part);
            }
        }
        let plan = meshstep_shard::Plan::of(ranks, parts, options)?;
        Ok(PipelineStage { sharings, plan })
    }
}

/// Returns the whole tensors of these parameters, which the mesh cuts, and the ranks of the first group that holds them together.
fn tensor_cuts(
    mesh: &Mesh,
    model: &Model,
    (sharing, positions): (Sharing, &[usize]),
    stage: Stage,
) -> Result<TensorCuts, Error> {
    let (cut, shards) = (sharing.cut(mesh), sharing.shards());
    let divided = stage != Stage::Replicated;
    let rank = |rank: usize| CutRank {
        shard: if divided { mesh.seat(rank, shards) } else { 0 },
        cut: mesh.seat(rank, cut),
    };
    let parameters: Vec<&Parameter> = positions.iter().map(|&i| &model.parameters()[i]).collect();
    let first = mesh.group(0, cut)?;
    let at: Vec<Coordinate> =
        first.ranks().map(|rank| mesh.coordinate(rank)).collect::<Result<_, MeshError>>()?;
    let mut cuts = vec![Vec::with_capacity(parameters.len()); at.len()];
    // Layers repeat.
    let mut known: HashMap<(&[usize], &Placement), Vec<Parts>> = HashMap::new();
    for Parameter { name, shape, placement, .. } in &parameters {
        let parts = match known.entry((shape, placement)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let parts = at.iter().map(|at| placement.parts(name, shape, mesh, at));
                new.insert(parts.collect::<Result<_, MeshError>>()?)
            }
        };
        cuts.iter_mut().zip(parts).for_each(|(cut, parts)| cut.push(parts.clone()));
    }
    Ok(TensorCuts {
        shapes: parameters.iter().map(|p| p.shape.clone()).collect(),
        cuts,
        ranks: mesh.group(0, sharing.tensors(mesh, stage))?.ranks().map(rank).collect(),
    })
}

/// Returns the number of elements of parameter `index` of the model.
fn whole_len(model: &Model, index: usize) -> usize {
    model.parameters()[index].shape.iter().fold(1, |len, &n| len.saturating_mul(n))
}

/// Refuses means and weights if families reduce over different ranks: neither the norm nor the gradient would be consistent.
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
