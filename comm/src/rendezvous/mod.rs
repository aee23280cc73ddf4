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
//! forwards the ranks' messages to all ranks in one order, so `get`, `wait` and `failure` read a local copy.
//!
//! # Authentication
//!
//! The store admits ranks that know the job's token. The token is never sent: rank and store prove it with HMAC-SHA256 over fresh
//! nonces of both and over the rank's claim (run, restart, rank, world size), so a recorded proof cannot be reused. After that
//! every frame carries a seal under a key of its connection and direction with a counter, so no frame can be changed, repeated,
//! dropped or inserted. Before that, frames are short, few connections are served at a time, and each must complete within
//! [`Options::handshake`].
//!
//! Other services use the same protocol on their own connections: [`Listener`] and [`call`].
//!
//! # Limits
//!
//! - Traffic is not encrypted: the network can read the values. A backend's own traffic (NCCL's) is neither authenticated nor
//!   encrypted.
//! - Without a token, which is allowed on loopback addresses only, any process of the machine can join as a rank.
//! - Processes with the token are trusted: a process with a false rank takes that rank's seat.
//! - The store ends with rank 0. A rank that left or was lost cannot rejoin: restart all ranks.
//! - The store keeps all messages, up to 64 MiB, and has two threads for each rank.
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

pub use channel::{Accepted, Incoming, Listener, Outgoing, call, connect};
pub use environment::Environment;
pub use environment_error::EnvironmentError;
pub use error::{Error, Failure, TurnedAway, Why};
pub use generation::Generation;
pub use options::Options;
pub use store::Store;
pub use token::Token;

use error::{Broken, Refusal};
