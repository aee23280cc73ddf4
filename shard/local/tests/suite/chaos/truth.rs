//! The history according to the arbiters' logs and the workers' answers.

use crate::chaos::model::Model;
use meshstep_membership::{Decision, Round, State, Worker};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Epoch, step, and each member's id with true if it counts.
type Granted = (u64, u64, Vec<(u64, bool)>);

#[derive(Debug, Default)]
pub(crate) struct Truth {
    granted: HashMap<u64, Granted>,
    epochs: HashMap<u64, Vec<Worker>>,
    /// Workers that began the run, or took part in an exchange that succeeded.
    counting: HashSet<Worker>,
    pub(crate) decided: BTreeMap<u64, Decision>,
    /// Step of every commit, by round.
    pub(crate) commits: BTreeMap<u64, u64>,
    /// State of each member before a round's exchange, by rank.
    pub(crate) brought: HashMap<u64, BTreeMap<usize, Arc<Model>>>,
    /// State that workers joining in a round take over.
    pub(crate) entering: HashMap<u64, Arc<Model>>,
    /// Hash of each merged fragment after a round's exchange, equal on all workers.
    merged: HashMap<(u64, usize), u64>,
}

impl Truth {
    /// Checks the next state of the log against the history.
    pub(crate) fn log(&mut self, state: &State) {
        if state.round == 0 {
            return;
        }
        let members: Vec<Worker> = state.members.iter().map(|place| place.worker).collect();
        let epoch = self.epochs.entry(state.epoch).or_insert_with(|| members.clone());
        assert_eq!(*epoch, members, "the members of epoch {}", state.epoch);
        let Some(decision) = &state.decision else {
            assert!(!self.decided.contains_key(&state.round), "round {} was decided", state.round);
            if state.epoch == 1 {
                self.counting.extend(&members);
            }
            for place in &state.members {
                let exchanged = self.counting.contains(&place.worker);
                assert_eq!(place.counts, exchanged, "{:?} in round {}", place.worker, state.round);
            }
            let seats = state.members.iter().map(|place| (place.worker.id, place.counts)).collect();
            let granted = (state.epoch, state.step, seats);
            assert_eq!(*self.granted.entry(state.round).or_insert_with(|| granted.clone()), granted);
            return;
        };
        assert_eq!(self.decided.entry(state.round).or_insert_with(|| decision.clone()), decision);
        if decision.is_commit() {
            assert!(
                self.commits.range(..state.round).all(|(_, step)| *step < state.step),
                "step {}",
                state.step
            );
            self.commits.insert(state.round, state.step);
        }
    }

    /// Records that an exchange succeeded: fragments were sent or have arrived.
    pub(crate) fn exchanged(&mut self, round: &Round) {
        self.counting.extend(&self.epochs[&round.epoch]);
    }

    /// Checks a round that a member was granted.
    pub(crate) fn check_granted(&self, round: &Round) {
        let seats: Vec<(u64, bool)> = round.members.iter().map(|seat| (seat.id, seat.counts)).collect();
        assert_eq!(self.granted[&round.number], (round.epoch, round.step, seats));
        assert!(round.divisor() > 0 && round.members[round.source()].counts);
    }

    /// Returns the last commit before this round.
    pub(crate) fn commit_before(&self, round: u64) -> Option<u64> {
        self.commits.range(..round).next_back().map(|(round, _)| *round)
    }

    /// Checks that all workers that applied the round have the same values of a fragment.
    pub(crate) fn check_merged(&mut self, round: u64, fragment: usize, hash: u64) {
        let first = *self.merged.entry((round, fragment)).or_insert(hash);
        assert_eq!(first, hash, "fragment {fragment} after round {round}");
    }
}
