//! The same steps on GPUs, through NCCL, as on loopback: on real GPUs, or on the stand-ins (`cargo xtask ci --only standin`).

mod among;
mod apart;
#[cfg(feature = "checkpoint")]
mod checkpoint;
#[cfg(feature = "checkpoint")]
mod consolidate;
mod failing;
mod graph;
mod launches;
mod lbfgs;
mod local;
mod local_failing;
#[cfg(feature = "checkpoint")]
mod local_moving;
mod missing;
mod pair;
mod propagate;
mod ranks;
mod reads;
mod replicas;
mod shared;
mod verify;
mod windows;

use crate::common::{End, Gradients, PRECISIONS, Run, STAGES, WITH_STATE, WhichRule, cases, long, turns};
use meshstep_comm::{Communicator, nccl};
use meshstep_optim::{AdamW, DynamicLossScale, LossScale, Norm};
use meshstep_shard::{Combine, Error, Missing, Moments, Optimizer, Options, Outcome, Stage, StepArgs};
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{Buffer, Category, DType, Layout, Meter, Queue};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Lock held by every test: the order of work is chosen for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of devices; prints a skip message without one, and fails if REQUIRE_GPU=1.
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

/// Returns true if every combination is tried: in a long run, and on real GPUs, which are quick.
fn all() -> bool {
    long() || !stand_in()
}

/// Returns [`turns`] on the stand-ins, all entries on real GPUs.
fn some<T: Copy>(of: &[T], first: usize, normal: u32) -> impl Iterator<Item = T> {
    turns(of, first, if all() { of.len() as u32 } else { normal })
}

/// Returns true if `ranks` ranks can run: each on its own device, or several on a stand-in device.
fn room_for(ranks: usize) -> bool {
    let room = devices() >= ranks || stand_in();
    if !room {
        println!("skipped: {ranks} ranks, {} devices", devices());
    }
    room
}

/// Runs on GPUs; all ranks must end alike, and leave no memory behind.
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

/// Rules that have kernels.
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
    let precisions: Vec<_> = PRECISIONS.into_iter().enumerate().collect();
    for (i, rule) in rules().enumerate() {
        for (j, (dtype, precision)) in some(&precisions, 3 * i, 3) {
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
    for order in 0..u64::from(cases(60, 100)) {
        seed(order);
        let stage = STAGES[order as usize % 4];
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

/// Contribution of a rank to one step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Plain,
    /// Rank 1 has a non-finite gradient.
    Overflow,
    /// Rank 1 lacks a gradient.
    Missing,
    /// Rank 0 requests an impossible rate, rank 1 an impossible norm.
    BadArguments,
    /// Rank 1 drops a micro-batch.
    Dropped,
    /// Gradients are dropped, and no step is taken.
    Discarded,
}

/// Returns the outcome of each event, and parameters, state and loss scale afterwards.
fn story(run: &Run, events: &[Event], comm: std::sync::Arc<dyn meshstep_comm::Communicator>) -> Vec<String> {
    let rank = comm.rank();
    let mut optimizer = run.build(comm).unwrap();
    let mut told = Vec::new();
    for (t, &event) in events.iter().enumerate() {
        let happened = happen(run, &mut optimizer, rank, t as u64 + 1, event);
        let (params, state) = (crate::common::params(&optimizer), crate::common::state(&optimizer));
        let scale = optimizer.loss_scale_state();
        told.push(format!("{event:?}: {happened}\n{scale:?}\n{params:?}\n{state:?}"));
    }
    told
}

fn happen(run: &Run, optimizer: &mut Optimizer, rank: usize, t: u64, event: Event) -> String {
    let odd = rank == 1;
    let batch = optimizer.micro_batch(1).unwrap();
    if odd && event == Event::Dropped {
        drop(batch);
    } else {
        for i in (0..run.lens.len()).filter(|&i| !(odd && event == Event::Missing && i == 3)) {
            let mut grad = run.gradient(t, 0, rank, i);
            if odd && event == Event::Overflow && i == 0 {
                grad[5] = f64::INFINITY;
            }
            crate::common::with_dtype(run.grads, &grad, |grad| {
                let there = crate::common::put(grad, &run.options.queue);
                batch.grad(&crate::common::name(i), there.as_slice()).unwrap();
            });
        }
        batch.finish().unwrap();
    }
    if event == Event::Discarded {
        return format!("{:?}", optimizer.discard_gradients());
    }
    let mut at = run.at(t);
    if event == Event::BadArguments {
        (at.lr, at.max_norm) = if odd { (at.lr, Some(-1.0)) } else { (f64::NAN, at.max_norm) };
    }
    match optimizer.step(at).and_then(meshstep_shard::Pending::outcome) {
        Ok(Outcome::Applied { norm, coef, .. }) => format!("applied {norm:e} {coef:e}"),
        Ok(Outcome::Skipped { non_finite, in_a_row, .. }) => format!("skipped {non_finite} {in_a_row}"),
        Err(error) => error.to_string(),
    }
}

/// Compares the same story on loopback and on GPUs.
fn both(run: &Run, events: &[Event]) {
    let here = meshstep_comm::loopback::spawn(run.ranks, |comm| story(run, events, comm)).unwrap();
    let devices: Vec<usize> = (0..run.ranks).map(|rank| rank % devices()).collect();
    let there = nccl::spawn(&devices, nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
        story(&run, events, comm)
    });
    for (rank, (here, there)) in here.iter().zip(there.unwrap()).enumerate() {
        for (t, (here, there)) in here.iter().zip(&there).enumerate() {
            assert_eq!(there, here, "event {t} on rank {rank}, {:?}", run.options.stage);
        }
    }
}

#[test]
fn skips_and_faults_are_those_of_loopback() {
    use Event::{BadArguments, Discarded, Dropped, Missing, Overflow, Plain};
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let events = [
        Plain,
        Overflow,
        Missing,
        Plain,
        BadArguments,
        Overflow,
        Overflow,
        Dropped,
        Discarded,
        Plain,
        Overflow,
        Overflow,
        Overflow,
        Overflow,
        Plain,
    ];
    for stage in STAGES {
        let options = Options { max_skips: 2, ..Run::default().options };
        let run = Run { ranks: 2, gradients: Gradients::Grid, options, ..Run::default() };
        both(&run.stage(stage), &events);
    }
}

#[test]
fn a_dynamic_loss_scale_is_that_of_loopback() {
    use Event::{BadArguments, Overflow, Plain};
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let rule = DynamicLossScale { init_scale: 1024.0, growth_interval: 2, ..DynamicLossScale::default() };
    let events = [Overflow, Overflow, Plain, Plain, BadArguments, Plain, Plain, Plain, Overflow, Plain];
    for rule in [LossScale::Dynamic(rule), LossScale::Static(128.0)] {
        let options = Options { loss_scale: Some(rule), ..Run::default().options };
        let run = Run { ranks: 2, gradients: Gradients::Grid, options, ..Run::default() };
        both(&run, &events);
    }
}

/// Steps with unread outcomes still move the scale, for a kernel that reads it and for a caller that asks for it in the end.
#[test]
fn a_loss_scale_moves_while_the_host_waits_for_nothing() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let rule = DynamicLossScale { init_scale: 1024.0, growth_interval: 2, ..DynamicLossScale::default() };
    let loss_scale = Some(LossScale::Dynamic(rule));
    let overflows = [true, false, false, false, true, false, false, true];
    let scales = nccl::spawn(&[0], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let options = Options { queue: queue.clone(), loss_scale, ..Options::default() };
        let layout = Layout::builder().param("w", &[3], DType::F32).build().unwrap();
        let mut optimizer = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), options).unwrap();
        let meter = Meter::new();
        let there = |values: [f32; 3]| {
            let mut buffer = Buffer::zeroed_on(&queue, 3, DType::F32, &meter, Category::Staging).unwrap();
            queue.upload((&values[..]).into(), buffer.as_mut()).unwrap();
            buffer
        };
        let (fine, not) = (there([1.0; 3]), there([1.0, f32::INFINITY, 1.0]));
        for (t, overflow) in overflows.into_iter().enumerate() {
            let batch = optimizer.micro_batch(1).unwrap();
            batch.grad("w", if overflow { &not } else { &fine }.as_slice()).unwrap();
            batch.finish().unwrap();
            let before = cuda::waits();
            drop(optimizer.step(StepArgs::default()).unwrap());
            assert!(t == 0 || cuda::waits() == before, "step {t}");
        }
        let address = optimizer.loss_scale_address().unwrap().unwrap();
        // SAFETY: the optimizer outlives the buffer and takes no step meanwhile.
        let known = unsafe { Buffer::from_raw_on(&queue, address, 1, DType::F64, ()) }.unwrap();
        let mut found = [0f64];
        queue.download(known.as_slice(), (&mut found[..]).into()).unwrap();
        (found[0], optimizer.loss_scale())
    });
    // 1024 falls to 512, grows to 1024, falls to 512, grows to 1024, falls.
    assert_eq!(scales.unwrap(), [(512.0, 512.0)]);
}

#[test]
fn ranks_that_step_with_different_things_are_told() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let run = Run { ranks: 2, ..Run::default() };
    let told = nccl::spawn(&[0, 1 % devices()], nccl::Options::default(), |comm| {
        let rank = comm.rank();
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
        let mut optimizer = run.build(comm).unwrap();
        let before = crate::common::params(&optimizer);
        run.hand_over(&mut optimizer, 1, 0).unwrap();
        let at = StepArgs { lr: 0.1 + rank as f64, ..StepArgs::default() };
        let told = optimizer.step(at).unwrap().outcome().unwrap_err().to_string();
        assert_eq!(crate::common::params(&optimizer), before);
        run.hand_over(&mut optimizer, 2, 0).unwrap();
        assert!(matches!(optimizer.step(run.at(2)).unwrap().outcome().unwrap(), Outcome::Applied { .. }));
        told
    });
    let one = |mine| {
        format!(
            "ranks disagree on lr: this rank has {mine}, the ranks have 0.1 to 1.1; give every rank the same value"
        )
    };
    assert_eq!(told.unwrap(), [one(0.1), one(1.1)]);
}

/// A step finds hyperparameters that have changed on one rank.
#[test]
fn ranks_with_other_hyperparameters_are_told() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let run = Run { ranks: 2, ..Run::default() };
    let told = nccl::spawn(&[0, 1 % devices()], nccl::Options::default(), |comm| {
        let (rank, queue) = (comm.rank(), Queue::cuda(Stream::new(comm.device()).unwrap()));
        let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
        let beta1 = Arc::new(AtomicU64::new(0.9f64.to_bits()));
        let rule = crate::common::elsewhere::Elsewhere { beta1: Arc::clone(&beta1), kernels: true };
        let mut optimizer =
            Optimizer::new(comm, run.layout(), rule, |_, _| Ok(()), run.options.clone()).unwrap();
        let mut step = |t| {
            run.hand_over(&mut optimizer, t, 0).unwrap();
            optimizer.step(run.at(t)).unwrap().outcome()
        };
        step(1).unwrap();
        beta1.fetch_xor(rank as u64, SeqCst);
        let told = step(2).unwrap_err();
        beta1.fetch_xor(rank as u64, SeqCst);
        step(2).unwrap();
        matches!(told, Error::Differ { field: "hyperparameters", .. })
    });
    assert_eq!(told.unwrap(), [true; 2]);
}

#[test]
fn an_error_that_nobody_asked_for_is_told_by_a_later_step() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let run = Run { ranks: 2, ..Run::default() };
    nccl::spawn(&[0, 1 % devices()], nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        let run = Run { options: Options { queue: queue.clone(), ..run.options.clone() }, ..run.clone() };
        let mut optimizer = run.build(comm).unwrap();
        run.hand_over(&mut optimizer, 1, 0).unwrap();
        drop(optimizer.step(StepArgs { lr: -1.0, ..StepArgs::default() }).unwrap());
        queue.synchronize().unwrap();
        run.hand_over(&mut optimizer, 2, 0).unwrap();
        let told = optimizer.step(run.at(2)).unwrap_err().to_string();
        assert!(told.contains("lr"), "{told}");
        // The step was taken nevertheless, and an error is returned once only.
        assert!(crate::common::state(&optimizer).iter().all(|(t, _)| *t == 1));
        run.hand_over(&mut optimizer, 3, 0).unwrap();
        optimizer.step(run.at(3)).unwrap().outcome().unwrap();
    })
    .unwrap();
}

#[test]
fn the_host_waits_for_nothing() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    let policies = [Missing::SkipIfMissingEverywhere, Missing::AllOrNone].into_iter().cycle();
    let all = STAGES.into_iter().zip(policies);
    for (stage, missing) in STAGES.map(|stage| (stage, Missing::Error)).into_iter().chain(all) {
        let options = Options { missing, ..Run::default().options };
        let run = Run { ranks: 1, in_place: true, options, ..Run::default() }.stage(stage);
        let waits = nccl::spawn(&[0], nccl::Options::default(), |comm| {
            let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
            let run = Run { options: Options { queue: queue.clone(), ..run.options.clone() }, ..run.clone() };
            let mut optimizer = run.build(comm).unwrap();
            let mut waits = Vec::new();
            for t in 1..=8 {
                let batch = optimizer.micro_batch(1).unwrap();
                // The caller's own kernels would fill the slots. Order of a backward pass, with gradients missing in the last
                // buckets only, so that the pool does not grow: freeing what it grows by waits.
                let left_alone = |i: usize| missing != Missing::Error && i < 2 && (t + i).is_multiple_of(2);
                for i in (0..run.lens.len()).rev().filter(|&i| !left_alone(i)) {
                    batch.slot(&crate::common::name(i)).unwrap().fill().unwrap();
                }
                batch.finish().unwrap();
                let before = cuda::waits();
                let pending = optimizer.step(run.at(t as u64)).unwrap();
                waits.push(cuda::waits() - before);
                // Only reading an outcome waits.
                if t < 5 {
                    pending.outcome().unwrap();
                }
            }
            waits
        });
        // The first step builds its tables.
        assert_eq!(waits.unwrap()[0][1..], [0; 7], "{stage:?} {missing:?}");
    }
}
