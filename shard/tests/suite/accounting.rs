//! Bytes held and bytes sent match the plan to the byte; ranges are owned as planned.

use crate::common::{PRECISIONS, Run, STAGES, WhichRule, cases, hash, turns};
use meshstep_optim::AdamW;
use meshstep_shard::{
    Master, Missing, Moments, NonFinite, Options, Outcome, Owners, Plan, Precision, Stage, StepArgs,
};
use meshstep_tensor::{Category, DType, Layout, Meter};
use proptest::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const MISSING: [Missing; 4] =
    [Missing::Error, Missing::Zero, Missing::SkipIfMissingEverywhere, Missing::AllOrNone];

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(150, 3000), ..ProptestConfig::default() })]

    #[test]
    fn measured_bytes_equal_the_plan(
        lens in prop::collection::vec(prop_oneof![Just(0usize), 1usize..500], 1..10),
        ranks in 1usize..9,
        stage in prop::sample::select(&STAGES[..]),
        bucket_len in prop_oneof![Just(None), (1usize..600).prop_map(Some)],
        rule in prop::sample::select(&[WhichRule::Sgd, WhichRule::AdamW, WhichRule::Lamb][..]),
        (dtype, precision) in prop::sample::select(&PRECISIONS[..]),
        missing in prop::sample::select(&MISSING[..]),
        non_finite in prop::sample::select(&[NonFinite::Skip, NonFinite::Propagate][..]),
        max_norm in prop_oneof![Just(None), Just(Some(1.0))],
    ) {
        prop_assume!(lens.iter().any(|&l| l > 0));
        prop_assume!(rule != WhichRule::Sgd || precision.moments == Moments::Full);
        let options = Options { stage, bucket_len, precision, missing, non_finite, ..Options::default() };
        let run = Run { lens, ranks, rule, max_norm, dtype, grads: dtype, options, ..Run::default() };
        let plan_options = Options { grads: Some(dtype), ..run.options.clone() };
        let plan = Plan::new(&run.layout(), ranks, &plan_options).unwrap();
        let reference = run.boxed_rule();
        meshstep_comm::loopback::spawn(ranks, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            for t in 1..=2 {
                run.read_and_hand_over(&mut opt, t, 0).unwrap();
                let outcome = opt.step(run.at(t)).unwrap().outcome().unwrap();
                let Outcome::Applied { traffic, .. } = outcome else { panic!("{outcome:?}") };
                let meter = &opt.options().meter;
                let memory = plan.memory(rank, &*reference);
                let by_category = [
                    (Category::Params, memory.params),
                    (Category::Gathered, memory.gathered),
                    (Category::Grads, memory.grads),
                    (Category::State, memory.state),
                    (Category::Master, memory.master),
                    (Category::Buckets, memory.buckets),
                    (Category::Staging, memory.staging),
                    (Category::Framework, 0),
                ];
                for (category, planned) in by_category {
                    assert_eq!(meter.peak(category), planned, "{category} on rank {rank}: {run:?}");
                }
                assert_eq!((traffic.peak, meter.live_total()), (memory.total(), memory.total()));
                assert_eq!(traffic.sent, plan.wire(rank, &*reference).total(), "rank {rank}: {run:?}");
                assert_eq!(traffic.pool_grown, 0);
            }
        }).unwrap();
    }

    #[test]
    fn a_pool_in_any_order_is_as_predicted(
        lens in prop::collection::vec(prop_oneof![Just(0usize), 1usize..300], 1..16),
        bucket_len in 1usize..600,
        order in prop_oneof![Just("registration"), Just("reverse"), Just("random")],
        seed in any::<u64>(),
    ) {
        prop_assume!(lens.iter().any(|&l| l > 0));
        let options = Options { stage: Stage::Zero2, bucket_len: Some(bucket_len), ..Options::default() };
        let run = Run { lens, ranks: 2, options, ..Run::default() };
        let mut indices: Vec<usize> = (0..run.lens.len()).collect();
        match order {
            "registration" => {}
            "reverse" => indices.reverse(),
            _ => indices.sort_by_key(|&i| hash(&[seed, i as u64])),
        }
        let plan = Plan::new(&run.layout(), 2, &run.options).unwrap();
        let predicted = plan.pool_bytes(indices.iter().copied());
        meshstep_comm::loopback::spawn(2, |comm| {
            let mut opt = run.build(comm).unwrap();
            for _ in 0..2 {
                let mb = opt.micro_batch(1).unwrap();
                for &i in &indices {
                    mb.grad(&crate::common::name(i), &vec![1f32; run.lens[i]][..]).unwrap();
                }
                mb.finish().unwrap();
                let _ = opt.step(StepArgs::default()).unwrap();
                let meter = &opt.options().meter;
                let peak = meter.peak(Category::Buckets);
                assert_eq!(peak, predicted, "{order} {run:?}");
                assert_eq!(meter.live(Category::Buckets), plan.memory(0, &crate::common::adamw()).buckets, "{order} {run:?}");
            }
        }).unwrap();
    }

    #[test]
    fn every_element_is_owned_and_counted_once(
        lens in prop::collection::vec(0usize..500, 1..10),
        ranks in 1usize..20,
        stage in prop::sample::select(&STAGES[1..]),
        bucket_len in prop_oneof![Just(None), (1usize..600).prop_map(Some)],
    ) {
        prop_assume!(lens.iter().any(|&l| l > 0));
        let options = Options { stage, bucket_len, ..Options::default() };
        let run = Run { lens, options, ..Run::default() };
        let plan = Plan::new(&run.layout(), ranks, &run.options).unwrap();
        let part = &plan.parts()[0];
        for (b, bucket) in part.buckets().iter().enumerate() {
            let mut owners = vec![0; bucket.len];
            for rank in 0..ranks {
                part.owned(b, rank).into_iter().flatten().for_each(|i| owners[i] += 1);
                prop_assert_eq!(part.owned(b, rank), part.counted(b, rank));
            }
            for i in bucket.params.iter().flat_map(|p| p.range()) {
                prop_assert_eq!(owners[i], 1);
            }
            prop_assert!(owners.iter().all(|&n| n <= 1));
            prop_assert_eq!(bucket.len % (64 * ranks), 0);
        }
    }
}

/// Gradients in registration order fill the last bucket first, so stage 2 holds them all until the first one is full.
#[test]
fn a_pool_out_of_order_grows_and_is_counted() {
    let lens = vec![64; 12];
    let options = Options { stage: Stage::Zero2, bucket_len: Some(64), ..Options::default() };
    let run = Run { lens, options, ..Run::default() };
    let grown = meshstep_comm::loopback::spawn(4, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        for i in 0..12 {
            let grad: Vec<f32> = run.gradient(1, 0, rank, i).iter().map(|&g| g as f32).collect();
            mb.grad(&crate::common::name(i), &grad[..]).unwrap();
        }
        mb.finish().unwrap();
        match opt.step(StepArgs::default()).unwrap().outcome().unwrap() {
            Outcome::Applied { traffic, .. } => traffic.pool_grown,
            skipped => panic!("{skipped:?}"),
        }
    });
    assert_eq!(grown.unwrap(), [10; 4]);
}

/// A delayed thread makes the others' gradients early, so the pool grows; the memory is freed afterwards.
#[test]
fn what_threads_made_the_pool_grow_by_is_given_back() {
    let options = Options { stage: Stage::Zero2, bucket_len: Some(64), ..Options::default() };
    let run = Run { lens: vec![64; 64], ranks: 2, options, ..Run::default() };
    meshstep_comm::loopback::spawn(2, |comm| {
        let mut opt = run.build(comm).unwrap();
        for _ in 0..20 {
            let next = AtomicUsize::new(64);
            let mb = opt.micro_batch(1).unwrap();
            std::thread::scope(|s| {
                for _ in 0..3 {
                    s.spawn(|| {
                        while let Some(i) = next.fetch_sub(1, Relaxed).checked_sub(1).filter(|&i| i < 64) {
                            mb.grad(&crate::common::name(i), &[1f32; 64][..]).unwrap();
                        }
                    });
                }
            });
            mb.finish().unwrap();
            let _ = opt.step(StepArgs::default()).unwrap();
            assert_eq!(opt.options().meter.live(Category::Buckets), 2 * 128 * 4);
        }
    })
    .unwrap();
}

#[test]
fn whole_parameters_stay_balanced_over_frozen_ones_and_later_groups() {
    for owners in [Owners::RoundRobin, Owners::SortedGreedy] {
        let loads = meshstep_comm::loopback::spawn(2, |comm| {
            let one =
                |i: usize| Layout::builder().param(format!("late{i}"), &[640], DType::F32).build().unwrap();
            let first =
                Layout::builder().frozen("big", &[100_000], DType::F32).param("a", &[640], DType::F32);
            let options = Options { stage: Stage::WholeParams(owners), ..Options::default() };
            let zeros = |_: &meshstep_tensor::Param, _: meshstep_tensor::SliceMut<'_>| Ok(());
            let first = first.build().unwrap();
            let mut opt =
                meshstep_shard::Optimizer::new(comm, first, crate::common::adamw(), zeros, options).unwrap();
            (0..3).for_each(|i| opt.add_param_group(one(i), crate::common::adamw(), zeros).unwrap());
            opt.options().meter.live(Category::State)
        });
        assert_eq!(loads.unwrap(), [2 * 640 * 2 * 4; 2], "{owners:?}");
    }
}

fn gpt2(layers: usize, d: usize) -> Vec<usize> {
    gpt(50257, 1024, layers, d)
}

fn gpt(vocab: usize, context: usize, layers: usize, d: usize) -> Vec<usize> {
    let block = [d, d, 3 * d * d, 3 * d, d * d, d, d, d, 4 * d * d, 4 * d, 4 * d * d, d];
    [vocab * d, context * d].into_iter().chain(block.repeat(layers)).chain([d, d]).collect()
}

fn llama(layers: usize, d: usize, ff: usize, kv: usize) -> Vec<usize> {
    let block = [d, d * d, d * kv, d * kv, d * d, d, d * ff, d * ff, d * ff];
    [32000 * d].into_iter().chain(block.repeat(layers)).chain([d, 32000 * d]).collect()
}

fn layout(lens: &[usize]) -> Layout {
    layout_of(lens, DType::F32)
}

fn layout_of(lens: &[usize], dtype: DType) -> Layout {
    let add = |b: meshstep_tensor::LayoutBuilder, (i, &len): (usize, &usize)| {
        b.param(format!("p{i}"), &[len], dtype)
    };
    lens.iter().enumerate().fold(Layout::builder(), add).build().unwrap()
}

/// Bytes of a rank with buckets of the default length.
fn planned(layout: &Layout, ranks: usize, stage: Stage) -> u64 {
    let master = if layout.len(DType::BF16) > 0 { Master::F32 } else { Master::default() };
    let precision = Precision { master, ..Precision::default() };
    let options = Options { stage, precision, ..Options::default() };
    Plan::new(layout, ranks, &options).unwrap().memory(0, &AdamW::default()).total()
}

#[test]
fn sharded_gradients_take_no_more_memory_than_whole_ones() {
    let models = [
        ("a small one", gpt(4096, 128, 4, 256)),
        ("gpt2", gpt2(12, 768)),
        ("gpt2-medium", gpt2(24, 1024)),
        ("gpt2-large", gpt2(36, 1280)),
        ("gpt2-xl", gpt2(48, 1600)),
        ("llama-7b", llama(32, 4096, 11008, 4096)),
        ("llama-70b", llama(80, 8192, 28672, 1024)),
    ];
    let worlds =
        [2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 100, 128, 192, 256, 384, 512, 768, 1000, 1024];
    for (model, lens) in &models {
        for dtype in [DType::F32, DType::BF16] {
            let layout = layout_of(lens, dtype);
            for ranks in worlds {
                let [one, two] = [Stage::Zero1, Stage::Zero2].map(|stage| planned(&layout, ranks, stage));
                assert!(
                    two <= one,
                    "{model} in {dtype} on {ranks} ranks: {two} bytes at stage 2, {one} at 1"
                );
            }
        }
    }
}

/// The example of the ZeRO paper: 2 bytes of parameters, and of gradients and state 14 / N.
#[test]
fn a_large_model_takes_what_the_paper_says() {
    let lens = gpt2(36, 4096);
    let params = lens.iter().sum::<usize>() as f64;
    for ranks in [64, 256, 1024] {
        let paper = (2.0 + 14.0 / ranks as f64) * params;
        let share = planned(&layout_of(&lens, DType::BF16), ranks, Stage::Zero2) as f64 / paper;
        assert!((1.0..1.03).contains(&share), "{share} times the paper's {paper} bytes on {ranks} ranks");
    }
}

#[test]
fn flat_shards_are_balanced_and_whole_parameters_are_not() {
    let models = [
        ("gpt2", gpt2(12, 768)),
        ("gpt2-xl", gpt2(48, 1600)),
        ("llama-7b", llama(32, 4096, 11008, 4096)),
        ("llama-70b", llama(80, 8192, 28672, 1024)),
    ];
    for (model, lens) in &models {
        let total: usize = lens.iter().sum();
        let layout = layout(lens);
        for ranks in [2, 3, 4, 7, 8, 16, 64, 100, 256, 512, 1000, 1024] {
            let plan = Plan::new(&layout, ranks, &Options::default()).unwrap();
            let shard: usize = plan.buckets().map(|b| b.len / ranks).sum();
            let balance = shard as f64 * ranks as f64 / total as f64;
            assert!((1.0..1.001).contains(&balance), "{model} on {ranks} ranks: {balance}");
        }
    }
    let owners = Owners::SortedGreedy.assign(&models[0].1, 8);
    let load =
        |rank| owners.iter().zip(&models[0].1).filter(|(o, _)| **o == rank).map(|(_, l)| l).sum::<usize>();
    let worst = (0..8).map(load).max().unwrap() as f64 * 8.0 / models[0].1.iter().sum::<usize>() as f64;
    assert!(worst > 2.0, "whole parameters of gpt2 on 8 ranks: {worst}");
}

#[test]
fn norms_have_the_same_bits_whatever_the_world() {
    let mut seen = std::collections::BTreeSet::new();
    let seeds = cases(5, 5) as usize;
    for seed in 0..seeds {
        for (r, ranks) in [1, 2, 3, 4, 5, 7, 8].into_iter().enumerate() {
            for (s, stage) in STAGES.into_iter().enumerate() {
                for bucket_len in turns(&[None, Some(1), Some(200)], seed + r + s, 1) {
                    let options = Options { stage, bucket_len, ..Options::default() };
                    let gradients = crate::common::Gradients::Equal;
                    let key = hash(&[seed as u64]);
                    let run = Run { ranks, options, gradients, seed: key, steps: 1, ..Run::default() };
                    seen.insert((seed, run.run().norms));
                }
            }
        }
    }
    assert_eq!(seen.len(), seeds, "{seen:?}");
}

#[test]
fn a_meter_is_shared_by_whoever_is_given_it() {
    let meter = Meter::new();
    let run = Run { ranks: 1, ..Run::default() };
    meshstep_comm::loopback::spawn(1, |comm| {
        let options = Options { meter: meter.clone(), ..run.options.clone() };
        let zeros = |_: &meshstep_tensor::Param, _: meshstep_tensor::SliceMut<'_>| Ok(());
        let opt = meshstep_shard::Optimizer::new(comm, run.layout(), run.groups(), zeros, options).unwrap();
        assert!(meter.live_total() > 0);
        drop(opt);
    })
    .unwrap();
    assert_eq!(meter.live_total(), 0);
}
