//! Worker state machine (sans-IO): repeats a worker's requests until they are answered. It has no clock and no socket.

use crate::message::{Ask, Digest, FromArbiter, ToArbiter, Word, Worker};
use crate::round::{Ballot, Decision, Round};
use crate::{Error, Refusal};
use std::time::Duration;

/// Interval between the attempts of a worker that has had no answer yet.
const FIRST_BEAT: Duration = Duration::from_millis(100);
/// Shortest time after which a connection without messages is useless. The arbiter may wait a second for its standby.
const SHORTEST_LOSS: Duration = Duration::from_secs(2);

/// A request that a worker waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Asks for membership.
    Join,
    /// Asks for an exchange at this step.
    Boundary(u64),
    /// Votes on an exchange and waits for the decision.
    Vote {
        /// Round number.
        round: u64,
        /// The worker's ballot.
        ballot: Ballot,
    },
    /// Asks to leave.
    Leave,
}

/// Answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Answers [`Request::Join`].
    Welcome,
    /// Answers [`Request::Boundary`].
    Granted(Round),
    /// Answers [`Request::Vote`].
    Decided(Decision),
    /// Answers [`Request::Leave`].
    Farewell,
}

/// Repeats requests to the arbiter, and ignores answers that may be stale: those of an arbiter of an earlier term, and those that
/// arrive after the lease has ended, when this worker may no longer be a member. The lease runs from the last acknowledged beat for
/// as long as the arbiter said; a later answer is held back until the arbiter has acknowledged another beat.
#[derive(Debug)]
pub struct Member {
    worker: Worker,
    digest: Digest,
    contact: String,
    deadline: Duration,
    /// Highest term received.
    term: u64,
    /// Last epoch of which this worker was a member.
    epoch: u64,
    welcome: bool,
    /// Number of the last granted round; the round itself until it is handed out, and its decision, follow.
    round: u64,
    grant: Option<Round>,
    /// Step of that round.
    step: Option<u64>,
    decision: Option<Decision>,
    requests: u64,
    pending: Option<Pending>,
    refused: Option<Refusal>,
    lease_until: Duration,
    beat: Duration,
    next_beat: Duration,
    ended: Option<Error>,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    request: Request,
    number: u64,
    until: Duration,
}

impl Member {
    /// Creates a worker without a request. It waits for an answer for `deadline` at most.
    pub fn new(worker: Worker, digest: Digest, contact: String, deadline: Duration) -> Self {
        Member {
            worker,
            digest,
            contact,
            deadline,
            term: 0,
            epoch: 0,
            welcome: false,
            round: 0,
            grant: None,
            step: None,
            decision: None,
            requests: 0,
            pending: None,
            refused: None,
            lease_until: Duration::ZERO,
            beat: FIRST_BEAT,
            next_beat: Duration::ZERO,
            ended: None,
        }
    }

    /// Returns the longest wait for an answer.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Returns the worker's id and start number.
    pub fn worker(&self) -> Worker {
        self.worker
    }

    /// Begins `request` in place of the previous one and returns its number: [`tick`](Member::tick) sends the request, and
    /// [`take`](Member::take) with that number returns the answer.
    pub fn begin(&mut self, request: Request, now: Duration) -> u64 {
        self.requests += 1;
        let until = now.saturating_add(self.deadline);
        self.pending = Some(Pending { request, number: self.requests, until });
        self.refused = None;
        self.next_beat = now;
        self.requests
    }

    /// Gives up request `number`: it is not sent again.
    pub fn cancel(&mut self, number: u64) {
        self.pending = self.pending.take().filter(|pending| pending.number != number);
    }

    /// Returns the highest term received; 0 before the first message.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Returns the step of the last round granted to this worker.
    pub fn granted_step(&self) -> Option<u64> {
        self.step
    }

    /// Returns the answer to request `number`, once, when it has arrived.
    pub fn take(&mut self, number: u64, now: Duration) -> Option<Result<Answer, Error>> {
        let Some(pending) = self.pending.filter(|pending| pending.number == number) else {
            return Some(Err(Error::Overtaken));
        };
        let unanswered = || Error::Unanswered { what: pending.request.name(), after: self.deadline };
        let answer = match (self.answer(pending.request), now >= pending.until) {
            (Some(Ok(Answer::Granted(_) | Answer::Decided(_))), late) if now >= self.lease_until => {
                late.then(|| Err(unanswered()))
            }
            (None, late) => late.then(|| Err(unanswered())),
            (answer, _) => answer,
        };
        if answer.is_some() {
            self.pending = None;
            self.grant = self.grant.take().filter(|_| !matches!(answer, Some(Ok(Answer::Granted(_)))));
        }
        answer
    }

    /// Returns the known answer, within the lease or not.
    fn answer(&self, request: Request) -> Option<Result<Answer, Error>> {
        match (request, &self.ended, &self.refused) {
            (Request::Leave, Some(Error::Left), _) => Some(Ok(Answer::Farewell)),
            (_, Some(ended), _) => Some(Err(ended.clone())),
            (_, _, Some(refusal)) => Some(Err(refusal.clone().into())),
            (Request::Join, ..) => self.welcome.then_some(Ok(Answer::Welcome)),
            (Request::Boundary(_), ..) => match &self.grant {
                None if self.is_open() => Some(Err(Error::Undecided { round: self.round })),
                grant => grant.clone().map(Answer::Granted).map(Ok),
            },
            (Request::Vote { round: asked, .. }, ..) if asked != self.round => {
                Some(Err(Error::OtherRound { asked, round: self.round }))
            }
            (Request::Vote { .. }, ..) => self.decision.clone().map(Answer::Decided).map(Ok),
            (Request::Leave, ..) => None,
        }
    }

    /// Returns true from the grant of an exchange until its decision is known.
    fn is_open(&self) -> bool {
        self.round > 0 && self.decision.is_none()
    }

    /// Returns the decision on `round` as soon as it has arrived, even while another request is pending.
    pub fn decided(&self, round: u64) -> Option<&Decision> {
        self.decision.as_ref().filter(|_| round == self.round)
    }

    /// Returns why the worker is no longer a member and cannot become one again.
    pub fn ended(&self) -> Option<&Error> {
        self.ended.as_ref()
    }

    /// Returns the time without a message from the arbiter after which the connection is useless: the arbiter has not acknowledged a
    /// beat for two more.
    pub fn lost_after(&self) -> Duration {
        self.beat.saturating_mul(3).max(SHORTEST_LOSS)
    }

    /// Returns the time at which [`tick`](Member::tick) has messages, or [`take`](Member::take) gives up.
    pub fn wake_at(&self) -> Duration {
        self.pending.map_or(self.next_beat, |pending| pending.until.min(self.next_beat))
    }

    /// Makes the next [`tick`](Member::tick) repeat all messages: the last ones may be lost.
    pub fn repeat(&mut self, now: Duration) {
        self.next_beat = now;
    }

    /// Returns the messages to send at time `now`, in this order.
    pub fn tick(&mut self, now: Duration) -> Vec<ToArbiter> {
        if now < self.next_beat || self.ended.is_some() {
            return Vec::new();
        }
        self.next_beat = now.saturating_add(self.beat);
        let (digest, contact) = (self.digest, self.contact.clone());
        let join = (self.epoch == 0).then_some(Ask::Join { digest, contact });
        let asked = self.pending.and_then(|pending| self.ask(pending));
        let asks = join.into_iter().chain([Ask::Beat { sent: now }]).chain(asked);
        // A round is granted after the end of the round before it.
        let after = self.round - u64::from(self.is_open());
        let (worker, term, epoch) = (self.worker, self.term, self.epoch);
        asks.map(|ask| ToArbiter { worker, term, epoch, after, ask }).collect()
    }

    fn ask(&self, pending: Pending) -> Option<Ask> {
        match pending.request {
            Request::Join => None,
            // The grant has arrived, and waits for an acknowledged beat; or the last round is open. Another request would be for
            // the round after it.
            Request::Boundary(_) if self.grant.is_some() || self.is_open() => None,
            Request::Boundary(step) => Some(Ask::Arrive { request: pending.number, step }),
            // A vote on any other round is an error of the caller, of which the arbiter does not hear.
            Request::Vote { round, .. } if round != self.round => None,
            Request::Vote { round, ballot } => Some(Ask::Vote { round, ballot }),
            Request::Leave => Some(Ask::Leave),
        }
    }

    /// Handles a message of the arbiter.
    pub fn hear(&mut self, message: FromArbiter) {
        if message.to != self.worker || message.term < self.term || self.ended.is_some() {
            return;
        }
        self.term = message.term;
        match message.word {
            Word::Welcome => self.welcome = true,
            Word::Heard { sent, lease } => {
                self.lease_until = self.lease_until.max(sent.saturating_add(lease));
                self.beat = lease / 6;
            }
            Word::Granted { round } => self.granted(round),
            Word::Decided { round, decision } if round == self.round => self.decision = Some(decision),
            Word::Decided { .. } => {}
            Word::Farewell => self.ended = Some(Error::Left),
            Word::Refused { refusal, .. } if refusal.is_final() => self.ended = Some(refusal.into()),
            Word::Refused { request, refusal } => {
                let asked = self.pending.is_some_and(|pending| pending.number == request);
                self.refused = asked.then_some(refusal).or(self.refused.take());
            }
        }
    }

    fn granted(&mut self, round: Round) {
        // Grants of earlier rounds may arrive again.
        if !self.is_open() && round.number > self.round && round.rank < round.members.len() {
            (self.round, self.epoch, self.decision) = (round.number, round.epoch, None);
            (self.step, self.grant) = (Some(round.step), Some(round));
        }
    }
}

/// Conversions for callers that have made the matching request: any other answer is a bug of the state machine.
impl Answer {
    pub(super) fn into_round(self) -> Round {
        match self {
            Answer::Granted(round) => round,
            other => unreachable!("a boundary is answered with {other:?}"),
        }
    }

    pub(super) fn into_decision(self) -> Decision {
        match self {
            Answer::Decided(decision) => decision,
            other => unreachable!("a vote is answered with {other:?}"),
        }
    }
}

impl Request {
    pub(super) fn name(self) -> &'static str {
        match self {
            Request::Join => "joining",
            Request::Boundary(_) => "a boundary",
            Request::Vote { .. } => "a vote",
            Request::Leave => "leaving",
        }
    }
}
