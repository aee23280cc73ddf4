//! Process rendezvous: ranks meet before they have a communicator, and report failures outside of it.
//!
//! ```
//! use meshstep_comm::rendezvous::{Environment, Options, Store};
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
//! let store = Store::join(&environment, &Options::default())?; // all ranks have joined
//! let first = store.generation(0);
//! if store.rank() == 0 {
//!     first.set("unique id", &[7; 128])?;
//! }
//! let id = first.wait("unique id", Duration::from_secs(60))?;
//! assert_eq!(id, [7; 128]);
//! assert_eq!(first.failure(), None); // no rank has failed or was lost so far
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Rank 0 runs the store, on the address of MASTER_ADDR only; every rank, rank 0 included, keeps one connection to it. The store
//! forwards the ranks' messages to all ranks in one order, so `get`, `wait` and `failure` read a local copy. It counts the arrivals at
//! a gather and sends the values once, when all are there; it forgets complete gathers, and generations that all ranks have left two
//! behind them.
//!
//! # Authentication and encryption
//!
//! Every connection is a Noise session, `Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s` of the crate `snow`, under a key derived from the
//! job's token, which is never sent. Its handshake authenticates both sides by the token; fresh keys of both sides encrypt what
//! follows, and a token that leaks later opens no recorded session. Messages longer than Noise's 65,535 bytes travel in several
//! records, and each direction changes its key (Noise's rekey) after 65,536 records.
//!
//! Version, purpose and the called listener's name travel in clear and are hashed into the handshake as its prologue, so nobody can
//! change them on the way. A listener refuses callers of another purpose or name: a call that is relayed to another listener of the
//! same purpose and token ends there. The name is the string by which the caller calls, so it is the same behind address translation,
//! and for a listener with several addresses: host and port as the environment gives them to all ranks, or the address that [`call`]
//! gets. A listener knows its own names, [`Options::names`] adds those of forwarded ports, and [`Listener::name`] is a random one, for
//! addresses that several machines have, to be published beside the address and called by [`connect`].
//!
//! Other services use the same protocol on their own connections: [`Listener`], [`call`] and [`connect`].
//!
//! # Strangers
//!
//! Connections that have not proven the token are polled, without threads, by the thread of the store or of the service's listener.
//! One that has not sent its greeting within 250 ms is cut. There is room for 256 of them and for 64 of one source address; when it is
//! full, the oldest without a greeting makes room. A greeting is at most 1 KiB and is opened before any Diffie-Hellman. Ranks that
//! were admitted are served first.
//!
//! # Threat model
//!
//! - A holder of the token is trusted: it can take any rank's seat, send any value and end the job. There is no defence against
//!   Byzantine ranks and no identity for each node. A job's token belongs to that job alone.
//! - A network that reads, records, changes, repeats, drops and relays learns the sizes and times of messages, purposes and names. It
//!   can end connections, which is a typed failure; it cannot read or forge a message, or bring a rank to another job or listener.
//! - A stranger without the token gets a refusal of a few bytes. A flood costs the time to accept and cut its connections; one that
//!   fills the link or the system's queue of connections delays ranks, which try again until their deadline.
//! - Without a token, which is allowed on loopback addresses only, every process of the machine is a holder.
//! - Tokens of repeated bytes are refused, and so are files of a token that others than their owner can access. Neither is a measure
//!   of randomness: take tokens of 128 random bits or more. Tokens and keys are not erased from memory.
//!
//! # Limits
//!
//! - A backend's own traffic (NCCL's) is neither authenticated nor encrypted.
//! - The store ends with rank 0. A rank that left or was lost cannot rejoin: restart all ranks.
//! - The store keeps at most 64 MiB of values of the generations in use, and at most 64 MiB of messages for a slow rank. It was tried
//!   with 1,024 ranks and serves no more.
//! - Deadlines are measured by the machine's clock: they are socket timeouts.

mod channel;
mod connect;
mod door;
mod environment;
mod environment_error;
mod error;
mod generation;
mod link;
mod message;
mod noise;
mod options;
mod server;
mod store;
mod token;
mod view;

pub use channel::{Accepted, Incoming, Listener, Outgoing, RawConnection, call, connect};
pub use environment::Environment;
pub use environment_error::EnvironmentError;
pub use error::{Error, Failure, TurnedAway, Why};
pub use generation::Generation;
pub use noise::{Cipher, Forged};
pub use options::Options;
pub use store::Store;
pub use token::Token;

use error::{Broken, Refusal};
