//! How processes meet before they have a communicator, and hear of each other's failures beside it.
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
//! let store = Store::join(&environment, &Options::default())?; // all ranks are there
//! let first = store.generation(0);
//! if store.rank() == 0 {
//!     first.set("unique id", &[7; 128])?;
//! }
//! let id = first.wait("unique id", Duration::from_secs(60))?;
//! assert_eq!(id, [7; 128]);
//! assert_eq!(first.failure(), None); // no rank failed or was lost so far
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Rank 0 runs the store, on the address that MASTER_ADDR stands for and on no other; every rank, rank 0 included, keeps one
//! connection to it. The store repeats what ranks say to all of them in one order, so `get`, `wait` and `failure` look at a
//! copy that each rank has.
//!
//! # Who is let in
//!
//! Those who know the job's token. It never travels: rank and store show each other HMAC-SHA256 proofs over fresh nonces of
//! both and over what the rank claims (run, restart, rank, world size), so a recorded proof proves nothing later. From then on
//! every frame carries a seal under a key of this connection and direction and counts, so none can be changed, repeated, left
//! out or added. Before, frames are short, few connections are served at a time, and each must be done within
//! [`Options::handshake`].
//!
//! Services of other kinds are called in the same way, on connections of their own: [`Listener`] and [`call`].
//!
//! # Limits
//!
//! - Nothing is encrypted: who can listen to the network reads the values. What a backend itself sends (NCCL's own traffic) is
//!   neither authenticated nor encrypted.
//! - Without a token, which is allowed on loopback addresses only, any process of the machine can be a rank.
//! - All who know the token are trusted: one that lies about its rank takes that rank's seat.
//! - When rank 0 is gone, so is the store. Nobody who left or was lost is let in again: start all ranks anew.
//! - The store keeps everything it is told, up to 64 MiB, and has two threads for each rank.
//! - Deadlines are of the machine's clock: they are those of sockets.

mod admission;
mod channel;
mod connect;
mod environment;
mod environment_error;
mod error;
mod frame;
mod generation;
mod ledger;
mod link;
mod message;
mod options;
mod proof;
mod server;
mod store;
mod token;
mod view;

pub use channel::{Incoming, Listener, Outgoing, call};
pub use environment::Environment;
pub use environment_error::EnvironmentError;
pub use error::{Error, Failure, TurnedAway, Why};
pub use generation::Generation;
pub use options::Options;
pub use store::Store;
pub use token::Token;

use error::{Broken, Refusal};
