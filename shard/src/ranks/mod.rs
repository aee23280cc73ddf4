//! Ranks of one optimizer: their roles, small exchanges of host words, and agreement checks.

pub(crate) mod agree;
pub(crate) mod data_rank;
pub(crate) mod host_words;
pub(crate) mod roles;
