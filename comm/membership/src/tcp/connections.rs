//! State of the arbiter's service: the arbiter, its connections, and messages that wait for the standby's copy of the log.

use super::protocol::{FromService, ToService};
use crate::durable_arbiter::DurableArbiter;
use crate::message::{FromArbiter, Worker};
use crate::wire::Wire;
use meshstep_comm::rendezvous::{Outgoing, Why};
use std::collections::VecDeque;
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest time for which messages wait for the standby; after it the arbiter goes on without a copy.
const STANDBY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Connections {
    pub(super) durable: DurableArbiter,
    pub(super) all: Vec<Connection>,
    pub(super) threads: Vec<JoinHandle<()>>,
    pub(super) next_id: u64,
    pub(super) closing: bool,
    copy: Option<LogCopy>,
    waiting: VecDeque<Waiting>,
}

/// A connection, authenticated by the token; its first message assigns it to a worker or to the standby.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) id: u64,
    /// Time that the worker has to call again once this connection has closed.
    pub(super) grace: Duration,
    pub(super) outgoing: Outgoing,
    pub(super) worker: Option<Worker>,
}

/// The standby's copy of the log.
#[derive(Debug)]
struct LogCopy {
    connection: u64,
    /// Last record that was sent, and last one that is on the standby's disk.
    sent: u64,
    kept: u64,
}

/// Messages that are sent once the standby has the record with this number.
#[derive(Debug)]
struct Waiting {
    number: u64,
    since: Duration,
    said: Vec<FromArbiter>,
}

impl Connections {
    pub(super) fn new(durable: DurableArbiter) -> Self {
        Connections {
            durable,
            all: Vec::new(),
            threads: Vec::new(),
            next_id: 0,
            closing: false,
            copy: None,
            waiting: VecDeque::new(),
        }
    }

    /// Returns true if the service serves nobody any more.
    pub(super) fn is_over(&self) -> bool {
        self.closing || self.durable.failed().is_some()
    }

    /// Returns true while a standby has every record.
    pub(super) fn has_copy(&self) -> bool {
        self.copy.as_ref().is_some_and(|copy| copy.kept == self.durable.logged())
    }

    pub(super) fn cut_all(&self) {
        self.all.iter().for_each(|connection| connection.outgoing.cut());
    }

    /// Sends the term, the first message of a connection.
    pub(super) fn greet(&mut self, id: u64) {
        let term = self.durable.state().term;
        self.send(id, &FromService::Term { term });
    }

    /// Handles a message of connection `id`.
    pub(super) fn hear(&mut self, id: u64, message: ToService, now: Duration) -> Result<(), Why> {
        match message {
            ToService::Ask { message } => {
                let worker = message.worker;
                match self.all.iter_mut().find(|connection| connection.id == id) {
                    Some(connection) if connection.worker.is_none_or(|known| known == worker) => {
                        connection.worker = Some(worker)
                    }
                    _ => return Err(Why::NotUnderstood),
                }
                let said = self.durable.hear(message, now);
                self.say(said, now);
            }
            ToService::Known { term } => self.durable.meet(term),
            ToService::Follow { term } => {
                self.durable.meet(term);
                self.follow(id);
            }
            ToService::Kept { number } => self.keep(id, number),
        }
        if self.is_over() { Err(Why::Closed) } else { Ok(()) }
    }

    /// Sends the messages once the standby, if there is one, has the state that they tell of. Workers ask again for lost ones.
    pub(super) fn say(&mut self, said: Vec<FromArbiter>, now: Duration) {
        self.replicate();
        let number = self.durable.logged();
        // All messages stay in order: a later one may tell of a state that waits.
        if self.waiting.is_empty() && self.copy.as_ref().is_none_or(|copy| copy.kept >= number) {
            return self.deliver(said);
        }
        if !said.is_empty() {
            self.waiting.push_back(Waiting { number, since: now, said });
        }
    }

    /// Goes on without the standby if messages have waited for it too long.
    pub(super) fn look(&mut self, now: Duration) {
        let late = |waiting: &Waiting| now.saturating_sub(waiting.since) > STANDBY;
        if self.waiting.front().is_some_and(late) {
            let copy = self.copy.take();
            let standby =
                self.all.iter().find(|one| copy.as_ref().is_some_and(|copy| copy.connection == one.id));
            standby.iter().for_each(|connection| connection.outgoing.cut());
        }
        self.release();
    }

    /// Removes a connection that has ended, and returns its worker, unless that has another connection.
    pub(super) fn remove(&mut self, id: u64) -> Option<(Worker, Duration)> {
        let place = self.all.iter().position(|connection| connection.id == id)?;
        let Connection { outgoing, worker, grace, .. } = self.all.remove(place);
        outgoing.cut();
        if self.copy.as_ref().is_some_and(|copy| copy.connection == id) {
            self.copy = None;
            self.release();
        }
        // The worker may have called again before the end of this connection was noticed.
        let others = |worker: &Worker| self.all.iter().all(|connection| connection.worker != Some(*worker));
        worker.filter(others).map(|worker| (worker, grace))
    }

    /// Makes connection `id` the standby's. There is one standby, the newest.
    fn follow(&mut self, id: u64) {
        let old = self.copy.replace(LogCopy { connection: id, sent: 0, kept: 0 });
        if let Some(old) = old.filter(|old| old.connection != id) {
            self.send(old.connection, &FromService::Replaced {});
        }
        self.replicate();
    }

    fn keep(&mut self, id: u64, number: u64) {
        if let Some(copy) = self.copy.as_mut().filter(|copy| copy.connection == id) {
            copy.kept = copy.kept.max(number);
        }
        self.release();
    }

    /// Sends the last record to the standby, if it is new.
    fn replicate(&mut self) {
        let number = self.durable.logged();
        let Some(copy) = self.copy.as_mut().filter(|copy| copy.sent < number) else { return };
        copy.sent = number;
        let (id, state) = (copy.connection, self.durable.state().clone());
        self.send(id, &FromService::Record { number, state });
    }

    /// Delivers what no longer waits.
    fn release(&mut self) {
        let kept = self.copy.as_ref().map_or(u64::MAX, |copy| copy.kept);
        while self.waiting.front().is_some_and(|waiting| waiting.number <= kept) {
            self.waiting.pop_front().into_iter().for_each(|waiting| self.deliver(waiting.said));
        }
    }

    fn deliver(&mut self, said: Vec<FromArbiter>) {
        if self.durable.failed().is_some() {
            return;
        }
        for message in said {
            let last = self.all.iter().rev().find(|connection| connection.worker == Some(message.to));
            let Some(id) = last.map(|connection| connection.id) else { continue };
            self.send(id, &FromService::Say { message });
        }
    }

    fn send(&mut self, id: u64, message: &FromService) {
        let Some(connection) = self.all.iter_mut().find(|connection| connection.id == id) else { return };
        if connection.outgoing.send(&message.encode()).is_err() {
            connection.outgoing.cut();
        }
    }
}
