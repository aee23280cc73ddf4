//! Closures that fail on one rank, missing gradients, and refusals at construction.

use crate::common::{draws, turns};
use crate::lbfgs::problems::Problem;
use crate::lbfgs::run::{Run, Share};
use crate::lbfgs::{SEARCHES, SMALL, STAGES, at};
use meshstep_comm::{Error as CommError, loopback};
use meshstep_optim::{Lbfgs, LineSearch, Sgd};
use meshstep_shard::{
    Combine, Error, Fault, MicroBatch, Missing, NotForLbfgs, Optimizer, Options, ShardedLbfgs, Stage,
    StepArgs, Until,
};
use meshstep_tensor::{DType, Layout, Meter, SliceMut};
use std::sync::Barrier;
use std::time::Duration;

/// Rank 2's closure fails at its third call, before, amid and after its gradients; then all ranks continue.
#[test]
fn a_closure_that_fails_on_one_rank_fails_everywhere_and_the_run_goes_on() {
    let mut drawn = draws(1);
    for (s, stage) in STAGES.into_iter().enumerate() {
        for (l, search) in SEARCHES.into_iter().enumerate().filter(|_| drawn()) {
            let run = at(&Run::new(Problem::Logistic, SMALL, search), stage);
            let whole = run.run(4).step.report.loss;
            for after in turns(&[0, 2, 4], s + l, 1) {
                let ends = meshstep_comm::loopback::spawn(4, |comm| {
                    let rank = comm.rank();
                    let mut opt = run.build(comm.clone()).unwrap();
                    let mut calls = 0;
                    let first = opt.step(|mb| {
                        calls += 1;
                        let x = run.read(mb)?;
                        if (rank, calls) == (2, 3) {
                            for i in 0..after {
                                mb.grad(&crate::common::name(i), &vec![1.0; run.lens[i]][..])?;
                            }
                            return Err("no data left".into());
                        }
                        let told = run.backward(mb, &x, rank, 4);
                        told.map_err(Box::<dyn std::error::Error + Send + Sync>::from)
                    });
                    let error = first.unwrap_err();
                    match rank {
                        2 => assert_eq!(error.to_string(), "the closure failed: no data left"),
                        _ => assert!(matches!(error, Error::ClosureElsewhere { rank: 2 }), "{error}"),
                    }
                    let again = opt.step(|mb| run.backward(mb, &run.read(mb)?, rank, 4)).unwrap();
                    again.report.loss
                })
                .unwrap();
                assert!((ends[0] - whole).abs() < 1e-8, "{stage:?} {search:?}: {ends:?} {whole}");
            }
        }
    }
}

#[test]
fn a_missing_gradient_is_named_or_counts_as_zeros() {
    let run = Run::new(Problem::LeastSquares, SMALL, LineSearch::StrongWolfe);
    for missing in [Missing::Error, Missing::Zero, Missing::SkipIfMissingEverywhere] {
        let options = Options { missing, ..run.options.clone() };
        let run = Run { options, ..run.clone() };
        meshstep_comm::loopback::spawn(3, |comm| {
            let rank = comm.rank();
            let mut opt = run.build(comm.clone()).unwrap();
            let told = opt.step(|mb| {
                mb.grad("p0", &[1e-9, 0.0, 0.0][..])?;
                mb.grad("p1", &[0.0][..])?;
                if rank != 1 {
                    mb.grad("p3", &[0.0; 6][..])?;
                }
                Ok::<_, Error>(1.0)
            });
            match (missing, rank) {
                (Missing::Error, 1) => {
                    let expected = Fault::MissingGradient { name: "p3".into() };
                    assert!(matches!(told, Err(Error::Fault { rank: 1, fault }) if fault == expected));
                }
                (Missing::Error, _) => assert!(matches!(told, Err(Error::ClosureElsewhere { rank: 1 }))),
                _ => assert_eq!(told.unwrap().report.evaluations, 1),
            }
        })
        .unwrap();
    }
}

#[test]
fn a_start_that_is_not_finite_is_refused_on_all_ranks() {
    let run = Run { share: Share::All, ..Run::new(Problem::LeastSquares, SMALL, LineSearch::None) };
    meshstep_comm::loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let mut opt = run.build(comm.clone()).unwrap();
        let bad = |mb: &MicroBatch<'_>| {
            run.backward(mb, &run.read(mb)?, 0, 1).map(|l| if rank == 1 { f64::NAN } else { l })
        };
        assert!(matches!(opt.step(bad), Err(Error::NotFinite { non_finite: 0, .. })));
        assert!(opt.optimizer().param("p0").unwrap().typed::<f64>().unwrap().iter().all(|&x| x == 0.0));
        opt.step(|mb| run.backward(mb, &run.read(mb)?, 0, 1)).unwrap();
    })
    .unwrap();
}

fn build(
    rule: Lbfgs,
    dtypes: [DType; 2],
    options: Options,
    comm: std::sync::Arc<dyn meshstep_comm::Communicator>,
) -> Result<(), Error> {
    let layout = Layout::builder().param("a", &[3], dtypes[0]).param("b", &[4], dtypes[1]).build().unwrap();
    let zeros = |_: &_, mut w: SliceMut<'_>| {
        w.zero().unwrap();
        Ok(())
    };
    ShardedLbfgs::new(comm, layout, rule, zeros, options).map(|_| ())
}

#[test]
fn what_cannot_work_is_refused_on_all_ranks() {
    let f64s = [DType::F64; 2];
    let weighted = Options { combine: Combine::Weighted, ..Options::default() };
    let refusals = meshstep_comm::loopback::spawn(3, |comm| {
        let rank = comm.rank();
        let rule = Lbfgs::default();
        let bad = Lbfgs { lr: if rank == 1 { -1.0 } else { 1.0 }, ..rule.clone() };
        let other = Lbfgs { history_len: 5 + rank, ..rule.clone() };
        [
            build(rule.clone(), f64s, weighted.clone(), comm.clone()),
            build(rule, [DType::F64, DType::F32], Options::default(), comm.clone()),
            build(bad, f64s, Options::default(), comm.clone()),
            build(other, f64s, Options::default(), comm),
        ]
    })
    .unwrap();
    for (rank, [weights, mixed, bad, other]) in refusals.into_iter().enumerate() {
        assert!(matches!(weights, Err(Error::NotForLbfgs(NotForLbfgs::Weights))));
        assert!(
            matches!(
                mixed,
                Err(Error::NotForLbfgs(NotForLbfgs::Types { first: DType::F32, other: DType::F64 }))
            ),
            "{mixed:?}"
        );
        match rank {
            1 => assert!(matches!(bad, Err(Error::Optim(_))), "{bad:?}"),
            _ => assert!(matches!(bad, Err(Error::Disagree { rank: 1, .. })), "{bad:?}"),
        }
        assert!(
            matches!(&other, Err(Error::Disagree { what, .. }) if what == "history_len of lbfgs"),
            "{other:?}"
        );
    }
}

/// One rank gathers while the others build an optimizer, or begin a run: an error on every rank, before any deadline.
#[test]
fn a_rank_that_gathers_while_others_begin_is_told() {
    let options = || Options { stage: Stage::Zero3, meter: Meter::new(), ..Options::default() };
    let layout = || Layout::builder().unit("all").param("w", &[600], DType::F64).build().unwrap();
    for odd in 0..3 {
        for makes in [true, false] {
            let config = loopback::Config { timeout: Duration::from_secs(5), ..loopback::Config::new(3) };
            let all = Barrier::new(3);
            let told = loopback::spawn_with(config, |comm| {
                let zeros = |_: &_, _: SliceMut<'_>| Ok(());
                let own =
                    || Optimizer::new(comm.clone(), layout(), Sgd::default(), zeros, options()).unwrap();
                let told = if comm.rank() == odd {
                    let opt = own();
                    let told = opt.gather("all").map(drop);
                    all.wait();
                    told
                } else if makes {
                    let told = ShardedLbfgs::new(comm.clone(), layout(), Lbfgs::default(), zeros, options());
                    all.wait();
                    told.map(drop)
                } else {
                    let mut opt = own();
                    let closure = |_: &MicroBatch<'_>| Ok::<_, Error>(0.0);
                    let told = opt.minimize(Until::default(), |_| StepArgs::default(), 1, closure);
                    all.wait();
                    told.map(drop)
                };
                matches!(told, Err(Error::Comm(failure)) if !matches!(failure.cause(), CommError::Timeout { .. }))
            });
            assert_eq!(told.unwrap(), [true; 3], "rank {odd}, {makes}");
        }
    }
}
