//! Interface for crates whose types checkpoints save. Training programs do not need it.
//!
//! A type of another crate implements [`Saveable`](crate::Saveable) with [`Contents::of`](crate::Contents::of) or
//! [`Contents::made`](crate::Contents::made), which take its [`SavedParts`].
//!
//! | item | purpose |
//! |---|---|
//! | [`SavedParts`] | state on this rank: its vectors, its settings, and its part in the calls of all ranks |
//! | [`SavedTensor`], [`Named`], [`PARAM`], [`MASTER`], [`REMAINDER`] | description of a parameter's vectors |
//! | [`Settings`], [`SavedProgress`], [`MOST_STEPS`] | state that belongs to no parameter |
//! | [`CheckpointCall`] | calls that some types do not support |
//! | [`Copies`] | placement of several groups or workers |
//! | [`Ranks`] | exchanges of the ranks that save or load together |
//! | [`Catalog`], [`SlotRef`] | contents of a saved step |
//! | [`Fitting`], [`Read`], [`read_own`], [`read_same`], [`STAGING`] | vectors of a saved step, and their values |

pub use crate::collective::compatibility::Fitting;
pub use crate::collective::load::{read_own, read_same};
pub use crate::collective::ranks::Ranks;
pub use crate::collective::write::STAGING;
pub use crate::format::catalog::{Catalog, SlotRef};
pub use crate::format::placement::Copies;
pub use crate::format::progress::{MOST_STEPS, SavedProgress};
pub use crate::format::settings::Settings;
pub use crate::parts::{CheckpointCall, SavedParts};
pub use crate::tensors::{MASTER, Named, PARAM, REMAINDER, Read, SavedTensor};
