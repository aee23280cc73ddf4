//! Ranks on GPUs, one of which fails, reads fewer outcomes than another, or leaves: no rank waits for it, and none reports
//! success.

use crate::common::gpus::{fail, two};
use crate::common::{self, Run};
use crate::cuda::{alone, room_for, stand_in};
use meshstep_comm::Communicator;
use meshstep_optim::{DynamicLossScale, Lamb, LossScale, LossScaleState, Norm};
use meshstep_shard::{Clip, Combine, Error, Optimizer, Options, Outcome, Stage, StepArgs, Until};
use meshstep_tensor::{DType, Layout, LayoutBuilder, Meter};
use std::sync::{Arc, Barrier};

/// A rate that every rank refuses.
const BAD: f64 = -1.0;

fn more(b: LayoutBuilder) -> Layout {
    b.param("more", &[40], DType::F32).build().unwrap()
}

fn step(
    run: &Run,
    optimizer: &mut Optimizer,
    t: u64,
    at: StepArgs,
) -> Result<meshstep_shard::Pending, Error> {
    run.hand_over(optimizer, t, 0)?;
    optimizer.step(at)
}

/// Rank 0 has read a step's error and rank 1 has not: parameters are added on both or on neither.
#[test]
fn an_untold_error_of_one_rank_does_not_part_those_who_add_parameters() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    two(|run, comm| {
        let rank = comm.rank();
        let mut optimizer = run.build(comm).unwrap();
        let pending = step(&run, &mut optimizer, 1, StepArgs { lr: BAD, ..StepArgs::default() }).unwrap();
        if rank == 0 {
            pending.outcome().unwrap_err();
        } else {
            drop(pending);
        }
        let refused = optimizer.add_param_group(more(Layout::builder()), common::adamw(), |_, _| Ok(()));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("lr"), "rank {rank}: {refused}");
        optimizer.add_param_group(more(Layout::builder()), common::adamw(), |_, _| Ok(())).unwrap();
        assert_eq!(optimizer.params().count(), run.lens.len() + 1);
    });
}

#[test]
fn an_untold_error_of_one_rank_does_not_part_those_who_minimize() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    two(|run, comm| {
        let rank = comm.rank();
        let mut optimizer = run.build(comm).unwrap();
        let pending = step(&run, &mut optimizer, 1, StepArgs { lr: BAD, ..StepArgs::default() }).unwrap();
        if rank == 0 {
            pending.outcome().unwrap_err();
        } else {
            drop(pending);
        }
        run.options.queue.synchronize().unwrap();
        let until = Until { max_iter: 3, ..Until::default() };
        let mut minimize = || {
            optimizer.minimize(
                until,
                |t| run.at(t),
                1,
                |batch| {
                    for i in 0..run.lens.len() {
                        let grad = run.gradient(1, 0, rank, i);
                        common::with_dtype(run.grads, &grad, |grad| {
                            batch.grad(&common::name(i), common::put(grad, &run.options.queue).as_slice())
                        })?;
                    }
                    Ok::<_, Error>(1.0)
                },
            )
        };
        let refused = minimize().unwrap_err().to_string();
        assert!(refused.contains("lr"), "rank {rank}: {refused}");
        minimize().unwrap();
    });
}

/// A rank that still holds a step's [`Pending`](meshstep_shard::Pending) gets its error there only.
#[test]
fn an_error_is_told_to_who_can_still_ask() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    two(|run, comm| {
        let mut optimizer = run.build(comm).unwrap();
        let first = step(&run, &mut optimizer, 1, StepArgs { lr: BAD, ..StepArgs::default() }).unwrap();
        run.options.queue.synchronize().unwrap();
        let second = step(&run, &mut optimizer, 2, run.at(2)).unwrap();
        run.options.queue.synchronize().unwrap();
        let third = step(&run, &mut optimizer, 3, run.at(3)).unwrap();
        assert!(first.outcome().unwrap_err().to_string().contains("lr"));
        assert!(matches!(second.outcome().unwrap(), Outcome::Applied { .. }));
        drop(third);
        run.options.queue.synchronize().unwrap();
        step(&run, &mut optimizer, 4, run.at(4)).unwrap().outcome().unwrap();
    });
}

/// This rank has launched a step that the other never takes.
#[test]
fn a_step_whose_collectives_were_ended_is_no_success() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let both = Barrier::new(2);
    two(|run, comm| {
        let mut optimizer = run.build(comm.clone()).unwrap();
        step(&run, &mut optimizer, 1, run.at(1)).unwrap().outcome().unwrap();
        run.hand_over(&mut optimizer, 2, 0).unwrap();
        if comm.rank() == 1 {
            both.wait();
            comm.abort();
            return;
        }
        let pending = optimizer.step(run.at(2)).unwrap();
        both.wait();
        let told = pending.outcome();
        assert!(matches!(told, Err(Error::Comm(_))), "{told:?}");
        assert!(matches!(optimizer.state("p0"), Err(Error::Comm(_))));
        assert!(matches!(run.hand_over(&mut optimizer, 3, 0), Err(Error::Comm(_))));
    });
}

/// Rank 1 runs out of memory in the middle of its first step, which builds tables.
#[test]
fn who_cannot_go_on_with_a_step_ends_it_for_all() {
    let _alone = alone();
    if !stand_in() || !room_for(2) {
        return println!("skipped: needs the stand-ins");
    }
    for stage in [Stage::Zero1, Stage::Zero2] {
        for at in 0..4 {
            let both = Barrier::new(2);
            two(|run, comm| {
                let run = run.stage(stage);
                let mut optimizer = run.build(comm.clone()).unwrap();
                let names = [c"cuMemAlloc_v2", c"cuMemHostAlloc", c"cuLaunchKernel", c"cuMemcpyDtoHAsync_v2"];
                run.hand_over(&mut optimizer, 1, 0).unwrap();
                both.wait();
                if comm.rank() == 1 {
                    fail(names[at], 2);
                    let told = optimizer.step(run.at(1)).map(drop);
                    assert!(told.is_err(), "{:?}", names[at]);
                    both.wait();
                    assert!(matches!(optimizer.micro_batch(1).map(drop), Err(Error::Comm(_))), "{told:?}");
                } else {
                    both.wait();
                    let told = optimizer.step(run.at(1)).and_then(meshstep_shard::Pending::outcome);
                    assert!(matches!(told, Err(Error::Comm(_))), "{:?}: {told:?}", names[at]);
                }
            });
        }
    }
}

/// An option that one rank alone has.
#[test]
fn what_one_rank_cannot_do_is_an_error_on_all() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    two(|run, comm| {
        let rank = comm.rank();
        let norm = if rank == 1 { Norm::P(3.0) } else { Norm::L2 };
        let odd = Run { options: Options { norm, ..run.options.clone() }, ..run.clone() };
        let told = odd.build(comm.clone()).map(drop).unwrap_err().to_string();
        assert!(told.contains("p-norm"), "rank {rank}: {told}");
        run.build(comm).unwrap();
    });
}

#[test]
fn what_works_on_the_cpu_alone_says_so() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    two(|run, comm| {
        let made =
            Optimizer::new(comm.clone(), run.layout(), Lamb::default(), |_, _| Ok(()), run.options.clone());
        let told = made.map(drop).unwrap_err();
        assert!(matches!(told, Error::Optim(meshstep_optim::Error::NoKernels { rule: "lamb" })), "{told}");
        run.build(comm).unwrap();
    });
}

/// Frozen and empty parameters, clipping before the reduction, and `t` afterwards.
#[test]
fn odd_layouts_and_local_clipping_are_those_of_loopback() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let layout = || {
        let layout = Layout::builder().param("p0", &[1], DType::F32).frozen("p1", &[9], DType::F32);
        layout.param("p2", &[0], DType::F32).param("p3", &[3], DType::F32).build().unwrap()
    };
    let odd = |run: &Run, comm: Arc<dyn Communicator>, stage: Stage| {
        let rank = comm.rank();
        let sent = matches!(stage, Stage::Zero2 | Stage::Zero3);
        let clip = if sent { Clip::AfterReduce } else { Clip::BeforeReduce };
        let options = Options { stage, clip, meter: Meter::new(), ..run.options.clone() };
        let queue = options.queue.clone();
        let mut optimizer = Optimizer::new(comm, layout(), common::adamw(), |_, _| Ok(()), options).unwrap();
        let mut told = Vec::new();
        for t in 1..4 {
            let batch = optimizer.micro_batch(1).unwrap();
            for (name, len) in [("p3", 3), ("p2", 0), ("p0", 1)] {
                let grad: Vec<f32> = (0..len).map(|i| (1 + rank + i) as f32 * t as f32).collect();
                batch.grad(name, common::put((&grad[..]).into(), &queue).as_slice()).unwrap();
            }
            batch.finish().unwrap();
            let at = StepArgs { lr: 0.1, max_norm: Some(2.0), ..StepArgs::default() };
            match optimizer.step(at).unwrap().outcome().unwrap() {
                Outcome::Applied { norm, coef, .. } => told.push(format!("{norm:e} {coef:e}")),
                other => panic!("{other:?}"),
            }
            told.push(format!("{:?}", optimizer.local_clip()));
        }
        told.push(format!("{:?} {:?}", common::params(&optimizer), common::state(&optimizer)));
        told
    };
    for stage in common::STAGES {
        let run = Run { ranks: 2, ..Run::default() };
        let here = meshstep_comm::loopback::spawn(2, |comm| odd(&run, comm, stage)).unwrap();
        let there = two(|run, comm| odd(&run, comm, stage));
        assert_eq!(there, here, "{stage:?}");
    }
}

/// An optimizer is dropped before its steps have ended, and their outcomes are read afterwards.
#[test]
fn steps_in_flight_outlive_their_optimizer() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let meter = Meter::new();
    two(|run, comm| {
        let options = Options { meter: meter.clone(), ..run.options.clone() };
        let mut optimizer = Optimizer::new(comm, run.layout(), run.groups(), |_, _| Ok(()), options).unwrap();
        let pending: Vec<_> = (1..=3).map(|t| step(&run, &mut optimizer, t, run.at(t)).unwrap()).collect();
        drop(optimizer);
        for pending in pending {
            assert!(matches!(pending.outcome().unwrap(), Outcome::Applied { .. }));
        }
    });
    assert_eq!(meter.live_total(), 0);
}

/// Runs one operation between two steps, selected by a number, and returns its outcome.
fn tell(run: &Run, optimizer: &mut Optimizer, t: u64, what: u64) -> String {
    let rank = optimizer.comm().rank();
    let said =
        |result: Result<(), Error>| result.map_or_else(|error| error.to_string(), |()| "good".to_owned());
    match what % 8 {
        0 => {
            let name = format!("more{t}");
            let layout = Layout::builder().param(&*name, &[40], DType::F32).build().unwrap();
            said(optimizer.add_param_group(layout, common::adamw(), |_, _| Ok(())))
        }
        1 => {
            drop(optimizer.micro_batch(1).unwrap());
            said(optimizer.discard_gradients())
        }
        2 => {
            let state = optimizer.loss_scale_state().map(|mut state| {
                state.scale *= 2.0;
                state.growth_tracker = 1;
                state
            });
            state.map_or(String::new(), |state| said(optimizer.restore_loss_scale(state)))
        }
        3 => said(optimizer.restore_loss_scale(LossScaleState {
            scale: 8.0,
            growth_tracker: 0,
            hysteresis_tracker: 0,
        })),
        _ => {
            let names: Vec<_> = optimizer.params().map(|p| (p.name().to_owned(), p.len())).collect();
            let batch = optimizer.micro_batch(1 + rank as u64).unwrap();
            for (i, (name, len)) in names.into_iter().enumerate() {
                let bad = what % 8 == 4 && rank == 1 && i == 3;
                let value = |j: usize| if bad { f32::NAN } else { ((i + j + rank) % 7) as f32 - 3.0 };
                let grad: Vec<f32> = (0..len).map(value).collect();
                batch.grad(&name, common::put((&grad[..]).into(), &run.options.queue).as_slice()).unwrap();
            }
            batch.finish().unwrap();
            let lr = if what % 8 == 5 && what & 8 != 0 { BAD } else { 0.01 };
            let at = StepArgs { lr, max_norm: (what & 16 != 0).then_some(1.0), ..StepArgs::default() };
            match optimizer.step(at).and_then(meshstep_shard::Pending::outcome) {
                Ok(Outcome::Applied { norm, coef, .. }) => format!("applied {norm:e} {coef:e}"),
                Ok(Outcome::Skipped { non_finite, in_a_row, .. }) => {
                    format!("skipped {non_finite} {in_a_row}")
                }
                Err(error) => error.to_string(),
            }
        }
    }
}

/// Steps, skips, faults, parameters added, gradients dropped and loss scales restored, in any order.
#[test]
fn any_sequence_ends_as_on_loopback() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    for seed in 0..u64::from(common::cases(10, 200)) {
        let any = |t: u64| common::hash(&[seed, t]);
        let stage = common::STAGES[seed as usize % common::STAGES.len()];
        let dynamic =
            DynamicLossScale { init_scale: 8.0, growth_interval: 2, hysteresis: 2, ..Default::default() };
        let loss_scale = [None, Some(LossScale::Static(8.0)), Some(LossScale::Dynamic(dynamic))];
        let story = |run: &Run, comm: Arc<dyn Communicator>| {
            let clip = if any(101) % 2 == 0 && !matches!(stage, Stage::Zero2 | Stage::Zero3) {
                Clip::BeforeReduce
            } else {
                Clip::AfterReduce
            };
            let combine = [Combine::Mean, Combine::Sum, Combine::Weighted][any(102) as usize % 3];
            let loss_scale = loss_scale[any(103) as usize % 3];
            let (meter, overlap) = (Meter::new(), any(104) % 2 == 0);
            let (max_skips, queue) = (2, run.options.queue.clone());
            let options = Options {
                stage,
                clip,
                combine,
                loss_scale,
                meter,
                overlap,
                max_skips,
                queue,
                ..run.options.clone()
            };
            let run = Run { options, ..run.clone() };
            let mut optimizer = run.build(comm).unwrap();
            (1..20)
                .map(|t| {
                    let told = tell(&run, &mut optimizer, t, any(t));
                    let scale = optimizer.loss_scale_state();
                    let (params, state) = (common::params(&optimizer), common::state(&optimizer));
                    format!("{} {told} {scale:?} {params:?} {state:?}", any(t) % 8)
                })
                .collect::<Vec<_>>()
        };
        let run = Run { ranks: 2, ..Run::default() };
        let here = meshstep_comm::loopback::spawn(2, |comm| story(&run, comm)).unwrap();
        let there = two(|run, comm| story(&run, comm));
        for (here, there) in here.iter().flatten().zip(there.iter().flatten()) {
            assert_eq!(there, here, "seed {seed}, {stage:?}");
        }
    }
}
