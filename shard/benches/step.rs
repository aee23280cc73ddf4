//! A whole clipped step of 16.8 M parameters on 4 loopback ranks: reduce, norm, update, gather; gradients already in place.
//! And a verification of what it leaves.

#![allow(missing_docs, clippy::unwrap_used, reason = "a bench says what is wrong by failing")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use meshstep_optim::AdamW;
use meshstep_shard::{At, Optimizer, Options, Outcome, Owners, Stage};
use meshstep_tensor::{DType, Layout, Meter, SliceMut};
use std::time::{Duration, Instant};

const RANKS: usize = 4;
const PARAMS: usize = 16;
const LEN: usize = 1 << 20;

fn layout() -> Layout {
    (0..PARAMS).fold(Layout::builder(), |b, i| b.param(format!("p{i}"), &[LEN], DType::F32)).build().unwrap()
}

/// `steps` steps on every rank; the time from the first hand-over to the last rank's end.
fn steps(stage: Stage, steps: u64) -> Duration {
    let took = meshstep_comm::loopback::spawn(RANKS, |comm| {
        let rank = comm.rank();
        let options = Options { stage, bucket_len: Some(2 * LEN), meter: Meter::new(), ..Options::default() };
        let fill = |_: &meshstep_tensor::Param, mut values: SliceMut<'_>| {
            values
                .typed_mut::<f32>()?
                .iter_mut()
                .zip(0u32..)
                .for_each(|(x, i)| *x = (i % 1000) as f32 / 1000.0);
            Ok(())
        };
        let names: Vec<String> = (0..PARAMS).map(|i| format!("p{i}")).collect();
        let mut opt = Optimizer::new(comm, layout(), AdamW::default(), fill, options).unwrap();
        let one = |opt: &mut Optimizer, write: bool| {
            let mb = opt.micro_batch(1).unwrap();
            for name in names.iter().rev() {
                let mut slot = mb.slot(name).unwrap();
                if write {
                    let values = slot.as_mut().unwrap().into_typed::<f32>().unwrap();
                    values
                        .iter_mut()
                        .zip(rank as u32..)
                        .for_each(|(x, i)| *x = (i % 777) as f32 / 777.0 - 0.5);
                }
                slot.fill().unwrap();
            }
            mb.finish().unwrap();
            let outcome = opt.step(At { max_norm: Some(1.0), ..At::default() }).unwrap().outcome().unwrap();
            assert!(matches!(outcome, Outcome::Applied { .. }));
        };
        // Everything is touched once before it is timed.
        (0..2).for_each(|_| one(&mut opt, true));
        let start = Instant::now();
        (0..steps).for_each(|_| one(&mut opt, false));
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

/// `count` verifications on every rank; the time from the first to the last rank's end. Throughput: what all ranks read.
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
        let options = Options { stage, bucket_len: Some(2 * LEN), meter: Meter::new(), ..Options::default() };
        let mut opt = Optimizer::new(comm, layout(), AdamW::default(), |_, _| Ok(()), options).unwrap();
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
