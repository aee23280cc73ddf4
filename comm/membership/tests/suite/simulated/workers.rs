//! Workers of the simulated run: their calls, exchanges and results.

use super::{COMM_DEADLINE, DEADLINE, End, Event, Phase, World, millis};
use crate::common::secs;
use meshstep_membership::{Answer, Ballot, Decision, Error, Refusal, Request, Round, ToArbiter};
use std::collections::BTreeMap;

impl World {
    /// Advances a worker as far as possible.
    pub(super) fn drive(&mut self, index: usize) {
        let now = self.now;
        if self.workers[index].end.is_some() || self.workers[index].stalled_until > now {
            return;
        }
        let worker = &mut self.workers[index];
        std::mem::take(&mut worker.inbox).into_iter().for_each(|message| worker.member.hear(message));
        while self.workers[index].end.is_none() && self.go_on(index) {}
        let worker = &mut self.workers[index];
        let said = worker.member.tick(now);
        let until = match &worker.phase {
            Phase::Computing { until } => *until,
            Phase::Exchanging { posted, .. } if *posted > now => *posted,
            Phase::Exchanging { done, .. } if *done > now => *done,
            // The worker polls for the contributions of the others.
            Phase::Exchanging { .. } => now + millis(20),
            _ => secs(1_000_000),
        };
        let wake_at = worker.member.wake_at().min(until).max(now + millis(1));
        worker.wake_at = wake_at;
        if worker.end.is_none() {
            self.at(wake_at, Event::Wake(index));
        }
        for message in said {
            let message = ToArbiter::decode(&message.encode()).unwrap();
            self.travel(|| Event::ToArbiter(message.clone()));
        }
    }

    /// Returns true if anything changed.
    pub(super) fn go_on(&mut self, index: usize) -> bool {
        let now = self.now;
        let worker = &mut self.workers[index];
        if worker.asked > 0
            && let Some(answer) = worker.member.take(worker.asked, now)
        {
            worker.asked = 0;
            self.answered(index, answer);
            return true;
        }
        match &worker.phase {
            Phase::Computing { until } if *until <= now => {
                let due = worker.model.next_due();
                let id = worker.member.worker().id;
                while worker.model.step < due {
                    worker.model.local_step(id);
                }
                self.arrive(index);
                true
            }
            Phase::Exchanging { .. } => self.exchange(index),
            _ => false,
        }
    }

    pub(super) fn arrive(&mut self, index: usize) {
        let (now, target) = (self.now, self.target);
        let worker = &mut self.workers[index];
        let request = match worker.wants_to_leave || worker.model.step > target {
            true => Request::Leave,
            false => Request::Boundary(worker.model.step),
        };
        worker.phase = if request == Request::Leave { Phase::Leaving } else { Phase::Asking { since: now } };
        worker.asked = worker.member.begin(request, now);
    }

    pub(super) fn compute(&mut self, index: usize) {
        let span = millis(50 + self.random.below(400));
        self.workers[index].phase = Phase::Computing { until: self.now + span };
    }

    pub(super) fn answered(&mut self, index: usize, answer: Result<Answer, Error>) {
        let worker = &mut self.workers[index];
        if let Phase::Asking { since } | Phase::Voting { since, .. } = &worker.phase {
            let took = self.now - *since;
            assert!(took <= DEADLINE + worker.stalled + millis(1), "{took:?} for {answer:?}");
        }
        match answer {
            Ok(Answer::Welcome) => {
                // The first workers name the same step; workers that join later may name any.
                worker.phase = Phase::Computing { until: self.now };
            }
            Ok(Answer::Granted(round)) => self.granted(index, round),
            Ok(Answer::Decided(decision)) => self.decided(index, &decision),
            Ok(Answer::Farewell) => self.end(index, End::Left),
            Err(Error::Unanswered { .. }) => self.ask_again(index),
            Err(Error::Refused(Refusal::TooFew { .. })) if worker.too_few < 2 => {
                worker.too_few += 1;
                self.arrive(index);
            }
            Err(error) => {
                assert!(
                    !matches!(error, Error::Refused(Refusal::Disagree { .. } | Refusal::Passed { .. })),
                    "{error}"
                );
                assert!(matches!(error, Error::Refused(_)), "{error}");
                self.refused(&error);
                self.end(index, End::Error(error));
            }
        }
    }

    /// Checks that a final refusal is justified.
    pub(super) fn refused(&self, error: &Error) {
        if let Error::Refused(Refusal::StateLost { .. }) = error {
            let disk = self.disk.as_ref().unwrap();
            assert!(!disk.members.iter().any(|place| place.gone.is_none() && place.counts), "{disk:?}");
        }
    }

    pub(super) fn end(&mut self, index: usize, end: End) {
        let worker = &mut self.workers[index];
        (worker.end, worker.phase) = (Some(end), Phase::Over);
    }

    pub(super) fn ask_again(&mut self, index: usize) {
        let now = self.now;
        let worker = &mut self.workers[index];
        match &mut worker.phase {
            Phase::Voting { round, result, since } => {
                let ballot = if result.is_some() { Ballot::Ready } else { Ballot::Failed };
                *since = now;
                worker.asked = worker.member.begin(Request::Vote { round: round.number, ballot }, now);
            }
            Phase::Leaving => self.end(index, End::Left),
            _ if worker.rounds.is_empty() && worker.model.step == 0 => {
                worker.phase = Phase::Asking { since: now };
                worker.asked = worker.member.begin(Request::Join, now);
            }
            _ => self.arrive(index),
        }
    }

    pub(super) fn granted(&mut self, index: usize, round: Round) {
        let me = self.workers[index].member.worker();
        let (epoch, step, members) = &self.truth.granted[&round.number];
        assert_eq!((*epoch, *step, members[round.rank]), (round.epoch, round.step, me));
        let ids: Vec<u64> = members.iter().map(|worker| worker.id).collect();
        assert_eq!(ids, round.members.iter().map(|seat| seat.id).collect::<Vec<_>>());
        assert!(round.divisor() > 0 && round.members[round.source()].counts);
        let posted = self.now + millis(self.random.below(60));
        let done = posted + millis(self.random.below(30));
        let worker = &mut self.workers[index];
        worker.too_few = 0;
        assert!(!round.counts() || worker.model.step == round.step);
        worker.rounds.push(round.clone());
        worker.phase = Phase::Exchanging { round, posted, done, gives_up: done + COMM_DEADLINE };
    }

    /// Returns true if the worker has reached its vote.
    pub(super) fn exchange(&mut self, index: usize) -> bool {
        let now = self.now;
        let worker = &self.workers[index];
        let Phase::Exchanging { round, posted, done, gives_up } = &worker.phase else { return false };
        let (round, done, gives_up) = (round.clone(), *done, *gives_up);
        if now >= *posted && round.counts() {
            let model = worker.model.clone();
            self.boards.entry(round.number).or_default().insert(worker.member.worker().id, model);
        }
        let known = worker.member.decided(round.number).is_some();
        if now < done && !known {
            return false;
        }
        let empty = BTreeMap::new();
        let board = self.boards.get(&round.number).unwrap_or(&empty);
        let complete = board.len() == round.divisor();
        if !complete && now < gives_up && !known {
            return false;
        }
        let fails = self.random.chance(self.trouble.failure);
        let result = (complete && !fails).then(|| self.result(index, &round));
        let ballot = match result {
            Some(_) if self.random.chance(self.trouble.veto) => Ballot::Veto,
            Some(_) => Ballot::Ready,
            None => Ballot::Failed,
        };
        let result = result.filter(|_| ballot == Ballot::Ready);
        let worker = &mut self.workers[index];
        worker.phase = Phase::Voting { round: round.clone(), result, since: now };
        worker.asked = worker.member.begin(Request::Vote { round: round.number, ballot }, now);
        if self.random.chance(self.trouble.death_after_vote) {
            let said = self.workers[index].member.tick(now);
            said.into_iter().for_each(|message| self.travel(|| Event::ToArbiter(message.clone())));
            self.die(index);
        }
        true
    }

    /// Returns the result of the exchange; a worker that has just joined takes over the source's state first.
    pub(super) fn result(&mut self, index: usize, round: &Round) -> [Option<u64>; 3] {
        let board = &self.boards[&round.number];
        let source = &board[&round.members[round.source()].id];
        for (id, model) in board {
            assert_eq!(model.committed, source.committed, "worker {id} in {round:?}");
            assert_eq!(model.step, round.step);
        }
        if !round.counts() {
            self.workers[index].model = source.clone();
        }
        source.exchanged(board)
    }

    pub(super) fn decided(&mut self, index: usize, decision: &Decision) {
        let worker = &mut self.workers[index];
        let Phase::Voting { round, result, .. } = &worker.phase else { panic!("{:?}", worker.phase) };
        let (number, step, result) = (round.number, round.step, *result);
        assert_eq!(&self.truth.decided[&number], decision, "round {number}");
        if !decision.is_commit() {
            if !round.counts() {
                // The worker may have no valid state; the next round, if any, provides it.
                worker.model.step = step;
            }
            return if self.trouble.retry { self.arrive(index) } else { self.compute(index) };
        }
        if self.random.chance(self.trouble.death_before_apply) {
            return self.die(index);
        }
        let worker = &mut self.workers[index];
        worker.model.apply(result.unwrap());
        worker.applied.push(number);
        let (committed, parts) = (worker.model.committed, worker.model.parts);
        let first = self.truth.results.entry(number).or_insert((committed, parts));
        assert_eq!(first.0, committed, "committed state after round {number}");
        if step.is_multiple_of(24) {
            assert_eq!(first.1, parts, "all state after step {step}, when everything was averaged");
        }
        self.compute(index);
    }
}
