//! Workers without an arbiter, and with its standby.

use super::told::{Line, now};
use super::{BOUND, begin};
use std::thread::sleep;
use std::time::Duration;

#[test]
fn workers_step_on_while_the_arbiter_is_away_and_exchange_when_it_is_back() {
    let (mut run, mut arbiter) = begin(0, 1);
    arbiter.kill();
    let killed = now();
    let alone = |line: &Line| matches!(line, Line::Alone(_));
    for id in 0..4 {
        run.until(id, killed + Duration::from_secs(1), "step alone", alone);
    }
    // They go on, each at its own pace, with many exchanges left out.
    let since = now() + Duration::from_secs(1);
    for id in 0..4 {
        run.until(id, since, "further step alone", alone);
    }
    let _arbiter = run.arbiter(0, "log", false);
    let back = now();
    let met = run.all_committed(0..4, back, |members| members.len() == 4);
    println!("exchange {:?} after the arbiter was back", met.saturating_sub(back));
    // A minority ahead of the others joins again; nobody else does.
    let mut again = vec![];
    for id in 0..4 {
        again.extend(run.lines(id).into_iter().filter(|(_, line)| matches!(line, Line::Again(_))));
    }
    assert!(again.len() <= 1, "{again:?}");
    assert!(
        again.iter().all(
            |(_, line)| matches!(line, Line::Again(why) if why.contains("where most members were at step"))
        ),
        "{again:?}"
    );
    run.end();
}

#[test]
fn a_promoted_standby_goes_on_with_the_run_and_the_old_arbiter_is_refused_when_it_returns() {
    let (mut run, mut arbiter) = begin(1, 2);
    let mut standby = run.standby(0, "copy");
    arbiter.says("followed");
    // Some exchanges of which the standby keeps the record first.
    let since = now();
    run.all_committed(0..4, since, |members| members.len() == 4);
    arbiter.kill();
    sleep(Duration::from_millis(300)); // a person takes longer
    standby.kill();
    let mut promoted = run.arbiter(1, "copy", true);
    let serves = now();
    let met = run.all_committed(0..4, serves, |members| members.len() == 4);
    println!("exchange {:?} after the promotion", met.saturating_sub(serves));
    assert!(met.saturating_sub(serves) < BOUND);
    // The old arbiter returns at its address. A worker that joins meets both, and takes part in the run of the promoted one.
    let mut old = run.arbiter(0, "log", false);
    run.worker(4);
    let failed = old.says("failed");
    assert!(
        failed.contains("this arbiter is of term 2 ") && failed.contains("knows of term 4294967297 "),
        "{failed}"
    );
    run.all_committed(0..5, serves, |members| members.len() == 5);
    run.end();
    promoted.kill();
}

#[test]
fn a_standby_that_is_lost_does_not_stop_the_run_and_one_that_comes_back_has_the_log() {
    let (mut run, mut arbiter) = begin(0, 2);
    let standby = run.standby(0, "copy");
    arbiter.says("followed");
    // Stopped, it answers nothing, and the arbiter waits for it only once.
    standby.stop();
    let stopped = now() + Duration::from_secs(1);
    let met = run.all_committed(0..4, stopped, |members| members.len() == 4);
    assert!(met - stopped < BOUND, "{:?}", met - stopped);
    drop(standby);
    let mut again = run.standby(0, "copy");
    arbiter.kill();
    again.kill();
    let _promoted = run.arbiter(1, "copy", true);
    let serves = now();
    run.all_committed(0..4, serves, |members| members.len() == 4);
    run.end();
}
