//! Membership of a worker that is a process of its own and calls its arbiter over TCP.

use super::dial::{Dialled, dial};
use super::protocol::{FromService, ToService};
use crate::member::{Answer, Member, Request};
use crate::message::{Digest, Worker};
use crate::wire::Wire;
use crate::{Ballot, ConnectionError, Decision, Error, Membership, Refusal, Round};
use meshstep_comm::rendezvous::{Outgoing, Token, Why};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Pause between two attempts to reach the arbiter.
const PAUSE: Duration = Duration::from_millis(50);
/// Time for which an arbiter may be away, to be started again, before workers go on without it.
const RESTART: Duration = Duration::from_secs(1);

/// Identity of a worker, and the arbiter that it calls.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Addresses of the arbiter and of its standbys. Of those that answer, the one of the highest term is the run's.
    pub addrs: Vec<SocketAddr>,
    /// Token of the job.
    pub token: Option<Token>,
    /// Name of the run, the same as the arbiter's.
    pub run: String,
    /// Id of this worker, unique in the run.
    pub id: u64,
    /// Digest shared by all workers.
    pub digest: Digest,
    /// Address by which the other members reach the worker, at most 64 bytes.
    pub contact: String,
    /// Longest time that a call waits for its answer.
    pub deadline: Duration,
    /// Steps after the last granted exchange that the worker may take without an arbiter. While none can be reached, a boundary up to
    /// that step is [`Error::Alone`] at once, and a later one waits for the deadline; a vote always waits, since its exchange may be
    /// committed. 0: every boundary waits.
    pub alone: u64,
}

/// Membership of a process. A background thread sends beats, and reconnects when the connection ends.
#[derive(Debug)]
pub struct Remote {
    line: Arc<ArbiterLink>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct ArbiterLink {
    caller: Caller,
    begin: Instant,
    inside: Mutex<Inside>,
    changed: Condvar,
}

#[derive(Debug)]
struct Inside {
    member: Member,
    outgoing: Option<Outgoing>,
    /// Time at which the connection was lost; `None` while there is one.
    away_since: Option<Duration>,
    /// Permanent error, which another connection would not change.
    refused: Option<ConnectionError>,
    closing: bool,
}

impl Remote {
    /// Joins the run; the process takes part from the next boundary on. If the id is taken, the call tries again until the
    /// deadline: the previous worker of that id may have ended, which the arbiter assumes after
    /// [`Config::grace`](crate::Config::grace).
    ///
    /// # Errors
    /// [`Error::Unanswered`] if no arbiter answers; [`Error::Connection`] if it has another token or run, or without an address;
    /// [`Error::Refused`] for another plan or rule, an id that stays taken, a contact that is too long; [`Error::NoThread`].
    pub fn join(caller: Caller) -> Result<Self, Error> {
        if caller.addrs.is_empty() {
            return Err(ConnectionError::NoAddress.into());
        }
        let began = Instant::now();
        loop {
            match Self::join_once(caller.clone()) {
                Err(Error::Refused(Refusal::IdTaken { .. })) if began.elapsed() + PAUSE < caller.deadline => {
                    std::thread::sleep(PAUSE);
                }
                joined => return joined,
            }
        }
    }

    fn join_once(caller: Caller) -> Result<Self, Error> {
        // A random number of the system: the standard library offers it only through `RandomState`.
        let life = RandomState::new().build_hasher().finish();
        let worker = Worker { id: caller.id, life };
        let member = Member::new(worker, caller.digest, caller.contact.clone(), caller.deadline);
        let away_since = Some(Duration::ZERO);
        let inside = Inside { member, outgoing: None, away_since, refused: None, closing: false };
        let (inside, begin, changed) = (Mutex::new(inside), Instant::now(), Condvar::new());
        let line = Arc::new(ArbiterLink { caller, begin, inside, changed });
        let for_thread = Arc::clone(&line);
        let thread = Builder::new().name("membership".to_owned()).spawn(move || for_thread.keep());
        let thread = thread.map_err(|error| Error::NoThread { message: error.to_string() })?;
        let remote = Remote { line, thread: Some(thread) };
        remote.line.ask(Request::Join)?;
        Ok(remote)
    }
}

impl Membership for Remote {
    fn boundary(&self, step: u64) -> Result<Round, Error> {
        self.line.ask(Request::Boundary(step)).map(Answer::into_round)
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error> {
        self.line.ask(Request::Vote { round: round.number, ballot }).map(Answer::into_decision)
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.line.lock().member.decided(round.number).cloned()
    }

    fn leave(&self) -> Result<(), Error> {
        self.line.ask(Request::Leave).map(drop)
    }

    fn deadline(&self) -> Option<Duration> {
        Some(self.line.caller.deadline)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let mut inside = self.line.lock();
        inside.closing = true;
        inside.outgoing.iter().for_each(Outgoing::cut);
        drop(inside);
        self.line.changed.notify_all();
        // The thread does not panic; a drop could not report a panic.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl ArbiterLink {
    /// Returns the link's state, also after a panic (decision 119): the arbiter checks each request of this worker by its numbers.
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    fn wait<'a>(&self, inside: MutexGuard<'a, Inside>, within: Duration) -> MutexGuard<'a, Inside> {
        self.changed.wait_timeout(inside, within).unwrap_or_else(PoisonError::into_inner).0
    }

    fn ask(&self, request: Request) -> Result<Answer, Error> {
        let mut inside = self.lock();
        let number = inside.member.begin(request, self.now());
        loop {
            let now = self.now();
            if let Some(answer) = inside.member.take(number, now) {
                return answer.map_err(|error| self.explain(error, &inside, request));
            }
            if let Some(error) = self.may_go_on_alone(&inside, request, now) {
                inside.member.cancel(number);
                return Err(error);
            }
            if let Some(refused) = &inside.refused {
                return Err(refused.clone().into());
            }
            inside.say(now);
            let left = inside.member.wake_at().saturating_sub(now);
            inside = self.wait(inside, left.max(Duration::from_millis(1)));
        }
    }

    /// Returns the error of a boundary that the worker passes without an exchange, since no arbiter can be reached.
    fn may_go_on_alone(&self, inside: &Inside, request: Request, now: Duration) -> Option<Error> {
        let Request::Boundary(step) = request else { return None };
        let away = now.saturating_sub(inside.away_since?);
        let last = inside.member.granted_step()?;
        let left = last.saturating_add(self.caller.alone).checked_sub(step)?;
        (self.caller.alone > 0 && away >= RESTART).then_some(Error::Alone { step, left })
    }

    /// Names the arbiter's absence as the reason for which there was no answer.
    fn explain(&self, error: Error, inside: &Inside, request: Request) -> Error {
        match (error, request, inside.member.granted_step()) {
            (Error::Unanswered { after, .. }, Request::Boundary(step), Some(last))
                if inside.away_since.is_some() =>
            {
                Error::Away { step, last, alone: self.caller.alone, after }
            }
            (error, ..) => error,
        }
    }

    /// Keeps a connection open until the worker has finished or met a permanent error.
    fn keep(&self) {
        let Caller { addrs, token, run, .. } = &self.caller;
        while !self.lock().is_over() {
            let known = self.lock().member.term();
            match dial(addrs, token.as_ref(), run, known) {
                Ok(line) => {
                    self.hold(line);
                    self.lock().away_since = Some(self.now());
                }
                Err(error) if error.may_change() => {}
                Err(error) => self.lock().refused = Some(error),
            }
            self.changed.notify_all();
            let inside = self.lock();
            if !inside.is_over() {
                drop(self.wait(inside, PAUSE));
            }
        }
    }

    /// Runs one connection to its end.
    fn hold(&self, Dialled { mut incoming, outgoing, .. }: Dialled) {
        let mut inside = self.lock();
        (inside.outgoing, inside.away_since) = (Some(outgoing), None);
        inside.member.repeat(self.now());
        drop(inside);
        let mut heard = self.now();
        loop {
            let wake_at = {
                let mut inside = self.lock();
                inside.say(self.now());
                if inside.is_over() || inside.outgoing.is_none() {
                    return inside.hang_up();
                }
                inside.member.wake_at()
            };
            let next = match incoming.next(self.begin + wake_at) {
                Ok(payload) => FromService::decode(&payload).ok_or(Why::NotUnderstood),
                Err(why) => Err(why),
            };
            let mut inside = self.lock();
            match next {
                Ok(message) => {
                    heard = self.now();
                    if let FromService::Say { message } = message {
                        inside.member.hear(message);
                    }
                }
                // A machine that has failed does not close its connections.
                Err(Why::Silent { .. }) if self.now() - heard < inside.member.lost_after() => {}
                Err(_) => return inside.hang_up(),
            }
            drop(inside);
            self.changed.notify_all();
        }
    }
}

impl Inside {
    fn is_over(&self) -> bool {
        self.closing || self.refused.is_some() || self.member.ended().is_some()
    }

    fn say(&mut self, now: Duration) {
        for message in self.member.tick(now) {
            let Some(outgoing) = &mut self.outgoing else { return };
            if outgoing.send(&ToService::Ask { message }.encode()).is_err() {
                return self.hang_up();
            }
        }
    }

    fn hang_up(&mut self) {
        self.outgoing.take().iter().for_each(Outgoing::cut);
    }
}
