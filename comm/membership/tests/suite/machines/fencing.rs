//! Members at different steps, and arbiters that have a successor.

use super::{Desk, T0, aborted, decisions, refusals, rounds, worker};
use crate::common::{config, secs};
use meshstep_membership::{Ask, Ballot, Decision, Departure, Error, Gone, Refusal, ToArbiter};

#[test]
fn members_at_different_steps_are_told_and_so_are_those_behind() {
    let mut desk = Desk::begun(2, 1);
    desk.all_vote(&[0, 1], Ballot::Ready);
    desk.arrive(0, 8);
    let said = desk.arrive(1, 12);
    let disagree = Refusal::Disagree { id: 0, step: 8, other: 1, other_step: 12 };
    assert_eq!(refusals(&said), [(0, disagree.clone()), (1, disagree)]);
    for step in [4, 3] {
        desk.arrive(0, step);
        let passed = Refusal::Passed { asked: step, step: 4 };
        assert_eq!(refusals(&desk.arrive(1, step)), [(0, passed.clone()), (1, passed)]);
    }
    desk.arrive(0, 5);
    assert_eq!(rounds(&desk.arrive(1, 5)).len(), 2);
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
    // Two against two; and two of three that ask for a step that has passed.
    for (steps, ids) in [(vec![8, 8, 12, 12], vec![0, 1, 2, 3]), (vec![4, 4, 8], vec![0, 1, 2])] {
        let mut desk = Desk::begun(steps.len(), 1);
        desk.all_vote(&ids, Ballot::Ready);
        let said: Vec<_> = ids.iter().flat_map(|&id| desk.arrive(id, steps[id as usize])).collect();
        let refused = refusals(&said);
        assert_eq!(refused.iter().map(|(to, _)| *to).collect::<Vec<_>>(), ids);
        assert!(
            refused.iter().all(|(_, refusal)| matches!(refusal, Refusal::Disagree { .. })),
            "{refused:?}"
        );
        let said: Vec<_> = ids.iter().flat_map(|&id| desk.arrive(id, 12)).collect();
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
    let said = fourth.say(1, Ask::Arrive { request: 1, after: 1, step: 8 });
    assert_eq!((rounds(&said).len(), decisions(&said).len()), (1, 1));
}

#[test]
fn an_arbiter_that_has_a_successor_says_no_more() {
    for (term, epoch) in [(2, 1), (1, 2)] {
        let mut desk = Desk::begun(2, 1);
        let ask = Ask::Beat { sent: T0 };
        assert_eq!(desk.tell(ToArbiter { worker: worker(1), term, epoch, ask }), []);
        let expected = Error::Superseded { term: 1, epoch: 1, later_term: term, later_epoch: epoch };
        assert_eq!(desk.arbiter.superseded(), Some(&expected));
        let log = desk.log.len();
        assert_eq!((desk.vote(0, Ballot::Ready), desk.pass(secs(9), &[0])), (vec![], vec![]));
        assert_eq!(desk.log.len(), log);
    }
}
