//! L-BFGS with its history on several GPUs: every point, loss and collective equals loopback's.

use crate::common::{STAGES, cases, long};
use crate::cuda::{alone, devices, room_for, seed, stand_in};
use crate::lbfgs::problems::Problem;
use crate::lbfgs::run::{End, Run, Share};
use meshstep_comm::{Communicator, nccl};
use meshstep_optim::{Lbfgs, LineSearch};
use meshstep_shard::{Error, Fault, Master, Missing, Options, Precision, ShardedLbfgs, Stage};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Category, DType, Layout, Meter, Queue, Slice, SliceMut, cast};
use std::sync::Arc;

pub(crate) const SEARCHES: [LineSearch; 2] = [LineSearch::None, LineSearch::StrongWolfe];

/// Divisions of the computation, and types: their sums round alike in any order of ranks.
const SHARES: [(Share, DType); 3] =
    [(Share::One, DType::F64), (Share::All, DType::F32), (Share::Rows, DType::F32)];

pub(crate) fn run(problem: Problem, lens: &[usize], search: LineSearch, stage: Stage) -> Run {
    let run = Run::new(problem, lens, search);
    let rule = Lbfgs { max_iter: 12, history_len: 4, ..run.rule.clone() };
    Run { rule, options: Options { stage, ..run.options.clone() }, ..run }
}

pub(crate) fn there(run: &Run, queue: &Queue) -> Run {
    Run { options: Options { queue: queue.clone(), ..run.options.clone() }, ..run.clone() }
}

/// Runs each rank with a GPU communicator and a queue, and returns the results.
fn on<R: Send>(ranks: usize, rank: impl Fn(Arc<dyn Communicator>, Queue) -> R + Sync) -> Vec<R> {
    let devices: Vec<usize> = (0..ranks).map(|rank| rank % devices()).collect();
    let made = nccl::spawn(&devices, nccl::Options::default(), |comm| {
        let queue = Queue::cuda(Stream::new(comm.device()).unwrap());
        rank(comm, queue)
    });
    made.unwrap()
}

/// Runs on GPUs; all ranks must end alike.
fn on_gpus(run: &Run, ranks: usize) -> End {
    let ends = on(ranks, |comm, queue| there(run, &queue).on_rank(comm).unwrap());
    assert!(ends.iter().all(|end| *end == ends[0]), "ranks end apart: {ends:?}");
    ends.into_iter().next().unwrap()
}

#[test]
fn every_point_is_loopbacks() {
    let _alone = alone();
    for ranks in [1, 2, 4] {
        if !room_for(ranks) {
            continue;
        }
        // Lengths that leave padding, whole buckets and an empty parameter.
        let problems = [(Problem::Rosenbrock, &[130usize, 1, 0, 69][..]), (Problem::Logistic, &[3, 1, 0, 6])];
        for (i, stage) in STAGES.into_iter().enumerate() {
            for (j, search) in SEARCHES.into_iter().enumerate() {
                let (problem, lens) = problems[(i + j + ranks) % 2];
                // The stand-ins run each stage with one search and one number of ranks, in fewer iterations.
                if !long() && (j != i % 2 || ranks != [1, 2, 4][i % 3]) {
                    continue;
                }
                for (k, (share, dtype)) in SHARES.into_iter().enumerate() {
                    // A third of the combinations suffices; beyond two GPUs only sums with zeros round alike in any order.
                    let apart = share != Share::One && ranks > 2 && !stand_in();
                    if (i + j + k + ranks / 2) % 3 > 0 || apart {
                        continue;
                    }
                    let run = Run { share, dtype, ..run(problem, lens, search, stage) };
                    let rule = Lbfgs { max_iter: if long() { 12 } else { 8 }, ..run.rule.clone() };
                    let run = Run { rule, ..run };
                    let (there, here) = (on_gpus(&run, ranks), run.run(ranks));
                    assert!(here.losses.len() > 4, "{:?}", here.step);
                    assert_eq!(there, here, "{problem:?} {stage:?} {search:?} {share:?} {dtype} on {ranks}");
                }
            }
        }
    }
}

#[test]
fn no_order_of_streams_shows() {
    let _alone = alone();
    if !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    for (i, stage) in STAGES.into_iter().enumerate() {
        let run = run(Problem::Rosenbrock, &[40, 9], SEARCHES[i % 2], stage);
        let rule = Lbfgs { max_iter: 6, ..run.rule.clone() };
        let run = Run { share: Share::One, rule, ..run };
        let expected = run.run(2);
        for order in 0..u64::from(cases(2, 4)) {
            seed(10 * i as u64 + order);
            assert_eq!(on_gpus(&run, 2), expected, "order {order}, {stage:?}");
        }
    }
}

/// Returns a rank's outcomes if a closure fails on rank 1 at its third call, if its gradient is missing, and afterwards.
#[test]
fn failures_are_those_of_loopback_and_the_run_goes_on() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let story = |run: &Run, comm: Arc<dyn Communicator>| {
        let rank = comm.rank();
        let mut opt = run.build(comm).unwrap();
        let mut calls = 0;
        let failed = opt.step(|mb| {
            calls += 1;
            let x = run.read(mb)?;
            if (rank, calls) == (1, 3) {
                run.grad(mb, 0, &vec![1.0; run.lens[0]]).unwrap();
                return Err("no data left".into());
            }
            let told = run.backward(mb, &x, rank, 2);
            told.map_err(Box::<dyn std::error::Error + Send + Sync>::from)
        });
        let failed = failed.unwrap_err();
        assert!(matches!(
            (&failed, rank),
            (Error::ClosureElsewhere { rank: 1 }, 0) | (Error::Closure { .. }, 1)
        ));
        let lacking = opt.step(|mb| {
            let x = run.read(mb)?;
            if rank == 0 { run.backward(mb, &x, 0, 2) } else { run.grad(mb, 1, &[1.0]).map(|()| 0.5) }
        });
        let lacking = lacking.unwrap_err();
        let expected = Fault::MissingGradient { name: "p0".into() };
        assert!(rank == 0 || matches!(&lacking, Error::Fault { rank: 1, fault } if *fault == expected));
        let again = opt.step(|mb| run.backward(mb, &run.read(mb)?, rank, 2)).unwrap();
        (failed.to_string(), lacking.to_string(), again, opt.state().pairs())
    };
    for (i, stage) in STAGES.into_iter().enumerate() {
        let run = run(Problem::Logistic, &[30, 1, 0, 6], SEARCHES[i % 2], stage);
        let run = Run { dtype: DType::F32, ..run };
        let run = Run { options: Options { missing: Missing::Error, ..run.options.clone() }, ..run };
        let here = meshstep_comm::loopback::spawn(2, |comm| story(&run, comm)).unwrap();
        let told = on(2, |comm, queue| story(&there(&run, &queue), comm));
        assert_eq!(told, here, "{stage:?}");
        assert!(here[0].2.report.iterations > 4, "{:?}", here[0]);
    }
}

#[test]
fn bf16_parameters_of_f32_masters_are_loopbacks() {
    let _alone = alone();
    if !room_for(2) {
        return;
    }
    let precision = Precision { master: Master::F32, ..Precision::default() };
    for stage in STAGES {
        let run = run(Problem::LeastSquares, &[20, 1, 0, 6], LineSearch::None, stage);
        let run = Run { dtype: DType::BF16, share: Share::All, ..run };
        let run = Run { options: Options { precision, ..run.options.clone() }, ..run };
        assert_eq!(on_gpus(&run, 2), run.run(2), "{stage:?}");
    }
}

#[test]
fn memory_is_counted_there_and_given_back() {
    let _alone = alone();
    if !room_for(1) {
        return;
    }
    for (search, gradients) in SEARCHES.into_iter().zip([2, 4]) {
        let meter = Meter::new();
        let live = on(1, |comm, queue| {
            let run = there(&run(Problem::Rosenbrock, &[1000], search, Stage::Zero1), &queue);
            let options = Options { meter: meter.clone(), ..run.options.clone() };
            let layout = Layout::builder().unit("all").param("p0", &[1000], DType::F64).build().unwrap();
            let first = |_: &_, out: SliceMut<'_>| cast(Slice::from(&[0.8; 1000][..]), out);
            let mut opt = ShardedLbfgs::new(comm, layout, run.rule.clone(), first, options).unwrap();
            opt.step(|mb| run.backward(mb, &run.read(mb)?, 0, 1)).unwrap();
            assert_eq!(opt.optimizer().param("p0").unwrap().place(), queue.place());
            meter.live(Category::State)
        });
        // Five slots of a direction and y, the start of the last direction, and gradients; a bucket's padding counts.
        assert_eq!(live[0] as usize, (2 * 5 + 1 + gradients) * 1024 * 8, "{search:?}");
        assert_eq!(meter.live_total(), 0);
    }
}
