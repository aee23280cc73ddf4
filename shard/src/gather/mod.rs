//! Parameters out: all-gathers after the update, and gathers of sharded units before they are read.

pub(crate) mod gatherer;
pub(crate) mod param_gather;
pub(crate) mod unit_gather;
pub(crate) mod unit_memory;
