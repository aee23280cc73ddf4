//! The end of an exchange: it is applied only if all members are ready.

use super::Arbiter;
use crate::config::MAX_VETOES;
use crate::message::{FromArbiter, Word, Worker};
use crate::round::{Ballot, Decision, Departure};
use std::time::Duration;

impl Arbiter {
    /// Handles a vote, which also asks for the decision on the round.
    pub(super) fn vote(
        &mut self,
        from: Worker,
        round: u64,
        ballot: Ballot,
        now: Duration,
        send: &mut Vec<FromArbiter>,
    ) {
        let Some(rank) = self.state.rank(from).filter(|_| round == self.state.round) else { return };
        match &self.state.decision {
            Some(decision) => {
                let decision = decision.clone();
                send.push(self.say(from, Word::Decided { round, decision }));
            }
            None => {
                // The first ballot stands.
                self.ballots[rank].get_or_insert(ballot);
                self.since.get_or_insert(now);
            }
        }
    }

    /// Decides once every member has voted, or one that had not voted is gone. The ballot of a member that voted and is gone
    /// stands.
    pub(super) fn decide(&mut self, send: &mut Vec<FromArbiter>) {
        if !self.state.is_open() {
            return;
        }
        let voted = self.state.members.iter().zip(&self.ballots);
        let lost = voted.clone().filter(|(place, ballot)| place.gone.is_some() && ballot.is_none());
        let lost: Vec<u64> = lost.map(|(place, _)| place.worker.id).collect();
        if lost.is_empty() && self.ballots.contains(&None) {
            return;
        }
        let who = |which: Ballot| -> Vec<u64> {
            voted
                .clone()
                .filter(|(_, ballot)| **ballot == Some(which))
                .map(|(place, _)| place.worker.id)
                .collect()
        };
        let (vetoed, failed) = (who(Ballot::Veto), who(Ballot::Failed));
        let decision = match lost.is_empty() && vetoed.is_empty() && failed.is_empty() {
            true if who(Ballot::Idle).is_empty() => Decision::Commit {},
            true => Decision::Idle {},
            false => Decision::Abort { vetoed, failed, lost },
        };
        let members: Vec<Worker> = self.state.live().map(|place| place.worker).collect();
        let round = self.state.round;
        let told =
            members.iter().map(|&to| self.say(to, Word::Decided { round, decision: decision.clone() }));
        send.extend(told);
        self.conclude(decision);
    }

    /// Updates the members after a decision: marks those that count, and drops those that have vetoed too often.
    fn conclude(&mut self, decision: Decision) {
        for (place, ballot) in self.state.members.iter_mut().zip(&self.ballots) {
            place.counts |= decision.is_commit();
            match ballot {
                Some(Ballot::Veto) => place.vetoes += 1,
                Some(Ballot::Ready) => place.vetoes = 0,
                Some(Ballot::Failed | Ballot::Idle) | None => {}
            }
        }
        let vetoing = self.state.live().filter(|place| place.vetoes >= MAX_VETOES);
        let vetoing: Vec<Worker> = vetoing.map(|place| place.worker).collect();
        vetoing.into_iter().for_each(|worker| self.depart(worker, Departure::Vetoed));
        self.state.decision = Some(decision);
        self.since = None;
    }
}
