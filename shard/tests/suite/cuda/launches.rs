//! Number of NCCL calls and kernel launches of a step, as the stand-ins count them.

use crate::common::gpus::on_ranks;
use crate::common::{self, Gradients, Run, STAGES};
use crate::cuda::{alone, room_for, stand_in};
use meshstep_comm::Kind;
use meshstep_shard::{NonFinite, Options, Stage};
use std::ffi::{CStr, c_char};
use std::sync::Barrier;

/// Steps before the counted ones: the first ones build the tables.
const WARM_UP: u64 = 2;
const STEPS: u64 = 4;

/// Counts of all ranks together.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Launches {
    /// Groups of NCCL, and operations outside groups.
    groups: usize,
    prepares: usize,
    updates: usize,
}

impl Launches {
    fn so_far() -> Self {
        type Kernels = extern "C" fn(*const c_char) -> usize;
        // SAFETY: the stand-ins are loaded and stay, and document these types.
        unsafe {
            let driver = libloading::Library::new("libcuda.so.1").unwrap();
            let nccl = libloading::Library::new("libnccl.so.2").unwrap();
            let kernels = driver.get::<Kernels>(b"meshstep_standin_launches").unwrap();
            let groups = nccl.get::<extern "C" fn() -> usize>(b"meshstep_standin_launches").unwrap();
            let kernels = |end: &CStr| kernels(end.as_ptr());
            Launches { groups: groups(), prepares: kernels(c"_prepare"), updates: kernels(c"adam_f32") }
        }
    }

    fn since(self, before: Launches) -> Self {
        Launches {
            groups: self.groups - before.groups,
            prepares: self.prepares - before.prepares,
            updates: self.updates - before.updates,
        }
    }
}

/// Operations of a rank's counted steps, by the rank's own count.
#[derive(Clone, Copy, Debug)]
struct Called {
    operations: u64,
    all_reduces: u64,
}

fn counted(run: &Run) -> (Launches, Vec<Called>) {
    let barrier = Barrier::new(run.ranks);
    let told = on_ranks(run, |comm, run| {
        let mut optimizer = run.build(comm.clone()).unwrap();
        let mut steps = |steps: std::ops::RangeInclusive<u64>| {
            for t in steps {
                run.hand_over(&mut optimizer, t, 0).unwrap();
                optimizer.step(run.at(t)).unwrap().outcome().unwrap();
            }
            common::params(&optimizer);
            barrier.wait();
            let counts = (Launches::so_far(), comm.stats());
            barrier.wait();
            counts
        };
        let (before, stats) = steps(1..=WARM_UP);
        let (after, later) = steps(WARM_UP + 1..=WARM_UP + STEPS);
        let reduced = |stats: meshstep_comm::Stats| stats.of(Kind::AllReduce).operations;
        let called = Called {
            operations: later.total().operations - stats.total().operations,
            all_reduces: reduced(later) - reduced(stats),
        };
        (after.since(before), called)
    });
    let (launches, called): (Vec<Launches>, Vec<Called>) = told.into_iter().unzip();
    assert!(launches.iter().all(|one| *one == launches[0]), "{launches:?}");
    (launches[0], called)
}

/// Stages with all collectives on one communicator.
fn stages() -> impl Iterator<Item = Stage> {
    STAGES.into_iter().filter(|&stage| stage != Stage::Zero3)
}

#[test]
fn an_exchange_is_one_operation_and_one_launch() {
    let _alone = alone();
    if !room_for(2) || !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    for stage in stages() {
        let run = Run { ranks: 2, gradients: Gradients::Grid, ..Run::default() }.stage(stage);
        let (launches, called) = counted(&run);
        let operations: u64 = called.iter().map(|called| called.operations).sum();
        let alone = !matches!(stage, Stage::Replicated | Stage::WholeParams(_));
        let expected =
            |one: &Called| if alone { one.all_reduces == STEPS } else { one.all_reduces >= 2 * STEPS };
        assert!(called.iter().all(expected), "{stage:?} {called:?}");
        assert_eq!(launches.groups as u64, operations, "{stage:?} {called:?}");
    }
}

#[test]
fn the_two_exchanges_of_a_step_that_nothing_stops_are_a_launch_each() {
    let _alone = alone();
    if !room_for(2) || !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    for stage in stages() {
        let options = Options { non_finite: NonFinite::Propagate, ..Run::default().options };
        let run = Run { ranks: 2, max_norm: None, options, ..Run::default() }.stage(stage);
        let (launches, called) = counted(&run);
        // The decision's operations use a communicator of their own.
        let operations: u64 = called.iter().map(|called| called.operations).sum();
        assert_eq!(launches.groups as u64, operations + 2 * STEPS * run.ranks as u64, "{stage:?} {called:?}");
    }
}

#[test]
fn one_launch_prepares_the_rows_of_all_buckets() {
    let _alone = alone();
    if !room_for(2) || !stand_in() {
        return println!("skipped: needs the stand-ins");
    }
    for stage in STAGES {
        for non_finite in [NonFinite::Skip, NonFinite::Propagate] {
            let options = Options { non_finite, bucket_len: Some(64), ..Run::default().options };
            let run = Run { ranks: 2, max_norm: None, options, ..Run::default() }.stage(stage);
            let (launches, _) = counted(&run);
            let steps = STEPS as usize * run.ranks;
            assert_eq!(launches.prepares, steps, "{stage:?} {non_finite:?} {launches:?}");
            // One launch per bucket, of which there are several.
            assert!(launches.updates >= 2 * steps, "{stage:?} {non_finite:?} {launches:?}");
        }
    }
}
