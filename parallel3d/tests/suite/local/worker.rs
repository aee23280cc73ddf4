//! One rank of a worker: its steps and its state.

use crate::common::{self, AT};
use meshstep_cases::{long, tried};
use meshstep_comm::{Communicator, loopback};
use meshstep_local::{LocalPlan, Placement, Weights};
use meshstep_optim::{AdamW, QhAdamW, Rounding};
use meshstep_parallel3d::{Axis, LocalOptimizer, Mesh, Model, Optimizer, replicas};
use meshstep_shard::{Combine, Groups, Master, Moments, Options, Outcome, Precision, Stage, Step, StepArgs};
use meshstep_tensor::{DType, Slice};
use std::collections::BTreeMap;
use std::sync::Arc;

pub const STEPS: u64 = 9;

/// Methods with their rules. Short runs try the first.
pub fn plans() -> Vec<(&'static str, LocalPlan, Groups)> {
    let adamw = || Groups::new(AdamW { weight_decay: 0.1, ..AdamW::default() });
    let delayed = LocalPlan::des_loc(3, 4, 4).with(|f| f.timing.delay = 2);
    vec![
        ("des-loc", LocalPlan::des_loc(2, 3, 4), adamw()),
        ("post-local sgd", LocalPlan::post_local_sgd(3, 2), adamw()),
        ("local adam", LocalPlan::local_adam(2), adamw()),
        ("local sgd", LocalPlan::local_sgd(3), adamw()),
        ("before", LocalPlan::des_loc(2, 3, 4).placed(Placement::Before), adamw()),
        ("mt-dao", LocalPlan::mt_dao(2, &[Some(3)], Some(4)), Groups::new(QhAdamW::default())),
        ("diloco", LocalPlan::diloco(3), adamw()),
        ("streaming diloco", LocalPlan::streaming_diloco(4, 3, 2, 0.5), adamw()),
        ("delayed", delayed, adamw()),
        ("tokens", LocalPlan::des_loc(2, 3, 4).with(|f| f.weights = Weights::Tokens), adamw()),
        ("small buckets", LocalPlan { bucket_len: 7, ..LocalPlan::local_adam(2) }, adamw()),
    ]
}

/// Parameter type, and the precision of the data beside it.
pub type Recipe = (DType, Precision);

/// Recipes that replicas may use; those without a sum in f32 are refused.
fn recipes() -> [Recipe; 4] {
    let plain = Precision::default();
    let drawn = Precision { moments: Moments::BF16, rounding: Rounding::Stochastic, seed: 7, ..plain };
    [
        (DType::F32, plain),
        (DType::F32, drawn),
        (DType::BF16, Precision { master: Master::F32, ..plain }),
        (DType::F16, Precision { master: Master::F32, ..drawn }),
    ]
}

/// Every plan under one recipe, different from the previous plan's; in long runs under all.
pub fn cases() -> Vec<(String, impl Fn(Stage) -> Job)> {
    let mut cases = Vec::new();
    let plans = plans().into_iter().enumerate().filter(|(i, _)| tried(*i, 1));
    for (i, (name, plan, rules)) in plans {
        let recipes = recipes().into_iter().enumerate();
        let own = i % recipes.len();
        for (_, recipe) in recipes.filter(|(r, _)| long() || *r == own) {
            let (plan, rules) = (plan.clone(), rules.clone());
            let job = move |stage| Job::new(stage, &plan, &rules).under(recipe);
            cases.push((format!("{name} in {recipe:?}"), job));
        }
    }
    cases
}

/// Settings shared by all ranks of a run.
#[derive(Clone)]
pub struct Job {
    pub model: Model,
    pub stage: Stage,
    pub plan: LocalPlan,
    pub rules: Groups,
    pub precision: Precision,
}

impl Job {
    pub fn new(stage: Stage, plan: &LocalPlan, rules: &Groups) -> Job {
        let (plan, rules, precision) = (plan.clone(), rules.clone(), Precision::default());
        Job { model: common::model(DType::F32), stage, plan, rules, precision }
    }

    /// Returns the job with another parameter type and precision.
    pub fn under(self, (dtype, precision): Recipe) -> Job {
        Job { model: common::model(dtype), precision, ..self }
    }

    /// Gradients accumulate in f32, in which their sums are exact.
    pub fn options(&self) -> Options {
        let Job { stage, precision, .. } = *self;
        let (combine, grads, bucket_len) = (Combine::Weighted, Some(DType::F32), Some(100));
        Options { stage, combine, grads, precision, bucket_len, ..Options::default() }
    }

    /// Creates the optimizer of one rank of a worker.
    pub fn optimizer(&self, comm: Arc<dyn Communicator>, mesh: &Mesh) -> Optimizer {
        Optimizer::new(comm, mesh.clone(), &self.model, self.rules.clone(), common::fill, self.options())
            .unwrap()
    }

    /// Creates one rank of a worker of `mesh`; also returns the worker's index.
    pub fn build(&self, world: Arc<dyn Communicator>, mesh: &Mesh) -> (LocalOptimizer, usize) {
        let (comm, own, workers) = replicas(world, mesh).unwrap();
        let worker = workers.across.rank();
        (LocalOptimizer::new(self.optimizer(comm, &own), workers, self.plan.clone()).unwrap(), worker)
    }

    /// Takes a step of worker `worker` with its own data, the same for any arrangement of its ranks. Returns the bytes sent within the
    /// worker.
    pub fn step(&self, local: &mut LocalOptimizer, worker: usize) -> u64 {
        let (step, mesh, at) = (local.local().steps(), local.mesh().clone(), local.coordinate().clone());
        let places = mesh.degree(Axis::Dp | Axis::Cp) as u64;
        let mb = local.micro_batch((8 << ((worker as u64 + step) % 3)) / places).unwrap();
        for parameter in self.model.parameters().iter().rev() {
            let grad = common::gradient(parameter, &mesh, &at, step as usize + 100 * worker);
            mb.grad(&parameter.name, &grad[..]).unwrap();
        }
        mb.finish().unwrap();
        let told = local.step(StepArgs { lr: 0.05 / (1.0 + step as f64), ..AT }).unwrap();
        let Outcome::Applied { traffic, .. } = told.outcome else { panic!("{told:?}") };
        assert_eq!(told.exchanged.failed, []);
        traffic.sent
    }

    /// Takes `steps` steps.
    pub fn steps(&self, local: &mut LocalOptimizer, worker: usize, steps: u64) -> u64 {
        (0..steps).map(|_| self.step(local, worker)).sum()
    }
}

/// State of a rank: index and bits of each element, by parameter and vector.
pub type Has = BTreeMap<(usize, String), Vec<(usize, u32)>>;

/// Returns this rank's state as elements of whole parameters.
pub fn has(local: &LocalOptimizer) -> Has {
    let mut all = Has::new();
    for (p, parameter) in local.model().parameters().iter().enumerate() {
        let held = common::held_at(parameter, local.mesh(), local.coordinate());
        let state = local.state(&parameter.name).unwrap();
        let mut add = |vector: &str, first: usize, values: Slice<'_>| {
            let values = common::read(values);
            let held = held[first..first + values.len()].iter().copied();
            if !values.is_empty() {
                all.insert((p, vector.to_owned()), held.zip(values.iter().map(|x| x.to_bits())).collect());
            }
        };
        match local.optimizer().options().stage {
            // With sharded parameters a rank holds only the elements it owns.
            Stage::Zero3 => add("param", state.range.start, state.values),
            _ => add("param", 0, local.param(&parameter.name).unwrap()),
        }
        let slots = state.slots.into_iter().chain(state.master.map(|master| ("master", master)));
        slots.for_each(|(name, slot)| add(name, state.range.start, slot));
    }
    all
}

/// Runs all ranks of a mesh for `steps` steps. Returns the worker and the state of each rank.
pub fn run(job: &Job, mesh: &str, steps: u64) -> Vec<(usize, Has)> {
    let mesh: Mesh = mesh.parse().unwrap();
    let ranks = loopback::spawn(mesh.world_size(), |world| {
        let (mut local, worker) = job.build(world, &mesh);
        job.steps(&mut local, worker, steps);
        (worker, has(&local))
    });
    ranks.unwrap()
}

/// Asserts that ranks together have exactly the state of whole workers.
pub fn assert_same(ranks: &[(usize, Has)], whole: &[(usize, Has)], what: &str) {
    for (worker, expected) in whole {
        let (mut expected, mut found) = (expected.clone(), Has::new());
        for (vector, elements) in ranks.iter().filter(|(own, _)| own == worker).flat_map(|(_, has)| has) {
            found.entry(vector.clone()).or_default().extend(elements);
        }
        for elements in found.values_mut() {
            elements.sort_unstable();
            elements.dedup();
        }
        expected.values_mut().for_each(|elements| elements.sort_unstable());
        assert!(!expected.is_empty() && found == expected, "{what}: worker {worker}");
    }
}
