//! Which meshes, stages, recipes and buckets fit a cluster, with their bytes.

use super::{Plan, families};
use crate::{Axis, Error, Mesh, Model};
use meshstep_shard::{Groups, Master, Memory, Options, Precision, Stage, Wire};
use meshstep_tensor::DType;

/// The ranks there are, and what each has for parameters and the step. Activations are not counted: leave them room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// All ranks.
    pub ranks: usize,
    /// Bytes of each.
    pub memory: u64,
    /// Ranks with a fast connection: tensor parallelism stays among them, as it exchanges activations in every layer.
    pub ranks_per_node: usize,
}

/// The types of what is kept, beside the model's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Recipe {
    /// Masters, moments and rounding.
    pub precision: Precision,
    /// [`Options::grads`].
    pub grads: Option<DType>,
}

/// What is tried: every combination, on every mesh.
#[derive(Clone, Debug)]
pub struct Space {
    /// What is divided among ranks.
    pub stages: Vec<Stage>,
    /// Types; those that contradict the model or the rule are passed over.
    pub recipes: Vec<Recipe>,
    /// [`Options::bucket_len`].
    pub bucket_lens: Vec<Option<usize>>,
    /// Everything else.
    pub options: Options,
}

impl Default for Space {
    /// Stages 0 to 3; f32 masters, remainders, or neither; gradients of the parameters' types; buckets of Megatron-Core's length and
    /// an eighth of it.
    fn default() -> Self {
        let recipe = |master| Recipe { precision: Precision { master, ..Precision::default() }, grads: None };
        Space {
            stages: vec![Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3],
            recipes: [Master::None, Master::F32, Master::Remainder].map(recipe).to_vec(),
            bucket_lens: vec![None, Some(5_000_000)],
            options: Options::default(),
        }
    }
}

/// A plan that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The ranks' arrangement.
    pub mesh: Mesh,
    /// What is divided among them.
    pub stage: Stage,
    /// The types.
    pub recipe: Recipe,
    /// Elements after which a bucket is closed.
    pub bucket_len: Option<usize>,
    /// What the rank holds that holds most.
    pub memory: Memory,
    /// What the rank sends in a step that sends most.
    pub wire: Wire,
}

impl Found {
    /// Options to build it with.
    pub fn options(&self, space: &Space) -> Options {
        let Found { stage, recipe: Recipe { precision, grads }, bucket_len, .. } = *self;
        Options { stage, precision, grads, bucket_len, ..space.options.clone() }
    }
}

impl Plan {
    /// Every mesh of `cluster` with every combination of `space` that fits its memory, that whose ranks send least in a step first, by
    /// eight binary digits, which pads do not reach; among equals that which holds least, then that with fewer ranks along `tp`, then along `cp`, then in the order of `space`.
    /// What is sent for activations is not counted. The model's pipeline stages are taken as they are. What contradicts itself is
    /// passed over, unless everything does: then it is an error.
    pub fn search(
        model: &Model,
        cluster: &Cluster,
        rules: impl Into<Groups>,
        space: &Space,
    ) -> Result<Vec<Found>, Error> {
        let rules = rules.into();
        let (mut found, mut possible, mut refused) = (Vec::new(), false, None);
        for mesh in meshes(model, cluster)? {
            let families = match families(&mesh, model) {
                Ok(families) => families,
                Err(error) => {
                    refused.get_or_insert(error);
                    continue;
                }
            };
            for candidate in space.on(&mesh) {
                let options = candidate.options(space);
                match Plan::placed(&mesh, model, families.clone(), &rules, &options) {
                    Ok(plan) => {
                        let (memory, wire) = plan.most();
                        let fits = memory.total() <= cluster.memory;
                        found.extend(fits.then_some(Found { memory, wire, ..candidate }));
                        possible = true;
                    }
                    Err(error) => {
                        refused.get_or_insert(error);
                    }
                }
            }
        }
        found.sort_by_key(|found: &Found| (rough(found.wire.total()), found.memory.total()));
        refused.filter(|_| !possible).map_or(Ok(found), Err)
    }
}

impl Space {
    /// Every combination, without its bytes.
    fn on(&self, mesh: &Mesh) -> impl Iterator<Item = Found> {
        let (memory, wire) = (Memory::default(), Wire::default());
        let found = move |stage, recipe, bucket_len| Found {
            mesh: mesh.clone(),
            stage,
            recipe,
            bucket_len,
            memory,
            wire,
        };
        let lens = move |stage, recipe| self.bucket_lens.iter().map(move |&len| found(stage, recipe, len));
        let recipes = move |stage| self.recipes.iter().flat_map(move |&recipe| lens(stage, recipe));
        self.stages.iter().flat_map(move |&stage| recipes(stage))
    }
}

/// Every arrangement of the ranks, fewer along `tp` first, then fewer along `cp`.
fn meshes(model: &Model, cluster: &Cluster) -> Result<Vec<Mesh>, Error> {
    let Cluster { ranks, ranks_per_node, .. } = *cluster;
    let stages = model.parameters().iter().map(|p| p.stage.saturating_add(1)).max().unwrap_or(1);
    if ranks == 0 || !ranks.is_multiple_of(stages) {
        return Err(Error::NoStages { ranks, stages });
    }
    let mut meshes = Vec::new();
    for tp in divisors(ranks / stages).into_iter().filter(|&tp| tp <= ranks_per_node.max(1)) {
        for cp in divisors(ranks / stages / tp) {
            let dp = ranks / stages / tp / cp;
            let pp = (stages > 1).then_some((Axis::Pp, stages));
            let axes = [(Axis::Dp, dp), (Axis::Cp, cp), (Axis::Tp, tp)];
            meshes.push(Mesh::new(pp.into_iter().chain(axes))?);
        }
    }
    Ok(meshes)
}

/// The first eight binary digits: what differs by pads alone is alike.
fn rough(bytes: u64) -> (u32, u64) {
    let dropped = (u64::BITS - bytes.leading_zeros()).saturating_sub(8);
    (dropped, bytes >> dropped)
}

/// Ascending.
fn divisors(n: usize) -> Vec<usize> {
    let small: Vec<usize> = (1..=n.isqrt()).filter(|&i| n.is_multiple_of(i)).collect();
    let large = small.iter().rev().map(|&i| n / i).filter(|&i| i > n.isqrt());
    small.iter().copied().chain(large).collect()
}
