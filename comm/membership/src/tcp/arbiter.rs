//! The arbiter as a process that workers call over TCP.
//!
//! One thread admits connections and watches the time; each admitted connection has a thread that reads. A message to a worker goes to the
//! last connection on which the worker has sent one.

use super::connections::{Connection, Connections};
use super::protocol::{ToService, purpose};
use crate::durable_arbiter::DurableArbiter;
use crate::wire::Wire;
use crate::{Config, ConnectionError, Error};
use meshstep_comm::rendezvous::{Accepted, Incoming, Listener, Token, Why};
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

/// Shortest time for which a silent connection is kept: a standby writes at least every second.
const IDLE: Duration = Duration::from_secs(5);

/// The arbiter of a run. It serves until it is dropped; a service started again with the same log continues from its last state.
///
/// ```
/// use meshstep_membership::{Ballot, Caller, Config, Contact, Digest, Log, Membership, Remote, Service, Standby, StandbyCopy};
/// use std::time::Duration;
///
/// # let dir = std::env::temp_dir().join(format!("meshstep-service-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// let (digest, here) = (Digest { plan: 1, rule: 2 }, "127.0.0.1:0".parse()?);
/// let (log, copy) = (dir.join("run.log"), dir.join("copy.log"));
/// let arbiter = Service::start(here, None, "run", Config::new(digest, 1), &log)?;
/// let standby = Standby::start(&[arbiter.addr()], None, "run", &copy)?; // usually on another machine
/// let contact = Contact::free(here.ip())?; // where members of an epoch meet
/// let worker = Remote::join(Caller {
///     addrs: vec![arbiter.addr()],
///     token: None, // everything stays on loopback addresses
///     run: "run".to_owned(),
///     id: 7,
///     digest,
///     contact: contact.to_string(),
///     deadline: Duration::from_secs(60),
///     alone: 0,
/// })?;
/// let round = worker.boundary(16)?;
/// let comm = Contact::connect(&round, "run", None, Duration::from_secs(60))?;
/// assert_eq!(meshstep_comm::Communicator::world_size(&*comm), 1);
/// assert!(worker.vote(&round, Ballot::Ready)?.is_commit());
/// worker.leave()?;
/// let StandbyCopy { term, .. } = standby.kept();
/// assert!(term <= arbiter.term());
/// drop((standby, arbiter));
/// let (_, state) = Log::open(&log)?; // an arbiter that is started again goes on from here
/// assert!(state.is_some_and(|state| state.round >= round.number));
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
    inside: Mutex<Connections>,
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
        let inside = Connections::new(durable);
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

    /// Returns true while a [`Standby`](crate::Standby) has the whole log on its disk.
    pub fn has_standby(&self) -> bool {
        self.shared.lock().has_copy()
    }

    /// Returns the term of this start of the arbiter.
    pub fn term(&self) -> u64 {
        self.shared.lock().durable.state().term
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let mut inside = self.shared.lock();
        inside.closing = true;
        inside.cut_all();
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
    /// Returns the connections, also after a panic (decision 119): the arbiter logs a state before it answers, so no answer is from a half
    /// change.
    fn lock(&self) -> MutexGuard<'_, Connections> {
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
            inside.say(said, now);
        }
        inside.look(now);
        if inside.is_over() {
            // Workers call the other arbiter.
            inside.cut_all();
        }
    }

    /// Starts the thread of an admitted connection; without a thread the connection is closed, and the worker tries again.
    fn welcome(self: &Arc<Self>, accepted: Accepted) {
        let Accepted { incoming, outgoing, from } = accepted;
        let mut inside = self.lock();
        if inside.is_over() {
            // A drop has cut the other connections already, and waits for their threads.
            return outgoing.cut();
        }
        let (id, shared) = (inside.next_id, Arc::clone(self));
        let body = move || shared.serve(id, incoming);
        let Ok(thread) = Builder::new().name(format!("arbiter's guest {id}")).spawn(body) else {
            return outgoing.cut();
        };
        inside.next_id += 1;
        inside.threads.push(thread);
        let grace = self.grace.unwrap_or(if self.is_near(from) { GRACE_HERE } else { GRACE });
        inside.all.push(Connection { id, grace, outgoing, worker: None });
    }

    /// Serves one connection to its last byte.
    fn serve(&self, id: u64, incoming: Incoming) {
        self.lock().greet(id);
        // The error is of no use here: the worker calls again or stops being a member.
        let _ = self.listen(id, incoming);
        let mut inside = self.lock();
        if let Some((worker, grace)) = inside.remove(id) {
            inside.durable.close(worker, self.now() + grace);
        }
    }

    /// Returns true if the other end is on this host.
    fn is_near(&self, from: SocketAddr) -> bool {
        from.ip().is_loopback() || from.ip() == self.listener.addr().ip()
    }

    fn listen(&self, id: u64, mut incoming: Incoming) -> Result<(), Why> {
        // A worker beats six times in each silence.
        let idle = IDLE.max(2 * self.silence);
        loop {
            let payload = incoming.next(Instant::now() + idle)?;
            let message = ToService::decode(&payload).ok_or(Why::NotUnderstood)?;
            let mut inside = self.lock();
            let now = self.now();
            inside.hear(id, message, now)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Digest;
    use meshstep_comm::rendezvous::call;

    #[test]
    fn a_connection_that_is_admitted_while_the_service_closes_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config::new(Digest { plan: 1, rule: 2 }, 1);
        let addr = "127.0.0.1:0".parse().unwrap();
        let mut service = Service::start(addr, None, "run", config, &dir.path().join("log")).unwrap();
        // The first half of a drop, up to the moment at which it waits for the threads.
        service.shared.lock().closing = true;
        join(service.thread.take());
        let (shared, addr, within) = (Arc::clone(&service.shared), service.addr(), Duration::from_secs(20));
        let caller = std::thread::spawn(move || {
            let (mut incoming, _outgoing) = call(addr, None, &purpose("run"), within).unwrap();
            incoming.next(Instant::now() + within)
        });
        let accepted = shared.listener.accept(Instant::now() + within, PATIENCE).unwrap();
        shared.welcome(accepted);
        assert!(shared.lock().all.is_empty());
        assert_eq!(caller.join().unwrap(), Err(Why::Closed));
    }
}
