//! One exchange between workers: agreement, reductions, vote and merges, on this rank's part of the fragments.

pub(crate) mod elastic_round;
pub(crate) mod engine;
mod finite;
pub(crate) mod fragment_state;
pub(crate) mod in_flight;
mod in_place;
pub(crate) mod owned_spans;
pub(crate) mod placement_conflict;
mod reductions;
pub(crate) mod replica;
mod staging;
pub(crate) mod votes;
pub(crate) mod workers;
