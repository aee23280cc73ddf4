//! Interface for crates whose types checkpoints save.

pub use super::collective::compatibility::Fitting;
pub use super::collective::load::{read_own, read_same};
pub use super::collective::ranks::Ranks;
pub use super::collective::write::STAGING;
pub use super::format::placement::Copies;
pub use super::format::progress::{MOST_STEPS, SavedProgress};
pub use super::format::settings::Settings;
pub use super::parts::{CheckpointCall, SavedParts};
pub use super::tensors::{MASTER, Named, PARAM, Read, SavedTensor};

impl SavedProgress {
    /// Returns the progress of an optimizer.
    pub fn of(optimizer: &crate::Optimizer) -> Self {
        optimizer.saved_progress()
    }
}
