//! Store server on rank 0: one thread that polls the listener, the strangers and all ranks.
//!
//! Messages are queued in the ledger; every rank's connection has its own place in it, so that a slow rank delays no other. What one
//! turn of the loop has received is sent as one batch.

mod gathers;
mod kept;
mod ledger;
mod log;
mod peer;
mod rejections;

use super::door::{Admitted, Departures, Door};
use super::link::after;
use super::message::{Claim, Message};
use super::noise::{CallHeader, Psk};
use super::{Environment, Error, Options, TurnedAway, Why};
use crate::sync::real::Mutex;
use ledger::{Ledger, MAX_BYTES};
use mio::net::TcpListener;
use mio::{Events, Poll, Token, Waker};
use peer::{Batches, Peer};
use rejections::Rejections;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Purpose of the store's listener.
pub(super) const PURPOSE: &str = "store";
/// Token of the wake-up by a drop.
const WAKER: Token = Token(1);
/// Interval at which silent ranks and due beats are looked for.
const LOOK: Duration = Duration::from_millis(20);
/// Strangers that one turn of the loop handles, with ranks present and before.
const FEW: usize = 8;
const MANY: usize = 64;
/// Time for ranks to receive the last messages.
const LINGER: Duration = Duration::from_secs(2);

/// Store server, which runs until it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

/// State shared with the server's thread.
#[derive(Debug)]
struct Control {
    closing: AtomicBool,
    waker: Waker,
    turned_away: Mutex<Rejections>,
}

/// State of the server's thread.
struct Loop {
    control: Arc<Control>,
    poll: Poll,
    /// `None` once the store closes.
    door: Option<Door>,
    departures: Departures,
    peers: HashMap<usize, Peer>,
    ledger: Ledger,
    options: Options,
    looked: Instant,
    /// Time at which a closing store ends.
    end: Option<Instant>,
}

impl Server {
    /// Starts serving the ranks of `environment` on `listener`.
    pub(super) fn start(
        listener: TcpListener,
        environment: &Environment,
        psk: Psk,
        options: &Options,
    ) -> Result<Self, Error> {
        let system =
            |error: std::io::Error| Error::System { what: "starting the store", message: error.to_string() };
        let poll = Poll::new().map_err(system)?;
        let door = open(listener, environment, psk, options, &poll).map_err(system)?;
        let waker = Waker::new(poll.registry(), WAKER).map_err(system)?;
        let turned_away = Mutex::new(Rejections::default());
        let control = Arc::new(Control { closing: AtomicBool::new(false), waker, turned_away });
        let Environment { run_id, restart, world_size, .. } = environment;
        let mut serving = Loop {
            control: Arc::clone(&control),
            poll,
            door: Some(door),
            departures: Departures::default(),
            peers: HashMap::new(),
            ledger: Ledger::new(run_id.clone(), *restart, *world_size, MAX_BYTES),
            options: options.clone(),
            looked: Instant::now(),
            end: None,
        };
        let thread = Builder::new().name("store".to_owned()).spawn(move || serving.run());
        Ok(Server { control, thread: Some(thread.map_err(system)?) })
    }

    /// Returns the last few rejected connections.
    pub(super) fn turned_away(&self) -> Vec<TurnedAway> {
        self.control.turned_away.lock().list()
    }
}

impl Drop for Server {
    /// Sends the remaining messages to the ranks, for at most [`LINGER`]; then joins the thread.
    fn drop(&mut self) {
        self.control.closing.store(true, Ordering::Release);
        // Without the wake-up the thread looks at its next timeout. It does not panic; a drop has no caller to report to.
        let _ = self.control.waker.wake();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn open(
    listener: TcpListener,
    environment: &Environment,
    psk: Psk,
    options: &Options,
    poll: &Poll,
) -> std::io::Result<Door> {
    let header = CallHeader { purpose: PURPOSE.to_owned(), endpoint: environment.endpoint() };
    let door = Door::new(listener, psk, header, options.handshake, poll.registry())?;
    door.names().add(door.local_addr()?.to_string());
    options.names.iter().for_each(|name| door.names().add(name.clone()));
    Ok(door)
}

impl Loop {
    fn run(&mut self) {
        let mut events = Events::with_capacity(1024);
        while !self.is_over() {
            let patience = self.patience(Instant::now());
            // A failure to poll is a wake-up without events: the peers are read at the next one.
            if self.poll.poll(&mut events, Some(patience)).is_err() {
                continue;
            }
            for event in &events {
                self.ready(event.token());
            }
            // Ranks come before strangers.
            self.send();
            let now = Instant::now();
            if let Some(door) = &mut self.door {
                // With ranks present a turn is short.
                let batch = if self.peers.len() > 1 { FEW } else { MANY };
                door.work(self.poll.registry(), batch, now, &mut self.departures);
            }
            self.take_departures();
            if now.saturating_duration_since(self.looked) >= LOOK {
                self.looked = now;
                self.look(now);
            }
            self.send();
            self.close_when_asked();
        }
    }

    fn patience(&self, now: Instant) -> Duration {
        let door = self.door.as_ref().and_then(|door| door.patience(now));
        let look = (self.looked + LOOK).saturating_duration_since(now);
        door.map_or(look, |door| door.min(look))
    }

    fn ready(&mut self, token: Token) {
        match (self.peers.get_mut(&token.0), &mut self.door) {
            (Some(_), _) => self.read(token.0),
            (None, Some(door)) if token != WAKER => door.ready(token),
            _ => {}
        }
    }

    /// Seats admitted ranks, and records rejected connections.
    fn take_departures(&mut self) {
        let Departures { admitted, turned_away } = std::mem::take(&mut self.departures);
        admitted.into_iter().for_each(|admitted| self.seat(admitted));
        if !turned_away.is_empty() {
            let mut kept = self.control.turned_away.lock();
            turned_away.into_iter().for_each(|turned_away| kept.push(turned_away));
        }
    }

    /// Seats a rank that knows the token, or refuses it.
    fn seat(&mut self, admitted: Admitted) {
        let Some(claim) = Claim::decode(&admitted.hello) else {
            let (from, why) = (admitted.from, Why::NotUnderstood);
            return self.control.turned_away.lock().push(TurnedAway { from, why });
        };
        let id = admitted.id;
        let mut peer = Peer::new(admitted, claim.rank);
        match self.ledger.seat(&claim) {
            Err(refusal) => peer.refuse(&Message::Refused(refusal)),
            // From here on the rank is a member: the store reports its loss to all.
            Ok(()) => peer.push(&Message::Welcome.encode()),
        }
        self.peers.insert(id, peer);
        self.read(id);
    }

    /// Handles the messages of a peer.
    fn read(&mut self, id: usize) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let (messages, mut end) = peer.read();
        for message in messages {
            let rank = peer.rank;
            let goodbye = matches!(message, Message::Bye);
            match (goodbye, peer.is_refused()) {
                (true, _) => return self.remove(id, None),
                (_, true) => {}
                _ => {
                    if let Err(why) = self.ledger.receive(rank, message) {
                        end = Err(why);
                        break;
                    }
                }
            }
        }
        if let Err(why) = end {
            self.remove(id, Some(why));
        }
    }

    /// Ends a peer's connection. Once the store closes, ranks end their connections for that reason.
    fn remove(&mut self, id: usize, lost: Option<Why>) {
        let Some(peer) = self.peers.remove(&id) else { return };
        peer.cut();
        if !peer.is_refused() && (self.end.is_none() || peer.rank == 0) {
            self.ledger.depart(peer.rank, lost);
        }
    }

    /// Sends due beats, and removes silent peers.
    fn look(&mut self, now: Instant) {
        let (silence, beat) = (self.options.silence, self.options.beat());
        let refused = self.options.handshake;
        let late = |peer: &Peer| peer.is_late(now, if peer.is_refused() { refused } else { silence });
        let silent: Vec<usize> =
            self.peers.iter().filter(|(_, peer)| late(peer)).map(|(id, _)| *id).collect();
        for id in silent {
            self.remove(id, Some(Why::Silent { after: silence }));
        }
        let beats = self.peers.values_mut().filter(|peer| peer.is_beat_due(now, beat));
        beats.for_each(|peer| peer.push(&Message::Beat.encode()));
    }

    /// Sends the ledger's messages, as many as each connection takes.
    fn send(&mut self) {
        let private = self.ledger.private();
        let mut batches = Batches::default();
        let mut failed = Vec::new();
        for (id, peer) in &mut self.peers {
            let rank = peer.rank;
            let own = private.iter().filter(|(to, _)| *to == rank);
            peer.defer(own.map(|(_, message)| Arc::clone(message)));
            if let Err(why) = peer.send(&self.ledger, &mut batches) {
                failed.push((*id, why));
            }
        }
        let sent = self.peers.values().filter(|peer| !peer.is_refused()).map(Peer::place).min();
        self.ledger.trim(sent.unwrap_or(self.ledger.end()));
        for (id, why) in failed {
            // A goodbye that has arrived counts more than the failed write.
            self.read(id);
            self.remove(id, Some(why));
        }
    }

    /// Begins to close: no more strangers, and every rank's connection ends after its last message.
    fn close_when_asked(&mut self) {
        if self.end.is_none() && self.control.closing.load(Ordering::Acquire) {
            self.door = None;
            self.end = Some(after(LINGER));
        }
        if self.end.is_some() {
            let end = self.ledger.end();
            self.peers.values_mut().filter(|peer| peer.place() == end).for_each(Peer::finish);
        }
    }

    fn is_over(&self) -> bool {
        self.end.is_some_and(|end| self.peers.is_empty() || Instant::now() >= end)
    }
}
