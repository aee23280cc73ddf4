//! Methods of a worker's own optimizer between exchanges; collective over the worker's ranks.

use super::LocalOptimizer;
#[cfg(feature = "checkpoint")]
use crate::Error;
#[cfg(feature = "checkpoint")]
use crate::checkpoint::{ModelPlacement, Sink};

impl LocalOptimizer {
    /// Brings this worker's parameters to one of its ranks ([`Optimizer::consolidate`](crate::Optimizer::consolidate)).
    #[cfg(feature = "checkpoint")]
    pub fn consolidate(&mut self, to: usize, sink: Sink<'_>) -> Result<(), Error> {
        self.inner.consolidate(to, sink)
    }

    /// [`consolidate`](Self::consolidate) for parameters that are parts of others.
    #[cfg(feature = "checkpoint")]
    pub fn consolidate_placed(
        &mut self,
        to: usize,
        sink: Sink<'_>,
        placing: &dyn ModelPlacement,
    ) -> Result<(), Error> {
        self.inner.consolidate_placed(to, sink, placing)
    }

    /// Releases the memory that the last background save kept
    /// ([`Optimizer::release_snapshot`](crate::Optimizer::release_snapshot)).
    #[cfg(feature = "checkpoint")]
    pub fn release_snapshot(&mut self) {
        self.inner.release_snapshot();
    }
}
