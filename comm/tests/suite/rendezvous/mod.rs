//! Process rendezvous: launchers' variables, bytes on the wire, and strangers.

mod channel;
mod common;
mod disagreement;
mod environment;
mod meeting;
mod processes;
mod proxy;
mod strangers;
mod wire;
