//! Options of ranks that meet over sockets.

use crate::rendezvous;
use std::net::IpAddr;
use std::time::Duration;

/// Options of [`join`](super::join). All ranks have the same `encrypt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Timeouts of the store.
    pub rendezvous: rendezvous::Options,
    /// Address on which this rank listens for the others. `None`: MESHSTEP_IFACE, the name of an interface or an address; else the
    /// address by which this rank reaches the store.
    pub address: Option<Address>,
    /// Encryption of streams.
    pub encrypt: Encrypt,
    /// Time for a rank to answer when a stream to it is opened; one minute.
    pub connect: Duration,
    /// Ranks of one host exchange bytes through shared memory; true. Otherwise they use sockets. [`Encrypt::Always`] turns it off.
    pub shared_memory: bool,
    /// Number of this rank's host. Ranks with different numbers count as ranks of different machines: for containers that may not
    /// share memory, and to try a job of several hosts on one. `None`, on all ranks: the system's marks alone tell hosts apart.
    pub host_id: Option<u64>,
    /// Default time that an operation waits for the other ranks; ten minutes.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        let (address, encrypt) = (None, Encrypt::default());
        Options {
            rendezvous: rendezvous::Options::default(),
            address,
            encrypt,
            connect: Duration::from_secs(60),
            shared_memory: true,
            host_id: None,
            timeout: Duration::from_secs(600),
        }
    }
}

/// Encryption of streams. Without it, a checksum in each record finds accidental changes only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Encrypt {
    /// Streams between machines are encrypted, streams within a machine are not.
    #[default]
    Remote = 0,
    /// Every stream is encrypted.
    Always = 1,
    /// No stream is encrypted: for a network that nobody else can reach.
    Never = 2,
}

impl Encrypt {
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        [Encrypt::Remote, Encrypt::Always, Encrypt::Never].into_iter().find(|encrypt| *encrypt as u8 == byte)
    }

    /// True if the stream to a rank is sealed.
    pub(super) fn seals(self, same_host: bool) -> bool {
        match self {
            Encrypt::Remote => !same_host,
            Encrypt::Always => true,
            Encrypt::Never => false,
        }
    }
}

/// Address on which a rank listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// The address.
    Ip(IpAddr),
    /// First address of the interface, IPv4 before IPv6.
    Interface(String),
}

impl Address {
    /// Reads an address or the name of an interface.
    pub fn parse(text: &str) -> Self {
        text.parse().map_or_else(|_| Address::Interface(text.to_owned()), Address::Ip)
    }
}
