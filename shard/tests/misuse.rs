//! Bad input, on one rank or on all: an error that names the thing, the same on every rank; nothing changes.

#![allow(clippy::unwrap_used, reason = "tests say what is wrong by failing")]

mod common;

use common::{Run, STAGES, adamw, name, params, state};
use meshstep_comm::{Action, Communicator, InFlight, Op, Stats, Tickets, loopback};
use meshstep_optim::{AdamW, Norm, Sgd};
use meshstep_shard::{At, Combine, Error, Fault, Groups, Initial, Optimizer, Options, Outcome, Plan, Stage};
use meshstep_tensor::{Buffer, DType, Layout, Param, Queue, Slice, SliceMut};
use std::sync::{Arc, Mutex};

fn zeros(_: &Param, _: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

fn layout(names: &[&str]) -> Layout {
    names.iter().fold(Layout::builder(), |b, n| b.param(*n, &[3, 2], DType::F32)).build().unwrap()
}

/// What each of 3 ranks is told when it builds with what `of` gives it.
fn built(of: impl Fn(usize) -> (Layout, Groups, Options) + Sync) -> Vec<String> {
    let told = loopback::spawn(3, |comm| {
        let (layout, groups, options) = of(comm.rank());
        match Optimizer::new(comm, layout, groups, zeros, options) {
            Ok(_) => "built".to_owned(),
            Err(error) => error.to_string(),
        }
    });
    told.unwrap()
}

fn differs(of: impl Fn(bool) -> (Layout, Groups, Options) + Sync, expected: &str) {
    for odd in 1..3 {
        let told = built(|rank| of(rank == odd));
        assert!(told.iter().all(|t| *t == expected.replace("{odd}", &odd.to_string())), "{told:#?}");
    }
}

fn usual() -> (Layout, Groups, Options) {
    (layout(&["a", "b"]), Groups::new(adamw()), Options::default())
}

#[test]
fn ranks_that_were_given_different_things_are_told_what_differs() {
    let name = |odd| if odd { (layout(&["a", "c"]), usual().1, usual().2) } else { usual() };
    differs(
        name,
        "ranks disagree on parameter 1: rank 0 has \"b\" [3, 2] f32, rank {odd} has \"c\" [3, 2] f32",
    );
    let order = |odd| if odd { (layout(&["b", "a"]), usual().1, usual().2) } else { usual() };
    differs(
        order,
        "ranks disagree on parameter 0: rank 0 has \"a\" [3, 2] f32, rank {odd} has \"b\" [3, 2] f32",
    );
    let shape = |odd| {
        let other = Layout::builder().param("a", &[3, 2], DType::F32).param("b", &[2, 3], DType::F32);
        if odd { (other.build().unwrap(), usual().1, usual().2) } else { usual() }
    };
    differs(
        shape,
        "ranks disagree on parameter 1: rank 0 has \"b\" [3, 2] f32, rank {odd} has \"b\" [2, 3] f32",
    );
    let rule = |odd| {
        let groups = Groups::new(AdamW { beta2: if odd { 0.99 } else { 0.999 }, ..adamw() });
        (usual().0, groups, usual().2)
    };
    differs(rule, "ranks disagree on beta2 of group 0: rank 0 has 0.999, rank {odd} has 0.99");
    let stage = |odd| {
        (
            usual().0,
            usual().1,
            Options { stage: if odd { Stage::Zero2 } else { Stage::Zero1 }, ..Options::default() },
        )
    };
    differs(stage, "ranks disagree on stage: rank 0 has Zero1, rank {odd} has Zero2");
}

#[test]
fn what_one_rank_cannot_do_no_rank_does() {
    for odd in 0..3 {
        let told = built(|rank| {
            let beta2 = if rank == odd { 1.5 } else { 0.999 };
            (usual().0, Groups::new(AdamW { beta2, ..adamw() }), usual().2)
        });
        for (rank, told) in told.iter().enumerate() {
            if rank == odd {
                assert!(told.contains("beta2") && told.contains("1.5"), "{told}");
            } else {
                let said = format!("ranks disagree on this call: rank 0 has no objection, rank {odd} has");
                assert!(odd == 0 || told.contains(&said), "{told}");
                assert!(told.contains("beta2"), "{told}");
            }
        }
    }
}

#[test]
fn contradictions_are_refused() {
    let refused = |of: (Layout, Groups, Options), needles: &[&str]| {
        let told = built(|_| of.clone());
        assert!(told.iter().all(|t| needles.iter().all(|n| t.contains(n))), "{told:?} {needles:?}");
    };
    let (layout, groups, options) = usual();
    let bf16 = Layout::builder().param("half", &[3], DType::BF16).build().unwrap();
    refused((bf16.clone(), groups.clone(), options.clone()), &["half", "bf16", "master: true"]);
    let wide = Options { grads: Some(DType::F64), ..options.clone() };
    refused((layout.clone(), groups.clone(), wide), &["\"b\"", "f64 gradients"]);
    let weighted = Options { grads: Some(DType::F16), combine: Combine::Weighted, ..options.clone() };
    refused((layout.clone(), groups.clone(), weighted), &["f16", "bf16 or f32"]);
    refused(
        (layout.clone(), groups.clone(), Options { bucket_len: Some(0), ..options.clone() }),
        &["bucket_len"],
    );
    refused((layout.clone(), groups.clone(), Options { norm: Norm::P(-1.0), ..options.clone() }), &["-1"]);
    let unknown = groups.clone().with(adamw(), ["nope"]);
    refused((layout.clone(), unknown, options.clone()), &["nope"]);
    let twice = groups.clone().with(adamw(), ["a"]).with(adamw(), ["a"]);
    refused((layout.clone(), twice, options.clone()), &["\"a\"", "two groups"]);
    let mixed = groups.clone().with(Sgd::default(), ["a"]);
    refused((layout.clone(), mixed, options.clone()), &["hyperparameters only"]);
    refused(
        (layout.clone(), groups.clone().with_lr(adamw(), -1.0, ["a"]), options.clone()),
        &["lr_scale", "-1"],
    );
    let frozen = Layout::builder().frozen("a", &[3], DType::F32).build().unwrap();
    refused((frozen, groups, options), &["frozen"]);
    assert!(matches!(Plan::new(&layout, 0, &Options::default()), Err(Error::NoRanks)));
    assert!(matches!(
        Plan::new(&layout, usize::MAX / 2, &Options::default()),
        Err(Error::TooManyRanks { .. })
    ));
}

#[test]
fn initial_values_are_compared_or_fail_together() {
    let build = |initial: Initial, values: &(dyn Fn(usize, &str) -> Result<f32, ()> + Sync)| {
        let told = loopback::spawn(3, |comm| {
            let rank = comm.rank();
            let fill = |p: &Param, mut out: SliceMut<'_>| match values(rank, p.name()) {
                Ok(value) => out.copy_from(Slice::from(&[value; 6][..])),
                Err(()) => out.copy_from(Slice::from(&[0f32; 5][..])),
            };
            let options = Options { initial, ..Options::default() };
            Optimizer::new(comm, layout(&["a", "b"]), adamw(), fill, options)
                .map(drop)
                .map_err(|e| e.to_string())
        });
        told.unwrap()
    };
    assert!(build(Initial::Compare, &|_, _| Ok(1.0)).iter().all(Result::is_ok));
    let differing = build(Initial::Compare, &|rank, name| Ok(f32::from(rank == 2 && name == "b")));
    assert!(
        differing
            .iter()
            .all(|d| d.as_ref().is_err_and(|d| d.contains("values of \"b\"") && d.contains("rank 2")))
    );
    for (initial, bad) in [(Initial::Compare, 1), (Initial::Broadcast, 0)] {
        let failing = build(initial, &|rank, _| if rank == bad { Err(()) } else { Ok(1.0) });
        assert!(failing.iter().all(|f| f.as_ref().is_err_and(|f| f.contains("\"a\""))), "{failing:?}");
    }
}

#[test]
fn a_wrong_gradient_is_refused_and_the_right_one_still_taken() {
    loopback::spawn(2, |comm| {
        let mut opt =
            Optimizer::new(comm, layout(&["a"]), Sgd::default(), zeros, Options::default()).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        assert!(matches!(mb.grad("x", &[1f32][..]), Err(Error::UnknownParam { count: 1, .. })));
        assert!(matches!(mb.slot("x"), Err(Error::UnknownParam { .. })));
        assert!(matches!(mb.grad("a", &[1f32][..]), Err(Error::GradLen { expected: 6, given: 1, .. })));
        let wide = mb.grad("a", &[1f64; 6][..]);
        assert!(matches!(wide, Err(Error::GradDType { expected: DType::F32, given: DType::F64, .. })));
        mb.grad("a", &[1f32; 6][..]).unwrap();
        assert!(matches!(mb.grad("a", &[1f32; 6][..]), Err(Error::GradTwice { .. })));
        mb.finish().unwrap();
        assert!(matches!(opt.micro_batch(1).map(drop), Err(Error::StepDue)));
        let _ = opt.step(At { lr: 1.0, ..At::default() }).unwrap();
        assert_eq!(opt.param("a").unwrap().typed::<f32>().unwrap(), [-1.0; 6]);
    })
    .unwrap();
}

/// One rank does `wrong` in its second step; every rank gets the same error, nothing changes, and training goes on.
fn one_rank_errs(stage: Stage, wrong: &(dyn Fn(&Run, &mut Optimizer) -> Option<At> + Sync)) -> Error {
    let run = Run::default().stage(stage);
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
        let at = if rank == 2 { wrong(&run, &mut opt) } else { Some(good(&mut opt, 2)) };
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
    type Wrong = fn(&Run, &mut Optimizer) -> Option<At>;
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
                Some(At { lr: f64::NAN, ..run.at(2) })
            },
            Fault::Lr,
        ),
        (
            |run, opt| {
                run.hand_over(opt, 2, 0).unwrap();
                Some(At { max_norm: Some(0.0), ..run.at(2) })
            },
            Fault::MaxNorm,
        ),
        (
            |run, opt| {
                run.hand_over(opt, 2, 0).unwrap();
                Some(At { grad_scale: -1.0, ..run.at(2) })
            },
            Fault::GradScale,
        ),
    ];
    for stage in STAGES {
        for (wrong, expected) in &wrongs {
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
    for stage in STAGES {
        let lr = one_rank_errs(stage, &|run, opt| {
            run.hand_over(opt, 2, 0).unwrap();
            Some(At { lr: 0.25, ..run.at(2) })
        });
        let told = lr.to_string();
        assert_eq!(told, "ranks disagree on lr: rank 0 has 0.005, rank 2 has 0.25", "{stage:?}");
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

/// A micro-batch dropped in the middle of several: the other ranks' buckets still meet this rank's zeros.
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

/// A scalar that f64 holds and f32 does not is refused before anything is written, on every rank.
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
            let step = opt.step(At { lr, ..At::default() });
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

/// A slot that never comes back cannot be waited for: every rank is told at once.
#[test]
fn a_leaked_slot_is_an_error_on_every_rank() {
    for stage in STAGES {
        let options = Options { stage, bucket_len: Some(64), ..Options::default() };
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
                assert!(matches!(opt.step(At::default()).map(drop), Err(Error::Comm(_))), "{stage:?}");
            }
            assert!(matches!(opt.micro_batch(1).map(drop), Err(Error::Comm(_))));
            assert!(matches!(opt.discard_gradients(), Err(Error::Comm(_))));
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
        assert!(matches!(heavy, Err(Error::WeightTooLarge { max: 16_777_216, .. })));
        assert!(opt.micro_batch(1 << 24).is_ok());
    })
    .unwrap();
}

/// A backend may leave anything in the chunks that a reduce-scatter does not promise.
#[derive(Debug)]
struct Scribbling {
    inner: Arc<dyn Communicator>,
    done: Arc<Done>,
}

#[derive(Debug, Default)]
struct Done(Mutex<Vec<Option<Finished>>>);

type Finished = (Buffer, Result<(), meshstep_comm::Error>);

impl Tickets for Done {
    fn redeem(&self, ticket: usize, _on: &Queue) -> Finished {
        self.0.lock().unwrap()[ticket].take().unwrap()
    }

    fn is_done(&self, _ticket: usize) -> bool {
        true
    }

    fn forget(&self, ticket: usize) {
        self.0.lock().unwrap()[ticket].take();
    }
}

impl Communicator for Scribbling {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn start(
        &self,
        op: Op,
        buffer: Buffer,
        after: &Queue,
    ) -> Result<InFlight, (Buffer, meshstep_comm::Error)> {
        let (mut buffer, result) = self.inner.start(op, buffer, after)?.wait(after);
        if let Action::ReduceScatter(_) = op.action() {
            let (rank, chunk) = (self.rank(), buffer.len() / self.world_size());
            let values = buffer.typed_mut::<f32>().unwrap();
            values.iter_mut().enumerate().filter(|(i, _)| i / chunk != rank).for_each(|(_, x)| *x = 7.0);
        }
        let mut done = self.done.0.lock().unwrap();
        done.push(Some((buffer, result)));
        Ok(InFlight::new(Arc::clone(&self.done) as Arc<dyn Tickets>, done.len() - 1))
    }

    fn split(
        &self,
        color: Option<u32>,
        key: i64,
    ) -> Result<Option<Arc<dyn Communicator>>, meshstep_comm::Error> {
        self.inner.split(color, key)
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

#[test]
fn what_a_reduce_scatter_leaves_elsewhere_does_not_count() {
    for stage in STAGES {
        let run = Run { lens: vec![10, 3, 100], ..Run::default() }.stage(stage);
        let norms = loopback::spawn(4, |inner| {
            let comm: Arc<dyn Communicator> = Arc::new(Scribbling { inner, done: Arc::default() });
            let mut opt = run.build(comm).unwrap();
            let mut norms = Vec::new();
            for t in 1..=run.steps {
                run.hand_over(&mut opt, t, 0).unwrap();
                match opt.step(run.at(t)).unwrap().outcome().unwrap() {
                    Outcome::Applied { norm, .. } => norms.push(norm.to_bits()),
                    skipped => panic!("{skipped:?}"),
                }
            }
            norms
        });
        assert!(norms.unwrap().iter().all(|n| *n == run.run().norms), "{stage:?}");
    }
}

/// A rank that leaves poisons the optimizer of the others: typed errors at once, and for good.
#[test]
fn a_rank_that_leaves_is_an_error_on_the_others() {
    for stage in STAGES {
        let run = Run::default().stage(stage);
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
