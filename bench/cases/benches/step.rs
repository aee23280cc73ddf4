//! A whole clipped step of 16.8 M parameters on 4 loopback ranks: reduce, norm, update, gather; the gradients are already
//! in place. Also a verification of the result.

#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark reports faults by failing")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use meshstep_bench_cases::step::Case;
use meshstep_shard::{Options, Outcome, Owners, Stage};
use meshstep_tensor::{DType, Layout};
use std::time::{Duration, Instant};

const RANKS: usize = 4;
const PARAMS: usize = 16;
const LEN: usize = 1 << 20;

fn layout() -> Layout {
    (0..PARAMS).fold(Layout::builder(), |b, i| b.param(format!("p{i}"), &[LEN], DType::F32)).build().unwrap()
}

fn options(stage: Stage) -> Options {
    Options { stage, bucket_len: Some(2 * LEN), ..Options::default() }
}

/// Runs `steps` steps on every rank. Returns the time from the first hand-over to the last rank's end.
fn steps(stage: Stage, steps: u64) -> Duration {
    let took = meshstep_comm::loopback::spawn(RANKS, |comm| {
        let mut case = Case::new(comm, layout(), options(stage)).unwrap();
        let start = Instant::now();
        for _ in 0..steps {
            let outcome = case.step(|_| ()).unwrap();
            assert!(matches!(outcome, Outcome::Applied { .. }));
        }
        start.elapsed()
    });
    took.unwrap().into_iter().max().unwrap()
}

fn step(c: &mut Criterion) {
    let mut group = c.benchmark_group("clipped AdamW step, 16.8 M parameters, 4 ranks");
    group.sample_size(10).warm_up_time(Duration::from_millis(1)).measurement_time(Duration::from_secs(4));
    let stages = [
        ("stage 0", Stage::Replicated),
        ("stage 1", Stage::Zero1),
        ("stage 2", Stage::Zero2),
        ("whole parameters", Stage::WholeParams(Owners::SortedGreedy)),
    ];
    for (name, stage) in stages {
        group.bench_function(name, |b| b.iter_custom(|n| steps(stage, n)));
    }
    group.finish();
}

/// Runs `count` verifications on every rank; the time is from the first start to the last rank's end, and the throughput
/// counts the bytes that all ranks read.
fn verify(c: &mut Criterion) {
    let mut group = c.benchmark_group("verification, AdamW, 16.8 M parameters, 4 ranks");
    group.sample_size(10).warm_up_time(Duration::from_millis(1)).measurement_time(Duration::from_secs(4));
    for (name, stage) in [("stage 0", Stage::Replicated), ("stage 1", Stage::Zero1)] {
        let states = if stage == Stage::Replicated { 2 * RANKS } else { 2 };
        group.throughput(Throughput::Bytes((4 * PARAMS * LEN * (RANKS + states)) as u64));
        group.bench_function(name, |b| b.iter_custom(|n| verifications(stage, n)));
    }
    group.finish();
}

fn verifications(stage: Stage, count: u64) -> Duration {
    let took = meshstep_comm::loopback::spawn(RANKS, |comm| {
        let mut opt = Case::new(comm, layout(), options(stage)).unwrap().opt;
        opt.verify_every(1).unwrap();
        opt.verify().unwrap();
        let start = Instant::now();
        (0..count).for_each(|_| assert_eq!(opt.verify().unwrap().unchecked, 0));
        start.elapsed()
    });
    took.unwrap().into_iter().max().unwrap()
}

criterion_group!(benches, step, verify);
criterion_main!(benches);
