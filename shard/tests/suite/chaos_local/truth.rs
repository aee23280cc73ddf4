//! What is true, by what arbiters have logged and workers have been told.

use crate::chaos_local::model::Model;
use meshstep_membership::{Decision, Round, State, Worker};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Epoch, step, and who is in it and counts.
type Granted = (u64, u64, Vec<(u64, bool)>);

#[derive(Debug, Default)]
pub(crate) struct Truth {
    granted: HashMap<u64, Granted>,
    epochs: HashMap<u64, Vec<Worker>>,
    /// Who has begun the run, or was in an exchange that took place.
    counting: HashSet<Worker>,
    pub(crate) decided: BTreeMap<u64, Decision>,
    /// The step of every commit, by round.
    pub(crate) commits: BTreeMap<u64, u64>,
    /// What each member has at a round's exchange, by rank.
    pub(crate) brought: HashMap<u64, BTreeMap<usize, Arc<Model>>>,
    /// What those who join in a round take over.
    pub(crate) entering: HashMap<u64, Arc<Model>>,
    /// What is equal after a round's exchange, of each fragment that was merged.
    merged: HashMap<(u64, usize), u64>,
}

impl Truth {
    /// One state of the log after the other.
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

    /// An exchange has taken place: something was sent or has arrived.
    pub(crate) fn exchanged(&mut self, round: &Round) {
        self.counting.extend(&self.epochs[&round.epoch]);
    }

    /// A member was told of its round.
    pub(crate) fn check_granted(&self, round: &Round) {
        let seats: Vec<(u64, bool)> = round.members.iter().map(|seat| (seat.id, seat.counts)).collect();
        assert_eq!(self.granted[&round.number], (round.epoch, round.step, seats));
        assert!(round.divisor() > 0 && round.members[round.source()].counts);
    }

    /// The last commit before this round.
    pub(crate) fn commit_before(&self, round: u64) -> Option<u64> {
        self.commits.range(..round).next_back().map(|(round, _)| *round)
    }

    /// Whoever has applied the round has the same of a fragment.
    pub(crate) fn check_merged(&mut self, round: u64, fragment: usize, hash: u64) {
        let first = *self.merged.entry((round, fragment)).or_insert(hash);
        assert_eq!(first, hash, "fragment {fragment} after round {round}");
    }
}
