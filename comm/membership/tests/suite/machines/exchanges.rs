//! Exchanges: votes, deaths, leavers, and members that are dropped.

use super::{Desk, LiveIds, T0, aborted, decisions, refusals, rounds, worker};
use crate::common::{DIGEST, secs};
use meshstep_membership::{Ask, Ballot, Decision, Departure, Gone, Refusal, ToArbiter, Word, Worker};
use std::time::Duration;

#[test]
fn an_exchange_is_committed_when_all_are_ready_and_only_then() {
    use Ballot::{Failed, Ready, Veto};
    for (ballots, expected) in [
        ([Ready, Ready, Ready], Decision::Commit {}),
        ([Ready, Veto, Ready], aborted(&[1], &[], &[])),
        ([Failed, Ready, Ready], aborted(&[], &[0], &[])),
        ([Failed, Veto, Veto], aborted(&[1, 2], &[0], &[])),
    ] {
        let mut desk = Desk::begun(3, 1);
        assert_eq!(desk.vote(0, ballots[0]), []);
        // The first ballot stands, and the decision waits for the others.
        assert_eq!(desk.vote(0, if ballots[0] == Ready { Veto } else { Ready }), []);
        assert_eq!(desk.vote(1, ballots[1]), []);
        assert_eq!(desk.log.last().unwrap().decision, None);
        let said = desk.vote(2, ballots[2]);
        let all: Vec<_> = (0..3).map(|id| (id, expected.clone())).collect();
        assert_eq!(decisions(&said), all);
        // The decision was logged with its messages, and is sent again on request.
        assert_eq!(desk.log.last().unwrap().decision.as_ref(), Some(&expected));
        assert_eq!(decisions(&desk.vote(1, Ready)), [(1, expected.clone())]);
        // After a failure communicators are made anew; after a veto they are kept.
        let step = if expected.is_commit() { 8 } else { 4 };
        let granted = (0..3).flat_map(|id| desk.arrive(id, step)).collect::<Vec<_>>();
        let epochs: Vec<u64> = rounds(&granted).iter().map(|(_, round)| round.epoch).collect();
        let epoch = if ballots[0] == Failed { 2 } else { 1 };
        assert_eq!((epochs, desk.arbiter.state().round), (vec![epoch; 3], 2));
    }
}

#[test]
fn a_death_before_the_vote_ends_the_exchange_and_after_it_does_not() {
    use Ballot::Ready;
    // A worker dies before its vote: the round is decided as soon as the worker is missed, even before others have voted.
    let mut desk = Desk::begun(3, 1);
    desk.vote(0, Ready);
    let said = desk.pass(secs(1), &[0, 1]);
    assert_eq!(decisions(&said), [(0, aborted(&[], &[], &[2])), (1, aborted(&[], &[], &[2]))]);
    // Two workers continue in a new epoch, and the divisor is two.
    desk.arrive(0, 4);
    let granted = rounds(&desk.arrive(1, 4));
    assert_eq!(granted.len(), 2);
    let round = &granted[0].1;
    assert_eq!((round.epoch, round.divisor(), round.members.len()), (2, 2, 2));
    assert_eq!(round.gone, [Gone { id: 2, why: Departure::Silent }]);
    // The worker was only suspended, and continues.
    let fenced = Refusal::Fenced { epoch: 1, now: 2, why: Some(Departure::Silent) };
    assert_eq!(refusals(&desk.vote(2, Ready)), [(2, fenced.clone())]);
    assert_eq!(refusals(&desk.arrive(2, 8)), [(2, fenced.clone())]);
    assert_eq!(refusals(&desk.say(2, Ask::Beat { sent: T0 })), [(2, fenced.clone())]);
    assert_eq!(refusals(&desk.join(2)), [(2, fenced)]);
    // The refusal also holds if the worker never received its grant.
    let ask = Ask::Join { digest: DIGEST, contact: String::new() };
    let said = desk.tell(ToArbiter { worker: worker(2), term: 0, epoch: 0, after: 0, ask });
    let unheard = Refusal::Fenced { epoch: 0, now: 2, why: Some(Departure::Silent) };
    assert_eq!(refusals(&said), [(2, unheard)]);
    assert_eq!(desk.all_vote(&[0, 1], Ready), Decision::Commit {});
    // After the arbiter has forgotten the reason, the worker is still not a member.
    for step in [8, 12] {
        if step == 12 {
            desk.join(3);
            desk.arrive(3, 0);
        }
        (0..2).for_each(|id| drop(desk.arrive(id, step)));
        let last = desk.arbiter.state().members.len() as u64;
        (0..last).for_each(|id| drop(desk.vote(if id == 2 { 3 } else { id }, Ready)));
    }
    let forgotten = Refusal::Fenced { epoch: 1, now: 3, why: None };
    assert_eq!(refusals(&desk.vote(2, Ready)), [(2, forgotten)]);

    // A worker dies after its vote: its ballot stands.
    let mut desk = Desk::begun(3, 1);
    desk.vote(2, Ready);
    assert_eq!(desk.pass(secs(1), &[0, 1]), []);
    desk.vote(0, Ready);
    let said = desk.vote(1, Ready);
    assert_eq!(decisions(&said), [(0, Decision::Commit {}), (1, Decision::Commit {})]);
}

#[test]
fn who_gives_signs_but_keeps_others_waiting_is_dropped() {
    // Late with its vote.
    let mut desk = Desk::begun(3, 1);
    desk.vote(1, Ballot::Ready);
    desk.vote(2, Ballot::Ready);
    assert_eq!(decisions(&desk.pass(Duration::from_millis(2500), &[0, 1, 2])), []);
    let said = desk.pass(Duration::from_millis(500), &[0, 1, 2]);
    assert_eq!(decisions(&said), [(1, aborted(&[], &[], &[0])), (2, aborted(&[], &[], &[0]))]);
    let late = Refusal::Fenced { epoch: 1, now: 1, why: Some(Departure::Late) };
    assert_eq!(refusals(&desk.vote(0, Ballot::Ready)), [(0, late)]);
    // Late at the boundary.
    desk.arrive(2, 8);
    let granted = rounds(&desk.pass(secs(3), &[1, 2]));
    assert_eq!(granted.len(), 1);
    assert_eq!(
        granted[0].1.gone,
        [Gone { id: 0, why: Departure::Late }, Gone { id: 1, why: Departure::Late }]
    );
    assert_eq!((granted[0].1.divisor(), granted[0].1.rank), (1, 0));
    // The arbiter itself stood still: no worker is late because of that.
    let mut desk = Desk::begun(2, 1);
    desk.vote(1, Ballot::Ready);
    desk.arbiter.excuse(secs(100));
    desk.now += secs(100);
    assert_eq!(decisions(&desk.pass(Duration::from_millis(500), &[])), []);
    assert_eq!(desk.arbiter.state().live_ids(), [0, 1]);
    assert_eq!(decisions(&desk.pass(secs(2), &[0, 1])), []);
    assert_eq!(decisions(&desk.pass(Duration::from_millis(500), &[0, 1])).len(), 1);
}

#[test]
fn who_vetoes_three_in_a_row_is_dropped() {
    use Ballot::{Failed, Ready, Veto};
    // A failure neither counts nor ends the row of vetoes; a ready ballot ends it.
    for (row, dropped) in [
        (vec![Veto, Veto, Veto], true),
        (vec![Veto, Failed, Veto, Veto], true),
        (vec![Veto, Veto, Ready, Veto, Veto], false),
        (vec![Failed, Failed, Failed, Failed], false),
    ] {
        let mut desk = Desk::begun(2, 1);
        let last = row.len() - 1;
        for (i, ballot) in row.iter().enumerate() {
            assert_eq!(desk.arbiter.state().live_ids(), [0, 1], "{row:?} {i}");
            desk.vote(0, Ready);
            desk.vote(1, *ballot);
            let committed = *ballot == Ready;
            assert_eq!(desk.arbiter.state().decision.as_ref().unwrap().is_commit(), committed);
            if i < last {
                // After a commit the next exchange is of a later step.
                let step = 4 + 4 * row[..=i].iter().filter(|ballot| **ballot == Ready).count() as u64;
                (0..2).for_each(|id| drop(desk.arrive(id, step)));
            }
        }
        let live = if dropped { vec![0] } else { vec![0, 1] };
        assert_eq!(desk.arbiter.state().live_ids(), live, "{row:?}");
        if dropped {
            let now = desk.arbiter.state().epoch;
            let vetoed = Refusal::Fenced { epoch: now, now, why: Some(Departure::Vetoed) };
            assert_eq!(refusals(&desk.arrive(1, 4)), [(1, vetoed)]);
            // A new start of the worker may join.
            let ask = Ask::Join { digest: DIGEST, contact: String::new() };
            let (worker, term) = (Worker { id: 1, life: 9 }, 0);
            assert_eq!(desk.tell(ToArbiter { worker, term, epoch: 0, after: 0, ask }), [(1, Word::Welcome)]);
        }
    }
}

#[test]
fn a_leaver_in_the_middle_of_an_exchange_costs_that_one() {
    let mut desk = Desk::begun(2, 1);
    let said = desk.say(1, Ask::Leave);
    assert_eq!(decisions(&said), [(0, aborted(&[], &[], &[1]))]);
    assert_eq!(rounds(&desk.arrive(0, 4))[0].1.divisor(), 1);
}

#[test]
fn a_round_without_an_exchange_makes_nobody_count_and_who_does_not_has_no_say() {
    let mut desk = Desk::begun(1, 1);
    desk.all_vote(&[0], Ballot::Ready);
    for id in [1, 2] {
        desk.join(id);
        desk.arrive(id, 0);
    }
    assert_eq!(rounds(&desk.arrive(0, 8)).len(), 3);
    assert_eq!(desk.all_vote(&[0, 1, 2], Ballot::Idle), Decision::Idle {});
    [0, 1].into_iter().for_each(|id| drop(desk.arrive(id, 12)));
    let granted = rounds(&desk.arrive(2, 12));
    assert_eq!((granted[0].1.epoch, granted[0].1.divisor()), (2, 1));
    // One idle ballot is enough.
    [0, 1].into_iter().for_each(|id| drop(desk.vote(id, Ballot::Ready)));
    assert_eq!(desk.all_vote(&[2], Ballot::Idle), Decision::Idle {});
    [1, 2].into_iter().for_each(|id| drop(desk.arrive(id, 20)));
    let granted = rounds(&desk.arrive(0, 16));
    assert_eq!((granted.len(), granted[0].1.step, granted[0].1.gone.len()), (1, 16, 2));
}
