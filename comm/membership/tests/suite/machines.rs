//! Arbiter and member state machines, event by event: the messages each sends, and those it ignores.

use crate::common::{DIGEST, config, secs};
use meshstep_membership::{
    Answer, Arbiter, Ask, Ballot, Config, ConfigError, Decision, Departure, Digest, Error, FromArbiter, Gone,
    Member, Output, Refusal, Request, Round, State, ToArbiter, Word, Worker,
};
use std::time::Duration;

const T0: Duration = Duration::ZERO;

fn worker(id: u64) -> Worker {
    Worker { id, life: 100 + id }
}

/// An arbiter driven by hand. Workers remember the epoch and round last granted to them.
struct Desk {
    arbiter: Arbiter,
    log: Vec<State>,
    now: Duration,
    epochs: [u64; 8],
    rounds: [u64; 8],
}

impl Desk {
    fn new(workers: usize, min: usize) -> Self {
        Self::after(config(workers, min), None)
    }

    fn after(config: Config, last: Option<State>) -> Self {
        let (arbiter, output) = Arbiter::new(config, last, T0).unwrap();
        Desk { arbiter, log: output.log.into_iter().collect(), now: T0, epochs: [0; 8], rounds: [0; 8] }
    }

    /// Creates an arbiter that has granted the first round, at step 4, to all its workers.
    fn begun(workers: usize, min: usize) -> Self {
        let mut desk = Desk::new(workers, min);
        (0..workers as u64).for_each(|id| drop(desk.join(id)));
        let last = (0..workers as u64).map(|id| desk.arrive(id, 4)).last().unwrap();
        assert_eq!(last.len(), workers);
        desk
    }

    fn note(&mut self, output: Output) -> Vec<(u64, Word)> {
        self.log.extend(output.log);
        for message in &output.send {
            if let Word::Granted { round } = &message.word {
                let id = message.to.id as usize;
                (self.epochs[id], self.rounds[id]) = (round.epoch, round.number);
            }
        }
        output.send.into_iter().map(|message| (message.to.id, message.word)).collect()
    }

    fn tell(&mut self, message: ToArbiter) -> Vec<(u64, Word)> {
        let output = self.arbiter.hear(message, self.now);
        self.note(output)
    }

    fn say(&mut self, id: u64, ask: Ask) -> Vec<(u64, Word)> {
        let (term, epoch) = (self.arbiter.state().term, self.epochs[id as usize]);
        self.tell(ToArbiter { worker: worker(id), term, epoch, ask })
    }

    fn join(&mut self, id: u64) -> Vec<(u64, Word)> {
        self.say(id, Ask::Join { digest: DIGEST, contact: String::new() })
    }

    fn arrive(&mut self, id: u64, step: u64) -> Vec<(u64, Word)> {
        self.say(id, Ask::Arrive { request: 10 + id, after: self.rounds[id as usize], step })
    }

    fn vote(&mut self, id: u64, ballot: Ballot) -> Vec<(u64, Word)> {
        self.say(id, Ask::Vote { round: self.rounds[id as usize], ballot })
    }

    /// Votes `ballot` for all of `ids`, and returns the decision.
    fn all_vote(&mut self, ids: &[u64], ballot: Ballot) -> Decision {
        ids.iter().for_each(|&id| drop(self.vote(id, ballot)));
        self.arbiter.state().decision.clone().unwrap()
    }

    /// Advances the time, with a beat of each of `alive` every half second.
    fn pass(&mut self, span: Duration, alive: &[u64]) -> Vec<(u64, Word)> {
        let until = self.now + span;
        let mut said = Vec::new();
        while self.now < until {
            self.now += Duration::from_millis(500);
            let sent = self.now;
            alive.iter().for_each(|&id| drop(self.say(id, Ask::Beat { sent })));
            let output = self.arbiter.tick(self.now);
            said.extend(self.note(output));
        }
        said
    }
}

fn rounds(said: &[(u64, Word)]) -> Vec<(u64, Round)> {
    let round = |(to, word): &(u64, Word)| match word {
        Word::Granted { round } => Some((*to, round.clone())),
        _ => None,
    };
    said.iter().filter_map(round).collect()
}

fn decisions(said: &[(u64, Word)]) -> Vec<(u64, Decision)> {
    let decision = |(to, word): &(u64, Word)| match word {
        Word::Decided { decision, .. } => Some((*to, decision.clone())),
        _ => None,
    };
    said.iter().filter_map(decision).collect()
}

fn refusals(said: &[(u64, Word)]) -> Vec<(u64, Refusal)> {
    let refusal = |(to, word): &(u64, Word)| match word {
        Word::Refused { refusal, .. } => Some((*to, refusal.clone())),
        _ => None,
    };
    said.iter().filter_map(refusal).collect()
}

fn aborted(vetoed: &[u64], failed: &[u64], lost: &[u64]) -> Decision {
    Decision::Abort { vetoed: vetoed.to_vec(), failed: failed.to_vec(), lost: lost.to_vec() }
}

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
    let other = Config { digest: Digest { rule: 9, ..DIGEST }, ..config(1, 1) };
    assert_eq!(Arbiter::new(other, desk.log.last().cloned(), T0).err(), Some(ConfigError::OtherRun));
}

#[test]
fn who_does_not_fit_is_told_why() {
    let mut desk = Desk::new(2, 1);
    let join = |worker, digest, contact: &str| ToArbiter {
        worker,
        term: 0,
        epoch: 0,
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
    let said = desk.tell(ToArbiter { worker: worker(2), term: 0, epoch: 0, ask });
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
            assert_eq!(desk.tell(ToArbiter { worker, term, epoch: 0, ask }), [(1, Word::Welcome)]);
        }
    }
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

#[test]
fn a_leaver_in_the_middle_of_an_exchange_costs_that_one() {
    let mut desk = Desk::begun(2, 1);
    let said = desk.say(1, Ask::Leave);
    assert_eq!(decisions(&said), [(0, aborted(&[], &[], &[1]))]);
    assert_eq!(rounds(&desk.arrive(0, 4))[0].1.divisor(), 1);
}

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
        Ask::Arrive { request, after: 1, step: 4 } => Some(request),
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

/// Accessor for the tests.
trait LiveIds {
    fn live_ids(&self) -> Vec<u64>;
}

impl LiveIds for State {
    fn live_ids(&self) -> Vec<u64> {
        self.members.iter().filter(|place| place.gone.is_none()).map(|place| place.worker.id).collect()
    }
}
