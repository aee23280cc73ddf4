//! A worker's side of the membership: what it asks for, until it is answered. A machine without a clock or a socket.

use crate::message::{Ask, Digest, FromArbiter, ToArbiter, Word, Worker};
use crate::round::{Ballot, Decision, Round};
use crate::{Error, Refusal};
use std::time::Duration;

/// How often a worker that has not been heard yet tries.
const FIRST_BEAT: Duration = Duration::from_millis(100);

/// What a worker waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// To be let in.
    Join,
    /// To exchange at this step.
    Boundary(u64),
    /// The end of an exchange.
    Vote {
        /// Which.
        round: u64,
        /// The worker's word on it.
        ballot: Ballot,
    },
    /// To be gone.
    Leave,
}

/// What a worker is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Request::Join`].
    Welcome,
    /// To [`Request::Boundary`].
    Granted(Round),
    /// To [`Request::Vote`].
    Decided(Decision),
    /// To [`Request::Leave`].
    Farewell,
}

/// Asks the arbiter, again and again, and knows what not to believe: an arbiter of an earlier term, and anything at a time when
/// this worker may no longer be a member. It is one from its last sign that was heard for as long as the arbiter said: later
/// an answer is kept back until the arbiter has heard another sign.
#[derive(Debug)]
pub struct Member {
    worker: Worker,
    digest: Digest,
    contact: String,
    deadline: Duration,
    /// The highest heard.
    term: u64,
    /// The last that it was a member of.
    epoch: u64,
    welcome: bool,
    /// The last exchange granted to it, itself until it is handed out, and its end.
    round: u64,
    grant: Option<Round>,
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
    /// A worker that has asked for nothing yet and waits for an answer for `deadline` at most.
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

    /// How long it waits for an answer.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Who it is.
    pub fn worker(&self) -> Worker {
        self.worker
    }

    /// Begins to ask for `request`, instead of what it asked for before; [`tick`](Member::tick) says so and
    /// [`take`](Member::take) has the answer to the request of the number that is returned.
    pub fn begin(&mut self, request: Request, now: Duration) -> u64 {
        self.requests += 1;
        let until = now.saturating_add(self.deadline);
        self.pending = Some(Pending { request, number: self.requests, until });
        self.refused = None;
        self.next_beat = now;
        self.requests
    }

    /// The answer to request `number`, once, when it is there.
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

    /// What is known to be the answer, believed or not.
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

    /// Whether it is in an exchange whose end it does not know.
    fn is_open(&self) -> bool {
        self.round > 0 && self.decision.is_none()
    }

    /// The end of `round`, as soon as it is heard, whatever the worker asks for.
    pub fn decided(&self, round: u64) -> Option<&Decision> {
        self.decision.as_ref().filter(|_| round == self.round)
    }

    /// Why it is no member and will not be again.
    pub fn ended(&self) -> Option<&Error> {
        self.ended.as_ref()
    }

    /// After how long without a word from the arbiter its connection is of no use: several signs were not answered.
    pub fn lost_after(&self) -> Duration {
        self.beat.saturating_mul(12).max(Duration::from_secs(1))
    }

    /// When [`tick`](Member::tick) has something to say, or [`take`](Member::take) gives up.
    pub fn wake_at(&self) -> Duration {
        self.pending.map_or(self.next_beat, |pending| pending.until.min(self.next_beat))
    }

    /// Has the next [`tick`](Member::tick) say everything again: what was said last may be lost.
    pub fn repeat(&mut self, now: Duration) {
        self.next_beat = now;
    }

    /// The time is `now`: what is to be said, in this order.
    pub fn tick(&mut self, now: Duration) -> Vec<ToArbiter> {
        if now < self.next_beat || self.ended.is_some() {
            return Vec::new();
        }
        self.next_beat = now.saturating_add(self.beat);
        let (digest, contact) = (self.digest, self.contact.clone());
        let join = (self.epoch == 0).then_some(Ask::Join { digest, contact });
        let asked = self.pending.and_then(|pending| self.ask(pending));
        let asks = join.into_iter().chain([Ask::Beat { sent: now }]).chain(asked);
        let (worker, term, epoch) = (self.worker, self.term, self.epoch);
        asks.map(|ask| ToArbiter { worker, term, epoch, ask }).collect()
    }

    fn ask(&self, pending: Pending) -> Option<Ask> {
        match pending.request {
            Request::Join => None,
            // It is there, and waits for a sign to be heard. Asked again it would be for the round after it.
            Request::Boundary(_) if self.grant.is_some() => None,
            Request::Boundary(step) => Some(Ask::Arrive { request: pending.number, after: self.round, step }),
            Request::Vote { round, ballot } => Some(Ask::Vote { round, ballot }),
            Request::Leave => Some(Ask::Leave),
        }
    }

    /// What the arbiter says.
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
        // Old ones come again.
        if !self.is_open() && round.number > self.round && round.rank < round.members.len() {
            (self.round, self.epoch, self.decision) = (round.number, round.epoch, None);
            self.grant = Some(round);
        }
    }
}

/// For a caller that has made the one request whose answer it is: anything else is a bug in the machine.
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
