//! Meeting of processes: they join at the store, exchange their cards, and make the streams of the world's group.

use super::card::{Card, Unreadable};
use super::error::Error;
use super::host::Host;
use super::hub::{Hub, PURPOSE};
use super::interface;
use super::mixed::Mixed;
use super::near::{self, Near};
use super::options::Options;
use super::streams::SocketStreams;
use crate::p2p::hosts::Hosts;
use crate::p2p::transport::Transport;
use crate::rendezvous::{Environment, Generation, Listener, Store};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Joins the other ranks of the job at the store, and makes the streams of generation 0.
pub(super) fn meet(environment: &Environment, options: &Options) -> Result<WorldStreams, Error> {
    meet_by(environment, options, |cards| cards)
}

/// Like [`meet`], by the cards that `route` makes of the ranks' cards: tests call ranks through relays.
pub(super) fn meet_by(
    environment: &Environment,
    options: &Options,
    route: impl FnOnce(Vec<Card>) -> Vec<Card>,
) -> Result<WorldStreams, Error> {
    let until = Instant::now() + options.rendezvous.deadline;
    let store = Store::join(environment, &options.rendezvous)?;
    let variable = std::env::var(interface::VARIABLE).ok();
    let ip = interface::choose(options.address.as_ref(), variable.as_deref(), store.addr())?;
    let (token, handshake) = (environment.token.clone(), options.rendezvous.handshake);
    let listener = Listener::bind(SocketAddr::new(ip, 0), token.as_ref(), PURPOSE, handshake)?;
    let generation = store.generation(0);
    let cards = route(exchange(&generation, &listener, options, until, environment.rank)?);
    let hub = Arc::new(Hub::start(environment.rank, cards, listener, token, options.connect)?);
    let meeting = WorldMeeting { store: Arc::new(store), hub, options: options.clone() };
    WorldStreams::form(meeting, generation, until.saturating_duration_since(Instant::now()))
}

/// Connections of this process, for all generations of its world.
#[derive(Clone, Debug)]
pub(super) struct WorldMeeting {
    pub(super) store: Arc<Store>,
    hub: Arc<Hub>,
    pub(super) options: Options,
}

/// Streams of the world's group in one generation.
#[derive(Debug)]
pub(super) struct WorldStreams {
    pub(super) transport: Box<dyn Transport>,
    pub(super) hosts: Hosts,
    pub(super) generation: Generation,
    pub(super) meeting: WorldMeeting,
}

impl WorldStreams {
    /// Makes the streams of `generation`. Collective.
    fn form(meeting: WorldMeeting, generation: Generation, within: Duration) -> Result<Self, Error> {
        let WorldMeeting { store, hub, options } = &meeting;
        hub.begin(generation.clone(), Arc::clone(store));
        let until = Instant::now() + within;
        let near = near::connect(hub, &generation, options, within)?;
        let left = until.saturating_duration_since(Instant::now());
        let hosts = near::hosts(near.as_ref(), hub.rank(), &generation, left)?;
        let transport: Box<dyn Transport> = match near {
            Some(near) if near.members.len() == hub.world_size() => near.transport,
            Some(Near { transport, members }) => {
                let far = Box::new(SocketStreams::world(hub, generation.number())?);
                Box::new(Mixed::new(transport, far, members))
            }
            None => Box::new(SocketStreams::world(hub, generation.number())?),
        };
        Ok(WorldStreams { transport, hosts, generation, meeting })
    }

    /// Makes the streams of the generation after `generation`. Collective.
    pub(super) fn next(
        meeting: WorldMeeting,
        generation: &Generation,
        within: Duration,
    ) -> Result<Self, Error> {
        let until = Instant::now() + within;
        let next = meeting.store.generation(generation.number() + 1);
        // A rank that has passed this barrier may open streams of the generation.
        next.barrier("streams", within)?;
        WorldStreams::form(meeting, next, until.saturating_duration_since(Instant::now()))
    }
}

/// What tests of the streams need of a world without a communicator.
#[cfg(test)]
impl WorldStreams {
    pub(super) fn rank(&self) -> usize {
        self.transport.rank()
    }

    pub(super) fn world_size(&self) -> usize {
        self.transport.world_size()
    }

    pub(super) fn generation(&self) -> &Generation {
        &self.generation
    }

    pub(super) fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
    }

    pub(super) fn next_generation(self, within: Duration) -> Result<Self, Error> {
        let WorldStreams { mut transport, generation, meeting, .. } = self;
        transport.close();
        drop(transport);
        WorldStreams::next(meeting, &generation, within)
    }
}

/// Publishes this rank's card and returns the cards of all ranks.
fn exchange(
    generation: &Generation,
    listener: &Listener,
    options: &Options,
    until: Instant,
    rank: usize,
) -> Result<Vec<Card>, Error> {
    let (addr, name, host) = (listener.addr(), listener.name().to_owned(), Host::read(options.host_id));
    let mine = Card { addr, name, host, encrypt: options.encrypt };
    let left = until.saturating_duration_since(Instant::now());
    let cards = generation.all_gather("addresses of streams", &mine.encode(), left)?;
    let cards: Vec<Card> = cards.iter().enumerate().map(read).collect::<Result<_, _>>()?;
    // Every rank compares with rank 0, so that all ranks name the same one.
    match cards.iter().position(|card| card.encrypt != cards[0].encrypt) {
        Some(other) => {
            let rank = if rank == other { 0 } else { other };
            Err(Error::OtherEncryption { rank, theirs: cards[rank].encrypt, mine: mine.encrypt })
        }
        None => Ok(cards),
    }
}

fn read((rank, card): (usize, &Vec<u8>)) -> Result<Card, Error> {
    Card::decode(card).map_err(|unreadable| match unreadable {
        Unreadable::Version(theirs) => Error::OtherVersion { rank, theirs },
        Unreadable::Garbage => Error::OtherVersion { rank, theirs: card.first().copied().unwrap_or(0) },
    })
}
