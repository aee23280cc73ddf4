//! Muon on GPUs, beside AdamW and alone: the bits of the CPU at every stage, whole matrices and matrices that several ranks hold.

use crate::common::gpus::{on, two};
use crate::common::{PRECISIONS, Run, hash, params, put, state};
use crate::cuda::{alone, room_for, seed, some, stand_in};
use meshstep_comm::Communicator;
use meshstep_optim::{AdamW, Blocks, Muon};
use meshstep_shard::{
    DataRank, Groups, Missing, NonFinite, Optimizer, Options, Outcome, Owners, ParamGroup, Part, Precision,
    RankRoles, Sizes, Stage, StepArgs,
};
use meshstep_tensor::{Category, DType, Layout, LayoutBuilder, Meter, Param, Slice, SliceMut};
use std::sync::Arc;

const SHAPES: [(&str, &[usize]); 8] = [
    ("embedding", &[50, 7]),
    ("qkv", &[36, 10]),
    ("experts", &[5, 8, 14]),
    ("bias", &[13]),
    ("none", &[3, 0, 4]),
    ("up", &[70, 20]),
    ("row", &[1, 40]),
    ("down", &[8, 8]),
];

fn layout(dtype: DType) -> Layout {
    let add = |b: LayoutBuilder, (name, shape): &(&str, &[usize])| b.param(*name, shape, dtype);
    SHAPES.iter().fold(Layout::builder(), add).frozen("f", &[9, 9], dtype).build().unwrap()
}

/// Muon with whole matrices, groups of rows and batches, beside AdamW.
fn rules() -> Groups {
    let muon = |blocks| Muon { blocks, momentum: 0.5, ns_steps: 3, ..Muon::moonshot() };
    Groups::new(AdamW { beta2: 0.9, ..AdamW::default() })
        .with(muon(Blocks::Whole), ["up", "row", "down"])
        .with_lr(muon(Blocks::Rows(3)), 0.5, ["qkv"])
        .with_lr(muon(Blocks::Batch), 2.0, ["experts", "none"])
}

/// Multiples of 1/8 below 4, whose sums over a few ranks and micro-batches are exact.
fn values(param: &Param, key: u64) -> Vec<f64> {
    let key = param.name().bytes().fold(key, |key, byte| hash(&[key, byte.into()]));
    (0..param.len()).map(|j| (hash(&[key, j as u64]) % 64) as f64 / 8.0 - 4.0).collect()
}

fn first(param: &Param, mut into: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    into.cast_from(Slice::from(&values(param, 1)[..]))
}

/// Settings of a training.
#[derive(Clone, Copy, Debug)]
struct Training {
    ranks: usize,
    stage: Stage,
    micro_batches: u64,
    bucket_len: Option<usize>,
    precision: (DType, Precision),
    missing: Missing,
    non_finite: NonFinite,
}

impl Training {
    fn on(ranks: usize, stage: Stage) -> Self {
        Training {
            ranks,
            stage,
            micro_batches: 1,
            bucket_len: Some(700),
            precision: PRECISIONS[0],
            missing: Missing::Zero,
            non_finite: NonFinite::Skip,
        }
    }

    /// Trains on GPUs or on the CPU; all ranks end alike.
    fn end(&self, gpus: bool) -> Vec<String> {
        let run = Run { ranks: self.ranks, ..Run::default() };
        let ends = on(gpus, &run, |comm, run| self.on_rank(comm, &run.options));
        assert!(ends.iter().all(|end| end.0 == ends[0].0), "ranks end apart: {self:?}");
        let (params, states): (Vec<_>, Vec<_>) = ends.into_iter().unzip();
        params.into_iter().take(1).chain(states).collect()
    }

    /// Takes five steps, of which the third has a gradient that is not finite; returns outcomes and parameters, and this rank's state.
    fn on_rank(&self, comm: Arc<dyn Communicator>, base: &Options) -> (String, String) {
        let (dtype, precision) = self.precision;
        let &Training { stage, bucket_len, missing, non_finite, .. } = self;
        let meter = Meter::new();
        let options = Options {
            stage,
            bucket_len,
            missing,
            non_finite,
            precision,
            meter: meter.clone(),
            ..base.clone()
        };
        let mut opt = Optimizer::new(comm, layout(dtype), rules(), first, options).unwrap();
        let (mut told, mut staging) = (String::new(), 0);
        for t in 1..=5 {
            self.hand_over(&mut opt, t);
            let max_norm = (non_finite == NonFinite::Skip).then_some(30.0);
            let at = StepArgs { lr: 0.1, max_norm, ..StepArgs::default() };
            match opt.step(at).unwrap().outcome().unwrap() {
                Outcome::Applied { norm, coef, .. } => told += &format!("{norm:e} {coef:e}\n"),
                Outcome::Skipped { non_finite, .. } => told += &format!("skipped {non_finite}\n"),
            }
            if t == 2 {
                staging = meter.peak(Category::Staging);
            }
        }
        // Later steps may need a second message of a decision's bytes.
        let later = meter.peak(Category::Staging) - staging;
        assert!(later < 512, "the first steps allocate all but {later}: {self:?}");
        opt.verify().unwrap();
        told += &format!("{:?}", params(&opt));
        (told, format!("{:?}", state(&opt)))
    }

    fn hand_over(&self, opt: &mut Optimizer, t: u64) {
        let (rank, queue) = (opt.comm().rank(), opt.options().queue.clone());
        let all: Vec<Param> = opt.params().filter(|p| !p.frozen()).cloned().collect();
        for micro in 0..self.micro_batches {
            let last = micro + 1 == self.micro_batches;
            let batch = if last { opt.micro_batch(1) } else { opt.accumulate(1) }.unwrap();
            for p in all.iter().rev().filter(|p| self.has(p.name(), t, rank)) {
                let mut grad = values(p, 10 * t + micro);
                if t == 3 && self.non_finite == NonFinite::Skip && p.name() == "up" {
                    grad[7] = f64::NAN;
                }
                let grad = put(Slice::from(&grad[..]), &meshstep_tensor::Queue::cpu());
                let mut cast =
                    meshstep_tensor::Buffer::zeroed(p.len(), p.dtype(), &Meter::new(), Category::Grads)
                        .unwrap();
                cast.as_mut().cast_from(grad.as_slice()).unwrap();
                batch.grad(p.name(), put(cast.as_slice(), &queue).as_slice()).unwrap();
            }
            batch.finish().unwrap();
        }
    }

    /// Returns true if a rank has this gradient: with the policy of missing gradients, some are missing on some ranks or on all.
    fn has(&self, name: &str, t: u64, rank: usize) -> bool {
        let misses = match (name, t) {
            ("up", 2) | ("qkv", 4) => true,
            ("experts", 2) => rank != 1,
            _ => false,
        };
        !misses || self.missing == Missing::Zero
    }
}

const STAGES: [Stage; 5] =
    [Stage::Replicated, Stage::WholeParams(Owners::SortedGreedy), Stage::Zero1, Stage::Zero2, Stage::Zero3];

#[test]
fn muon_beside_adamw_has_the_cpus_bits_at_every_stage() {
    let _alone = alone();
    for ranks in [1, 2, 4] {
        if !room_for(ranks) {
            continue;
        }
        for (i, stage) in STAGES.into_iter().enumerate() {
            let bucket_len = [None, Some(700), Some(200)][(i + ranks) % 3];
            let micro_batches = 1 + i as u64 % 2;
            let training = Training { micro_batches, bucket_len, ..Training::on(ranks, stage) };
            assert_eq!(training.end(true), training.end(false), "{training:?}");
        }
    }
}

#[test]
fn every_precision_has_the_cpus_bits() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    for (i, precision) in some(&PRECISIONS, 0, 10).enumerate() {
        let stage = [Stage::Zero3, Stage::Zero1][i % 2];
        let training = Training { precision, ..Training::on(2, stage) };
        assert_eq!(training.end(true), training.end(false), "{training:?}");
    }
}

#[test]
fn missing_gradients_and_steps_that_nothing_stops_have_the_cpus_bits() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    for stage in STAGES {
        let skips = Training { missing: Missing::SkipIfMissingEverywhere, ..Training::on(2, stage) };
        let propagates = Training { non_finite: NonFinite::Propagate, ..Training::on(2, stage) };
        for training in [skips, propagates] {
            assert_eq!(training.end(true), training.end(false), "{training:?}");
        }
    }
}

#[test]
fn no_order_of_streams_shows_in_an_exchange() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    let training = Training::on(2, Stage::Zero3);
    let expected = training.end(false);
    for order in 0..u64::from(crate::common::cases(6, 60)) {
        seed(order);
        assert_eq!(training.end(true), expected, "order {order}");
    }
}

/// Matrices that a plan cuts at stage 1, and more matrices after some steps, longer than those before.
#[test]
fn cut_matrices_and_added_ones_have_the_cpus_bits() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let train = |comm: Arc<dyn Communicator>, base: &Options| {
        let meter = Meter::new();
        let options = Options { stage: Stage::Zero1, meter, ..base.clone() };
        let of = |names: &[&str]| {
            let add = |b: LayoutBuilder, name: &&str| {
                let (_, shape) = SHAPES.iter().find(|(other, _)| other == name).unwrap();
                b.param(*name, shape, DType::F32)
            };
            names.iter().fold(Layout::builder(), add).build().unwrap()
        };
        let mut opt = Optimizer::empty(Arc::clone(&comm), DataRank::OWN, options.clone()).unwrap();
        let training = Training::on(2, Stage::Zero1);
        let step = |opt: &mut Optimizer, t| {
            training.hand_over(opt, t);
            let outcome = opt.step(StepArgs { lr: 0.1, ..StepArgs::default() }).unwrap().outcome().unwrap();
            assert!(matches!(outcome, Outcome::Applied { .. }), "{outcome:?}");
            opt.verify().unwrap();
            let names: Vec<_> = opt.params().map(|p| p.name().to_owned()).collect();
            let each: Vec<_> = names.into_iter().zip(params(opt)).collect();
            format!("{each:?} {:?}", state(opt))
        };
        let add = |opt: &mut Optimizer, names: &[&str]| {
            let part = Part::new(of(names), Sizes::all(2), [], &options).unwrap();
            let (rules, among) = (Muon::default().into(), RankRoles::all(Arc::clone(&comm)));
            opt.add_parts(vec![ParamGroup { part, rules, among }], first).unwrap();
        };
        add(&mut opt, &["down", "row"]);
        let mut told = vec![step(&mut opt, 1), step(&mut opt, 2)];
        add(&mut opt, &["up", "qkv"]);
        opt.add_param_group(of(&["embedding"]), Muon::moonshot(), first).unwrap();
        told.extend([step(&mut opt, 4), step(&mut opt, 5)]);
        told
    };
    let base = Run { ranks: 2, ..Run::default() }.options;
    let here = meshstep_comm::loopback::spawn(2, |comm| train(comm, &base)).unwrap();
    // These ranks compare their calls, and have a deadline.
    let there = two(|run, comm| train(comm, &run.options));
    for (rank, (there, here)) in there.iter().zip(&here).enumerate() {
        for (step, (there, here)) in there.iter().zip(here).enumerate() {
            assert_eq!(there, here, "rank {rank}, step {step}");
        }
    }
}
