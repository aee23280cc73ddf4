//! Record of workers in a checkpoint: the progress of each worker, and the exchanges in flight between them.

use crate::exchange::engine::Engine;
use crate::exchange::in_flight::Flight;
use crate::{Fragment, LocalPlan, Placement};
use meshstep_checkpoint::extend::{MOST_STEPS, SavedProgress};
use meshstep_checkpoint::{CheckpointError, Mismatch};
use meshstep_shard::Optimizer;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use twox_hash::XxHash3_64;

/// Section of workers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct LocalSection {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) local: Option<LocalRecord>,
}

/// State of all workers at one step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LocalRecord {
    /// [`LocalPlan::describe`], and its digest in hexadecimal digits.
    pub(crate) plan: String,
    pub(crate) hash: String,
    /// Number of steps taken, skipped or failed.
    pub(crate) step: u64,
    /// Fragments that are to be sent again.
    pub(crate) again: Vec<usize>,
    /// Number of outer steps of each fragment.
    pub(crate) outer_steps: Vec<u64>,
    pub(crate) flights: Vec<FlightRecord>,
    pub(crate) workers: Vec<WorkerRecord>,
}

/// Exchange in flight: fragments that were sent together and arrive together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct FlightRecord {
    pub(crate) fragments: Vec<usize>,
    /// Step at which the exchange arrives, and true if it arrives before that step's update.
    pub(crate) step: u64,
    pub(crate) before: bool,
}

/// State of one worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct WorkerRecord {
    /// True if the worker's values count.
    pub(crate) active: bool,
    /// Progress of the worker's own optimizer.
    #[serde(flatten)]
    pub(crate) progress: SavedProgress,
    /// Tokens since each fragment was last merged, summed over the worker's ranks.
    pub(crate) tokens: Vec<u64>,
    /// The part of `tokens` that was sent with each fragment in flight.
    pub(crate) sent: Vec<u64>,
}

impl LocalRecord {
    /// Records the state of `engine` and `flights`, without that of the workers.
    pub(super) fn of(engine: &Engine, flights: &[Flight]) -> Self {
        let flight = |flight: &Flight| FlightRecord {
            fragments: flight.fragments.clone(),
            step: flight.arrives.0,
            before: flight.arrives.1 == Placement::Before,
        };
        LocalRecord {
            plan: engine.plan.describe(),
            hash: hash(&engine.plan),
            step: engine.step,
            again: engine.again.iter().copied().collect(),
            outer_steps: engine.parts.outer_t().collect(),
            flights: flights.iter().map(flight).collect(),
            workers: Vec::new(),
        }
    }

    /// Checks that the plan is `here`; the error has the first line of its description that differs.
    pub(super) fn same_plan(&self, here: &LocalPlan) -> Result<(), Mismatch> {
        if self.hash == hash(here) {
            return Ok(());
        }
        let (text, saved) = (here.describe(), current_spelling(&self.plan));
        if saved == text && self.hash == hash_of(&self.plan) {
            return Ok(());
        }
        let (mut saved, mut own) = (saved.lines(), text.lines());
        let (saved, here) = loop {
            match (saved.next(), own.next()) {
                (None, None) => break (self.hash.clone(), hash(here)),
                (a, b) if a == b => {}
                (a, b) => break (a.unwrap_or("nothing").to_owned(), b.unwrap_or("nothing").to_owned()),
            }
        };
        Err(Mismatch::Setting { what: "the local plan".to_owned(), saved, here })
    }

    /// Returns the workers with values that count.
    pub(super) fn counted(&self) -> Result<Vec<usize>, CheckpointError> {
        let counted = self.workers.iter().enumerate().filter(|(_, worker)| worker.active);
        let counted: Vec<usize> = counted.map(|(w, _)| w).collect();
        if counted.is_empty() { Err(wrong("no worker's values count")) } else { Ok(counted) }
    }

    /// Returns the counts of each of `among` workers that resume from the mean of the workers `counted`: equal parts of the sums, rounded
    /// up, so that a count above zero stays above zero.
    pub(super) fn divided(&self, counted: &[usize], among: usize) -> WorkerRecord {
        let workers: Vec<&WorkerRecord> = counted.iter().filter_map(|&w| self.workers.get(w)).collect();
        let each = |of: fn(&WorkerRecord) -> &[u64]| {
            let sum = |i: usize| workers.iter().map(|worker| u128::from(of(worker)[i])).sum::<u128>();
            let own = |i| u64::try_from(sum(i).div_ceil(among as u128)).unwrap_or(u64::MAX);
            (0..workers.first().map_or(0, |first| of(first).len())).map(own).collect()
        };
        let (tokens, sent) = (each(|worker| &worker.tokens), each(|worker| &worker.sent));
        WorkerRecord { tokens, sent, ..WorkerRecord::default() }
    }

    /// Returns the error of a record with more workers than the checkpoint has tensors for.
    pub(super) fn of_too_many(&self) -> CheckpointError {
        wrong(format!("it lists {} workers, and has no tensors for them", self.workers.len()))
    }

    /// Checks the counts that any plan resumes from.
    pub(super) fn check_counts(&self) -> Result<(), CheckpointError> {
        let own = self.workers.iter().filter_map(|worker| worker.progress.steps.as_ref());
        let steps = self.outer_steps.iter().chain(own);
        match steps.chain([&self.step]).find(|&&count| count >= MOST_STEPS) {
            Some(count) => Err(wrong(format!("{count} is no count of steps"))),
            None => Ok(()),
        }
    }

    /// Checks that the record is consistent and agrees with its plan.
    pub(super) fn check(&self, plan: &LocalPlan) -> Result<(), CheckpointError> {
        let fragments = plan.fragments.len();
        let mut on_its_way = BTreeSet::new();
        for flight in &self.flights {
            let Some(left) = flight.step.checked_sub(self.step).filter(|_| !flight.fragments.is_empty())
            else {
                return Err(wrong("an exchange in flight never arrives"));
            };
            for &f in &flight.fragments {
                let in_time = |of: &Fragment| of.travels() && left <= of.timing.delay;
                let travels = plan.fragments.get(f).is_some_and(in_time);
                if !travels || !on_its_way.insert(f) {
                    return Err(wrong(format!("fragment {f} cannot be in flight at this step")));
                }
            }
        }
        if let Some(f) = self.again.iter().find(|&&f| f >= fragments) {
            return Err(wrong(format!("there is no fragment {f}")));
        }
        let sent = |worker: &WorkerRecord| {
            let fragments = self.flights.iter().flat_map(|flight| &flight.fragments);
            worker.sent.len() == on_its_way.len()
                && fragments.zip(&worker.sent).all(|(&f, sent)| *sent <= worker.tokens[f])
        };
        let whole = |worker: &WorkerRecord| worker.tokens.len() == fragments && sent(worker);
        match self.outer_steps.len() == fragments && self.workers.iter().all(whole) {
            true => Ok(()),
            false => Err(wrong("it does not list every fragment")),
        }
    }
}

impl WorkerRecord {
    /// Records the worker's state as one of its ranks sees it.
    pub(super) fn of(inner: &Optimizer, engine: &Engine, flights: &[Flight]) -> Self {
        let tokens = (0..engine.plan.fragments.len()).map(|f| engine.parts.of(f).tokens);
        WorkerRecord {
            active: engine.active,
            progress: SavedProgress::of(inner),
            tokens: tokens.collect(),
            sent: flights.iter().flat_map(|flight| &flight.sent).map(|sent| sent.tokens).collect(),
        }
    }

    /// Adds the record of another rank of the same worker.
    pub(super) fn with(mut self, other: &Self) -> Self {
        self.active &= other.active;
        let add = |sums: &mut Vec<u64>, more: &[u64]| {
            sums.iter_mut().zip(more).for_each(|(sum, more)| *sum = sum.saturating_add(*more));
        };
        add(&mut self.tokens, &other.tokens);
        add(&mut self.sent, &other.sent);
        self
    }
}

impl FlightRecord {
    pub(super) fn arrives(&self) -> (u64, Placement) {
        (self.step, if self.before { Placement::Before } else { Placement::After })
    }
}

/// Returns a saved plan's text with the words of today: `alpha` is `taken` now, and a mean has no `beta` any more, because delayed
/// means of moments take the decay of the rule.
fn current_spelling(plan: &str) -> String {
    let without_beta = |line: &str| match line.split_once(" = mean, beta ") {
        Some((fragment, _)) => format!("{fragment} = mean\n"),
        None => format!("{line}\n"),
    };
    let plan: String = plan.lines().map(without_beta).collect();
    plan.replace("alpha of fragment", "taken of fragment")
}

fn hash(plan: &LocalPlan) -> String {
    hash_of(&plan.describe())
}

fn hash_of(text: &str) -> String {
    format!("{:016x}", XxHash3_64::oneshot(text.as_bytes()))
}

fn wrong(reason: impl Into<String>) -> CheckpointError {
    CheckpointError::Contradiction { what: "workers".to_owned(), reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_divided_evenly_and_none_are_lost() {
        let worker = |tokens: [u64; 4], sent| WorkerRecord {
            tokens: tokens.to_vec(),
            sent: vec![sent],
            ..WorkerRecord::default()
        };
        let workers =
            vec![worker([1, 0, 5, u64::MAX], 1), worker([100; 4], 100), worker([2, 0, 2, u64::MAX], 2)];
        let record = LocalRecord { workers, ..LocalRecord::default() };
        let divided = |among| {
            let own = record.divided(&[0, 2], among);
            (own.tokens, own.sent)
        };
        assert_eq!(divided(2), (vec![2, 0, 4, u64::MAX], vec![2]));
        assert_eq!(divided(6), (vec![1, 0, 2, u64::MAX / 3], vec![1]));
        // The sum does not fit in 64 bits.
        assert_eq!(divided(1), (vec![3, 0, 7, u64::MAX], vec![3]));
        assert!(LocalRecord::default().divided(&[0], 3).tokens.is_empty());
    }

    #[test]
    fn plans_that_were_saved_in_older_words_are_the_same() {
        let plan = LocalPlan::local_adam(4);
        let text = plan.describe();
        assert!(text.contains("mean\n") && text.contains("taken of fragment"), "{text}");
        let saved = |plan: String| LocalRecord { hash: hash_of(&plan), plan, ..LocalRecord::default() };
        for beta in ["1", "0.9", "0.999"] {
            let older = text.replace("mean\n", &format!("mean, beta {beta}\n"));
            let older = older.replace("taken of fragment", "alpha of fragment");
            assert!(saved(older.clone()).same_plan(&plan).is_ok(), "{older}");
            let other = saved(older).same_plan(&LocalPlan::local_adam(5)).unwrap_err();
            assert!(other.to_string().contains("period"), "{other}");
        }
    }
}
