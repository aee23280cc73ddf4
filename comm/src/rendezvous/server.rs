//! Store server on rank 0: admission, handshake timeouts, and shutdown.
//!
//! One thread accepts connections. Each connection has a reader thread, and a writer thread once its rank is seated. Messages are
//! queued in the ledger; each writer goes through it at its own pace, so that a slow rank delays no other.

use super::admission;
use super::ledger::Ledger;
use super::link::{self, after};
use super::message::{Claim, Message};
use super::proof::Key;
use super::{Environment, Error, Options, Refusal, TurnedAway, Why};
use crate::sync::{Condvar, Mutex};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Maximum number of unauthenticated connections; more of them queue in the system.
const MAX_STRANGERS: usize = 32;
/// Poll interval of the listener.
const LOOK: Duration = Duration::from_millis(20);
/// Time for ranks to receive the last messages.
const LINGER: Duration = Duration::from_secs(2);

/// Store server, which runs until it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    store: Arc<StoreState>,
    acceptor: Option<JoinHandle<()>>,
}

/// State shared by the store's threads.
#[derive(Debug)]
pub(super) struct StoreState {
    pub(super) token: Key,
    pub(super) options: Options,
    pub(super) state: Mutex<ServerState>,
    pub(super) changed: Condvar,
}

#[derive(Debug)]
pub(super) struct ServerState {
    pub(super) ledger: Ledger,
    connections: Vec<Connection>,
    threads: Vec<JoinHandle<()>>,
    next_id: u64,
    closing: bool,
}

/// Connection to the store.
#[derive(Debug)]
struct Connection {
    id: u64,
    stream: Arc<TcpStream>,
    seated: bool,
}

impl Server {
    /// Starts serving the ranks of `environment` on `listener`.
    pub(super) fn start(
        listener: TcpListener,
        environment: &Environment,
        token: Key,
        options: &Options,
    ) -> Result<Self, Error> {
        let system = |what, error: std::io::Error| Error::System { what, message: error.to_string() };
        listener.set_nonblocking(true).map_err(|error| system("making the listener non-blocking", error))?;
        let Environment { run_id, restart, world_size, .. } = environment;
        let ledger = Ledger::new(run_id.clone(), *restart, *world_size, super::ledger::MAX_LOG);
        let (connections, threads) = (Vec::new(), Vec::new());
        let state = ServerState { ledger, connections, threads, next_id: 0, closing: false };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let store = Arc::new(StoreState { token, options: options.clone(), state, changed });
        let for_thread = Arc::clone(&store);
        let thread = Builder::new().name("store".to_owned()).spawn(move || accept(&for_thread, &listener));
        let acceptor = Some(thread.map_err(|error| system("starting a thread for the store", error))?);
        Ok(Server { store, acceptor })
    }

    /// Returns the last few rejected connections.
    pub(super) fn turned_away(&self) -> Vec<TurnedAway> {
        self.store.state.lock().ledger.turned_away()
    }
}

impl Drop for Server {
    /// Sends the remaining messages to the ranks, for at most [`LINGER`]; then joins all threads.
    fn drop(&mut self) {
        {
            let mut state = self.store.state.lock();
            state.closing = true;
            state
                .connections
                .iter()
                .filter(|connection| !connection.seated)
                .for_each(|connection| link::cut(&connection.stream));
        }
        self.store.changed.notify_all();
        join(self.acceptor.take());
        let until = after(LINGER);
        let mut state = self.store.state.lock();
        while !state.connections.is_empty() && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            state = self.store.changed.wait(state, Some(left));
        }
        state.connections.iter().for_each(|connection| link::cut(&connection.stream));
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        threads.into_iter().for_each(|thread| join(Some(thread)));
    }
}

/// The store's threads do not panic; if one did, a drop has no caller to report to.
fn join(thread: Option<JoinHandle<()>>) {
    let _ = thread.map(JoinHandle::join);
}

fn accept(store: &Arc<StoreState>, listener: &TcpListener) {
    loop {
        let may_accept = {
            let mut state = store.state.lock();
            state.threads.retain(|thread| !thread.is_finished());
            if state.closing {
                return;
            }
            state.connections.iter().filter(|connection| !connection.seated).count() < MAX_STRANGERS
        };
        match may_accept.then(|| listener.accept()) {
            Some(Ok((stream, from))) => store.welcome(stream, from),
            Some(Err(error)) if error.kind() == ErrorKind::Interrupted => {}
            // There is no pending connection, or no capacity for another one.
            None | Some(Err(_)) => {
                let state = store.state.lock();
                if !state.closing {
                    drop(store.changed.wait(state, Some(LOOK)));
                }
            }
        }
    }
}

impl StoreState {
    /// Starts the thread of a connection; without a thread the connection is closed, and the peer tries again.
    fn welcome(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) {
        let stream = Arc::new(stream);
        let mut state = self.state.lock();
        if state.closing {
            return;
        }
        let id = state.next_id;
        state.next_id += 1;
        let (store, for_thread) = (Arc::clone(self), Arc::clone(&stream));
        let body = move || store.serve(id, &for_thread, from);
        if let Ok(thread) = Builder::new().name(format!("store's peer {id}")).spawn(body) {
            state.connections.push(Connection { id, stream, seated: false });
            state.threads.push(thread);
        }
    }

    /// Serves one connection from its first byte to its last.
    fn serve(self: &Arc<Self>, id: u64, stream: &Arc<TcpStream>, from: SocketAddr) {
        match admission::admit(self, id, stream) {
            Ok(Some((rank, receiver, sender))) => self.seated(id, rank, receiver, sender),
            Ok(None) => {}
            Err(why) => self.state.lock().ledger.turn_away(TurnedAway { from, why }),
        }
        link::cut(stream);
        self.state.lock().connections.retain(|connection| connection.id != id);
        self.changed.notify_all();
    }

    /// Seats the rank of connection `id`. The ledger and the connection change under one lock: a closing store waits for every
    /// rank that was announced to others.
    pub(super) fn seat(&self, id: u64, claim: &Claim) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        let verdict = state.ledger.seat(claim);
        let seated = verdict.is_ok();
        state
            .connections
            .iter_mut()
            .filter(|connection| connection.id == id)
            .for_each(|connection| connection.seated = seated);
        drop(state);
        self.changed.notify_all();
        verdict
    }

    fn seated(self: &Arc<Self>, id: u64, rank: usize, receiver: link::Receiver, sender: link::Sender) {
        let store = Arc::clone(self);
        let writer = Builder::new().name(format!("store to rank {rank}"));
        let writer = writer.spawn(move || store.tell(id, sender));
        let lost = match &writer {
            Ok(_) => self.listen(rank, receiver),
            Err(error) => Some(Why::System { message: error.to_string() }),
        };
        let mut state = self.state.lock();
        state
            .connections
            .iter()
            .filter(|connection| connection.id == id)
            .for_each(|connection| link::cut(&connection.stream));
        state.connections.retain(|connection| connection.id != id);
        if !state.closing || rank == 0 {
            // Once the store closes, ranks end their connections for that reason.
            state.ledger.depart(rank, lost);
        }
        drop(state);
        self.changed.notify_all();
        join(writer.ok());
    }

    /// Receives a rank's messages until its goodbye (`None`) or its loss.
    fn listen(&self, rank: usize, mut receiver: link::Receiver) -> Option<Why> {
        loop {
            match receiver.message(after(self.options.silence)) {
                Ok((Message::Bye, _)) => return None,
                Ok((message, payload)) => {
                    if let Err(why) = self.state.lock().ledger.receive(rank, message, payload) {
                        return Some(why);
                    }
                    self.changed.notify_all();
                }
                Err(why) => return Some(why),
            }
        }
    }

    /// Sends all ledger entries to a rank, in order, and a beat now and then as a sign of life.
    fn tell(&self, id: u64, mut sender: link::Sender) {
        let mut told = 0;
        while let Some(news) = self.news(id, told) {
            told += news.len();
            let sent = match news.is_empty() {
                true => sender.message(&Message::Beat),
                false => sender.payloads(&news),
            };
            if sent.is_err() {
                // The reader of either side reports the reason.
                return sender.cut();
            }
        }
        sender.finish();
    }

    /// Returns the new ledger entries; empty when a beat is due, `None` when the connection is over.
    fn news(&self, id: u64, told: usize) -> Option<Vec<Arc<[u8]>>> {
        let beat = after(self.options.beat());
        let mut state = self.state.lock();
        loop {
            let news = state.ledger.since(told);
            if !news.is_empty() {
                return Some(news.to_vec());
            }
            let left = beat.saturating_duration_since(Instant::now());
            if state.closing || state.connections.iter().all(|connection| connection.id != id) {
                return None;
            }
            if left.is_zero() {
                return Some(Vec::new());
            }
            state = self.changed.wait(state, Some(left));
        }
    }
}
