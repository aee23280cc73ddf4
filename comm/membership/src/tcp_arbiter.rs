//! The arbiter as a process that workers call over TCP.
//!
//! One thread accepts and watches the time, and each connection has one that reads. What is said to a worker goes to the last
//! connection that it spoke on.

use crate::durable_arbiter::Desk;
use crate::message::{FromArbiter, ToArbiter, Worker};
use crate::{Config, ConnectionError, Error};
use meshstep_comm::rendezvous::{Incoming, Listener, Outgoing, Token, Why};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// How often the listener and the time are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// Between two looks, no less than this is a stall.
const STALL: Duration = Duration::from_millis(200);
/// How long a connection may take to prove that it knows the token.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a worker may take to make room for what is said to it.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a worker may take to call again, from the same host and from elsewhere: [`Config::grace`]'s defaults.
const GRACE_HERE: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(10);
/// Connections that have not proven themselves, at a time.
const MAX_STRANGERS: usize = 32;

/// What a connection is to be for, beside its token: one run's workers do not call another's arbiter.
pub(super) fn purpose(run: &str) -> String {
    format!("membership of {run}")
}

/// The arbiter of a run. It serves until it is dropped; one that is started again with the same log goes on with what the
/// last one said.
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
    /// After so long between two looks workers are excused for what was not heard.
    stalled: Duration,
    begin: Instant,
    inside: Mutex<Inside>,
    changed: Condvar,
}

#[derive(Debug)]
struct Inside {
    desk: Desk,
    guests: Vec<Guest>,
    threads: Vec<JoinHandle<()>>,
    next_id: u64,
    closing: bool,
}

/// A connection: to a stranger, then to somebody with the token, then to the worker that its first message is of.
#[derive(Debug)]
struct Guest {
    id: u64,
    stream: TcpStream,
    /// How long the worker may take to call again once this connection has closed.
    grace: Duration,
    outgoing: Option<Outgoing>,
    worker: Option<Worker>,
}

impl Service {
    /// Serves the workers of `run` at `addr`, with what they have said and were told in `log`.
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
        // Looks themselves are no stall, however short the grace is.
        let stalled = (silence.min(grace.unwrap_or(GRACE_HERE)) / 2).max(STALL);
        let listener = Listener::bind(addr, token, &purpose(run)).map_err(ConnectionError::from)?;
        let desk = Desk::open(config, Some(log), Duration::ZERO)?;
        let inside = Inside { desk, guests: Vec::new(), threads: Vec::new(), next_id: 0, closing: false };
        let (inside, changed, begin) = (Mutex::new(inside), Condvar::new(), Instant::now());
        let shared = Arc::new(Shared { listener, silence, grace, stalled, begin, inside, changed });
        let for_thread = Arc::clone(&shared);
        let thread = Builder::new().name("arbiter".to_owned()).spawn(move || for_thread.watch());
        let thread = thread.map_err(|error| Error::NoThread { message: error.to_string() })?;
        Ok(Service { shared, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.shared.listener.addr()
    }

    /// Why it says nothing any more: its log cannot be written, or it has a successor.
    pub fn failed(&self) -> Option<Error> {
        self.shared.lock().desk.failed().cloned()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let mut inside = self.shared.lock();
        inside.closing = true;
        // Who is gone already need not be cut off.
        inside.guests.iter().for_each(|guest| drop(guest.stream.shutdown(Shutdown::Both)));
        drop(inside);
        self.shared.changed.notify_all();
        join(self.thread.take());
        let threads = std::mem::take(&mut self.shared.lock().threads);
        threads.into_iter().for_each(|thread| join(Some(thread)));
    }
}

/// Our threads do not panic; if one did, there is nobody to tell in a drop.
fn join(thread: Option<JoinHandle<()>>) {
    let _ = thread.map(JoinHandle::join);
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Accepts, and lets deadlines pass, until the service ends.
    fn watch(self: Arc<Self>) {
        let mut looked = self.now();
        let mut inside = self.lock();
        while !inside.closing {
            let now = self.now();
            let gap = now - looked;
            if gap > self.stalled {
                // This process stood still, so nobody was heard; what they said comes now.
                inside.desk.excuse(gap);
            }
            looked = now;
            self.accept(&mut inside);
            if inside.desk.wake_at().is_some_and(|at| at <= now) {
                let said = inside.desk.tick(now);
                inside.say(said);
            }
            inside = self.changed.wait_timeout(inside, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives whoever has connected a thread; without one the connection is closed, and the worker tries again.
    fn accept(self: &Arc<Self>, inside: &mut Inside) {
        inside.threads.retain(|thread| !thread.is_finished());
        while inside.guests.iter().filter(|guest| guest.outgoing.is_none()).count() < MAX_STRANGERS {
            let Some(stream) = self.listener.accept() else { return };
            let Ok(kept) = stream.try_clone() else { return };
            let (id, shared) = (inside.next_id, Arc::clone(self));
            let name = format!("arbiter's guest {id}");
            let Ok(thread) = Builder::new().name(name).spawn(move || shared.serve(id, stream)) else {
                return;
            };
            inside.next_id += 1;
            inside.threads.push(thread);
            // A connection that was reset does not tell any more where it came from.
            let grace = self.grace.unwrap_or(if is_near(&kept) { GRACE_HERE } else { GRACE });
            inside.guests.push(Guest { id, stream: kept, grace, outgoing: None, worker: None });
        }
    }

    /// One connection from its first byte to its last.
    fn serve(&self, id: u64, stream: TcpStream) {
        if let Ok((incoming, outgoing)) = self.listener.admit(stream, HANDSHAKE, PATIENCE) {
            if let Some(guest) = self.lock().guest(id) {
                guest.outgoing = Some(outgoing);
            }
            // How it ended shows in whether the worker calls again.
            let _ = self.listen(id, incoming);
        }
        let mut inside = self.lock();
        let Some(place) = inside.guests.iter().position(|guest| guest.id == id) else { return };
        let Guest { stream, worker, grace, .. } = inside.guests.remove(place);
        let _ = stream.shutdown(Shutdown::Both);
        // It may have called again before this connection was seen to end.
        let gone = worker.filter(|worker| inside.guests.iter().all(|guest| guest.worker != Some(*worker)));
        if let Some(worker) = gone {
            inside.desk.close(worker, self.now() + grace);
        }
    }

    fn listen(&self, id: u64, mut incoming: Incoming) -> Result<(), Why> {
        loop {
            // Whoever beats is heard six times as often.
            let payload = incoming.next(Instant::now() + 2 * self.silence)?;
            let message = ToArbiter::decode(&payload).ok_or(Why::NotUnderstood)?;
            let mut inside = self.lock();
            let worker = message.worker;
            match inside.guest(id) {
                Some(guest) if guest.worker.is_none_or(|known| known == worker) => {
                    guest.worker = Some(worker)
                }
                _ => return Err(Why::NotUnderstood),
            }
            let now = self.now();
            let said = inside.desk.hear(message, now);
            inside.say(said);
        }
    }
}

/// Whether the other end is on this host.
fn is_near(stream: &TcpStream) -> bool {
    let ends = stream.peer_addr().ok().zip(stream.local_addr().ok());
    ends.is_some_and(|(peer, local)| peer.ip().is_loopback() || peer.ip() == local.ip())
}

impl Inside {
    fn guest(&mut self, id: u64) -> Option<&mut Guest> {
        self.guests.iter_mut().find(|guest| guest.id == id)
    }

    /// What does not arrive is asked for again.
    fn say(&mut self, said: Vec<FromArbiter>) {
        for message in said {
            let last = self.guests.iter_mut().rev().find(|guest| guest.worker == Some(message.to));
            let Some(Guest { outgoing: Some(outgoing), .. }) = last else { continue };
            if outgoing.send(&message.encode()).is_err() {
                outgoing.cut();
            }
        }
    }
}
