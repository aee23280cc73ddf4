//! Shared memory of Linux: sealed memfds, Unix sockets, eventfds.

mod bell;
mod card;
mod cursor;
mod group;
mod layout;
mod link;
mod mapping;
mod meeting;
#[cfg(test)]
#[cfg(not(miri))]
mod model;
mod offers;
mod peer;
mod primitives;
mod region;
mod sleep_word;
mod sleeper;
mod split;
#[cfg(test)]
mod tests;
mod windows;

pub(crate) use meeting::MemoryListener;
