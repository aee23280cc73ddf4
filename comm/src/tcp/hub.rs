//! Connections of a process: one thread accepts those of the ranks below it, and short-lived ones call the ranks above it.

use super::card::Card;
use super::error::Error;
use super::hello::{GroupId, Hello};
use super::host::{is_local, same_host};
use super::mailbox::{Mailbox, Mailboxes, NewConnection};
use crate::p2p::transport::LostWhy;
use crate::rendezvous::{Accepted, Failure, Generation, Listener, RawConnection, Store, Token, Why, connect};
use crate::sync::real::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Purpose of the listeners, which each have a name of their own.
pub(super) const PURPOSE: &str = "streams";
/// Interval at which the accepting thread looks for the end of the process's groups.
const TICK: Duration = Duration::from_millis(50);
/// Wait for the first message of one accepted connection, in turns.
const TURN: Duration = Duration::from_millis(1);
/// Time for the first message of an accepted connection.
const GREETING: Duration = Duration::from_secs(30);
/// Longest wait for the answer of one call; the caller then calls again.
const CALL: Duration = Duration::from_secs(2);

/// Connections of a process to the ranks of its world.
#[derive(Debug)]
pub(super) struct Hub {
    rank: usize,
    cards: Vec<Card>,
    /// For each rank, true if it is on this host.
    near: Vec<bool>,
    /// For each rank, true if the stream to it is sealed.
    sealed: Vec<bool>,
    token: Option<Token>,
    connect: Duration,
    mailboxes: Arc<Mailboxes>,
    /// The store's view of the ranks in this generation; the store lives as long as the groups.
    generation: Mutex<Option<(Generation, Arc<Store>)>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hub {
    /// Starts to accept connections. `cards` are those of all ranks.
    pub(super) fn start(
        rank: usize,
        cards: Vec<Card>,
        listener: Listener,
        token: Option<Token>,
        connect: Duration,
    ) -> Result<Self, Error> {
        let is_near = |card: &Card| same_host(&cards[rank].host, &card.host, is_local(card.addr.ip()));
        let near: Vec<bool> = cards.iter().map(is_near).collect();
        let sealed = near.iter().map(|near| cards[rank].encrypt.seals(*near)).collect();
        let (mailboxes, stop): (Arc<Mailboxes>, Arc<AtomicBool>) = Default::default();
        let (for_thread, stopped) = (Arc::clone(&mailboxes), Arc::clone(&stop));
        let body = move || accept(&listener, &for_thread, &stopped);
        let thread = Builder::new().name(format!("streams of rank {rank}")).spawn(body);
        let thread = Some(thread.map_err(Error::system("starting a thread for streams"))?);
        let generation = Mutex::default();
        Ok(Hub { rank, cards, near, sealed, token, connect, mailboxes, generation, stop, thread })
    }

    /// Index of this process in the world.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.cards.len()
    }

    pub(super) fn mailboxes(&self) -> &Mailboxes {
        &self.mailboxes
    }

    /// True if `rank` of the world is on this host.
    pub(super) fn is_near(&self, rank: usize) -> bool {
        self.near[rank]
    }

    /// True if the stream to `rank` of the world is sealed.
    pub(super) fn seals(&self, rank: usize) -> bool {
        self.sealed[rank]
    }

    /// Goes on to a generation, and closes connections of earlier ones.
    pub(super) fn begin(&self, generation: Generation, store: Arc<Store>) {
        self.mailboxes.begin(generation.number());
        *self.generation.lock() = Some((generation, store));
    }

    /// Returns the rank of the world that the store has lost, if any.
    pub(super) fn lost(&self) -> Option<(usize, LostWhy)> {
        let failure = self.generation.lock().as_ref()?.0.failure()?;
        let Failure::Lost { rank, why } = failure else { return None };
        let why = match why {
            Why::Closed => LostWhy::Closed,
            other => LostWhy::System { what: "the connection to the store", message: other.to_string() },
        };
        Some((rank, why))
    }

    /// Calls rank `to` of the world, on a thread, for `group`, in which it has index `peer` and this rank `from`.
    pub(super) fn call(
        &self,
        to: usize,
        group: GroupId,
        peer: usize,
        from: usize,
        mailbox: &Arc<Mailbox>,
    ) -> Result<(), LostWhy> {
        let sealed = self.sealed[to];
        let call = RankCall {
            card: self.cards[to].clone(),
            token: self.token.clone(),
            hello: Hello { group, from, sealed },
            until: Instant::now() + self.connect,
            stop: Arc::clone(&self.stop),
        };
        let mailbox = Arc::clone(mailbox);
        let body = move || mailbox.put(peer, call.make());
        let started = Builder::new().name(format!("call to rank {to}")).spawn(body);
        let refused =
            |error: std::io::Error| LostWhy::System { what: "starting a thread", message: error.to_string() };
        started.map(drop).map_err(refused)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The thread does not panic; if it did, a drop has no caller to report to.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Call to one rank.
struct RankCall {
    card: Card,
    token: Option<Token>,
    hello: Hello,
    until: Instant,
    stop: Arc<AtomicBool>,
}

impl RankCall {
    /// Calls until the rank answers, the time is over or the process's groups have ended.
    fn make(&self) -> NewConnection {
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            let end = match self.once(left.min(CALL)) {
                Ok(connection) => return Ok((connection, self.hello.sealed)),
                Err(end) => end,
            };
            let permanent = !matches!(end, crate::rendezvous::Error::Unreachable { .. });
            if permanent || left < CALL || self.stop.load(Ordering::Relaxed) {
                return Err(LostWhy::System { what: "opening the stream", message: end.to_string() });
            }
        }
    }

    fn once(&self, within: Duration) -> Result<RawConnection, crate::rendezvous::Error> {
        let Card { addr, name, .. } = &self.card;
        let (incoming, mut outgoing) = connect(*addr, self.token.as_ref(), PURPOSE, name, within)?;
        let unreachable = |last: String| crate::rendezvous::Error::Unreachable {
            host: addr.ip().to_string(),
            port: addr.port(),
            after: within,
            last,
        };
        outgoing.send(&self.hello.encode()).map_err(|why| unreachable(why.to_string()))?;
        RawConnection::new(incoming, outgoing)
            .ok_or_else(|| unreachable("it is not authenticated".to_owned()))
    }
}

/// Accepted connection without its first message.
struct Newcomer {
    accepted: Accepted,
    until: Instant,
}

/// Accepts connections until it is stopped.
fn accept(listener: &Listener, mailboxes: &Mailboxes, stop: &AtomicBool) {
    let mut newcomers: Vec<Newcomer> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let tick = if newcomers.is_empty() { TICK } else { TURN };
        if let Some(accepted) = listener.accept(Instant::now() + tick, GREETING) {
            newcomers.push(Newcomer { accepted, until: Instant::now() + GREETING });
        }
        newcomers = newcomers.into_iter().filter_map(|newcomer| newcomer.greet(mailboxes)).collect();
    }
}

impl Newcomer {
    /// Hands the connection to its group once its first message is there; returns it if the message may still come.
    fn greet(mut self, mailboxes: &Mailboxes) -> Option<Self> {
        match self.accepted.incoming.next(Instant::now() + TURN) {
            Err(Why::Silent { .. }) => return Some(self).filter(|newcomer| Instant::now() < newcomer.until),
            // The caller notices the end of its connection.
            Err(_) => {}
            Ok(hello) => {
                let Accepted { incoming, outgoing, .. } = self.accepted;
                let hello = Hello::decode(&hello)?;
                let connection = RawConnection::new(incoming, outgoing)?;
                mailboxes.deliver(hello.group, hello.from, Ok((connection, hello.sealed)));
            }
        }
        None
    }
}
