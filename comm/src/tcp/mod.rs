//! Ranks as processes, on one machine or on several, over sockets.

mod card;
mod error;
mod hello;
mod host;
mod hub;
mod inbox;
mod interface;
mod mailbox;
mod mixed;
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
