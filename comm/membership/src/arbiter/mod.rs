//! The one who says who takes part and what counts. A machine without a clock, a socket or a file: messages and the time go
//! in; what is to be logged, and what is to be said after that, come out.

mod ballots;
mod boundary;

use crate::config::{Config, MAX_CONTACT, MAX_WORKERS};
use crate::message::{Ask, FromArbiter, ToArbiter, Word, Worker};
use crate::round::{Ballot, Departure};
use crate::state::State;
use crate::{ConfigError, Error, Refusal};
use std::time::Duration;

/// Grants exchanges to the members of an epoch and decides on them.
///
/// Of its fields all but `state` are lost with it. Workers ask until they are answered, so a successor gets them back.
#[derive(Debug)]
pub struct Arbiter {
    config: Config,
    state: State,
    /// Members that are not gone and those who want to be, in the order in which they came.
    peers: Vec<Peer>,
    /// Of the open round, by rank.
    ballots: Vec<Option<Ballot>>,
    /// When the first of those who wait at a boundary, or for the others' votes, began to.
    since: Option<Duration>,
    superseded: Option<Error>,
}

#[derive(Debug)]
struct Peer {
    worker: Worker,
    contact: String,
    heard: Duration,
    /// Its connection has closed: when that makes it none, unless it calls again.
    lost_at: Option<Duration>,
    arrived: Option<Arrival>,
}

impl Peer {
    /// When it is none any more, if nothing is heard before.
    fn lost_at(&self, silence: Duration) -> Duration {
        let silent = self.heard.saturating_add(silence);
        self.lost_at.map_or(silent, |at| at.min(silent))
    }
}

/// A worker that waits at a boundary.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    request: u64,
    step: u64,
}

/// What an event leads to: first the log, and only once that is safe the messages.
#[derive(Debug, Default)]
#[must_use = "what is not said is not heard"]
pub struct Output {
    /// The state as it is now, where it has changed.
    pub log: Option<State>,
    /// What is said.
    pub send: Vec<FromArbiter>,
}

impl Arbiter {
    /// A new term after `last`, the last state of the log. What is returned beside it is to be logged before it hears
    /// anything.
    ///
    /// # Errors
    /// Settings that no run can have, or not the one in the log.
    pub fn new(config: Config, last: Option<State>, now: Duration) -> Result<(Self, Output), ConfigError> {
        config.check()?;
        let state = last.unwrap_or_else(|| State::new(config.digest));
        if state.digest != config.digest {
            return Err(ConfigError::OtherRun);
        }
        Ok(Self::begin_term(config, state, now))
    }

    /// One that knows what this one has logged.
    pub(super) fn successor(&self, now: Duration) -> (Self, Output) {
        Self::begin_term(self.config.clone(), self.state.clone(), now)
    }

    fn begin_term(config: Config, mut state: State, now: Duration) -> (Self, Output) {
        state.term += 1;
        let peer = |place: &crate::state::Place| Peer {
            worker: place.worker,
            contact: place.contact.clone(),
            heard: now,
            lost_at: None,
            arrived: None,
        };
        let peers = state.live().map(peer).collect();
        let ballots = vec![None; state.members.len()];
        let log = Some(state.clone());
        let arbiter = Arbiter { config, state, peers, ballots, since: None, superseded: None };
        (arbiter, Output { log, send: Vec::new() })
    }

    /// What it knows for good.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// That a worker has heard a later arbiter: then this one says no more.
    pub fn superseded(&self) -> Option<&Error> {
        self.superseded.as_ref()
    }

    /// The ids of workers that wait at a boundary.
    pub fn waiting(&self) -> impl Iterator<Item = u64> + '_ {
        self.peers.iter().filter(|peer| peer.arrived.is_some()).map(|peer| peer.worker.id)
    }

    /// When [`tick`](Arbiter::tick) would do something, if nothing is heard before.
    pub fn wake_at(&self) -> Option<Duration> {
        let silent = self.peers.iter().map(|peer| peer.lost_at(self.config.silence));
        silent.chain(self.since.map(|since| since.saturating_add(self.config.patience))).min()
    }

    /// Gives everybody `gap` more: for that long nothing was heard because nobody listened.
    pub fn excuse(&mut self, gap: Duration) {
        self.peers.iter_mut().for_each(|peer| {
            peer.heard += gap;
            peer.lost_at = peer.lost_at.map(|at| at + gap);
        });
        self.since = self.since.map(|since| since + gap);
    }

    /// A worker's message.
    pub fn hear(&mut self, message: ToArbiter, now: Duration) -> Output {
        self.event(|arbiter, send| {
            let State { term, epoch, .. } = arbiter.state;
            if message.term > term || message.epoch > epoch {
                let (later_term, later_epoch) = (message.term, message.epoch);
                arbiter.superseded = Some(Error::Superseded { term, epoch, later_term, later_epoch });
                return;
            }
            arbiter.answer(message, now, send);
            arbiter.decide(send);
            arbiter.grant(false, send);
        })
    }

    /// The time is `now`.
    pub fn tick(&mut self, now: Duration) -> Output {
        self.event(|arbiter, send| {
            let silence = arbiter.config.silence;
            let silent = arbiter.peers.iter().filter(|peer| now >= peer.lost_at(silence));
            let silent: Vec<Worker> = silent.map(|peer| peer.worker).collect();
            silent.into_iter().for_each(|worker| arbiter.depart(worker, Departure::Silent));
            let late =
                arbiter.since.is_some_and(|since| now >= since.saturating_add(arbiter.config.patience));
            if late {
                let awaited = arbiter.awaited();
                awaited.into_iter().for_each(|worker| arbiter.depart(worker, Departure::Late));
            }
            arbiter.decide(send);
            arbiter.grant(late, send);
        })
    }

    /// A worker whose thread or process is known to have ended.
    pub fn lose(&mut self, worker: Worker) -> Output {
        self.event(|arbiter, send| {
            arbiter.depart(worker, Departure::Silent);
            arbiter.decide(send);
            arbiter.grant(false, send);
        })
    }

    /// That a worker's last connection has closed: it is none any more at `lost_at`, unless it is heard before.
    pub fn close(&mut self, worker: Worker, lost_at: Duration) {
        let peer = self.peers.iter_mut().find(|peer| peer.worker == worker);
        peer.into_iter().for_each(|peer| peer.lost_at = Some(lost_at));
    }

    fn event(&mut self, event: impl FnOnce(&mut Self, &mut Vec<FromArbiter>)) -> Output {
        let mut send = Vec::new();
        if self.superseded.is_some() {
            return Output::default();
        }
        let before = self.state.clone();
        event(self, &mut send);
        if self.superseded.is_some() {
            return Output::default();
        }
        Output { log: (self.state != before).then(|| self.state.clone()), send }
    }

    fn answer(&mut self, message: ToArbiter, now: Duration, send: &mut Vec<FromArbiter>) {
        let from = message.worker;
        let word = if message.ask == Ask::Leave || self.state.departure(from) == Some(Departure::Left) {
            self.depart(from, Departure::Left);
            Word::Farewell
        } else if let Some(refusal) = self.fence(&message) {
            Word::Refused { request: 0, refusal }
        } else if let Ask::Join { digest, contact } = message.ask {
            match self.join(from, digest, contact, now) {
                Ok(()) => Word::Welcome,
                Err(refusal) => Word::Refused { request: 0, refusal },
            }
        } else {
            return self.answer_peer(from, message.ask, now, send);
        };
        send.push(self.say(from, word));
    }

    fn answer_peer(&mut self, from: Worker, ask: Ask, now: Duration, send: &mut Vec<FromArbiter>) {
        let Some(peer) = self.peers.iter_mut().find(|peer| peer.worker == from) else {
            // It wanted to join a predecessor, and will say so again.
            return;
        };
        (peer.heard, peer.lost_at) = (now, None);
        match ask {
            Ask::Beat { sent } => {
                let lease = self.config.silence;
                send.push(self.say(from, Word::Heard { sent, lease }));
            }
            Ask::Arrive { request, after, step } => {
                self.arrive(from, Arrival { request, step }, after, now, send)
            }
            Ask::Vote { round, ballot } => self.vote(from, round, ballot, now, send),
            Ask::Join { .. } | Ask::Leave => {}
        }
    }

    /// Why a worker that was a member is heard no more.
    fn fence(&self, message: &ToArbiter) -> Option<Refusal> {
        let ToArbiter { worker, epoch, .. } = *message;
        let why = self.state.departure(worker);
        let known = self.peers.iter().any(|peer| peer.worker == worker);
        (!known && (epoch > 0 || why.is_some())).then_some(Refusal::Fenced {
            epoch,
            now: self.state.epoch,
            why,
        })
    }

    fn join(
        &mut self,
        worker: Worker,
        digest: crate::Digest,
        contact: String,
        now: Duration,
    ) -> Result<(), Refusal> {
        let run = self.state.digest;
        if let Some(peer) = self.peers.iter_mut().find(|peer| peer.worker == worker) {
            (peer.heard, peer.lost_at) = (now, None);
            return Ok(());
        }
        if digest.plan != run.plan {
            return Err(Refusal::OtherPlan { mine: digest.plan, run: run.plan });
        }
        if digest.rule != run.rule {
            return Err(Refusal::OtherRule { mine: digest.rule, run: run.rule });
        }
        if contact.len() > MAX_CONTACT {
            return Err(Refusal::Contact { len: contact.len(), max: MAX_CONTACT });
        }
        if self.peers.iter().any(|peer| peer.worker.id == worker.id) {
            return Err(Refusal::IdTaken { id: worker.id });
        }
        if self.peers.len() >= MAX_WORKERS {
            return Err(Refusal::Full { max: MAX_WORKERS });
        }
        self.peers.push(Peer { worker, contact, heard: now, lost_at: None, arrived: None });
        Ok(())
    }

    /// From now on it is no member, and does not become one in this life.
    fn depart(&mut self, worker: Worker, why: Departure) {
        self.peers.retain(|peer| peer.worker != worker);
        if let Some(rank) = self.state.rank(worker) {
            self.state.members[rank].gone = Some(why);
        }
    }

    /// Members that the others wait for.
    fn awaited(&self) -> Vec<Worker> {
        let arrived = |worker| self.peers.iter().any(|peer| peer.worker == worker && peer.arrived.is_some());
        let voted = |rank: usize| self.ballots[rank].is_some();
        let places = self.state.members.iter().enumerate().filter(|(_, place)| place.gone.is_none());
        let open = self.state.is_open();
        let missing =
            places.filter(|(rank, place)| if open { !voted(*rank) } else { !arrived(place.worker) });
        missing.map(|(_, place)| place.worker).collect()
    }

    fn say(&self, to: Worker, word: Word) -> FromArbiter {
        FromArbiter { to, term: self.state.term, word }
    }
}
