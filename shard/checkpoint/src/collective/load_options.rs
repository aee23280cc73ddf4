//! Options of a load.

/// Options of a load, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Load {
    /// Checkpoint to load; `None` loads the newest complete one.
    pub step: Option<u64>,
    /// Loads the vectors that fit, and reports those that were missing, unexpected or of another type; without it these are errors. Missing
    /// vectors stay as they are; shapes must be the same.
    pub partial: bool,
    /// Allows other hyperparameters, another schedule or loss scale, and other random bits; without it these are errors.
    pub other_settings: bool,
}
