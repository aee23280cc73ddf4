//! Member state machine: requests, answers, leases, and calls out of order.

use super::{Desk, T0, aborted, rounds, worker};
use crate::common::{DIGEST, secs};
use meshstep_membership::{
    Answer, Ask, Ballot, Decision, Error, FromArbiter, Member, Refusal, Request, Round, Word, Worker,
};
use std::time::Duration;

/// A member driven by hand.
struct Told {
    member: Member,
    term: u64,
    asked: Option<u64>,
}

impl Told {
    fn new() -> Self {
        Told { member: Member::new(worker(1), DIGEST, "here".to_owned(), secs(20)), term: 1, asked: None }
    }

    /// Creates a member with a lease until 11 s that has asked for a boundary.
    fn asking() -> Self {
        let mut told = Told::new();
        told.hear(Word::Heard { sent: secs(1), lease: secs(10) });
        told.begin(Request::Boundary(4), secs(1));
        told
    }

    fn begin(&mut self, request: Request, now: Duration) {
        self.asked = Some(self.member.begin(request, now));
    }

    fn take(&mut self, now: Duration) -> Option<Result<Answer, Error>> {
        let answer = self.member.take(self.asked?, now);
        self.asked = self.asked.filter(|_| answer.is_none());
        answer
    }

    fn hear(&mut self, word: Word) {
        self.member.hear(FromArbiter { to: worker(1), term: self.term, word });
    }

    fn asks(&mut self, now: Duration) -> Vec<Ask> {
        self.member.tick(now).into_iter().map(|message| message.ask).collect()
    }

    /// Returns the last round with a known end, as each message names it.
    fn known_ends(&mut self, now: Duration) -> Vec<u64> {
        self.member.tick(now).into_iter().map(|message| message.after).collect()
    }
}

fn round(number: u64) -> Round {
    let mut desk = Desk::begun(2, 1);
    desk.all_vote(&[0, 1], Ballot::Veto);
    let said = desk.arrive(0, 4).into_iter().chain(desk.arrive(1, 4)).collect::<Vec<_>>();
    Round { number, ..rounds(&said)[1].1.clone() }
}

#[test]
fn a_member_asks_until_it_is_answered_or_gives_up() {
    let mut told = Told::new();
    told.begin(Request::Join, T0);
    let join = Ask::Join { digest: DIGEST, contact: "here".to_owned() };
    assert_eq!(told.asks(T0), [join.clone(), Ask::Beat { sent: T0 }]);
    assert_eq!(told.asks(T0), []);
    assert_eq!(told.member.wake_at(), Duration::from_millis(100));
    let later = Duration::from_millis(100);
    assert_eq!(told.asks(later), [join, Ask::Beat { sent: later }]);
    assert_eq!(told.take(secs(19)), None);
    let unanswered = Error::Unanswered { what: "joining", after: secs(20) };
    assert_eq!(told.take(secs(20)), Some(Err(unanswered)));
    assert_eq!(told.take(secs(21)), None);
    told.begin(Request::Join, secs(30));
    told.hear(Word::Welcome);
    assert_eq!(told.take(secs(30)), Some(Ok(Answer::Welcome)));

    let mut told = Told::asking();
    told.hear(Word::Granted { round: round(1) });
    assert_eq!(told.take(secs(2)), Some(Ok(Answer::Granted(round(1)))));
    // As a member of an epoch it no longer asks to join, and beats at intervals of the lease.
    told.member.repeat(secs(2));
    assert_eq!(told.asks(secs(2)), [Ask::Beat { sent: secs(2) }]);
    assert_eq!(told.member.wake_at(), secs(2) + secs(10) / 6);
    assert_eq!(told.known_ends(secs(4)), [0]);
    let vote = Request::Vote { round: 1, ballot: Ballot::Ready };
    told.begin(vote, secs(3));
    let asks = [Ask::Beat { sent: secs(3) }, Ask::Vote { round: 1, ballot: Ballot::Ready }];
    assert_eq!(told.asks(secs(3)), asks);
    // After a vote without an answer the worker votes again, and gets the decision that was made.
    let unanswered = Error::Unanswered { what: "a vote", after: secs(20) };
    assert_eq!(told.take(secs(23)), Some(Err(unanswered)));
    told.hear(Word::Decided { round: 1, decision: Decision::Commit {} });
    told.hear(Word::Heard { sent: secs(23), lease: secs(10) });
    told.begin(vote, secs(24));
    assert_eq!(told.take(secs(24)), Some(Ok(Answer::Decided(Decision::Commit {}))));
    assert_eq!(told.known_ends(secs(30)), [1]);
}

#[test]
fn a_connection_is_lost_after_half_a_lease_and_not_before_two_seconds() {
    let mut told = Told::new();
    assert_eq!(told.member.lost_after(), secs(2));
    for (lease, after) in [(secs(60), secs(30)), (secs(3), secs(2))] {
        told.hear(Word::Heard { sent: secs(1), lease });
        assert_eq!(told.member.lost_after(), after);
    }
}

#[test]
fn an_answer_is_believed_only_while_the_lease_lasts() {
    let mut told = Told::asking();
    told.hear(Word::Granted { round: round(1) });
    // The worker was suspended until the lease had ended, with the answer already received.
    assert_eq!(told.take(secs(11)), None);
    told.hear(Word::Decided { round: 1, decision: aborted(&[], &[], &[0]) });
    // The worker only renews its lease: a repeated boundary request would be for the next round.
    let join = Ask::Join { digest: DIGEST, contact: "here".to_owned() };
    assert!(!told.asks(secs(11)).iter().any(|ask| matches!(ask, Ask::Arrive { .. }) || *ask == join));
    let mut fenced = Told::asking();
    fenced.hear(Word::Granted { round: round(1) });
    let refusal = Refusal::Fenced { epoch: 1, now: 2, why: None };
    fenced.hear(Word::Refused { request: 0, refusal: refusal.clone() });
    assert_eq!(fenced.take(secs(11)), Some(Err(refusal.clone().into())));
    fenced.begin(Request::Boundary(4), secs(12));
    assert_eq!(fenced.take(secs(12)), Some(Err(refusal.into())));
    assert_eq!(fenced.asks(secs(12)), []);
    // An acknowledgement of an old beat does not help, one of a new beat does.
    told.hear(Word::Heard { sent: T0, lease: secs(10) });
    assert_eq!(told.take(secs(11)), None);
    told.hear(Word::Heard { sent: secs(11), lease: secs(10) });
    assert_eq!(told.take(secs(12)), Some(Ok(Answer::Granted(round(1)))));
    // The same holds for a decision.
    told.begin(Request::Vote { round: 1, ballot: Ballot::Ready }, secs(12));
    assert_eq!(told.take(secs(21)), None);
    assert_eq!(told.member.decided(1), Some(&aborted(&[], &[], &[0])));
    assert!(matches!(told.take(secs(32)), Some(Err(Error::Unanswered { .. }))));
}

#[test]
fn a_member_does_not_listen_to_an_arbiter_of_an_earlier_term_or_to_what_is_another_s() {
    let mut told = Told::asking();
    told.term = 5;
    told.hear(Word::Heard { sent: secs(1), lease: secs(10) });
    told.term = 4;
    told.hear(Word::Granted { round: round(1) });
    assert_eq!(told.take(secs(2)), None);
    told.member.hear(FromArbiter { to: worker(2), term: 5, word: Word::Granted { round: round(1) } });
    let other_life = Worker { life: 1, ..worker(1) };
    told.member.hear(FromArbiter { to: other_life, term: 5, word: Word::Farewell });
    assert_eq!(told.take(secs(2)), None);
    told.member.repeat(secs(2));
    assert!(told.member.tick(secs(2)).iter().all(|message| message.term == 5));
    told.term = 6;
    told.hear(Word::Granted { round: round(1) });
    assert!(matches!(told.take(secs(2)), Some(Ok(Answer::Granted(_)))));
}

#[test]
fn calls_out_of_order_are_errors_that_change_nothing() {
    let mut told = Told::asking();
    let vote = |round| Request::Vote { round, ballot: Ballot::Ready };
    told.begin(vote(1), secs(1));
    assert_eq!(told.take(secs(1)), Some(Err(Error::OtherRound { asked: 1, round: 0 })));
    told.begin(Request::Boundary(4), secs(1));
    told.hear(Word::Granted { round: round(1) });
    assert!(matches!(told.take(secs(1)), Some(Ok(Answer::Granted(_)))));
    told.begin(Request::Boundary(8), secs(1));
    assert_eq!(told.take(secs(1)), Some(Err(Error::Undecided { round: 1 })));
    told.begin(vote(2), secs(1));
    assert_eq!(told.take(secs(1)), Some(Err(Error::OtherRound { asked: 2, round: 1 })));
    // During a round, another round's grant and decision are ignored, and a repeated grant has no effect.
    told.begin(vote(1), secs(1));
    told.hear(Word::Granted { round: round(2) });
    told.hear(Word::Decided { round: 2, decision: Decision::Commit {} });
    assert_eq!(told.take(secs(1)), None);
    told.hear(Word::Decided { round: 1, decision: aborted(&[], &[], &[0]) });
    assert_eq!(told.take(secs(1)), Some(Ok(Answer::Decided(aborted(&[], &[], &[0])))));
    told.begin(Request::Boundary(4), secs(1));
    told.hear(Word::Granted { round: round(1) });
    assert_eq!(told.take(secs(1)), None);
    // A refusal of another request is ignored.
    let refusal = Refusal::TooFew { have: 1, min: 2 };
    told.hear(Word::Refused { request: 2, refusal: refusal.clone() });
    assert_eq!(told.take(secs(1)), None);
    let number = told.member.tick(secs(1)).into_iter().find_map(|message| match message.ask {
        Ask::Arrive { request, step: 4 } if message.after == 1 => Some(request),
        _ => None,
    });
    told.hear(Word::Refused { request: number.unwrap(), refusal: refusal.clone() });
    assert_eq!(told.take(secs(1)), Some(Err(refusal.into())));
    // A call replaced by another has no answer; the other call has.
    let first = told.member.begin(Request::Boundary(4), secs(1));
    told.begin(Request::Leave, secs(1));
    assert_eq!(told.member.take(first, secs(1)), Some(Err(Error::Overtaken)));
    told.hear(Word::Farewell);
    assert_eq!(told.take(secs(1)), Some(Ok(Answer::Farewell)));
    told.begin(Request::Boundary(8), secs(1));
    assert_eq!(told.take(secs(1)), Some(Err(Error::Left)));
}
