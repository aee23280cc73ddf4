//! Seeded random schedules of failures, in simulated time.

use crate::common::secs;
use crate::simulated::{End, Trouble, World};
use meshstep_cases::cases;
use meshstep_cases::seeds::seeds;
use meshstep_membership::{Error, Refusal};
use std::time::Duration;

const TARGET: u64 = 96;
/// By this time every worker has ended, whatever happened.
const HORIZON: Duration = Duration::from_secs(600);

/// Creates a world from its seed alone.
fn world(seed: u64) -> World {
    let mut random = World::new(seed ^ 0x5eed, 1, 1, 0, Trouble::default()).random;
    let founders = 1 + random.below(5) as usize;
    let min_workers = 1 + random.below(founders as u64) as usize;
    let mut often = |most: u64| if random.chance(500) { 0 } else { random.below(most) };
    let trouble = Trouble {
        loss: often(200),
        repeat: often(200),
        death_before_apply: often(30),
        death_after_vote: often(30),
        arbiter_death: often(60),
        veto: often(60),
        failure: often(40),
        retry: seed.is_multiple_of(2),
    };
    let mut world = World::new(seed, founders, min_workers, TARGET, trouble);
    let moment = |random: &mut crate::simulated::Random| Duration::from_millis(random.below(15_000));
    for _ in 0..random.below(4) {
        let id = if random.chance(300) { random.below(founders as u64) } else { 100 + random.below(4) };
        world.spawn_at(moment(&mut random), id);
    }
    for _ in 0..random.below(3) {
        world.crash_at(moment(&mut random), random.below(6) as usize);
    }
    for _ in 0..random.below(3) {
        let span = Duration::from_millis(random.below(8_000));
        world.stall_at(moment(&mut random), random.below(6) as usize, span);
    }
    for _ in 0..random.below(2) {
        world.leave_at(moment(&mut random), random.below(6) as usize);
    }
    for _ in 0..random.below(3) {
        world.arbiter_crash_at(moment(&mut random));
    }
    world
}

mod whatever_happens_survivors_agree_and_nobody_waits_for_ever {
    meshstep_cases::ten_parts! { super::survivors_agree_and_nobody_waits_for_ever }
}

fn survivors_agree_and_nobody_waits_for_ever(part: u64) {
    let seeds = seeds(part, cases(500, 5000));
    let (mut ends, mut aborts, mut commits) = ([0; 4], 0, 0);
    for &seed in &seeds {
        let result = std::panic::catch_unwind(|| {
            let mut world = world(seed);
            world.run(HORIZON);
            assert!(world.all_over(), "somebody waits at {:?}: {:#?}", world.now, world.workers);
            world
        });
        let world = result.unwrap_or_else(|_| panic!("seed {seed}: MESHSTEP_SEED={seed} repeats it"));
        commits += world.truth.commits.len();
        aborts += world.truth.decided.len() - world.truth.commits.len();
        for worker in &world.workers {
            let end = match worker.end.as_ref().unwrap() {
                End::Left => 0,
                End::Died => 1,
                End::Error(Error::Refused(Refusal::Fenced { .. })) => 2,
                End::Error(_) => 3,
            };
            ends[end] += 1;
        }
    }
    println!("{commits} commits, {aborts} aborts; left, died, fenced, other: {ends:?}");
    // With few seeds no minimum is required.
    let least = |n: usize| n * seeds.len() / 500;
    let loud = aborts > least(100) && ends.iter().all(|n| *n > least(10));
    assert!(seeds.len() < 50 || loud, "too quiet: {aborts} {ends:?}");
}

#[test]
fn without_trouble_every_exchange_is_committed_by_all() {
    for founders in 1..6 {
        let mut world = World::new(9, founders, founders, TARGET, Trouble::default());
        world.run(HORIZON);
        assert!(world.all_over());
        assert_eq!(world.truth.commits.len() as u64, TARGET / 4);
        for worker in &world.workers {
            assert_eq!((worker.applied.len() as u64, worker.end.clone()), (TARGET / 4, Some(End::Left)));
            // Workers leave one after the other, and no worker misses its last exchange because of that.
            assert_eq!(worker.rounds.last().unwrap().step, TARGET);
        }
    }
}

/// Three workers train; a fourth joins while they are between steps 4 and 8.
#[test]
fn who_joins_in_mid_interval_counts_after_one_exchange_and_equals_the_others_after_the_longest_period() {
    for seed in 0..20 {
        let mut world = World::new(seed, 3, 3, TARGET, Trouble::default());
        while world.truth.commits.is_empty() {
            let next = world.now + Duration::from_millis(1);
            world.run(next);
        }
        let now = world.now;
        world.spawn_at(now, 9);
        world.run(HORIZON);
        let joiner = &world.workers[3];
        let counts: Vec<_> =
            joiner.rounds.iter().map(|round| (round.step, round.counts(), round.divisor())).collect();
        assert_eq!(counts[..3], [(8, false, 3), (12, true, 4), (16, true, 4)], "{counts:?}");
        // The simulation asserts that all state is equal after step 24, an exchange of all parts.
        assert!(
            joiner.rounds.iter().any(|round| round.step == 24)
                && joiner.applied.len() as u64 == TARGET / 4 - 1
        );
        assert_eq!(joiner.rounds[0].members[3].contact, "worker 9");
    }
}

#[test]
fn of_three_workers_two_are_left_and_divide_by_two() {
    let mut world = World::new(4, 3, 2, TARGET, Trouble::default());
    world.crash_at(secs(3), 1);
    world.run(HORIZON);
    let rounds = &world.workers[0].rounds;
    let last = rounds.last().unwrap();
    assert_eq!((last.divisor(), last.epoch, last.step), (2, 2, TARGET));
    assert_eq!(last.gone.iter().map(|gone| gone.id).collect::<Vec<_>>(), [1]);
    assert!(rounds.iter().all(|round| round.divisor() == if round.epoch == 1 { 3 } else { 2 }));
    // Without a retry one exchange is left out, at most.
    assert!(world.truth.commits.len() as u64 >= TARGET / 4 - 1);
}
