//! A step allocates nothing after warm-up: no temporaries besides the memory that the meter counts.

use crate::allocator::Counts;
use crate::common::{Run, STAGES, alone, draws, long, turns};
use meshstep_optim::{Lbfgs, LineSearch};
use meshstep_shard::{Error, NonFinite, Options, Outcome, ShardedLbfgs, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Meter, Param, Slice, SliceMut};
use std::process::Command;

/// Takes two warm-up steps, then four counted ones, hand-over included. Returns the number of allocations of the ranks' threads
/// (the communication threads' are counted in `comm`), and the largest of any thread.
fn allocations(run: &Run) -> (usize, usize) {
    let ready = std::sync::Barrier::new(run.ranks);
    meshstep_comm::loopback::spawn(run.ranks, |comm| {
        let rank = comm.rank();
        Counts::take_part();
        let mut opt = run.build(comm).unwrap();
        let names: Vec<String> = (0..run.lens.len()).map(crate::common::name).collect();
        let grads: Vec<Vec<f32>> = (0..run.lens.len())
            .map(|i| run.gradient(1, 0, rank, i).iter().map(|&g| g as f32).collect())
            .collect();
        for t in 1..=6 {
            if t == 3 {
                ready.wait();
                Counts::reset();
                ready.wait();
                Counts::run(true);
                ready.wait();
            }
            for batch in 0..run.micro_batches {
                let last = batch + 1 == run.micro_batches;
                let mb = if last { opt.micro_batch(1) } else { opt.accumulate(1) }.unwrap();
                for (name, grad) in names.iter().zip(&grads).rev() {
                    mb.grad(name, Slice::from(&grad[..])).unwrap();
                }
                mb.finish().unwrap();
            }
            let outcome = opt
                .step(StepArgs { lr: 0.1, max_norm: run.max_norm, ..StepArgs::default() })
                .unwrap()
                .outcome()
                .unwrap();
            assert!(matches!(outcome, Outcome::Applied { .. }));
        }
        ready.wait();
        Counts::run(false);
        ready.wait();
    })
    .unwrap();
    (Counts::number(), Counts::largest())
}

/// Counts the allocations of one step of L-BFGS, from the third evaluation on, including its closure.
fn allocations_of_lbfgs(stage: Stage, line_search: LineSearch) -> usize {
    const LENS: [usize; 4] = [1000, 17, 0, 2500];
    let ready = std::sync::Barrier::new(3);
    meshstep_comm::loopback::spawn(3, |comm| {
        Counts::take_part();
        let rule =
            Lbfgs { line_search, max_iter: 25, history_len: 6, tolerance_change: 0.0, ..Lbfgs::default() };
        let names: Vec<String> = (0..LENS.len()).map(crate::common::name).collect();
        let add = |b: meshstep_tensor::LayoutBuilder, (name, len): (&String, usize)| {
            b.param(name.clone(), &[len], DType::F64)
        };
        let layout = names.iter().zip(LENS).fold(Layout::builder().unit("all"), add).build().unwrap();
        let options = Options { stage, bucket_len: Some(1500), meter: Meter::new(), ..Options::default() };
        let first = |_: &Param, mut w: SliceMut<'_>| {
            w.typed_mut::<f64>()?.iter_mut().enumerate().for_each(|(i, w)| *w = 0.1 + (i % 7) as f64);
            Ok(())
        };
        let mut opt = ShardedLbfgs::new(comm, layout, rule, first, options).unwrap();
        let (mut calls, mut grad) = (0, vec![0.0; 2500]);
        let step = opt.step(|mb| {
            calls += 1;
            if calls == 3 {
                ready.wait();
                Counts::reset();
                ready.wait();
                Counts::run(true);
            }
            let mut loss = 0.0;
            let all = mb.gather("all")?;
            for (name, len) in names.iter().zip(LENS) {
                let x = all.param(name)?.typed::<f64>()?;
                loss += x.iter().map(|x| x.powi(4) / 4.0).sum::<f64>();
                grad.iter_mut().zip(x).for_each(|(g, x)| *g = x.powi(3));
                mb.grad(name, &grad[..len])?;
            }
            Ok::<_, Error>(loss)
        });
        ready.wait();
        Counts::run(false);
        ready.wait();
        let report = step.unwrap().report;
        assert!(report.evaluations > 12 && opt.state().pairs() == 6, "{report:?}");
    })
    .unwrap();
    Counts::number()
}

/// Set in the process that counts.
const ALONE: &str = "MESHSTEP_TEST_ALLOCATIONS";

/// Runs in a process of its own, because the count covers all threads, including those of other tests.
#[test]
fn a_step_allocates_nothing_after_warm_up() {
    if std::env::var_os(ALONE).is_some() {
        return count();
    }
    let test = "allocations::a_step_allocates_nothing_after_warm_up";
    let told = alone(test, Command::new(std::env::current_exe().unwrap()).env(ALONE, "1"));
    assert!(told.contains("1 passed"), "{told}");
}

fn count() {
    let (mut drawn, len) = (draws(1), if long() { 3_000_000 } else { 400_000 });
    for (s, stage) in STAGES.into_iter().enumerate().filter(|_| drawn()) {
        for line_search in turns(&[LineSearch::None, LineSearch::StrongWolfe], s, 1) {
            assert_eq!(allocations_of_lbfgs(stage, line_search), 0, "{stage:?}, L-BFGS with {line_search:?}");
        }
        for micro_batches in turns(&[1, 2], s + s / 2, 1) {
            let options = Options { bucket_len: Some(3000), ..Options::default() };
            let small = Run { lens: vec![1000, 17, 0, 2500, 64], micro_batches, options, ..Run::default() };
            let (number, largest) = allocations(&small.stage(stage));
            assert!(
                number == 0 && largest <= 4096,
                "{stage:?}, {micro_batches} micro-batches: {number}, {largest}"
            );
            let options = Options { non_finite: NonFinite::Propagate, ..small.options.clone() };
            let ahead = Run { max_norm: None, options, ..small };
            let (number, _) = allocations(&ahead.stage(stage));
            assert_eq!(number, 0, "{stage:?}, {micro_batches} micro-batches, bucket by bucket");
        }
        // Large enough for several threads.
        let options = Options { bucket_len: None, ..Options::default() };
        let large = Run { lens: vec![len, 100_000], ranks: 2, options, ..Run::default() };
        let (number, largest) = allocations(&large.stage(stage));
        assert_eq!((number, largest), (0, 0), "{stage:?}, on several threads");
    }
}
