//! Collectives over messages, once for all backends of processes.
//!
//! A rank writes its call of an operation to the others, compares the calls of all, and moves bytes when they agree. Small buffers
//! travel with the call. In a reduction each chunk goes to its owner rank, which adds the
//! values in the order of the ranks, in the transport's memory, while more arrive. Buffers that the ranks of one host have registered do
//! not travel: each rank reads the others' where they lie. What a rank writes to all crosses the link to another
//! host once: one rank of that host passes it on. A rank that finds a failure writes its cause to all others and reads theirs; all ranks
//! adopt the same cause.

mod cause;
mod codec;
mod engine;
mod failure;
mod group;
pub(crate) mod hosts;
mod in_place;
pub mod in_process;
mod inbox;
mod links;
mod memory;
mod names;
mod outbox;
mod pace;
mod seat;
mod small;
mod system;
#[cfg(test)]
mod tests;
mod transfer;
pub(crate) mod transport;
mod windows;

pub(crate) use seat::{P2pSeat, communicator};
