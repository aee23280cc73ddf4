//! The same steps on GPUs, through NCCL, as on loopback: on real ones, or on the stand-ins (`cargo xtask ci --only standin`).
#![cfg(feature = "cuda")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

mod common;

use common::{End, Gradients, PRECISIONS, Run, STAGES, WITH_STATE, WhichRule};
use meshstep_comm::nccl;
use meshstep_optim::Norm;
use meshstep_shard::{Combine, Missing, Moments, Optimizer, Options, Stage};
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{Meter, Queue};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by every test: the order of work is chosen for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many devices there are; none says so, which REQUIRE_GPU=1 makes a failure.
fn devices() -> usize {
    let missing = match (cuda::probe(), nccl::probe()) {
        (Ok(driver), Ok(_)) => return driver.devices,
        (Err(missing), _) => missing.to_string(),
        (_, Err(missing)) => missing.to_string(),
    };
    assert!(std::env::var_os("REQUIRE_GPU").is_none(), "{missing}");
    println!("skipped: {missing}");
    0
}

fn stand_in() -> bool {
    devices() > 0 && cuda::probe().unwrap().stand_in && nccl::probe().unwrap().stand_in
}

fn seed(seed: u64) {
    type Seed = extern "C" fn(u64);
    // SAFETY: the stand-in is loaded and stays, and documents this type.
    unsafe {
        let driver = libloading::Library::new("libcuda.so.1").unwrap();
        driver.get::<Seed>(b"meshstep_standin_seed").unwrap()(seed);
    }
}

/// Whether `ranks` can run: each on a device of its own, or several on one where that is the stand-in's.
fn room_for(ranks: usize) -> bool {
    let room = devices() >= ranks || stand_in();
    if !room {
        println!("skipped: {ranks} ranks, {} devices", devices());
    }
    room
}

/// The run on GPUs; all ranks must end alike, and leave no memory behind.
fn on_gpus(run: &Run) -> End {
    let devices: Vec<usize> = (0..run.ranks).map(|rank| rank % devices()).collect();
    let options = nccl::Options { check: false, ..nccl::Options::default() };
    let ends = nccl::spawn(&devices, options, |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
        run.on_rank(comm).unwrap()
    });
    let ends = ends.unwrap();
    assert!(ends.iter().all(|end| *end == ends[0]), "ranks end apart: {run:?}");
    ends.into_iter().next().unwrap()
}

/// The rules that have kernels.
fn rules() -> impl Iterator<Item = WhichRule> {
    let more = [WhichRule::Sgd].into_iter().chain(WITH_STATE);
    more.filter(|&rule| Run { rule, ..Run::default() }.boxed_rule().on_device().is_some())
}

#[test]
fn exact_sums_end_with_the_bits_of_loopback() {
    let _alone = alone();
    for ranks in [1, 2, 4] {
        if !room_for(ranks) {
            continue;
        }
        for (i, stage) in STAGES.into_iter().enumerate() {
            for rule in [WhichRule::Sgd, WhichRule::AdamW] {
                let (in_place, shuffle) = (i % 2 == 0, i % 3 == 1);
                let gradients = Gradients::Grid;
                let run = Run { ranks, rule, gradients, in_place, shuffle, ..Run::default() }.stage(stage);
                let end = on_gpus(&run);
                assert_eq!(end, run.run(), "{stage:?} on {ranks} ranks: {rule:?}");
                assert_eq!(end, run.naive(), "{stage:?} on {ranks} ranks: {rule:?}");
            }
        }
    }
}

#[test]
fn every_rule_and_precision_ends_with_the_bits_of_loopback() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let stages = [Stage::Zero1, Stage::Zero2];
    for (i, rule) in rules().enumerate() {
        for (j, (dtype, precision)) in PRECISIONS.into_iter().enumerate() {
            if rule == WhichRule::Sgd && precision.moments == Moments::BF16 {
                continue; // without state there are no moments
            }
            let options = Options { precision, ..Run::default().options };
            let (gradients, steps) = (Gradients::Equal, 4);
            let run =
                Run { ranks: 2, rule, dtype, grads: dtype, gradients, steps, options, ..Run::default() };
            let run = run.stage(stages[(i + j) % 2]);
            assert_eq!(on_gpus(&run), run.run(), "{rule:?} {dtype} {precision:?}");
        }
    }
}

#[test]
fn stages_agree_to_the_bit_and_with_loopback_nearly() {
    let _alone = alone();
    for ranks in [2, 4] {
        if !room_for(ranks) {
            continue;
        }
        let run = Run { ranks, steps: 5, ..Run::default() };
        let first = on_gpus(&run.stage(STAGES[0]));
        for stage in STAGES {
            assert_eq!(on_gpus(&run.stage(stage)), first, "{stage:?}");
        }
        let loopback = run.run();
        for (there, here) in first.params.iter().zip(&loopback.params) {
            let floats = |bytes: &[u8]| -> Vec<f32> {
                bytes.chunks(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
            };
            for (a, b) in floats(there).into_iter().zip(floats(here)) {
                assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{a} and {b}");
            }
        }
    }
}

#[test]
fn micro_batches_weights_and_norms_are_those_of_loopback() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    for (i, stage) in STAGES.into_iter().enumerate() {
        for combine in [Combine::Mean, Combine::Sum, Combine::Weighted] {
            let norm = [Norm::L1, Norm::L2, Norm::Inf][i % 3];
            let options = Options { combine, norm, ..Run::default().options };
            let gradients = Gradients::Grid;
            let run = Run { ranks: 2, micro_batches: 2, gradients, options, ..Run::default() }.stage(stage);
            assert_eq!(on_gpus(&run), run.run(), "{stage:?} {combine:?} {norm:?}");
        }
    }
}

#[test]
fn no_order_of_streams_shows() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    let run = Run { ranks: 2, gradients: Gradients::Grid, in_place: true, ..Run::default() };
    let expected = run.run();
    for order in 0..100 {
        seed(order);
        let stage = STAGES[order as usize % 3];
        assert_eq!(on_gpus(&run.stage(stage)), expected, "order {order}, {stage:?}");
    }
}

#[test]
fn what_a_gpu_cannot_do_is_refused_at_construction() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let base = Run { ranks: 1, ..Run::default() };
    let with = |options: Options| Run { options, ..base.clone() };
    let options = || base.options.clone();
    let cases = [
        (Run { rule: WhichRule::Lamb, ..base.clone() }, "lamb has no CUDA kernels"),
        (Run { rule: WhichRule::Lars, ..base.clone() }, "lars has no CUDA kernels"),
        (with(Options { missing: Missing::SkipIfMissingEverywhere, ..options() }), "not for memory of a GPU"),
        (with(Options { missing: Missing::AllOrNone, ..options() }), "not for memory of a GPU"),
        (with(Options { norm: Norm::P(3.0), ..options() }), "on a GPU"),
    ];
    let told = nccl::spawn(&[0], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let comm: std::sync::Arc<dyn meshstep_comm::Communicator> = comm;
        let refused = |(run, _): &(Run, &str)| {
            let run = Run { options: Options { queue: queue.clone(), ..run.options.clone() }, ..run.clone() };
            run.build(comm.clone()).map(|_: Optimizer| ()).unwrap_err().to_string()
        };
        cases.iter().map(refused).collect::<Vec<_>>()
    });
    for (told, (run, expected)) in told.unwrap()[0].iter().zip(&cases) {
        assert!(told.to_lowercase().contains(&expected.to_lowercase()), "{:?}: {told}", run.rule);
    }
}

#[test]
fn memory_is_counted_and_given_back() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let meter = Meter::new();
    let run = Run { ranks: 1, ..Run::default() };
    nccl::spawn(&[0], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let options = Options { queue, meter: meter.clone(), ..run.options.clone() };
        let zeros = |_: &meshstep_tensor::Param, _: meshstep_tensor::SliceMut<'_>| Ok(());
        let mut optimizer = Optimizer::new(comm, run.layout(), run.groups(), zeros, options).unwrap();
        run.hand_over(&mut optimizer, 1, 0).unwrap_err();
        assert!(meter.live_total() > 0);
    })
    .unwrap();
    assert_eq!(meter.live_total(), 0);
}
