//! Arbiter state machine (sans-IO): decides membership and commits exchanges. Messages and the time go in; the state to log, and
//! the messages to send after that, come out.

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
/// Only `state` survives the arbiter. Workers repeat their requests until they are answered, so a successor recovers the other
/// fields.
///
/// ```
/// use meshstep_membership::{Answer, Arbiter, Ask, Ballot, Config, Decision, Digest, FromArbiter, Member, Output, Place, Request};
/// use meshstep_membership::{Seat, ToArbiter, Word, Worker};
/// use std::time::Duration;
///
/// let (digest, now) = (Digest { plan: 1, rule: 2 }, Duration::ZERO);
/// let (mut arbiter, Output { log, .. }) = Arbiter::new(Config::new(digest, 1), None, now)?;
/// assert_eq!(log.map(|state| state.term), Some(1)); // to be written before any message is sent
/// let worker = Worker { id: 7, life: 1 };
/// let mut member = Member::new(worker, digest, "10.0.0.7 1 2 3".to_owned(), Duration::from_secs(60));
///
/// // Carries messages, as bytes, until the request is answered.
/// let mut ask = |arbiter: &mut Arbiter, request: Request| -> Option<Answer> {
///     let number = member.begin(request, now);
///     for message in member.tick(now) {
///         let message = ToArbiter::decode(&message.encode())?;
///         let Output { send, .. } = arbiter.hear(message, now);
///         send.iter().filter_map(|answer| FromArbiter::decode(&answer.encode())).for_each(|answer| member.hear(answer));
///     }
///     member.take(number, now)?.ok()
/// };
/// assert_eq!(ask(&mut arbiter, Request::Join), Some(Answer::Welcome));
/// let Some(Answer::Granted(round)) = ask(&mut arbiter, Request::Boundary(16)) else { panic!("no round") };
/// assert!(matches!(&round.members[..], [Seat { id: 7, .. }]));
/// let vote = Request::Vote { round: round.number, ballot: Ballot::Ready };
/// assert_eq!(ask(&mut arbiter, vote), Some(Answer::Decided(Decision::Commit {})));
/// assert!(matches!(&arbiter.state().members[..], [Place { counts: true, .. }]));
///
/// // A beat is acknowledged with the time for which the worker stays a member.
/// let beat = ToArbiter { worker, term: 1, epoch: round.epoch, after: round.number, ask: Ask::Beat { sent: now } };
/// let answers = arbiter.hear(beat, now).send;
/// assert!(matches!(answers[..], [FromArbiter { word: Word::Heard { .. }, .. }]), "{answers:?}");
/// # Ok::<(), meshstep_membership::ConfigError>(())
/// ```
#[derive(Debug)]
pub struct Arbiter {
    config: Config,
    state: State,
    /// Members that are not gone and workers that want to join, in the order in which they came.
    peers: Vec<Peer>,
    /// Digest of the workers here. The first epoch makes it that of the run, if none was given.
    brought: Option<crate::Digest>,
    /// Ballots on the open round, by rank.
    ballots: Vec<Option<Ballot>>,
    /// Time since which the first worker waits at a boundary, or for the others' votes.
    since: Option<Duration>,
    superseded: Option<Error>,
}

#[derive(Debug)]
struct Peer {
    worker: Worker,
    contact: String,
    heard: Duration,
    /// If the worker's connection has closed: the time at which it stops being a member, unless it calls again.
    lost_at: Option<Duration>,
    arrived: Option<Arrival>,
}

impl Peer {
    /// Returns the time at which the worker stops being a member, if no message comes before.
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

/// Result of an event: the log is written first, and the messages are sent only once it is on the disk.
#[derive(Debug, Default)]
#[must_use = "the state must be logged and the messages sent"]
pub struct Output {
    /// The new state, if it has changed.
    pub log: Option<State>,
    /// Messages to send.
    pub send: Vec<FromArbiter>,
}

impl Arbiter {
    /// Starts a new term after `last`, the last state of the log. The caller logs the returned output before the arbiter receives
    /// any message.
    ///
    /// # Errors
    /// Settings that are invalid, or differ from the run in the log.
    pub fn new(config: Config, last: Option<State>, now: Duration) -> Result<(Self, Output), ConfigError> {
        config.check()?;
        let mut state = last.unwrap_or_else(State::new);
        state.digest = match (state.digest, config.digest) {
            (Some(logged), Some(given)) if logged != given => return Err(ConfigError::OtherRun),
            (logged, given) => logged.or(given),
        };
        Ok(Self::begin_term(config, state, now))
    }

    /// Starts a successor that knows what this arbiter has logged.
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
        let arbiter = Arbiter { config, state, peers, brought: None, ballots, since: None, superseded: None };
        (arbiter, Output { log, send: Vec::new() })
    }

    /// Returns the durable state.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns the error if a worker has already received messages of a later arbiter; this one then sends no more.
    pub fn superseded(&self) -> Option<&Error> {
        self.superseded.as_ref()
    }

    /// Returns the ids of workers that wait at a boundary.
    pub fn waiting(&self) -> impl Iterator<Item = u64> + '_ {
        self.peers.iter().filter(|peer| peer.arrived.is_some()).map(|peer| peer.worker.id)
    }

    /// Returns the time at which [`tick`](Arbiter::tick) has something to do, if no message comes before.
    pub fn wake_at(&self) -> Option<Duration> {
        let silent = self.peers.iter().map(|peer| peer.lost_at(self.config.silence));
        silent.chain(self.since.map(|since| since.saturating_add(self.config.patience))).min()
    }

    /// Extends all deadlines by `gap`, a time during which this process did not run and received no messages.
    pub fn excuse(&mut self, gap: Duration) {
        self.peers.iter_mut().for_each(|peer| {
            peer.heard += gap;
            peer.lost_at = peer.lost_at.map(|at| at + gap);
        });
        self.since = self.since.map(|since| since + gap);
    }

    /// Handles a worker's message.
    pub fn hear(&mut self, message: ToArbiter, now: Duration) -> Output {
        self.event(|arbiter, send| {
            if let Some(error) = arbiter.later_than_this(&message) {
                arbiter.superseded = Some(error);
                return;
            }
            arbiter.answer(message, now, send);
            arbiter.decide(send);
            arbiter.grant(false, send);
        })
    }

    /// Stops this arbiter if `term`, that of another one, is later than its own.
    pub fn meet(&mut self, term: u64) {
        let State { term: own, epoch, .. } = self.state;
        if term > own && self.superseded.is_none() {
            let superseded = Error::Superseded { term: own, epoch, later_term: term, later_epoch: epoch };
            self.superseded = Some(superseded);
        }
    }

    /// Returns an error if the worker knows what only a later arbiter, or a longer log, could have told it.
    fn later_than_this(&self, message: &ToArbiter) -> Option<Error> {
        let State { term, epoch, round, .. } = self.state;
        if message.term > term || message.epoch > epoch {
            let (later_term, later_epoch) = (message.term, message.epoch);
            return Some(Error::Superseded { term, epoch, later_term, later_epoch });
        }
        let after = message.after;
        let later = match message.ask {
            _ if after > round || after == round && self.state.is_open() => after,
            Ask::Vote { round: granted, .. } if granted > round => granted,
            _ => return None,
        };
        Some(Error::Stale { round, later })
    }

    /// Handles the deadlines that have passed at time `now`.
    pub fn tick(&mut self, now: Duration) -> Output {
        self.event(|arbiter, send| {
            let silence = arbiter.config.silence;
            let silent = arbiter.peers.iter().filter(|peer| now >= peer.lost_at(silence));
            let silent: Vec<Worker> = silent.map(|peer| peer.worker).collect();
            silent.into_iter().for_each(|worker| arbiter.depart(worker, Departure::Silent));
            let late =
                arbiter.since.is_some_and(|since| now >= since.saturating_add(arbiter.config.patience));
            if late {
                // A worker between two connections has its grace.
                let between = arbiter.peers.iter().filter(|peer| peer.lost_at.is_some());
                let between: Vec<Worker> = between.map(|peer| peer.worker).collect();
                let awaited = arbiter.awaited().into_iter().filter(|worker| !between.contains(worker));
                awaited.for_each(|worker| arbiter.depart(worker, Departure::Late));
            }
            arbiter.decide(send);
            arbiter.grant(late, send);
        })
    }

    /// Drops a worker after its thread or process is known to have ended.
    pub fn lose(&mut self, worker: Worker) -> Output {
        self.event(|arbiter, send| {
            arbiter.depart(worker, Departure::Silent);
            arbiter.decide(send);
            arbiter.grant(false, send);
        })
    }

    /// Records that a worker's last connection has closed: it stops being a member at `lost_at`, unless a message comes before. At a
    /// boundary it waits again once it asks again, since it may have gone on without an arbiter.
    pub fn close(&mut self, worker: Worker, lost_at: Duration) {
        let peer = self.peers.iter_mut().find(|peer| peer.worker == worker);
        peer.into_iter().for_each(|peer| (peer.lost_at, peer.arrived) = (Some(lost_at), None));
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
            return self.answer_peer(from, message.after, message.ask, now, send);
        };
        send.push(self.say(from, word));
    }

    fn answer_peer(
        &mut self,
        from: Worker,
        after: u64,
        ask: Ask,
        now: Duration,
        send: &mut Vec<FromArbiter>,
    ) {
        let Some(peer) = self.peers.iter_mut().find(|peer| peer.worker == from) else {
            // The worker wanted to join a predecessor, and will repeat the request.
            return;
        };
        (peer.heard, peer.lost_at) = (now, None);
        match ask {
            Ask::Beat { sent } => {
                let lease = self.config.silence;
                send.push(self.say(from, Word::Heard { sent, lease }));
            }
            Ask::Arrive { request, step } => self.arrive(from, Arrival { request, step }, after, now, send),
            Ask::Vote { round, ballot } => self.vote(from, round, ballot, now, send),
            Ask::Join { .. } | Ask::Leave => {}
        }
    }

    /// Returns the refusal for a worker that was a member and is not any more.
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
        let waiting = self.brought.filter(|_| !self.peers.is_empty());
        let run = self.state.digest.or(waiting).unwrap_or(digest);
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
        self.brought = Some(run);
        Ok(())
    }

    /// Ends a worker's membership: it cannot become a member again in this life.
    fn depart(&mut self, worker: Worker, why: Departure) {
        self.peers.retain(|peer| peer.worker != worker);
        if let Some(rank) = self.state.rank(worker) {
            self.state.members[rank].gone = Some(why);
        }
    }

    /// Returns the members that the others wait for.
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
