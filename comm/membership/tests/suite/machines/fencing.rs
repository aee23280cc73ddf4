//! Members at different steps, and arbiters that have a successor.

use super::{Desk, T0, aborted, decisions, refusals, rounds, worker};
use crate::common::{config, secs};
use meshstep_membership::{Ask, Ballot, Decision, Departure, Error, Gone, Refusal, ToArbiter};

#[test]
fn a_member_behind_the_others_goes_on_to_their_step_and_they_wait_for_it() {
    let mut desk = Desk::begun(2, 1);
    desk.all_vote(&[0, 1], Ballot::Ready);
    desk.arrive(0, 8);
    let behind = |step, others| Refusal::Behind { step, others };
    assert_eq!(refusals(&desk.arrive(1, 12)), [(0, behind(8, 12))]);
    // The one behind passes a step at which it would exchange, and meets the other.
    assert_eq!(refusals(&desk.arrive(0, 10)), [(0, behind(10, 12))]);
    let granted = rounds(&desk.arrive(0, 12));
    assert_eq!((granted.len(), granted[0].1.step, granted[0].1.epoch), (2, 12, 1));
    desk.all_vote(&[0, 1], Ballot::Ready);
    for step in [4, 3] {
        desk.arrive(0, step);
        let passed = Refusal::Passed { asked: step, step: 12 };
        assert_eq!(refusals(&desk.arrive(1, step)), [(0, passed.clone()), (1, passed)]);
    }
    desk.arrive(0, 13);
    assert_eq!(rounds(&desk.arrive(1, 13)).len(), 2);
}

#[test]
fn a_member_behind_that_does_not_come_is_dropped_when_the_others_patience_ends() {
    let mut desk = Desk::begun(3, 1);
    desk.all_vote(&[0, 1, 2], Ballot::Ready);
    desk.arrive(0, 12);
    desk.arrive(1, 8);
    assert_eq!(refusals(&desk.arrive(2, 12)).len(), 1);
    // The others ask again, as they do until they are answered, and the third one only beats.
    desk.arrive(0, 12);
    let said = desk.pass(secs(3), &[0, 1, 2]);
    let granted = rounds(&said);
    assert_eq!(granted.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(granted[0].1.gone, [Gone { id: 1, why: Departure::Late }]);
}

#[test]
fn the_minority_at_another_step_is_fenced_and_the_others_go_on() {
    for order in [[0, 1, 2], [1, 2, 0], [2, 0, 1]] {
        let mut desk = Desk::begun(3, 1);
        desk.all_vote(&[0, 1, 2], Ballot::Ready);
        let step = |id| if id == 1 { 12 } else { 8 };
        let said = order.map(|id| desk.arrive(id, step(id)));
        let (granted, why) = (rounds(&said[2]), Departure::OutOfStep { step: 12, others: 8 });
        assert_eq!(granted.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [0, 2]);
        let round = &granted[0].1;
        assert_eq!((round.step, round.epoch, round.divisor()), (8, 2, 2));
        assert_eq!((&round.gone, refusals(&said.concat())), (&vec![Gone { id: 1, why }], vec![]));
        let fenced = Refusal::Fenced { epoch: 1, now: 2, why: Some(why) };
        assert_eq!(refusals(&desk.arrive(1, 12)), [(1, fenced)]);
    }
}

#[test]
fn without_a_majority_that_may_exchange_nobody_is_fenced() {
    // Two against two; two of three that ask for a step that has passed; and three of three apart.
    for (steps, behind) in
        [(vec![8, 8, 12, 12], vec![0, 1]), (vec![4, 4, 12], vec![0, 1]), (vec![12, 8, 10], vec![1, 2])]
    {
        let ids: Vec<u64> = (0..steps.len() as u64).collect();
        let mut desk = Desk::begun(steps.len(), 1);
        desk.all_vote(&ids, Ballot::Ready);
        let said: Vec<_> = ids.iter().flat_map(|&id| desk.arrive(id, steps[id as usize])).collect();
        let expected = |&id: &u64| (id, Refusal::Behind { step: steps[id as usize], others: 12 });
        assert_eq!(refusals(&said), behind.iter().map(expected).collect::<Vec<_>>());
        let said: Vec<_> = behind.iter().flat_map(|&id| desk.arrive(id, 12)).collect();
        assert_eq!((rounds(&said).len(), rounds(&said)[0].1.epoch), (ids.len(), 1));
    }
}

#[test]
fn a_successor_says_what_was_logged_and_asks_for_the_votes_that_were_not() {
    use Ballot::Ready;
    // Ballots are lost with the arbiter, and cast again.
    let mut desk = Desk::begun(2, 1);
    desk.vote(0, Ready);
    let mut next = Desk::after(config(2, 1), desk.log.last().cloned());
    (next.epochs, next.rounds) = (desk.epochs, desk.rounds);
    assert_eq!((next.arbiter.state().term, next.log.len()), (2, 1));
    assert_eq!(next.vote(1, Ready), []);
    assert_eq!(decisions(&next.vote(0, Ready)).len(), 2);
    // A commit that was logged counts, even if no member has received it.
    let mut third = Desk::after(config(2, 1), next.log.last().cloned());
    (third.epochs, third.rounds) = (next.epochs, next.rounds);
    assert_eq!(decisions(&third.vote(1, Ready)), [(1, Decision::Commit {})]);
    assert_eq!(decisions(&third.vote(0, Ballot::Failed)), [(0, Decision::Commit {})]);
    // The same holds for a grant: the arbiter repeats it for a member that has not received it.
    third.arrive(0, 8);
    third.arrive(1, 8);
    let mut fourth = Desk::after(config(2, 1), third.log.last().cloned());
    (fourth.epochs, fourth.rounds) = (next.epochs, next.rounds);
    assert_eq!(fourth.arbiter.state().term, 4);
    let granted = rounds(&fourth.arrive(1, 8));
    assert_eq!((granted.len(), granted[0].1.number, granted[0].1.step), (1, 2, 8));
    // Members have one silence to come back.
    assert_eq!(fourth.arbiter.wake_at(), Some(secs(1)));
    let said = fourth.pass(secs(1), &[1]);
    assert_eq!(decisions(&said), [(1, aborted(&[], &[], &[0]))]);
    // A member that missed the round while the arbiter was down gets the round and its decision at once.
    let (term, epoch, ask) = (4, 1, Ask::Arrive { request: 1, step: 8 });
    let said = fourth.tell(ToArbiter { worker: worker(1), term, epoch, after: 1, ask });
    assert_eq!((rounds(&said).len(), decisions(&said).len()), (1, 1));
}

#[test]
fn an_arbiter_on_an_incomplete_copy_of_the_log_says_so_and_no_more() {
    let mut desk = Desk::begun(2, 1);
    let copies = desk.log.clone();
    desk.all_vote(&[0, 1], Ballot::Ready);
    // The copy ends before the decision, and a worker knows it, as its beats say too; or before the grant, and a worker votes.
    let open = copies.iter().rfind(|state| state.round == 1 && state.decision.is_none()).cloned();
    let first = copies.iter().rfind(|state| state.round == 0).cloned();
    let (arrive, beat) = (Ask::Arrive { request: 1, step: 8 }, Ask::Beat { sent: T0 });
    let vote = Ask::Vote { round: 1, ballot: Ballot::Ready };
    for (last, after, ask, round) in [(open.clone(), 1, arrive, 1), (open, 1, beat, 1), (first, 0, vote, 0)] {
        let mut next = Desk::after(config(2, 1), last);
        let epoch = next.arbiter.state().epoch;
        assert_eq!(next.tell(ToArbiter { worker: worker(1), term: 1, epoch, after, ask }), []);
        assert_eq!(next.arbiter.superseded(), Some(&Error::Stale { round, later: 1 }));
    }
}

#[test]
fn an_arbiter_that_has_a_successor_says_no_more() {
    for (term, epoch) in [(2, 1), (1, 2)] {
        let mut desk = Desk::begun(2, 1);
        let ask = Ask::Beat { sent: T0 };
        assert_eq!(desk.tell(ToArbiter { worker: worker(1), term, epoch, after: 0, ask }), []);
        let expected = Error::Superseded { term: 1, epoch: 1, later_term: term, later_epoch: epoch };
        assert_eq!(desk.arbiter.superseded(), Some(&expected));
        let log = desk.log.len();
        assert_eq!((desk.vote(0, Ballot::Ready), desk.pass(secs(9), &[0])), (vec![], vec![]));
        assert_eq!(desk.log.len(), log);
    }
}
