//! Calls of all ranks: saves, loads, background saves, resharding, and checkpoints in memory.

pub(crate) mod background;
pub(crate) mod claim;
pub(crate) mod compatibility;
pub(crate) mod consolidate;
pub(crate) mod in_memory;
pub(crate) mod load;
pub(crate) mod load_options;
pub(crate) mod ranks;
pub(crate) mod read;
pub(crate) mod reshard;
pub(crate) mod save;
pub(crate) mod share_catalog;
pub(crate) mod snapshot;
pub(crate) mod transfer_plan;
pub(crate) mod windowed_transfer;
pub(crate) mod write;
pub(crate) mod writer_election;
