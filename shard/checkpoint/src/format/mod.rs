//! Format of a checkpoint: pieces of tensors, the manifest, and the files of ranks. No collectives.

pub(crate) mod catalog;
pub(crate) mod consistency;
pub(crate) mod coverage;
pub(crate) mod dims;
pub(crate) mod hashes;
pub(crate) mod header;
pub(crate) mod local_pieces;
pub(crate) mod manifest;
pub(crate) mod mismatch;
pub(crate) mod numbers;
pub(crate) mod parse;
pub(crate) mod piece;
pub(crate) mod placement;
pub(crate) mod progress;
pub(crate) mod rules;
pub(crate) mod run_id;
pub(crate) mod settings;
pub(crate) mod text;
pub(crate) mod tied_names;
pub(crate) mod unique_keys;
