//! Calls of a training loop that wrappers of an optimizer share.

use crate::{Error, Sharded};
use meshstep_shard::{Guarded, Optimizer, Outcome, Repaired, Step, StepArgs};

/// The optimizer's calls between steps. The inherent methods of the same names take losses instead of gradients.
impl Step for Sharded {
    type Outcome = Outcome;
    type Error = Error;

    fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    fn guarded(&mut self) -> Guarded<'_> {
        Guarded::new(&mut self.optimizer)
    }

    fn step(&mut self, at: StepArgs) -> Result<Outcome, Error> {
        Sharded::step(self, at)
    }

    /// Repairs the parameters, and writes them into the variables.
    fn repair(&mut self) -> Result<Vec<Repaired>, Error> {
        let repaired = self.optimizer.repair()?;
        self.refresh()?;
        Ok(repaired)
    }
}
