//! Hooks before and after a step's update, on this rank's shard and before the parameters are gathered.

use crate::error::Error;
use crate::update::params::Params;

/// Hooks around the update of a step that is decided. They run on all ranks of the optimizer or on none; an error is this rank's
/// alone, and ends the run.
pub trait UpdateHooks {
    /// Returns true if updated parameters wait for [`after`](Self::after) before they are sent.
    fn holds(&self) -> bool {
        false
    }

    /// Returns true if the hooks have work in this step, so that the host waits for the GPU's decision. Otherwise a GPU decides
    /// and updates without them, and neither [`before`](Self::before) nor [`after`](Self::after) is called. On the CPU both are
    /// always called.
    fn waits(&self) -> bool {
        false
    }

    /// Runs before the update, or in its place if the step is skipped.
    fn before(&mut self, _params: &mut Params) -> Result<(), Error> {
        Ok(())
    }

    /// Runs after the update, or after a skip.
    fn after(&mut self, _params: &mut Params, _applied: bool) -> Result<(), Error> {
        Ok(())
    }

    /// Returns true if the hooks changed parameters, so that they are sent even without an update.
    fn changed(&self) -> bool {
        false
    }
}

/// No hooks.
impl UpdateHooks for () {}
