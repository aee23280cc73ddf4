//! Calls of a training loop that wrappers of an optimizer share.

use crate::{Error, Sharded};
use meshstep_shard::{Guarded, Optimizer, Repaired, Step, StepArgs};

/// The optimizer's calls between steps. The inherent methods of the same names take losses instead of gradients.
impl<S: Step<Error: std::error::Error + Send + Sync + 'static>> Step for Sharded<S> {
    type Outcome = S::Outcome;
    type Error = Error;

    fn optimizer(&self) -> &Optimizer {
        self.optimizer.optimizer()
    }

    fn guarded(&mut self) -> Guarded<'_> {
        self.optimizer.guarded()
    }

    /// Takes the optimizer's step, and writes the new parameters into the variables.
    fn step(&mut self, at: StepArgs) -> Result<S::Outcome, Error> {
        let outcome = self.optimizer.step(at).map_err(Error::of_step)?;
        self.refresh()?;
        Ok(outcome)
    }

    fn wrap_error(&self, error: meshstep_shard::Error) -> Error {
        Error::of_step(self.optimizer.wrap_error(error))
    }

    /// Takes the parameters to where the model is evaluated, and writes them into the variables.
    fn begin_evaluation(&mut self) -> Result<(), Error> {
        self.optimizer.begin_evaluation().map_err(Error::of_step)?;
        self.refresh()
    }

    /// Takes the parameters back to where they are trained, and writes them into the variables.
    fn end_evaluation(&mut self) -> Result<(), Error> {
        self.optimizer.end_evaluation().map_err(Error::of_step)?;
        self.refresh()
    }

    /// Repairs the parameters, and writes them into the variables.
    fn repair(&mut self) -> Result<Vec<Repaired>, Error> {
        let repaired = self.optimizer.repair().map_err(Error::of_step)?;
        self.refresh()?;
        Ok(repaired)
    }
}
