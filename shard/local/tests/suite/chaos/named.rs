//! Single events with their expected consequences.

use crate::chaos::schedule::{Happens, Setup};
use crate::chaos::world::{End, Life, World};
use crate::common::WhichRule;
use meshstep_local::LocalPlan;
use meshstep_shard::NonFinite;
use std::sync::Arc;

fn des_loc(workers: usize) -> Setup {
    Setup::new(LocalPlan::des_loc(4, 12, 24), WhichRule::AdamW, workers)
}

fn run(setup: Setup) -> Arc<World> {
    let world = World::new(1, setup);
    world.run();
    world
}

/// Returns the hashes of parameters and moments after a step.
fn after(life: &Life, step: u64) -> [u64; 3] {
    life.hashes.iter().rfind(|(at, _)| *at == step).unwrap().1
}

#[test]
fn without_trouble_every_exchange_comes_about_on_all() {
    for workers in 1..6 {
        let world = run(des_loc(workers));
        let inner = world.lock();
        assert_eq!(inner.truth.commits.len(), 12 + 1); // and the beginning
        for life in &inner.lives {
            assert_eq!((life.end.as_ref(), life.applied.len()), (Some(&End::Left), 12));
            assert_eq!(after(life, 24), after(&inner.lives[0], 24));
        }
    }
}

/// Three workers train with periods of 4, 12 and 24; a fourth joins after step 7.
#[test]
fn who_joins_in_mid_interval_counts_after_one_exchange_and_equals_the_others_after_the_longest_period() {
    let world = run(Setup { script: vec![(7, Happens::Comes(9))], ..des_loc(3) });
    let inner = world.lock();
    let joiner = &inner.lives[3];
    assert_eq!(inner.lives[0].rounds[..2], [(4, true, 3), (8, true, 3)]);
    assert_eq!(joiner.rounds[..3], [(12, true, 4), (16, true, 4), (20, true, 4)], "{:?}", joiner.rounds);
    let equal = |step: u64, which: usize| {
        inner.lives.iter().all(|life| after(life, step)[which] == after(joiner, step)[which])
    };
    // The joiner has the others' moments until it has taken a step of its own.
    assert!(
        !equal(7, 0)
            && joiner.hashes[0].1 == inner.lives[0].hashes.iter().rfind(|(at, _)| *at == 7).unwrap().1
    );
    assert!(equal(8, 0) && !equal(8, 1) && !equal(8, 2));
    assert!(equal(12, 0) && equal(12, 1) && !equal(12, 2));
    assert!(equal(16, 0) && !equal(16, 1));
    assert!((0..3).all(|which| equal(24, which) && equal(48, which)));
}

#[test]
fn of_three_workers_two_are_left_and_divide_by_two() {
    let world = run(Setup { script: vec![(7, Happens::Dies(1))], ..des_loc(3) });
    let inner = world.lock();
    let divisors: Vec<(u64, usize)> = inner.lives[0].rounds.iter().map(|round| (round.0, round.2)).collect();
    let expected = (1..=12).map(|i| (4 * i, if i == 1 { 3 } else { 2 }));
    assert_eq!(divisors, expected.collect::<Vec<_>>());
    // A worker that is lost between two exchanges costs no exchange.
    assert_eq!(inner.truth.commits.len(), 12 + 1);
    assert_eq!([0, 1, 2].map(|i| inner.lives[i].end.clone().unwrap()), [End::Left, End::Died, End::Left]);
}

#[test]
fn a_worker_whose_values_are_not_finite_is_dropped_and_the_others_go_on() {
    let mut setup = Setup { broken: Some((2, 5)), ..des_loc(3) };
    setup.run.options.non_finite = NonFinite::Propagate;
    let world = run(setup);
    let inner = world.lock();
    let End::Error(end) = inner.lives[2].end.clone().unwrap() else { panic!("{:?}", inner.lives[2].end) };
    assert!(end.contains("vetoed three exchanges in a row"), "{end}");
    for life in &inner.lives[..2] {
        assert_eq!((life.end.as_ref(), life.applied.len()), (Some(&End::Left), 12 - 3));
        assert_eq!(life.rounds.iter().map(|round| round.2).collect::<Vec<_>>()[..6], [3, 3, 3, 3, 2, 2]);
    }
}
