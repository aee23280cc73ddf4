//! Boundaries: members meet here before an exchange, and others join them.

use super::{Arbiter, Arrival, Peer};
use crate::Refusal;
use crate::message::{FromArbiter, Word, Worker};
use crate::round::Departure;
use crate::state::{Former, Place};
use std::time::Duration;

impl Arbiter {
    /// Records that a worker waits at a boundary; `after` is the last round with an end that the worker knows.
    pub(super) fn arrive(
        &mut self,
        from: Worker,
        arrival: Arrival,
        after: u64,
        now: Duration,
        send: &mut Vec<FromArbiter>,
    ) {
        let rank = self.state.rank(from);
        match rank {
            Some(rank) if after < self.state.round => return self.remind(from, rank, send),
            Some(_) if self.state.is_open() => return,
            _ => {}
        }
        if rank.is_some() || self.state.epoch == 0 {
            self.since.get_or_insert(now);
        }
        let peer = self.peers.iter_mut().find(|peer| peer.worker == from);
        peer.into_iter().for_each(|peer| peer.arrived = Some(arrival));
    }

    /// Sends a member the last round, and its decision, again.
    fn remind(&self, to: Worker, rank: usize, send: &mut Vec<FromArbiter>) {
        let round = self.state.granted(rank);
        send.push(self.say(to, Word::Granted { round }));
        let (round, decision) = (self.state.round, self.state.decision.clone());
        send.extend(decision.map(|decision| self.say(to, Word::Decided { round, decision })));
    }

    /// Grants the next exchange, to the members and the workers that wait to join, once every member has arrived. `late` is true if
    /// the members have waited long enough for others.
    pub(super) fn grant(&mut self, late: bool, send: &mut Vec<FromArbiter>) {
        let first = self.state.epoch == 0;
        if self.state.is_open() {
            return;
        }
        if !first && !self.state.live().any(|place| place.counts) {
            let lost = Refusal::StateLost { step: self.state.step };
            return self.refuse(|_| true, &lost, send);
        }
        let arrived = self.peers.iter().filter(|peer| peer.arrived.is_some()).count();
        let all_there =
            if first { late || arrived >= self.config.workers } else { self.awaited().is_empty() };
        if arrived == 0 || !all_there {
            return;
        }
        // Joining workers take over the members' step; in the first epoch all workers are members.
        let members: Vec<Worker> = self.state.live().map(|place| place.worker).collect();
        let is_member = |peer: &Peer| first || members.contains(&peer.worker);
        let min = self.config.min_workers;
        match self.agreed(&is_member) {
            Err(Refusal::Disagree { .. }) if !first => {
                let ahead = |step: u64| self.out_of_step(step).filter(|(_, other)| *other > step).count();
                if let Some(step) = self.majority().filter(|&step| arrived - ahead(step) >= min) {
                    self.drop_ahead(step);
                }
                self.send_on_to(self.farthest(), send);
                self.grant(late, send);
            }
            Err(refusal) => self.refuse(is_member, &refusal, send),
            Ok(_) if arrived < min && !late => {}
            Ok(_) if arrived < min => self.refuse(is_member, &Refusal::TooFew { have: arrived, min }, send),
            Ok(step) => self.begin(step, send),
        }
    }

    /// Returns the step at which all members are, if an exchange is possible there.
    fn agreed(&self, is_member: &impl Fn(&Peer) -> bool) -> Result<u64, Refusal> {
        let peers = self.peers.iter().filter(|peer| is_member(peer));
        let mut at = peers.filter_map(|peer| peer.arrived.map(|arrival| (peer.worker.id, arrival.step)));
        // At least one member has arrived: `grant` returns early otherwise.
        let (id, step) = at.next().unwrap_or_default();
        if let Some((other, other_step)) = at.find(|(_, other)| *other != step) {
            return Err(Refusal::Disagree { id, step, other, other_step });
        }
        match self.has_passed(step) {
            true => Err(Refusal::Passed { asked: step, step: self.state.step }),
            false => Ok(step),
        }
    }

    fn has_passed(&self, step: u64) -> bool {
        let committed = self.state.decision.as_ref().is_some_and(|decision| decision.is_commit());
        step < self.state.step || committed && step == self.state.step
    }

    /// Returns the step at which more than half of the counting members are, if an exchange is possible there: these have the run's
    /// state.
    fn majority(&self) -> Option<u64> {
        let counting: Vec<Worker> =
            self.state.live().filter(|place| place.counts).map(|place| place.worker).collect();
        let steps: Vec<u64> = counting.iter().filter_map(|&worker| self.step_of(worker)).collect();
        let most = |step: &u64| 2 * steps.iter().filter(|other| *other == step).count() > counting.len();
        steps.iter().copied().find(most).filter(|&step| !self.has_passed(step))
    }

    fn step_of(&self, worker: Worker) -> Option<u64> {
        let peer = self.peers.iter().find(|peer| peer.worker == worker)?;
        peer.arrived.map(|arrival| arrival.step)
    }

    /// Drops members ahead of the others; each is refused at its next request.
    fn drop_ahead(&mut self, others: u64) {
        let ahead: Vec<_> = self.out_of_step(others).filter(|(_, step)| *step > others).collect();
        for (worker, step) in ahead {
            self.depart(worker, Departure::OutOfStep { step, others });
        }
    }

    /// Returns the highest step at which a member waits.
    fn farthest(&self) -> u64 {
        self.state.live().filter_map(|place| self.step_of(place.worker)).max().unwrap_or_default()
    }

    /// Sends the members behind `others` on to that step, where the others wait for them. They have missed no committed exchange.
    fn send_on_to(&mut self, others: u64, send: &mut Vec<FromArbiter>) {
        let behind: Vec<_> = self.out_of_step(others).collect();
        for (worker, step) in behind {
            let peer = self.peers.iter_mut().find(|peer| peer.worker == worker);
            let Some(Arrival { request, .. }) = peer.and_then(|peer| peer.arrived.take()) else { continue };
            send.push(self.say(worker, Word::Refused { request, refusal: Refusal::Behind { step, others } }));
            // The others' patience begins anew with their next messages.
            self.since = None;
        }
    }

    /// Iterates over the members at another step, with their steps.
    fn out_of_step(&self, others: u64) -> impl Iterator<Item = (Worker, u64)> + '_ {
        let at = self.state.live().filter_map(|place| Some((place.worker, self.step_of(place.worker)?)));
        at.filter(move |(_, step)| *step != others)
    }

    fn refuse(&mut self, whom: impl Fn(&Peer) -> bool, refusal: &Refusal, send: &mut Vec<FromArbiter>) {
        let term = self.state.term;
        for peer in self.peers.iter_mut().filter(|peer| whom(peer)) {
            let Some(Arrival { request, .. }) = peer.arrived.take() else { continue };
            let word = Word::Refused { request, refusal: refusal.clone() };
            send.push(FromArbiter { to: peer.worker, term, word });
        }
        self.since = None;
    }

    /// Begins the round at `step`, in a new epoch if members came or went, or the last exchange left the communicators unusable.
    fn begin(&mut self, step: u64, send: &mut Vec<FromArbiter>) {
        let first = self.state.epoch == 0;
        let broke = self.state.decision.as_ref().is_some_and(|decision| decision.broke());
        let mut members: Vec<Place> = self.state.live().cloned().collect();
        let stayed = members.len();
        let known = |worker: Worker| self.state.rank(worker).is_some();
        let joining = self.peers.iter().filter(|peer| peer.arrived.is_some() && !known(peer.worker));
        members.extend(joining.map(|peer| Place {
            worker: peer.worker,
            contact: peer.contact.clone(),
            counts: first,
            vetoes: 0,
            gone: None,
        }));
        let gone = self.state.members.iter().filter_map(|place| {
            let worker = place.worker;
            place.gone.map(|why| Former { worker, why })
        });
        let gone: Vec<Former> = gone.collect();
        if first || broke || !gone.is_empty() || members.len() > stayed {
            self.state.epoch += 1;
            self.state.digest = self.state.digest.or(self.brought);
            self.state.gone = gone;
            self.state.members = members;
        }
        self.state.round += 1;
        self.state.step = step;
        self.state.decision = None;
        self.ballots = vec![None; self.state.members.len()];
        self.since = None;
        self.peers.iter_mut().for_each(|peer| peer.arrived = None);
        for (rank, place) in self.state.members.iter().enumerate() {
            send.push(self.say(place.worker, Word::Granted { round: self.state.granted(rank) }));
        }
    }
}
