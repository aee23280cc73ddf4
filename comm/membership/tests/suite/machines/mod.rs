//! Arbiter and member state machines, event by event: the messages each sends, and those it ignores.

mod exchanges;
mod fencing;
mod joining;
mod member;

use crate::common::{DIGEST, config};
use meshstep_membership::{
    Arbiter, Ask, Ballot, Config, Decision, Output, Refusal, Round, State, ToArbiter, Word, Worker,
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
        let (term, epoch, round) =
            (self.arbiter.state().term, self.epochs[id as usize], self.rounds[id as usize]);
        // A worker that arrives knows the end of its last round.
        let after = if matches!(ask, Ask::Arrive { .. }) { round } else { round.saturating_sub(1) };
        self.tell(ToArbiter { worker: worker(id), term, epoch, after, ask })
    }

    fn join(&mut self, id: u64) -> Vec<(u64, Word)> {
        self.say(id, Ask::Join { digest: DIGEST, contact: String::new() })
    }

    fn arrive(&mut self, id: u64, step: u64) -> Vec<(u64, Word)> {
        self.say(id, Ask::Arrive { request: 10 + id, step })
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

/// Accessor for the tests.
trait LiveIds {
    fn live_ids(&self) -> Vec<u64>;
}

impl LiveIds for State {
    fn live_ids(&self) -> Vec<u64> {
        self.members.iter().filter(|place| place.gone.is_none()).map(|place| place.worker.id).collect()
    }
}
