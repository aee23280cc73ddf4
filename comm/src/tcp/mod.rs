//! Ranks as processes: over sockets between machines, through shared memory within one.
//!
//! ```
//! use meshstep_comm::rendezvous::Environment;
//! use meshstep_comm::tcp::{self, Options};
//! use std::time::Duration;
//!
//! # let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
//! # let launcher = [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")];
//! # let port = ("MESHSTEP_PORT", free.to_string());
//! # let lookup = |name: &str| match launcher.iter().find(|(key, _)| *key == name) {
//! #     Some((_, value)) => Some((*value).to_owned()),
//! #     None => (name == port.0).then(|| port.1.clone()),
//! # };
//! let environment = Environment::read(lookup)?; // or `from_env()`, under torchrun or srun
//! let world = tcp::join(&environment, &Options::default())?; // all ranks have joined
//! assert_eq!((world.rank(), world.world_size()), (0, 1));
//! let comm = world.communicator(); // as every `Communicator`
//! comm.barrier()?;
//! let next = world.next_generation(Duration::from_secs(60))?; // after a failed operation, on all ranks
//! assert_eq!(next.generation().number(), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Ranks meet at the [`rendezvous`](crate::rendezvous) and exchange their addresses through its store. Each pair of ranks has one
//! socket in each group, which is opened when it is first used: the lower rank calls the random name of the other's listener, and the
//! handshake of the rendezvous proves that both know the job's token. A rank listens on the address of [`Options::address`] or
//! MESHSTEP_IFACE, by default on the address by which it reaches the store.
//!
//! Ranks of one host exchange bytes through shared memory, unless [`Options::shared_memory`] is off or [`Encrypt::Always`] is asked for:
//! each writes to memory of its own, which the others map read-only.
//!
//! # Records
//!
//! Bytes travel in records of at most 128 KiB, each with its length, its number and a checksum of both. A plain record has a checksum
//! (XXH3) of its bytes. An encrypted one is at most 65,535 bytes and is sealed by the Noise ciphers of the handshake, with a key for
//! each direction that changes after 65,536 records. A rank delivers no byte of a record before it has checked the whole record.
//!
//! Streams are encrypted unless both ranks run on one machine: in the same start of its kernel and the same namespaces of network and
//! shared memory, at an address of that network, with the same [`Options::host_id`]. [`Encrypt`] makes that always or never.
//!
//! # Failures
//!
//! A connection that is reset, ends without a goodbye, or delivers anything but the next record ends its stream with the reason.
//! Nothing is sent again within a generation. [`World::next_generation`] gives new streams to the same ranks.
//!
//! Every operation returns within two seconds of its deadline: a transfer may overrun it by half a second, and ranks take up to a
//! second to agree on the cause. `tests/faults` runs a thousand random schedules of lost, damaged, late and stopped connections,
//! frames and processes.
//!
//! # Limits
//!
//! - A plain stream finds accidental changes only: a network that can change bytes on purpose can change checksums too.
//! - A rank that was lost cannot rejoin, and the others have no next generation: start all ranks again.
//! - Link-local IPv6 addresses are not used: their scope is a number of one machine.
//! - The loss of a machine is noticed after 30 seconds without traffic, or when an operation's deadline ends.
//! - Unix only. Without Linux, every stream is encrypted by default and MESHSTEP_IFACE is an address.

mod card;
mod error;
mod hello;
mod host;
mod hub;
pub mod in_process;
mod inbox;
mod interface;
mod mailbox;
mod meeting;
mod mixed;
mod near;
mod options;
mod outbox;
mod record;
mod stream;
mod streams;
mod world;

pub use error::Error;
pub use options::{Address, Encrypt, Options};
pub use world::{World, join};

#[cfg(test)]
mod tests;
