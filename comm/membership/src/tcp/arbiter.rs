//! The arbiter as a process that workers call over TCP.
//!
//! One thread admits connections and watches the time; each admitted connection has a thread that reads. A message to a worker goes to the
//! last connection on which the worker has sent one.

use crate::durable_arbiter::DurableArbiter;
use crate::message::{FromArbiter, ToArbiter, Worker};
use crate::{Config, ConnectionError, Error};
use meshstep_comm::rendezvous::{Accepted, Incoming, Listener, Outgoing, Token, Why};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Interval at which the thread checks the listener and the time.
const LOOK: Duration = Duration::from_millis(20);
/// Shortest time between two checks that counts as a stall.
const STALL: Duration = Duration::from_millis(200);
/// Longest time that a connection may take to prove that it knows the token.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Longest time that a send to a worker may block.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time that a worker has to call again, from the same host and from elsewhere: [`Config::grace`]'s defaults.
const GRACE_HERE: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(10);

/// Purpose of a connection, checked beside its token: workers of one run cannot call another run's arbiter.
pub(super) fn purpose(run: &str) -> String {
    format!("membership of {run}")
}

/// The arbiter of a run. It serves until it is dropped; a service started again with the same log continues from its last state.
#[derive(Debug)]
pub struct Service {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    listener: Listener,
    silence: Duration,
    grace: Option<Duration>,
    /// Longest gap between two checks; after a longer one all deadlines are extended by it.
    stalled: Duration,
    begin: Instant,
    inside: Mutex<ArbiterState>,
}

#[derive(Debug)]
struct ArbiterState {
    durable: DurableArbiter,
    connections: Vec<Connection>,
    threads: Vec<JoinHandle<()>>,
    next_id: u64,
    closing: bool,
}

/// A connection, authenticated by the token; its first message assigns it to a worker.
#[derive(Debug)]
struct Connection {
    id: u64,
    /// Time that the worker has to call again once this connection has closed.
    grace: Duration,
    outgoing: Outgoing,
    worker: Option<Worker>,
}

impl Service {
    /// Serves the workers of `run` at `addr`; the arbiter's state is kept in `log`.
    ///
    /// # Errors
    /// [`Error::Config`], [`Error::Log`], [`Error::Connection`], [`Error::NoThread`].
    pub fn start(
        addr: SocketAddr,
        token: Option<&Token>,
        run: &str,
        config: Config,
        log: &Path,
    ) -> Result<Self, Error> {
        let (silence, grace) = (config.silence, config.grace);
        // Regular checks do not count as stalls, however short the grace is.
        let stalled = (silence.min(grace.unwrap_or(GRACE_HERE)) / 2).max(STALL);
        let listener =
            Listener::bind(addr, token, &purpose(run), HANDSHAKE).map_err(ConnectionError::from)?;
        let durable = DurableArbiter::open(config, Some(log), Duration::ZERO)?;
        let inside = ArbiterState {
            durable,
            connections: Vec::new(),
            threads: Vec::new(),
            next_id: 0,
            closing: false,
        };
        let (inside, begin) = (Mutex::new(inside), Instant::now());
        let shared = Arc::new(Shared { listener, silence, grace, stalled, begin, inside });
        let for_thread = Arc::clone(&shared);
        let thread = Builder::new().name("arbiter".to_owned()).spawn(move || for_thread.watch());
        let thread = thread.map_err(|error| Error::NoThread { message: error.to_string() })?;
        Ok(Service { shared, thread: Some(thread) })
    }

    /// Returns the address on which the service listens.
    pub fn addr(&self) -> SocketAddr {
        self.shared.listener.addr()
    }

    /// Accepts workers that call the service at this address: that of a forwarded port.
    ///
    /// # Errors
    /// [`Error::Connection`] for a name above 256 bytes, which no address is.
    pub fn add_name(&self, addr: SocketAddr) -> Result<(), Error> {
        Ok(self.shared.listener.add_name(&addr.to_string()).map_err(ConnectionError::from)?)
    }

    /// Returns why the service has stopped answering: its log cannot be written, or it has a successor.
    pub fn failed(&self) -> Option<Error> {
        self.shared.lock().durable.failed().cloned()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let mut inside = self.shared.lock();
        inside.closing = true;
        inside.connections.iter().for_each(|connection| connection.outgoing.cut());
        drop(inside);
        join(self.thread.take());
        let threads = std::mem::take(&mut self.shared.lock().threads);
        threads.into_iter().for_each(|thread| join(Some(thread)));
    }
}

/// Service threads do not panic; a drop could not report a panic.
fn join(thread: Option<JoinHandle<()>>) {
    let _ = thread.map(JoinHandle::join);
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, ArbiterState> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Admits connections and handles deadlines until the service ends.
    fn watch(self: Arc<Self>) {
        let mut looked = self.now();
        while !self.lock().closing {
            let now = self.now();
            self.look(now, now - looked);
            looked = now;
            let until = Instant::now() + LOOK;
            while let Some(accepted) = self.listener.accept(until, PATIENCE) {
                self.welcome(accepted);
            }
        }
    }

    /// Handles the deadlines that have passed; `gap` is the time since the last look.
    fn look(&self, now: Duration, gap: Duration) {
        let mut inside = self.lock();
        inside.threads.retain(|thread| !thread.is_finished());
        if gap > self.stalled {
            // This process stood still and read no messages; they arrive now.
            inside.durable.excuse(gap);
        }
        if inside.durable.wake_at().is_some_and(|at| at <= now) {
            let said = inside.durable.tick(now);
            inside.say(said);
        }
    }

    /// Starts the thread of an admitted connection; without a thread the connection is closed, and the worker tries again.
    fn welcome(self: &Arc<Self>, accepted: Accepted) {
        let Accepted { incoming, outgoing, from } = accepted;
        let mut inside = self.lock();
        let (id, shared) = (inside.next_id, Arc::clone(self));
        let body = move || shared.serve(id, incoming);
        let Ok(thread) = Builder::new().name(format!("arbiter's guest {id}")).spawn(body) else {
            return outgoing.cut();
        };
        inside.next_id += 1;
        inside.threads.push(thread);
        let grace = self.grace.unwrap_or(if self.is_near(from) { GRACE_HERE } else { GRACE });
        inside.connections.push(Connection { id, grace, outgoing, worker: None });
    }

    /// Serves one connection to its last byte.
    fn serve(&self, id: u64, incoming: Incoming) {
        // The error is of no use here: the worker calls again or stops being a member.
        let _ = self.listen(id, incoming);
        let mut inside = self.lock();
        let Some(place) = inside.connections.iter().position(|connection| connection.id == id) else {
            return;
        };
        let Connection { outgoing, worker, grace, .. } = inside.connections.remove(place);
        outgoing.cut();
        // The worker may have called again before the end of this connection was noticed.
        let gone = worker
            .filter(|worker| inside.connections.iter().all(|connection| connection.worker != Some(*worker)));
        if let Some(worker) = gone {
            inside.durable.close(worker, self.now() + grace);
        }
    }

    /// Returns true if the other end is on this host.
    fn is_near(&self, from: SocketAddr) -> bool {
        from.ip().is_loopback() || from.ip() == self.listener.addr().ip()
    }

    fn listen(&self, id: u64, mut incoming: Incoming) -> Result<(), Why> {
        loop {
            // A worker beats six times in each silence.
            let payload = incoming.next(Instant::now() + 2 * self.silence)?;
            let message = ToArbiter::decode(&payload).ok_or(Why::NotUnderstood)?;
            let mut inside = self.lock();
            let worker = message.worker;
            match inside.connection(id) {
                Some(connection) if connection.worker.is_none_or(|known| known == worker) => {
                    connection.worker = Some(worker)
                }
                _ => return Err(Why::NotUnderstood),
            }
            let now = self.now();
            let said = inside.durable.hear(message, now);
            inside.say(said);
        }
    }
}

impl ArbiterState {
    fn connection(&mut self, id: u64) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|connection| connection.id == id)
    }

    /// Sends the messages; workers ask again for lost ones.
    fn say(&mut self, said: Vec<FromArbiter>) {
        for message in said {
            let last =
                self.connections.iter_mut().rev().find(|connection| connection.worker == Some(message.to));
            let Some(Connection { outgoing, .. }) = last else { continue };
            if outgoing.send(&message.encode()).is_err() {
                outgoing.cut();
            }
        }
    }
}
