//! L-BFGS over sharded layouts, and runs of other rules: the same at every stage, with exact counts, and after failures.

mod failures;
mod histories;
mod parameters;
pub(crate) mod problems;
mod rules;
pub(crate) mod run;

use crate::common::{STAGES, long, tried, turns};
use meshstep_comm::Kind;
use meshstep_optim::{Lbfgs, LineSearch};
use meshstep_shard::{Options, Stage, Stop};
use meshstep_tensor::DType;
use problems::Problem;
use run::{Run, Share};

pub(crate) const SEARCHES: [LineSearch; 2] = [LineSearch::None, LineSearch::StrongWolfe];

/// Ten elements and a thousand, cut so that there are padding, whole buckets and an empty parameter.
pub(crate) const SMALL: &[usize] = &[3, 1, 0, 6];
pub(crate) const LARGE: &[usize] = &[500, 1, 0, 399, 100];

pub(crate) fn at(run: &Run, stage: Stage) -> Run {
    Run { options: Options { stage, ..run.options.clone() }, ..run.clone() }
}

#[test]
fn world_sizes_and_stages_do_not_show_where_sums_are_exact() {
    let of = |stage| (1..=5).map(move |ranks| (stage, ranks));
    let worlds: Vec<(Stage, usize)> = STAGES.into_iter().flat_map(of).collect();
    let mut rows = 0..;
    for (problem, lens) in
        [(Problem::Rosenbrock, SMALL), (Problem::Logistic, SMALL), (Problem::Rosenbrock, LARGE)]
    {
        for search in SEARCHES {
            for (share, dtype) in
                [(Share::One, DType::F64), (Share::One, DType::F32), (Share::All, DType::F32)]
            {
                let Some(row) = rows.next().filter(|row| tried(*row, 1)) else { continue };
                let run = Run { share, dtype, ..Run::new(problem, lens, search) };
                // More iterations than the history is long.
                let rule = Lbfgs { max_iter: if long() { 30 } else { 15 }, ..run.rule.clone() };
                let run = Run { rule, ..run };
                let one = at(&run, Stage::Replicated).run(1);
                // 7 and 30 have no common divisor, so that rows begin with different worlds.
                for (stage, ranks) in turns(&worlds, 7 * row + 13, 1) {
                    let end = at(&run, stage).run(ranks);
                    assert_eq!(end.seen, one.seen, "{run:?} {stage:?} on {ranks}: points");
                    assert_eq!(end.losses, one.losses, "{run:?} {stage:?} on {ranks}: losses");
                    assert_eq!(end.params, one.params, "{run:?} {stage:?} on {ranks}: params");
                    assert_eq!(end.step.report, one.step.report);
                }
                println!("{problem:?} of {} in {dtype}, {search:?}: {} points", run.len(), one.seen.len());
            }
        }
    }
}

#[test]
fn rows_over_ranks_give_nearly_the_same_iterates_and_the_same_minimum() {
    for (p, (problem, lens, minimum)) in [
        (Problem::Rosenbrock, SMALL, Some(0.0)),
        (Problem::Rosenbrock, LARGE, Some(0.0)),
        (Problem::Logistic, SMALL, None),
        (Problem::LeastSquares, SMALL, None),
    ]
    .into_iter()
    .enumerate()
    .filter(|(p, _)| tried(*p, 1))
    {
        let run = Run::new(problem, lens, LineSearch::StrongWolfe);
        let one = run.run(1);
        let minimum = minimum.unwrap_or(one.step.report.loss);
        for ranks in turns(&[2, 3, 4, 5], p, 1) {
            let end = run.run(ranks);
            let pairs = end.seen.iter().zip(&one.seen).take(11);
            let worst = pairs.map(|(a, b)| relative(a, b)).fold(0.0, f64::max);
            let report = end.step.report;
            println!("{problem:?} of {} on {ranks}: first points within {worst:.1e}; {report:?}", run.len());
            assert!(worst < 1e-6, "{problem:?} on {ranks}: {worst:e}");
            assert!((report.loss - minimum).abs() < 1e-9, "{problem:?} on {ranks}: {report:?}");
            assert!(report.grad_max < 1e-4, "{problem:?} on {ranks}: {report:?}");
        }
    }
}

fn relative(a: &[f64], b: &[f64]) -> f64 {
    let largest = |x: &mut dyn Iterator<Item = f64>| x.fold(0.0, |m: f64, x| m.max(x.abs()));
    largest(&mut a.iter().zip(b).map(|(a, b)| a - b)) / largest(&mut b.iter().copied()).max(1e-300)
}

#[test]
fn every_collective_is_accounted_for() {
    for stage in STAGES {
        for search in SEARCHES {
            let run = at(&Run::new(Problem::Rosenbrock, LARGE, search), stage);
            let run = Run { rule: Lbfgs { max_iter: 12, ..run.rule.clone() }, ..run };
            let stats = meshstep_comm::loopback::spawn(3, |comm| {
                let mut opt = run.build(comm.clone()).unwrap();
                let before = comm.stats();
                let closure =
                    |mb: &meshstep_shard::MicroBatch<'_>| run.backward(mb, &run.read(mb)?, comm.rank(), 3);
                let step = opt.step(closure).unwrap();
                let of = |kind| comm.stats().of(kind).operations - before.of(kind).operations;
                let all = Kind::ALL.map(of).iter().sum::<u64>();
                (
                    step,
                    all,
                    of(Kind::AllReduce),
                    of(Kind::ReduceScatter),
                    of(Kind::AllGather),
                    of(Kind::Broadcast),
                )
            })
            .unwrap();
            let (step, all, reduced, scattered, gathered, broadcast) = stats[0];
            let report = step.report;
            assert_eq!(all, step.evaluating + step.publishing + report.folds, "{stage:?} {search:?}");
            let folds = match search {
                LineSearch::None => report.evaluations,
                LineSearch::StrongWolfe => report.evaluations + report.iterations - 1,
            };
            assert_eq!(report.folds, folds, "{stage:?} {search:?}: {report:?}");
            // Four buckets: 500; 1 and an empty parameter; 399; 100.
            let (buckets, evaluations) = (step.publishing, report.evaluations);
            match stage {
                Stage::Replicated => {
                    assert_eq!((buckets, gathered, broadcast), (0, 0, 0));
                    assert_eq!((reduced - folds) % evaluations, 0);
                }
                Stage::WholeParams(_) => {
                    assert_eq!((scattered, gathered), (0, 0));
                    assert_eq!(broadcast, buckets * (evaluations + 1));
                }
                Stage::Zero3 => {
                    assert_eq!((scattered, gathered, broadcast), (step.evaluating, 0, 0));
                    assert_eq!((reduced, buckets, scattered), (folds, 0, 4 * evaluations));
                }
                _ => {
                    assert_eq!((scattered, gathered), (buckets * evaluations, buckets * (evaluations + 1)));
                    assert_eq!((reduced, broadcast), (folds, 0));
                }
            }
            println!(
                "{stage:?} {search:?}: {} folds, {} evaluating, {} publishing",
                folds, step.evaluating, step.publishing
            );
        }
    }
}

#[test]
fn a_run_tells_its_history() {
    let run = Run::new(Problem::Logistic, SMALL, LineSearch::StrongWolfe);
    let ends = meshstep_comm::loopback::spawn(4, |comm| {
        let mut opt = run.build(comm.clone()).unwrap();
        opt.minimize(|mb| run.backward(mb, &run.read(mb)?, comm.rank(), 4)).unwrap()
    })
    .unwrap();
    let end = &ends[0];
    assert!(ends.iter().all(|other| other == end));
    assert_eq!(end.history.len() as u64, end.iterations + 1);
    assert!(end.history.windows(2).all(|w| w[1].loss <= w[0].loss));
    assert_eq!(end.history.last().unwrap().grad_norm, end.grad_norm);
    assert!(matches!(end.stop, Stop::Gradient | Stop::Loss | Stop::Direction), "{end:?}");
}
