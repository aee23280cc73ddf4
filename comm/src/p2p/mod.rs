//! Collectives over messages, once for every backend whose ranks are processes.

pub(crate) mod transport;
