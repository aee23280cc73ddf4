//! A fault on one rank, in a step or between two, is an error on every rank; afterwards training continues, or every rank gets an
//! error.

use crate::common::{Run, STAGES, adamw, draws, name, params, state};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::Sgd;
use meshstep_shard::{
    Combine, Error, Fault, Groups, NonFinite, Optimizer, Options, Stage, StepArgs, WeightError,
};
use meshstep_tensor::{DType, Layout, Param, SliceMut};
use std::sync::{Arc, Barrier};

fn zeros(_: &Param, _: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

fn layout(names: &[&str]) -> Layout {
    names.iter().fold(Layout::builder(), |b, n| b.param(*n, &[3, 2], DType::F32)).build().unwrap()
}

/// A run that updates a bucket before all of them have arrived.
fn ahead() -> Run {
    let options = Options { non_finite: NonFinite::Propagate, ..Run::default().options };
    Run { max_norm: None, options, ..Run::default() }
}

type Wrong<'a> = &'a (dyn Fn(&Run, &mut Optimizer) -> Option<StepArgs> + Sync);

/// One rank does `wrong` in its second step; every rank gets the same error, nothing changes, and training continues: also if
/// buckets are updated before all of them have arrived.
fn one_rank_errs(stage: Stage, wrong: Wrong<'_>) -> Error {
    let [error, early] = [Run::default(), ahead()].map(|run| one_rank_errs_in(&run.stage(stage), wrong));
    assert_eq!(error.to_string(), early.to_string());
    error
}

fn one_rank_errs_in(run: &Run, wrong: Wrong<'_>) -> Error {
    let errors = loopback::spawn(4, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        let good = |opt: &mut Optimizer, t| {
            run.hand_over(opt, t, 0).unwrap();
            run.at(t)
        };
        let at = good(&mut opt, 1);
        let _ = opt.step(at).unwrap();
        let before = (params(&opt), state(&opt));
        let at = if rank == 2 { wrong(run, &mut opt) } else { Some(good(&mut opt, 2)) };
        let error = opt.step(at.unwrap_or_default()).map(drop).unwrap_err();
        assert_eq!((params(&opt), state(&opt)), before);
        for t in 2..=3 {
            let at = good(&mut opt, t);
            let _ = opt.step(at).unwrap();
        }
        (error, params(&opt))
    });
    let errors = errors.unwrap();
    let expected = run.run().params;
    assert!(errors.iter().all(|(e, end)| e.to_string() == errors[0].0.to_string() && *end == expected));
    errors.into_iter().next().unwrap().0
}

#[test]
fn a_fault_on_one_rank_is_every_ranks_error() {
    type Wrong = fn(&Run, &mut Optimizer) -> Option<StepArgs>;
    let wrongs: [(Wrong, Fault); 6] = [
        (|_, _| None, Fault::NoMicroBatch),
        (
            |_, opt| {
                drop(opt.micro_batch(1).unwrap());
                None
            },
            Fault::Unfinished,
        ),
        (
            |run, opt| {
                let mb = opt.micro_batch(1).unwrap();
                for i in [5, 4, 0, 1] {
                    mb.grad(&name(i), &vec![1f32; run.lens[i]][..]).unwrap();
                }
                mb.finish().unwrap();
                Some(run.at(2))
            },
            Fault::MissingGradient { name: "p3".into() },
        ),
        (
            |run, opt| {
                run.hand_over(opt, 2, 0).unwrap();
                Some(StepArgs { lr: f64::NAN, ..run.at(2) })
            },
            Fault::Lr,
        ),
        (
            |run, opt| {
                run.hand_over(opt, 2, 0).unwrap();
                Some(StepArgs { max_norm: Some(0.0), ..run.at(2) })
            },
            Fault::MaxNorm,
        ),
        (
            |run, opt| {
                run.hand_over(opt, 2, 0).unwrap();
                Some(StepArgs { grad_scale: -1.0, ..run.at(2) })
            },
            Fault::GradScale,
        ),
    ];
    let mut drawn = draws(1);
    for stage in STAGES {
        for (wrong, expected) in wrongs.iter().filter(|_| drawn()) {
            let error = one_rank_errs(stage, wrong);
            assert!(
                matches!(&error, Error::Fault { rank: 2, fault } if fault == expected),
                "{stage:?}: {error}"
            );
        }
    }
}

#[test]
fn scalars_that_differ_are_named() {
    let mut drawn = draws(1);
    for stage in STAGES.into_iter().filter(|_| drawn()) {
        let lr = one_rank_errs(stage, &|run, opt| {
            run.hand_over(opt, 2, 0).unwrap();
            Some(StepArgs { lr: 0.25, ..run.at(2) })
        });
        let told = lr.to_string();
        assert_eq!(told, "ranks disagree on lr: rank 0 has 0.005, rank 2 has 0.25", "{stage:?}");
        // One ulp is a difference, in either direction.
        for (next, theirs) in [
            (f64::next_up as fn(f64) -> f64, "0.005000000000000001"),
            (f64::next_down, "0.004999999999999999"),
        ] {
            let told = one_rank_errs(stage, &|run, opt| {
                run.hand_over(opt, 2, 0).unwrap();
                Some(StepArgs { lr: next(run.at(2).lr), ..run.at(2) })
            });
            let expected = format!("ranks disagree on lr: rank 0 has 0.005, rank 2 has {theirs}");
            assert_eq!(told.to_string(), expected, "{stage:?}");
        }
    }
}

#[test]
fn gradients_are_discarded_together_finished_or_not() {
    for stage in STAGES {
        let run = Run::default().stage(stage);
        let ends = loopback::spawn(3, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            let mb = opt.micro_batch(1).unwrap();
            if rank == 1 {
                drop(mb);
                assert!(matches!(opt.micro_batch(1).map(drop), Err(Error::StepDue)));
            } else {
                mb.grad("p3", &[1f32; 130][..]).unwrap();
                mb.finish().unwrap();
            }
            opt.discard_gradients().unwrap();
            for t in 1..=3 {
                run.hand_over(&mut opt, t, 0).unwrap();
                let _ = opt.step(run.at(t)).unwrap();
            }
            params(&opt)
        });
        let expected = Run { ranks: 3, ..run.clone() }.run().params;
        assert!(ends.unwrap().iter().all(|end| *end == expected), "{stage:?}");
    }
}

/// A micro-batch of several is dropped: the other ranks' buckets still meet this rank's zeros.
#[test]
fn a_dropped_accumulation_is_a_fault_and_no_more() {
    for stage in STAGES {
        let run = Run { micro_batches: 3, ..Run::default() }.stage(stage);
        let ends = loopback::spawn(3, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            for batch in 0..3 {
                if rank == 1 && batch == 0 {
                    drop(opt.accumulate(1).unwrap());
                } else {
                    run.hand_over(&mut opt, 1, batch).unwrap();
                }
            }
            let step = opt.step(run.at(1)).map(drop).unwrap_err();
            assert!(matches!(step, Error::Fault { rank: 1, fault: Fault::Unfinished }), "{stage:?}: {step}");
            for t in 1..=3 {
                (0..3).for_each(|batch| run.hand_over(&mut opt, t, batch).unwrap());
                let _ = opt.step(run.at(t)).unwrap();
            }
            params(&opt)
        });
        let expected = Run { ranks: 3, ..run.clone() }.run().params;
        assert!(ends.unwrap().iter().all(|end| *end == expected), "{stage:?}");
    }
}

/// A scalar that f64 can hold and f32 cannot is refused on every rank, before anything is written.
#[test]
fn a_rate_beyond_f32_is_refused_before_anything_is_written() {
    for (lr, lr_scale) in [(1e39, 1.0), (1e10, 1e30), (f64::from_bits(u64::MAX), 1.0)] {
        loopback::spawn(4, |comm| {
            let wide = Layout::builder().param("d", &[4], DType::F64).build().unwrap();
            let mut opt = Optimizer::new(comm, wide, Sgd::default(), zeros, Options::default()).unwrap();
            let groups = Groups::new(adamw()).with_lr(adamw(), lr_scale, ["w"]);
            let narrow = Layout::builder().param("w", &[10], DType::F32).build().unwrap();
            opt.add_param_group(narrow, groups, zeros).unwrap();
            let mb = opt.micro_batch(1).unwrap();
            mb.grad("d", &[1f64; 4][..]).unwrap();
            mb.grad("w", &[1f32; 10][..]).unwrap();
            mb.finish().unwrap();
            let step = opt.step(StepArgs { lr, ..StepArgs::default() });
            assert!(matches!(step, Err(Error::Fault { fault: Fault::Lr, .. })), "{step:?}");
            assert_eq!(opt.param("d").unwrap().typed::<f64>().unwrap(), [0.0; 4]);
        })
        .unwrap();
    }
}

#[test]
fn a_group_added_while_a_step_is_due_is_refused_on_every_rank() {
    let told = loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let mut opt = Optimizer::new(comm, layout(&["a"]), adamw(), zeros, Options::default()).unwrap();
        if rank == 1 {
            let mb = opt.accumulate(1).unwrap();
            mb.grad("a", &[1f32; 6][..]).unwrap();
            mb.finish().unwrap();
        }
        opt.add_param_group(layout(&["b"]), adamw(), zeros).unwrap_err().to_string()
    });
    let told = told.unwrap();
    assert!(told[0].contains("rank 0 has no objection, rank 1 has the step's last micro-batch"), "{told:?}");
    assert!(told[1].starts_with("the step's last micro-batch"), "{told:?}");
}

/// A slot that never comes back cannot be waited for: every rank gets an error at once.
#[test]
fn a_leaked_slot_is_an_error_on_every_rank() {
    for (stage, non_finite) in
        STAGES.into_iter().flat_map(|s| [(s, NonFinite::Skip), (s, NonFinite::Propagate)])
    {
        let options = Options { stage, bucket_len: Some(64), non_finite, ..Options::default() };
        // No rank leaves before every rank has its error.
        let told = Barrier::new(2);
        loopback::spawn(2, |comm| {
            let rank = comm.rank();
            let mut opt = Optimizer::new(comm, layout(&["a", "b"]), adamw(), zeros, options.clone()).unwrap();
            let mb = opt.micro_batch(1).unwrap();
            mb.grad("b", &[1f32; 6][..]).unwrap();
            if rank == 0 {
                std::mem::forget(mb.slot("a").unwrap());
                let lost = mb.finish().unwrap_err();
                assert!(matches!(&lost, Error::SlotLeaked { name } if name == "a"), "{lost}");
            } else {
                // The other rank may have given up by now.
                let _ = mb.grad("a", &[1f32; 6][..]);
                let _ = mb.finish();
            }
            for _ in 0..2 {
                assert!(matches!(opt.step(StepArgs::default()).map(drop), Err(Error::Comm(_))), "{stage:?}");
            }
            assert!(matches!(opt.micro_batch(1).map(drop), Err(Error::Comm(_))));
            assert!(matches!(opt.discard_gradients(), Err(Error::Comm(_))));
            told.wait();
        })
        .unwrap();
    }
}

#[test]
fn a_weight_that_f32_cannot_multiply_by_is_refused() {
    loopback::spawn(1, |comm| {
        let options = Options { combine: Combine::Weighted, ..Options::default() };
        let mut opt = Optimizer::new(comm, layout(&["a"]), Sgd::default(), zeros, options).unwrap();
        let heavy = opt.micro_batch((1 << 24) + 1).map(drop);
        assert!(matches!(heavy, Err(Error::Weights(WeightError::TooLarge { max: 16_777_216, .. }))));
        assert!(opt.micro_batch(1 << 24).is_ok());
    })
    .unwrap();
}

/// A rank that leaves poisons the optimizer of the others: typed errors, at once and in later calls.
#[test]
fn a_rank_that_leaves_is_an_error_on_the_others() {
    for (stage, run) in STAGES.into_iter().flat_map(|s| [(s, Run::default()), (s, ahead())]) {
        let run = run.stage(stage);
        loopback::spawn(3, |comm: Arc<dyn Communicator>| {
            let rank = comm.rank();
            let mut opt = run.build(comm).unwrap();
            if rank == 1 {
                return;
            }
            let _ = run.hand_over(&mut opt, 1, 0);
            for _ in 0..2 {
                let error = opt.step(run.at(1)).map(drop).unwrap_err();
                assert!(matches!(error, Error::Comm(_)), "{error}");
            }
            assert!(matches!(opt.micro_batch(1).map(drop), Err(Error::Comm(_))));
            assert!(matches!(opt.discard_gradients(), Err(Error::Comm(_))));
            assert!(matches!(opt.add_param_group(layout(&["late"]), adamw(), zeros), Err(Error::Comm(_))));
        })
        .unwrap();
    }
}
