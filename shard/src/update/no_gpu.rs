//! Stand-ins for the types of `gpu.rs` in builds without GPUs: nothing is in flight after a step.

use crate::error::Error;
use meshstep_tensor::Queue;

/// Nothing.
#[derive(Debug, Default)]
pub(crate) struct GpuTable {}

impl GpuTable {
    /// Does nothing.
    pub(super) fn clear(&mut self) {}
}

/// Parameters that have arrived.
#[derive(Debug, Default)]
pub(crate) struct ParamArrival {}

impl ParamArrival {
    /// Returns at once.
    #[expect(clippy::unnecessary_wraps, clippy::unused_self, reason = "on a GPU the wait can fail")]
    pub(crate) fn wait(&self, _: &Queue) -> Result<(), Error> {
        Ok(())
    }
}
