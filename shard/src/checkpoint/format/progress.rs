//! Progress of an optimizer: the section of settings from which its steps continue.

use super::settings::{Settings, contradiction};
use crate::checkpoint::error::CheckpointError;
use meshstep_optim::LossScaleState;
use serde::{Deserialize, Serialize};

/// Counts and loss scale between two steps.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SavedProgress {
    /// Number of steps taken or skipped; `None` means the manifest's step.
    pub steps: Option<u64>,
    /// Number of steps skipped in a row.
    pub skips: u32,
    /// Number of latest skips in a row at which the loss scale could not fall.
    #[serde(rename = "hopeless")]
    pub skips_at_min_scale: u32,
    /// State of the loss scale, if there is one.
    pub loss_scale: Option<Scale>,
}

/// State of a loss scale.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Scale {
    /// As text, which loses no bits.
    scale: String,
    growth_tracker: u64,
    hysteresis_tracker: u64,
}

/// Counts of steps from this value on are refused.
pub const MOST_STEPS: u64 = 1 << 53;

/// Counts of skipped steps in a row from this value on are refused.
const MOST_SKIPS: u64 = 1 << 31;

impl SavedProgress {
    /// Reads the section and checks it.
    pub fn read(settings: &Settings) -> Result<Self, CheckpointError> {
        let progress: Self = settings.section()?;
        progress.check()?;
        Ok(progress)
    }

    /// Checks the limits on counts, and that the loss scale is a number.
    pub fn check(&self) -> Result<(), CheckpointError> {
        let skips = u64::from(self.skips.max(self.skips_at_min_scale));
        let counts = [(self.steps.unwrap_or(0), MOST_STEPS), (skips, MOST_SKIPS)];
        match counts.into_iter().find(|(count, most)| count >= most) {
            Some((count, _)) => Err(contradiction(format!("{count} is no count of steps"))),
            None if self.loss_scale.is_some() != self.scale().is_some() => {
                Err(contradiction("the loss scale is no number".to_owned()))
            }
            None => Ok(()),
        }
    }

    /// Returns the state of the loss scale.
    pub fn scale(&self) -> Option<LossScaleState> {
        let Scale { scale, growth_tracker, hysteresis_tracker } = self.loss_scale.as_ref()?;
        let (growth_tracker, hysteresis_tracker) = (*growth_tracker, *hysteresis_tracker);
        Some(LossScaleState { scale: scale.parse().ok()?, growth_tracker, hysteresis_tracker })
    }
}

impl From<LossScaleState> for Scale {
    fn from(state: LossScaleState) -> Self {
        let LossScaleState { scale, growth_tracker, hysteresis_tracker } = state;
        Scale { scale: scale.to_string(), growth_tracker, hysteresis_tracker }
    }
}
