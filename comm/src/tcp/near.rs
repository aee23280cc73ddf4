//! Shared memory between the ranks of one host, which takes the place of sockets between them.

use super::error::Error;
use super::hub::Hub;
use super::options::{Encrypt, Options};
use crate::p2p::hosts::Hosts;
use crate::p2p::transport::Transport;
use crate::rendezvous::Generation;
use crate::shared_memory::{MeetError, MemoryListener, RingBytes};
use std::time::{Duration, Instant};

/// Transport between the ranks of this host.
pub(super) struct Near {
    pub(super) transport: Box<dyn Transport>,
    /// Ranks of the world, in the order of their ranks in the transport.
    pub(super) members: Vec<usize>,
}

/// Connects the ranks of this host that offer shared memory; `None` if no other rank does. All ranks of the world call it.
///
/// Ranks without shared memory, because it is off, encryption is [`Encrypt::Always`] or the system has none, publish an empty card.
pub(super) fn connect(
    hub: &Hub,
    generation: &Generation,
    options: &Options,
    within: Duration,
) -> Result<Option<Near>, Error> {
    let until = Instant::now() + within;
    let listener = listen(options)?;
    let card = listener.as_ref().map(MemoryListener::card).unwrap_or_default();
    let cards = generation.all_gather("addresses of shared memory", &card, within)?;
    let Some(listener) = listener else { return Ok(None) };
    let members: Vec<usize> =
        (0..cards.len()).filter(|rank| hub.is_near(*rank) && !cards[*rank].is_empty()).collect();
    let Some(own) = members.iter().position(|member| *member == hub.rank()) else { return Ok(None) };
    if members.len() == 1 {
        return Ok(None);
    }
    let cards: Vec<Vec<u8>> = members.iter().map(|member| cards[*member].clone()).collect();
    let left = until.saturating_duration_since(Instant::now());
    let hopeless = || generation.departure().is_some();
    match listener.connect(own, &cards, left, hopeless) {
        Ok(transport) => Ok(Some(Near { transport, members })),
        Err(error) => Err(unmet(error, generation, &members)),
    }
}

/// Returns the hosts of all ranks: those that share memory are one host. All ranks of the world call it.
pub(super) fn hosts(
    near: Option<&Near>,
    rank: usize,
    generation: &Generation,
    within: Duration,
) -> Result<Hosts, Error> {
    // A host is known by its first rank.
    let first = near.and_then(|near| near.members.iter().min()).copied().unwrap_or(rank);
    let firsts = generation.all_gather("hosts", &(first as u64).to_le_bytes(), within)?;
    let number = |first: &Vec<u8>| first.as_slice().try_into().map_or(u64::MAX, u64::from_le_bytes);
    Ok(Hosts::new(&firsts.iter().map(|first| number(first) as usize).collect::<Vec<_>>()))
}

/// Error of a meeting. If a rank did not come because it has left or was lost, the store's reason is the clearer one.
fn unmet(error: MeetError, generation: &Generation, members: &[usize]) -> Error {
    let absent = matches!(error, MeetError::Late { .. } | MeetError::Gone { .. });
    let departure = generation.departure().filter(|_| absent);
    departure.map_or_else(|| failed(error.of_world(members)), Error::from)
}

fn listen(options: &Options) -> Result<Option<MemoryListener>, Error> {
    if !options.shared_memory || options.encrypt == Encrypt::Always {
        return Ok(None);
    }
    match MemoryListener::open(RingBytes::default()) {
        Ok(listener) => Ok(Some(listener)),
        Err(MeetError::Unsupported) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

fn failed(error: MeetError) -> Error {
    let message = format!("{error}; without Options::shared_memory ranks of one host use sockets");
    Error::System { what: "sharing memory with the ranks of this host", message }
}
