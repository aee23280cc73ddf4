//! Muon beside an element-wise rule at every stage; at stages 1 and 2 no rank's chunk cuts a matrix.

use crate::common::{hash, params};
use meshstep_comm::loopback::spawn;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Muon, Rule};
use meshstep_shard::{
    DataRank, NonFinite, Optimizer, Options, Outcome, ParamGroup, Part, Plan, RankRoles, Sizes, Stage,
    StepArgs,
};
use meshstep_tensor::{Category, DType, Layout, LayoutBuilder, Meter, Param, Slice, SliceMut};
use std::sync::Arc;

const MATRICES: [[usize; 2]; 7] = [[6, 10], [10, 6], [1, 9], [8, 8], [2, 0], [30, 20], [5, 5]];

pub fn matrices() -> Layout {
    let add =
        |b: LayoutBuilder, (i, shape): (usize, &[usize; 2])| b.param(format!("w{i}"), shape, DType::F32);
    MATRICES.iter().enumerate().fold(Layout::builder(), add).build().unwrap()
}

/// Parameters of an element-wise rule, which chunks cut.
fn others() -> Layout {
    Layout::builder()
        .param("embedding", &[50, 7], DType::F32)
        .param("bias", &[13], DType::F32)
        .build()
        .unwrap()
}

/// Multiples of 1/64 below 4, whose sums over a few ranks and micro-batches are exact.
pub fn values(param: &Param, key: u64) -> Vec<f32> {
    let key = param.name().bytes().fold(key, |key, byte| hash(&[key, byte.into()]));
    (0..param.len()).map(|j| (hash(&[key, j as u64]) % 512) as f32 / 64.0 - 4.0).collect()
}

pub fn first(param: &Param, mut into: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    into.copy_from(Slice::from(&values(param, 1)[..]))
}

/// Settings of a run.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub ranks: usize,
    pub stage: Stage,
    pub micro_batches: u64,
    pub bucket_len: Option<usize>,
    /// Reduces in the step, which is taken with any gradients.
    pub in_step: bool,
}

impl Run {
    /// Makes the settings of stage 0 on so many ranks.
    pub fn on(ranks: usize) -> Self {
        Run { ranks, stage: Stage::Replicated, micro_batches: 1, bucket_len: None, in_step: false }
    }

    fn options(&self) -> Options {
        Options {
            stage: self.stage,
            bucket_len: self.bucket_len,
            reduce_in_step: self.in_step,
            non_finite: if self.in_step { NonFinite::Propagate } else { NonFinite::Skip },
            meter: Meter::new(),
            ..Options::default()
        }
    }

    pub fn build(&self, comm: Arc<dyn Communicator>) -> Optimizer {
        let mut opt = Optimizer::new(comm, others(), AdamW::default(), first, self.options()).unwrap();
        opt.add_param_group(matrices(), Muon::default(), first).unwrap();
        opt
    }

    /// Takes three steps, clipped together unless they reduce in the step; returns the parameters.
    pub fn on_rank(&self, comm: Arc<dyn Communicator>) -> Vec<Vec<u8>> {
        let mut opt = self.build(comm);
        let all: Vec<Param> = opt.params().cloned().collect();
        for t in 1..=3 {
            for micro in 0..self.micro_batches {
                let last = micro + 1 == self.micro_batches;
                let batch = if last { opt.micro_batch(1) } else { opt.accumulate(1) }.unwrap();
                all.iter().for_each(|p| batch.grad(p.name(), &values(p, t)[..]).unwrap());
                batch.finish().unwrap();
            }
            let max_norm = (!self.in_step).then_some(3.0);
            let at = StepArgs { lr: 0.1, max_norm, ..StepArgs::default() };
            let outcome = opt.step(at).unwrap().outcome().unwrap();
            assert!(matches!(outcome, Outcome::Applied { .. }), "{outcome:?}");
        }
        params(&opt)
    }

    /// Returns what all ranks end with.
    fn end(&self) -> Vec<Vec<u8>> {
        let ends = spawn(self.ranks, |comm| self.on_rank(comm)).unwrap();
        assert!(ends.iter().all(|end| *end == ends[0]), "{self:?}");
        ends.into_iter().next().unwrap()
    }
}

#[test]
fn muon_beside_adamw_has_the_same_bits_at_stages_0_to_3_on_any_ranks() {
    for in_step in [false, true] {
        // A step that gradients cannot stop is not clipped here.
        let expected = Run { in_step, ..Run::on(1) }.end();
        for ranks in [1, 2, 3, 4, 8] {
            for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3] {
                for (micro_batches, bucket_len) in [(1, None), (4, Some(700)), (1, Some(100))] {
                    let held = matches!(stage, Stage::Replicated | Stage::Zero1) && micro_batches == 1;
                    if in_step && !held {
                        continue;
                    }
                    let run = Run { ranks, stage, micro_batches, bucket_len, in_step };
                    assert!(run.end() == expected, "{run:?}");
                }
            }
        }
    }
}

#[test]
fn memory_and_traffic_are_the_plans_to_the_byte() {
    for stage in [Stage::Zero1, Stage::Zero2] {
        for ranks in [2, 3, 8] {
            let run = Run { ranks, stage, micro_batches: 1, bucket_len: Some(700), in_step: false };
            spawn(ranks, |comm| {
                let rank = comm.rank();
                let options = run.options();
                let part = Part::new(matrices(), Sizes::all(ranks), [], &options).unwrap();
                let muon = Muon::default();
                let part = part.for_rules(&muon.clone().into(), &options).unwrap();
                let plan = Plan::of(ranks, vec![part], &options).unwrap();
                let mut opt = Optimizer::new(comm, matrices(), muon.clone(), first, options.clone()).unwrap();
                for t in 1..=2 {
                    let batch = opt.micro_batch(1).unwrap();
                    // The order of a backward pass, which the plan's memory is for.
                    let all: Vec<Param> = matrices().params().to_vec();
                    all.iter().rev().for_each(|p| batch.grad(p.name(), &values(p, t)[..]).unwrap());
                    batch.finish().unwrap();
                    let outcome = opt.step(StepArgs::default()).unwrap().outcome().unwrap();
                    let Outcome::Applied { traffic, .. } = outcome else { panic!("{outcome:?}") };
                    assert_eq!(traffic.sent, plan.wire(rank, &muon).total(), "{run:?}, rank {rank}");
                }
                let memory = plan.memory(rank, &muon);
                assert_eq!(options.meter.live(Category::State), memory.state, "{run:?}, rank {rank}");
                assert_eq!(options.meter.peak_total(), memory.total(), "{run:?}, rank {rank}");
            })
            .unwrap();
        }
    }
}

/// Matrices of a transformer's layers, in f32.
fn transformer(layers: usize, shapes: &[[usize; 2]]) -> Layout {
    let all = (0..layers).flat_map(|_| shapes).enumerate();
    all.fold(Layout::builder(), |b, (i, shape)| b.param(format!("w{i}"), shape, DType::F32)).build().unwrap()
}

pub fn models() -> [(&'static str, Layout); 2] {
    let gpt2_xl = transformer(48, &[[1600, 4800], [1600, 1600], [1600, 6400], [6400, 1600]]);
    let (kv, mlp) = ([1024, 4096], [14_336, 4096]);
    let llama_8b = transformer(32, &[[4096, 4096], kv, kv, [4096, 4096], mlp, mlp, [4096, 14_336]]);
    [("GPT-2 XL", gpt2_xl), ("Llama 8B", llama_8b)]
}

/// Multiplications of an iteration of Newton-Schulz.
fn cost(shape: &[usize]) -> usize {
    let (short, long) = (shape[0].min(shape[1]), shape[0].max(shape[1]));
    short * short * (2 * long + short)
}

/// Returns the largest load over an even share, and the same over the least that whole matrices allow: some rank has at least
/// `ceil(k / ranks)` of the `k` largest.
fn balance(loads: &[usize], sizes: &[usize]) -> (f64, f64) {
    let (ranks, largest) = (loads.len(), *sizes.iter().max().unwrap());
    let most = *loads.iter().max().unwrap() as f64;
    let even = sizes.iter().sum::<usize>() as f64 / ranks as f64;
    let several = sizes.iter().filter(|size| **size == largest).count().div_ceil(ranks) * largest;
    (most / even, most / even.max(several as f64))
}

#[test]
fn owners_of_transformers_matrices_are_balanced() {
    for (name, layout) in models() {
        let costs: Vec<usize> = layout.params().iter().map(|p| cost(p.shape())).collect();
        let lens: Vec<usize> = layout.params().iter().map(Param::len).collect();
        for ranks in 2..=64 {
            let options = Options { stage: Stage::Zero1, ..Options::default() };
            let part =
                Part::new(layout.clone(), Sizes::all(ranks), [], &options).unwrap().uncut(&options).unwrap();
            let mut owned = vec![0; ranks];
            for placed in part.buckets().iter().flat_map(|bucket| &bucket.params) {
                owned[placed.owner] += costs[placed.param];
            }
            let plan = Plan::of(ranks, vec![part], &options).unwrap();
            // Padding makes all ranks' state equal.
            let state = plan.memory(0, &Muon::default()).state as usize / 4;
            let (memory, cost) = (balance(&vec![state; ranks], &lens), balance(&owned, &costs));
            println!(
                "{name}, {ranks} ranks: {memory:.3?} of an even share of memory, {cost:.3?} of the cost"
            );
            assert!(memory.1 <= 1.15 && cost.1 <= 1.2, "{name}, {ranks} ranks: {memory:?}, {cost:?}");
            if ranks.is_power_of_two() {
                assert!(memory.0 <= 1.15 && cost.0 <= 1.15, "{name}, {ranks} ranks: {memory:?}, {cost:?}");
            }
        }
    }
}

#[test]
fn ranks_that_plan_different_chunks_disagree() {
    let errors = spawn(2, |comm| {
        let options = Options { stage: Stage::Zero1, meter: Meter::new(), ..Options::default() };
        let rank = comm.rank();
        let mut opt = Optimizer::empty(Arc::clone(&comm), DataRank::OWN, options.clone()).unwrap();
        let part = Part::new(matrices(), Sizes::all(2), [], &options).unwrap();
        let part = if rank == 0 { part.uncut(&options).unwrap() } else { part };
        let (rules, among) = (AdamW::default().into(), RankRoles::all(comm));
        opt.add_parts(vec![ParamGroup { part, rules, among }], first).unwrap_err().to_string()
    });
    assert!(errors.unwrap().iter().all(|error| error.contains("no parameter is cut")));
}

#[test]
fn a_matrix_with_nan_skips_the_step_everywhere_and_zeros_leave_a_matrix_to_its_decay() {
    for ranks in [1, 3] {
        let ends = loopback::spawn(ranks, |comm| {
            let run = Run { stage: Stage::Zero1, ..Run::on(ranks) };
            let rank = comm.rank();
            let mut opt = run.build(comm);
            let all: Vec<Param> = opt.params().cloned().collect();
            let before = params(&opt);
            let batch = opt.micro_batch(1).unwrap();
            for p in &all {
                let mut grad = values(p, 2);
                if p.name() == "w3" && rank == 0 {
                    grad[5] = f32::NAN;
                }
                batch.grad(p.name(), &grad[..]).unwrap();
            }
            batch.finish().unwrap();
            let outcome = opt.step(StepArgs::default()).unwrap().outcome().unwrap();
            assert!(matches!(outcome, Outcome::Skipped { .. }), "{outcome:?}");
            assert!(params(&opt) == before);
            let batch = opt.micro_batch(1).unwrap();
            all.iter().for_each(|p| batch.grad(p.name(), &vec![0f32; p.len()][..]).unwrap());
            batch.finish().unwrap();
            opt.step(StepArgs { lr: 0.5, ..StepArgs::default() }).unwrap().outcome().unwrap();
            opt.param("w3").unwrap().typed::<f32>().unwrap().to_vec()
        });
        let w3 = matrices().get("w3").unwrap().clone();
        let lw = (0.5 * Muon::default().weight_decay) as f32;
        let expected: Vec<f32> = values(&w3, 1).iter().map(|p| p - lw * p).collect();
        assert!(ends.unwrap().iter().all(|end| *end == expected), "{}", Muon::default().name());
    }
}
