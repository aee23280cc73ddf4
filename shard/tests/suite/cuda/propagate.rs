//! Steps taken with any gradients; a bucket is updated while the next is still in flight.

use crate::common::{self, End, Gradients, PRECISIONS, Run, STAGES, WhichRule};
use crate::cuda::events::{Event, both};
use crate::cuda::{alone, devices, on_gpus, room_for, seed, stand_in};
use meshstep_comm::nccl;
use meshstep_optim::Norm;
use meshstep_shard::{Clip, Combine, NonFinite, Options, Outcome, Stage, StepArgs};
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{DType, Queue};

fn propagating(run: &Run) -> Run {
    let options = Options { non_finite: NonFinite::Propagate, ..run.options.clone() };
    Run { options, ..run.clone() }
}

#[test]
fn exact_sums_end_with_the_bits_of_loopback_and_of_a_plain_loop() {
    let _alone = alone();
    for ranks in [1, 2, 4] {
        if !room_for(ranks) {
            continue;
        }
        for (i, stage) in STAGES.into_iter().enumerate() {
            for max_norm in [None, Some(1.0)] {
                let rule = [WhichRule::AdamW, WhichRule::Sgd][i % 2];
                let base = Run { gradients: Gradients::Grid, shuffle: i % 3 == 1, ..Run::default() };
                let run = Run { ranks, rule, max_norm, in_place: i % 2 == 0, ..base }.stage(stage);
                let end = on_gpus(&propagating(&run));
                assert_eq!(end, run.run(), "{stage:?} on {ranks} ranks: {rule:?}");
                assert_eq!(end, run.naive(), "{stage:?} on {ranks} ranks: {rule:?}");
            }
        }
    }
}

#[test]
fn combinations_norms_and_clips_are_those_of_loopback() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    for (i, stage) in STAGES.into_iter().enumerate() {
        for (j, combine) in [Combine::Mean, Combine::Sum, Combine::Weighted].into_iter().enumerate() {
            let norm = [Norm::L1, Norm::L2, Norm::Inf][(i + j) % 3];
            let options = Options { combine, norm, ..Run::default().options };
            let gradients = Gradients::Grid;
            let run = Run { ranks: 2, micro_batches: 2, gradients, options, ..Run::default() };
            let run = propagating(&Run { max_norm: None, ..run }.stage(stage));
            assert_eq!(on_gpus(&run), run.run(), "{stage:?} {combine:?} {norm:?}");
        }
        if matches!(stage, Stage::Zero2 | Stage::Zero3) {
            continue; // they do not keep what would be clipped
        }
        let options = Options { clip: Clip::BeforeReduce, ..Run::default().options };
        let run = Run { ranks: 2, gradients: Gradients::Equal, options, ..Run::default() };
        let run = propagating(&run.stage(stage));
        assert_eq!(on_gpus(&run), run.run(), "{stage:?}");
    }
}

/// Returns values with all NaNs equal.
fn values(dtype: DType, end: &End) -> Vec<Option<u32>> {
    let bits = end.params.iter().flat_map(|p| p.chunks(dtype.size())).map(|b| match b {
        &[a, b] => u32::from(u16::from_ne_bytes([a, b])) << 16,
        b => u32::from_ne_bytes(b.try_into().unwrap()),
    });
    bits.map(|bits| (!f32::from_bits(bits).is_nan()).then_some(bits)).collect()
}

#[test]
fn what_is_not_finite_goes_where_it_goes_on_loopback() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    for (i, stage) in STAGES.into_iter().enumerate() {
        for (dtype, precision) in
            PRECISIONS.into_iter().filter(|(d, _)| ![DType::F64, DType::F16].contains(d))
        {
            let options = Options { precision, ..Run::default().options };
            let max_norm = [None, Some(1.0)][i % 2];
            let run =
                Run { ranks: 2, dtype, max_norm, gradients: Gradients::Broken, options, ..Run::default() };
            let run = propagating(&run.stage(stage));
            let (there, here) = (on_gpus(&run), run.run());
            let (bits, expected) = (values(dtype, &there), values(dtype, &here));
            assert_eq!(bits, expected, "{stage:?} {dtype} {precision:?}");
            let broken = bits.iter().filter(|x| x.is_none()).count();
            assert!(broken > 0 && broken < bits.len(), "{stage:?} {dtype}: {broken}");
            assert_eq!((&there.norms, &there.coefs), (&here.norms, &here.coefs));
            assert_eq!(f64::from_bits(there.norms[1]), f64::INFINITY);
        }
    }
}

/// With different arguments on ranks, some may update buckets as they arrive, others wait for all of them.
#[test]
fn faults_leave_everything_untouched() {
    use Event::{BadArguments, Discarded, Dropped, Missing, Plain};
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let events =
        [Plain, Missing, Plain, BadArguments, BadArguments, Dropped, Discarded, Plain, Missing, Plain];
    for stage in STAGES {
        for max_norm in [None, Some(1.0)] {
            let run = Run { ranks: 2, max_norm, gradients: Gradients::Grid, ..Run::default() };
            both(&propagating(&run.stage(stage)), &events);
        }
    }
}

#[test]
fn no_order_of_streams_shows() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    let run = Run { ranks: 2, max_norm: None, gradients: Gradients::Grid, in_place: true, ..Run::default() };
    let run = propagating(&Run { lens: vec![70, 1, 0, 130, 64, 300, 3], ..run });
    let expected = run.run();
    for order in 0..u64::from(common::cases(40, 100)) {
        seed(order);
        let stage = STAGES[order as usize % 4];
        assert_eq!(on_gpus(&run.stage(stage)), expected, "order {order}, {stage:?}");
    }
}

#[test]
fn the_host_waits_for_nothing() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    for (stage, max_norm) in STAGES.into_iter().flat_map(|stage| [(stage, None), (stage, Some(1.0))]) {
        let run = propagating(&Run { ranks: 1, max_norm, ..Run::default() }.stage(stage));
        let waits = nccl::spawn(&[0], nccl::Options::default(), |comm| {
            let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
            let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
            let mut optimizer = run.build(comm).unwrap();
            let mut waits = Vec::new();
            for t in 1..=6 {
                let batch = optimizer.micro_batch(1).unwrap();
                for i in (0..run.lens.len()).rev() {
                    batch.slot(&common::name(i)).unwrap().fill().unwrap();
                }
                batch.finish().unwrap();
                let before = cuda::waits();
                let pending = optimizer.step(run.at(t)).unwrap();
                waits.push(cuda::waits() - before);
                if t < 4 {
                    pending.outcome().unwrap();
                }
            }
            waits
        });
        // The first step builds its tables.
        assert_eq!(waits.unwrap()[0][1..], [0; 5], "{stage:?} {max_norm:?}");
    }
}

/// Words exchanged between steps do not mix with a norm that is still in flight.
#[test]
fn losses_are_combined_while_a_norm_is_on_its_way() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    let run = propagating(&Run { ranks: 2, max_norm: None, gradients: Gradients::Grid, ..Run::default() });
    for order in 0..20 {
        seed(order);
        let told = nccl::spawn(&[0, 1 % devices()], nccl::Options::default(), |comm| {
            let rank = meshstep_comm::Communicator::rank(&*comm);
            let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
            let run = Run { options: Options { queue, ..run.options.clone() }, ..run.clone() };
            let mut optimizer = run.build(comm).unwrap();
            let mut told = Vec::new();
            for t in 1..=3 {
                run.hand_over(&mut optimizer, t, 0).unwrap();
                let pending = optimizer.step(run.at(t)).unwrap();
                let evaluated = optimizer.step_with(StepArgs { lr: 0.0, ..run.at(t) }, 1, |batch| {
                    // Slots are filled as they are: freeing memory would wait for all work.
                    for i in (0..run.lens.len()).rev() {
                        batch.slot(&common::name(i))?.fill()?;
                    }
                    Ok::<_, meshstep_shard::Error>(t as f64 + rank as f64)
                });
                assert_eq!(evaluated.unwrap().loss, t as f64 + 0.5, "order {order}");
                let Outcome::Applied { norm, .. } = pending.outcome().unwrap() else {
                    panic!("it was skipped")
                };
                told.push(norm.to_bits());
            }
            told
        });
        let norms = told.unwrap();
        assert_eq!(norms, [run.run().norms, run.run().norms], "order {order}");
    }
}
