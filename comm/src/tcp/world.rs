//! Ranks as processes: they meet at the store, exchange their cards, and form groups over sockets.

use super::card::{Card, Unreadable};
use super::error::Error;
use super::host::Host;
use super::hub::{Hub, PURPOSE};
use super::interface;
use super::options::Options;
use super::streams::SocketStreams;
use crate::p2p::transport::Transport;
use crate::rendezvous::{Environment, Generation, Listener, Store};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Joins the other ranks of the job: all ranks call it, and it returns when all have.
///
/// # Errors
/// [`Error::Rendezvous`] as for [`Store::join`], and if this rank's address is taken, not of this machine, or needs a token;
/// [`Error::NoInterface`] and [`Error::NoAddress`] for MESHSTEP_IFACE; [`Error::OtherVersion`] and [`Error::OtherEncryption`] if
/// ranks were started differently.
pub fn join(environment: &Environment, options: &Options) -> Result<World, Error> {
    let until = Instant::now() + options.rendezvous.deadline;
    let store = Store::join(environment, &options.rendezvous)?;
    let variable = std::env::var(interface::VARIABLE).ok();
    let ip = interface::choose(options.address.as_ref(), variable.as_deref(), store.addr())?;
    let (token, handshake) = (environment.token.clone(), options.rendezvous.handshake);
    let listener = Listener::bind(SocketAddr::new(ip, 0), token.as_ref(), PURPOSE, handshake)?;
    let generation = store.generation(0);
    let cards = exchange(&generation, &listener, options, until, environment.rank)?;
    let hub = Arc::new(Hub::start(environment.rank, cards, listener, token, options.connect)?);
    World::form(Arc::new(store), hub, generation)
}

/// World of ranks that are processes, in one generation. The store and the connections end with the last of its generations and
/// groups.
#[derive(Debug)]
pub struct World {
    transport: Box<dyn Transport>,
    generation: Generation,
    hub: Arc<Hub>,
    store: Arc<Store>,
}

impl World {
    /// Forms the world's group in `generation`.
    fn form(store: Arc<Store>, hub: Arc<Hub>, generation: Generation) -> Result<Self, Error> {
        hub.begin(generation.clone(), Arc::clone(&store));
        let transport: Box<dyn Transport> = Box::new(SocketStreams::world(&hub, generation.number())?);
        Ok(World { transport, generation, hub, store })
    }

    /// Index of this process.
    pub fn rank(&self) -> usize {
        self.transport.rank()
    }

    /// Number of processes.
    pub fn world_size(&self) -> usize {
        self.transport.world_size()
    }

    /// The store at which the ranks met.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The store's values and failures of this generation.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// Returns the world of the next generation, with new streams; the streams of this one end. All ranks call it within `within`,
    /// after an operation has failed: late or aborted operations of this generation cannot reach the next one.
    ///
    /// A generation has all ranks of the world. A process that ended cannot rejoin, so after the loss of a rank no generation follows:
    /// start all ranks again.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] with the lost rank, or with the ranks that did not call it in time.
    pub fn next_generation(self, within: Duration) -> Result<World, Error> {
        let World { mut transport, generation, hub, store } = self;
        transport.close();
        drop(transport);
        let next = store.generation(generation.number() + 1);
        // A rank that has passed this barrier may open streams of the generation.
        next.barrier("streams", within)?;
        World::form(store, hub, next)
    }

    /// The streams of the world's group.
    #[cfg(test)]
    pub(super) fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
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
    let (addr, name, host) = (listener.addr(), listener.name().to_owned(), Host::read());
    let mine = Card { addr, name, host, encrypt: options.encrypt };
    let left = until.saturating_duration_since(Instant::now());
    let cards = generation.all_gather("cards of streams", &mine.encode(), left)?;
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
