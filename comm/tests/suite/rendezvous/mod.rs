//! Process rendezvous: launchers' variables, bytes on the wire, and strangers.

mod channel;
pub(crate) mod common;
mod disagreement;
mod environment;
#[cfg(target_os = "linux")]
mod flood;
mod many;
mod meeting;
mod processes;
mod proxy;
mod strangers;
mod wire;
