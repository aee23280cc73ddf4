//! Arithmetic of a step: owners, buckets, order, bytes. No memory and no communication.

pub(crate) mod bucket;
pub(crate) mod bucket_chain;
pub(crate) mod bucket_order;
pub(crate) mod bytes;
pub(crate) mod layout_plan;
pub(crate) mod matrix_exchange;
pub(crate) mod overlap;
mod owner_swaps;
pub(crate) mod partition;
mod rule_check;
pub(crate) mod rule_parts;
pub(crate) mod slot_tree;
pub(crate) mod step_plan;
pub(crate) mod tensor_cuts;
pub(crate) mod units;
