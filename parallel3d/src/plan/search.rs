//! Search for the meshes, stages, recipes and bucket lengths that fit a cluster, with their bytes.

use super::{Plan, families};
use crate::{Axis, Error, Mesh, Model};
use meshstep_shard::{Groups, Master, Memory, Options, Precision, Stage, Wire};
use meshstep_tensor::DType;

/// Number of ranks and the memory of each for parameters and the step. The plan does not count activations: leave room for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Total number of ranks.
    pub ranks: usize,
    /// Bytes available on each rank.
    pub memory: u64,
    /// Ranks with a fast connection. The search keeps tensor parallelism within them, because it exchanges activations in every layer.
    pub ranks_per_node: usize,
}

/// Data types besides the model's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Recipe {
    /// Masters, moments and rounding.
    pub precision: Precision,
    /// [`Options::grads`].
    pub grads: Option<DType>,
}

/// Search space: every combination is tried on every mesh.
#[derive(Clone, Debug)]
pub struct Space {
    /// ZeRO stages to try.
    pub stages: Vec<Stage>,
    /// Recipes to try. The search skips those that contradict the model or the rule.
    pub recipes: Vec<Recipe>,
    /// Values of [`Options::bucket_len`] to try.
    pub bucket_lens: Vec<Option<usize>>,
    /// All other options.
    pub options: Options,
}

impl Default for Space {
    /// Stages 0 to 3; f32 masters, remainders, or neither; gradients in the parameters' types; buckets of Megatron-Core's length and an
    /// eighth of that.
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

/// Search result: a configuration that fits.
///
/// ```
/// use meshstep_optim::AdamW;
/// use meshstep_parallel3d::models::Llama3;
/// use meshstep_parallel3d::{Cluster, Found, Plan, Recipe, Space};
/// use meshstep_tensor::DType::BF16;
///
/// let model = Llama3::B8.model(BF16, 1).build()?;
/// let cluster = Cluster { ranks: 16, memory: 40_000_000_000, ranks_per_node: 8 };
/// let space = Space::default();
/// let found = Plan::search(&model, &cluster, AdamW::default(), &space)?;
/// let Found { mesh, memory, recipe: Recipe { grads, .. }, .. } = &found[0]; // the least traffic
/// assert_eq!((mesh.world_size(), *grads), (16, None));
/// assert!(memory.total() <= cluster.memory && found[0].options(&space).stage == found[0].stage);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Arrangement of the ranks.
    pub mesh: Mesh,
    /// ZeRO stage.
    pub stage: Stage,
    /// Data types.
    pub recipe: Recipe,
    /// Elements after which a bucket is closed.
    pub bucket_len: Option<usize>,
    /// Memory of the rank that holds most.
    pub memory: Memory,
    /// Bytes sent in a step by the rank that sends most.
    pub wire: Wire,
}

impl Found {
    /// Returns the options for building this configuration.
    pub fn options(&self, space: &Space) -> Options {
        let Found { stage, recipe: Recipe { precision, grads }, bucket_len, .. } = *self;
        Options { stage, precision, grads, bucket_len, ..space.options.clone() }
    }
}

impl Plan {
    /// Returns every mesh of `cluster` with every combination of `space` that fits its memory, least traffic in a step first.
    /// Traffic is compared in its first eight binary digits, so that padding makes no difference. Ties go to lower memory, then to fewer
    /// ranks along `tp`, then along `cp`, then to the order of `space`. The traffic of activations is not counted, and the model's
    /// pipeline stages are fixed. Configurations that contradict themselves are skipped; if all do, the first error is returned.
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
    /// Iterates over every combination, with zero bytes.
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

/// Returns every arrangement of the ranks: fewer ranks along `tp` first, then fewer along `cp`.
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

/// Returns the first eight binary digits: byte counts that differ only by padding compare as equal.
fn rough(bytes: u64) -> (u32, u64) {
    let dropped = (u64::BITS - bytes.leading_zeros()).saturating_sub(8);
    (dropped, bytes >> dropped)
}

/// Returns the divisors of `n`, ascending.
fn divisors(n: usize) -> Vec<usize> {
    let small: Vec<usize> = (1..=n.isqrt()).filter(|&i| n.is_multiple_of(i)).collect();
    let large = small.iter().rev().map(|&i| n / i).filter(|&i| i > n.isqrt());
    small.iter().copied().chain(large).collect()
}
