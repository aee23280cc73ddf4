//! Workers that join: their plans, their connections, and the step from which they count.

use super::{Desk, LiveIds, T0, aborted, decisions, refusals, rounds, worker};
use crate::common::{DIGEST, config, secs};
use meshstep_membership::{
    Arbiter, Ask, Ballot, Config, ConfigError, Decision, Departure, Digest, Gone, Refusal, ToArbiter, Word,
    Worker,
};
use std::time::Duration;

#[test]
fn settings_that_no_run_can_have_are_refused() {
    let refused = |workers, min, silence, patience| {
        let config = Config { silence, patience, ..config(workers, min) };
        Arbiter::new(config, None, T0).err()
    };
    let workers = |workers, min_workers| Some(ConfigError::Workers { workers, min_workers, max: 256 });
    for (n, min) in [(0, 0), (1, 0), (2, 3), (257, 1)] {
        assert_eq!(refused(n, min, secs(1), secs(1)), workers(n, min));
    }
    let max = secs(30 * 24 * 3600);
    for (silence, patience) in [(T0, secs(1)), (secs(1), T0), (Duration::MAX, max), (max, max + secs(1))] {
        let time = ConfigError::Time { silence, patience, max };
        assert_eq!(refused(1, 1, silence, patience), Some(time));
    }
    assert_eq!(refused(256, 256, secs(1), secs(1)), None);
    let desk = Desk::begun(1, 1);
    let other = Config { digest: Some(Digest { rule: 9, ..DIGEST }), ..config(1, 1) };
    assert_eq!(Arbiter::new(other, desk.log.last().cloned(), T0).err(), Some(ConfigError::OtherRun));
}

/// The digest is in the log with the first epoch, so that a successor knows it.
#[test]
fn the_workers_that_begin_an_open_run_decide_its_digest() {
    let open = Config { digest: None, ..config(2, 1) };
    let mut desk = Desk::after(open.clone(), None);
    let mine = Digest { plan: 4, rule: 9 };
    let join = |id, digest| ToArbiter {
        worker: worker(id),
        term: 0,
        epoch: 0,
        after: 0,
        ask: Ask::Join { digest, contact: "c".repeat(if id == 7 { 65 } else { 1 }) },
    };
    // A worker that is refused decides nothing, and one that waits decides for those that come.
    let refused = desk.tell(join(7, DIGEST));
    assert_eq!(refusals(&refused), [(7, Refusal::Contact { len: 65, max: 64 })]);
    assert_eq!(desk.tell(join(0, mine)), [(0, Word::Welcome)]);
    assert_eq!(refusals(&desk.tell(join(1, DIGEST))), [(1, Refusal::OtherPlan { mine: 3, run: 4 })]);
    // It leaves before the run has begun: the next worker decides.
    assert_eq!(desk.tell(ToArbiter { ask: Ask::Leave, ..join(0, mine) }), [(0, Word::Farewell)]);
    assert_eq!(desk.tell(join(2, DIGEST)), [(2, Word::Welcome)]);
    assert_eq!(desk.arbiter.state().digest, None);
    assert_eq!(desk.tell(ToArbiter { ask: Ask::Leave, ..join(2, DIGEST) }), [(2, Word::Farewell)]);
    (3..5).for_each(|id| assert_eq!(desk.tell(join(id, mine)), [(id, Word::Welcome)]));
    (3..5).for_each(|id| drop(desk.arrive(id, 0)));
    assert_eq!((desk.arbiter.state().epoch, desk.log.last().unwrap().digest), (1, Some(mine)));
    assert_eq!(refusals(&desk.tell(join(5, DIGEST))), [(5, Refusal::OtherPlan { mine: 3, run: 4 })]);
    // A successor, and one that is given the digest, know it; one that is given another is refused.
    let log = desk.log.last().cloned();
    for (given, ok) in [(None, true), (Some(mine), true), (Some(DIGEST), false)] {
        let again = Arbiter::new(Config { digest: given, ..open.clone() }, log.clone(), T0);
        let found = again.map(|(arbiter, _)| arbiter.state().digest);
        assert_eq!(found, if ok { Ok(Some(mine)) } else { Err(ConfigError::OtherRun) });
    }
    // An arbiter that starts with a digest on the log of one that knew none has its own.
    let (begun, _) = Arbiter::new(open, None, T0).unwrap();
    let given = Config { digest: Some(DIGEST), ..config(2, 1) };
    assert_eq!(Arbiter::new(given, Some(begun.state().clone()), T0).unwrap().0.state().digest, Some(DIGEST));
}

#[test]
fn who_does_not_fit_is_told_why() {
    let mut desk = Desk::new(2, 1);
    let join = |worker, digest, contact: &str| ToArbiter {
        worker,
        term: 0,
        epoch: 0,
        after: 0,
        ask: Ask::Join { digest, contact: contact.to_owned() },
    };
    let mine = Digest { plan: 4, ..DIGEST };
    let said = desk.tell(join(worker(0), mine, ""));
    assert_eq!(refusals(&said), [(0, Refusal::OtherPlan { mine: 4, run: 3 })]);
    let said = desk.tell(join(worker(0), Digest { rule: 4, ..DIGEST }, ""));
    assert_eq!(refusals(&said), [(0, Refusal::OtherRule { mine: 4, run: 5 })]);
    let said = desk.tell(join(worker(0), DIGEST, &"c".repeat(65)));
    assert_eq!(refusals(&said), [(0, Refusal::Contact { len: 65, max: 64 })]);
    // A repeated join has no effect; another start with the same id waits until the first is dropped.
    assert_eq!(desk.join(0), [(0, Word::Welcome)]);
    assert_eq!(desk.join(0), [(0, Word::Welcome)]);
    let twin = Worker { life: 7, ..worker(0) };
    assert_eq!(refusals(&desk.tell(join(twin, DIGEST, ""))), [(0, Refusal::IdTaken { id: 0 })]);
    desk.pass(secs(1), &[]);
    assert_eq!(desk.tell(join(twin, DIGEST, "")), [(0, Word::Welcome)]);
    for id in 1..256 {
        desk.tell(join(Worker { id, life: 1 }, DIGEST, ""));
    }
    let said = desk.tell(join(Worker { id: 999, life: 1 }, DIGEST, ""));
    assert_eq!(refusals(&said), [(999, Refusal::Full { max: 256 })]);
}

/// A worker that calls again in time stays a member, and a stall of the service drops no worker.
#[test]
fn a_closed_connection_is_missed_after_its_grace() {
    let slow = Config { silence: secs(60), patience: secs(120), ..config(3, 1) };
    let mut desk = Desk::after(slow, None);
    (0..3).for_each(|id| drop(desk.join(id)));
    (0..3).for_each(|id| drop(desk.arrive(id, 4)));
    let gone = |desk: &Desk| desk.arbiter.state().members.iter().map(|place| place.gone).collect::<Vec<_>>();
    (0..2).for_each(|id| desk.arbiter.close(worker(id), desk.now + secs(1)));
    assert_eq!(desk.arbiter.wake_at(), Some(desk.now + secs(1)));
    desk.pass(secs(2), &[0]);
    assert_eq!(gone(&desk), [None, Some(Departure::Silent), None]);
    desk.arbiter.close(worker(2), desk.now + secs(1));
    desk.arbiter.excuse(secs(10));
    desk.pass(secs(10), &[0]);
    assert_eq!(gone(&desk)[2], None);
    desk.pass(secs(1), &[0]);
    assert_eq!(gone(&desk)[2], Some(Departure::Silent));
}

/// A worker that has lost its connection may have gone on alone: it waits at a boundary again only once it asks again. Meanwhile it is
/// not late.
#[test]
fn a_closed_connection_ends_a_wait_at_a_boundary() {
    let slow = Config { silence: secs(60), ..config(2, 1) };
    let mut desk = Desk::after(slow, None);
    (0..2).for_each(|id| drop(desk.join(id)));
    (0..2).for_each(|id| drop(desk.arrive(id, 4)));
    desk.all_vote(&[0, 1], Ballot::Ready);
    desk.arrive(0, 8);
    desk.arbiter.close(worker(0), desk.now + secs(10));
    assert_eq!(desk.arrive(1, 12), []);
    assert_eq!(desk.arbiter.waiting().collect::<Vec<_>>(), [1]);
    // The others' patience is three seconds.
    assert_eq!(desk.pass(secs(5), &[1]), []);
    assert_eq!(desk.arbiter.state().live_ids(), [0, 1]);
    let granted = rounds(&desk.arrive(0, 12));
    assert_eq!((granted.len(), granted[0].1.step, granted[0].1.epoch), (2, 12, 1));
    desk.all_vote(&[0, 1], Ballot::Ready);
    desk.arbiter.close(worker(0), desk.now + secs(10));
    desk.arrive(1, 16);
    let granted = rounds(&desk.pass(secs(10), &[1]));
    assert_eq!(granted[0].1.gone, [Gone { id: 0, why: Departure::Silent }]);
}

#[test]
fn the_first_epoch_waits_for_all_and_then_for_its_patience() {
    let mut desk = Desk::new(3, 2);
    (0..3).for_each(|id| drop(desk.join(id)));
    assert_eq!(desk.arrive(2, 4), []);
    assert_eq!(desk.arrive(0, 4), []);
    let granted = rounds(&desk.arrive(1, 4));
    // Members are in the order of joining, and all count.
    let ids: Vec<u64> = granted[0].1.members.iter().map(|seat| seat.id).collect();
    assert_eq!((ids, granted.len()), (vec![0, 1, 2], 3));
    for (rank, (to, round)) in granted.iter().enumerate() {
        assert_eq!((*to, round.rank, round.epoch, round.number), (rank as u64, rank, 1, 1));
        assert_eq!((round.step, round.divisor(), round.counts(), round.has_joiners()), (4, 3, true, false));
    }

    let mut desk = Desk::new(3, 2);
    (0..2).for_each(|id| drop(desk.join(id)));
    desk.arrive(0, 4);
    desk.arrive(1, 4);
    assert_eq!(rounds(&desk.pass(Duration::from_millis(2500), &[0, 1])), []);
    assert_eq!(rounds(&desk.pass(Duration::from_millis(500), &[0, 1])).len(), 2);

    // Too few workers have come: those present are refused, and may wait again.
    let mut desk = Desk::new(3, 2);
    desk.join(0);
    desk.arrive(0, 4);
    let too_few = [(0, Refusal::TooFew { have: 1, min: 2 })];
    assert_eq!(refusals(&desk.pass(secs(3), &[0])), too_few);
    assert_eq!(desk.pass(secs(3), &[0]), []);
    desk.arrive(0, 4);
    desk.join(1);
    desk.arrive(1, 4);
    assert_eq!(rounds(&desk.pass(secs(3), &[0, 1])).len(), 2);
}

#[test]
fn who_joins_counts_from_its_first_committed_exchange_on() {
    let mut desk = Desk::begun(2, 1);
    // The worker joins in the middle of an exchange, and is admitted at the next.
    desk.join(2);
    assert_eq!(desk.arrive(2, 0), []);
    assert_eq!(desk.all_vote(&[0, 1], Ballot::Ready), Decision::Commit {});
    desk.arrive(1, 8);
    let granted = rounds(&desk.arrive(0, 8));
    let (to, round) = &granted[2];
    assert_eq!(
        (*to, round.rank, round.step, round.epoch, round.divisor(), round.source()),
        (2, 2, 8, 2, 2, 0)
    );
    assert!(!round.counts() && round.has_joiners() && granted[0].1.counts());
    // The exchange was aborted: the new worker still does not count, and takes over the state again.
    desk.all_vote(&[0, 1, 2], Ballot::Failed);
    let granted: Vec<_> = (0..3).flat_map(|id| desk.arrive(id, 8)).collect();
    assert_eq!((rounds(&granted)[2].1.counts(), rounds(&granted)[0].1.divisor()), (false, 2));
    desk.all_vote(&[0, 1, 2], Ballot::Ready);
    let granted: Vec<_> = (0..3).flat_map(|id| desk.arrive(id, 12)).collect();
    let round = &rounds(&granted)[2].1;
    assert_eq!((round.counts(), round.divisor(), round.epoch, round.has_joiners()), (true, 3, 3, false));
    // The oldest member leaves: the next one that counts is the source.
    desk.all_vote(&[0, 1, 2], Ballot::Ready);
    desk.say(0, Ask::Leave);
    desk.join(3);
    desk.arrive(3, 0);
    desk.arrive(1, 16);
    let granted = rounds(&desk.arrive(2, 16));
    let ids: Vec<u64> = granted[0].1.members.iter().map(|seat| seat.id).collect();
    assert_eq!((ids, granted[0].1.source(), granted[0].1.divisor()), (vec![1, 2, 3], 0, 2));
    assert_eq!(granted[0].1.gone, [Gone { id: 0, why: Departure::Left }]);
}

#[test]
fn with_nobody_left_that_counts_the_state_is_lost() {
    let mut desk = Desk::begun(1, 1);
    desk.all_vote(&[0], Ballot::Ready);
    desk.join(1);
    desk.arrive(1, 0);
    desk.arrive(0, 8);
    desk.vote(1, Ballot::Ready);
    // The only member with the state dies before the exchange is committed.
    let said = desk.pass(secs(1), &[1]);
    assert_eq!(decisions(&said), [(1, aborted(&[], &[], &[0]))]);
    let lost = Refusal::StateLost { step: 8 };
    assert_eq!(refusals(&desk.arrive(1, 8)), [(1, lost.clone())]);
    desk.join(2);
    assert_eq!(refusals(&desk.arrive(2, 0)), [(2, lost)]);
}

#[test]
fn one_trains_on_alone_if_that_suffices() {
    for (min, alone) in [(1, true), (2, false)] {
        let mut desk = Desk::begun(2, min);
        desk.all_vote(&[0, 1], Ballot::Ready);
        assert_eq!(desk.say(1, Ask::Leave), [(1, Word::Farewell)]);
        // The arbiter repeats its answer to a repeated request, and to late messages of the worker.
        assert_eq!(desk.say(1, Ask::Leave), [(1, Word::Farewell)]);
        assert_eq!(desk.arrive(1, 8), [(1, Word::Farewell)]);
        let said = desk.arrive(0, 8);
        if alone {
            assert_eq!((rounds(&said)[0].1.divisor(), rounds(&said)[0].1.epoch), (1, 2));
            assert_eq!(desk.all_vote(&[0], Ballot::Ready), Decision::Commit {});
        } else {
            assert_eq!(said, []);
            let too_few = [(0, Refusal::TooFew { have: 1, min: 2 })];
            assert_eq!(refusals(&desk.pass(secs(3), &[0])), too_few);
            // A worker that joins meanwhile makes two again.
            desk.arrive(0, 8);
            desk.join(2);
            let granted = rounds(&desk.arrive(2, 0));
            assert_eq!((granted.len(), granted[0].1.divisor()), (2, 1));
        }
    }
}
