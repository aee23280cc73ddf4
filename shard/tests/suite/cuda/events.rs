//! Skips, faults and loss scales: a GPU reports what loopback reports.

use super::{alone, devices, room_for};
use crate::common::{Gradients, Run, STAGES};
use meshstep_comm::nccl;
use meshstep_optim::{AdamW, DynamicLossScale, LossScale};
use meshstep_shard::{Optimizer, Options, Outcome, Preemption, StepArgs};
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{Buffer, Category, DType, Layout, Meter, Queue};

/// Contribution of a rank to one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Event {
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
    /// Rank 1 is asked to end the run; the request stays.
    Preempted,
    /// Rank 1 has a non-finite gradient, and rank 0 is asked to end the run.
    PreemptedOverflow,
}

/// Returns the outcome of each event, and parameters, state and loss scale afterwards.
fn story(run: &Run, events: &[Event], comm: std::sync::Arc<dyn meshstep_comm::Communicator>) -> Vec<String> {
    let rank = comm.rank();
    let options = Options { preemption: Preemption::new(), ..run.options.clone() };
    let run = &Run { options, ..run.clone() };
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
    if event == if odd { Event::Preempted } else { Event::PreemptedOverflow } {
        run.options.preemption.request();
    }
    let batch = optimizer.micro_batch(1).unwrap();
    if odd && event == Event::Dropped {
        drop(batch);
    } else {
        for i in (0..run.lens.len()).filter(|&i| !(odd && event == Event::Missing && i == 3)) {
            let mut grad = run.gradient(t, 0, rank, i);
            if odd && matches!(event, Event::Overflow | Event::PreemptedOverflow) && i == 0 {
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
        Ok(Outcome::Applied { norm, coef, preempted, .. }) => {
            format!("applied {norm:e} {coef:e} {preempted}")
        }
        Ok(Outcome::Skipped { non_finite, in_a_row, preempted, .. }) => {
            format!("skipped {non_finite} {in_a_row} {preempted}")
        }
        Err(error) => error.to_string(),
    }
}

/// Compares the same story on loopback and on GPUs.
pub(super) fn both(run: &Run, events: &[Event]) {
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

/// The device passes a request on, beside steps that are skipped and steps that fail.
#[test]
fn a_preemption_is_told_as_on_loopback() {
    use Event::{BadArguments, Missing, Overflow, Plain, Preempted, PreemptedOverflow};
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let rule = DynamicLossScale { init_scale: 1024.0, growth_interval: 2, ..DynamicLossScale::default() };
    for (i, stage) in STAGES.into_iter().enumerate() {
        let loss_scale = (i % 2 == 0).then_some(LossScale::Dynamic(rule));
        let options = Options { loss_scale, ..Run::default().options };
        let run = Run { ranks: 2, gradients: Gradients::Grid, options, ..Run::default() };
        both(&run.stage(stage), &[Plain, Overflow, Preempted, Missing, Overflow, BadArguments, Plain]);
        both(&run.stage(stage), &[Plain, PreemptedOverflow, Plain]);
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
