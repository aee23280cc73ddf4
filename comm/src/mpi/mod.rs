//! MPI backend.
mod announcements;
mod calls;
mod error;
mod identity;
mod incoming;
mod job;
mod launcher;
mod options;
mod outgoing;
mod pause;
mod process;
mod start;
mod streams;
#[doc(hidden)]
pub mod testing;
mod threads;
mod tiles;
mod transport;

pub use error::Error;
pub use options::Options;
pub use threads::ThreadLevel;
