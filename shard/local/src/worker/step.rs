//! Steps of a worker.

use crate::{LocalError, LocalOptimizer, LocalStep};
use meshstep_shard::{Guarded, Optimizer, Step, StepArgs};

/// Every call but the step is collective over the worker's ranks alone. A micro-batch's weight also counts for
/// [`Weights::Tokens`](crate::Weights); a [verification](Step::verify_every) takes values that an exchange wrote for values that
/// this rank wrote.
impl Step for LocalOptimizer {
    type Outcome = LocalStep;
    type Error = LocalError;

    fn optimizer(&self) -> &Optimizer {
        &self.inner
    }

    fn guarded(&mut self) -> Guarded<'_> {
        Guarded::new(&mut self.inner)
    }

    /// Takes the worker's step, and the exchanges that are due between workers. Collective over the worker's ranks; with an
    /// exchange due, over all workers' ranks, and all workers take equally many steps.
    ///
    /// On a GPU the host waits for the outcome; in a step that exchanges it also waits for the decision before the update.
    ///
    /// An error of the worker's step is returned on its ranks only: the others report the exchange that was due in
    /// [`Exchanged::failed`](crate::Exchanged::failed). [`LocalError::Workers`] means that the step was taken, but workers can no
    /// longer exchange: the fragments that were due follow their failure policy, and the next step with an exchange due is an
    /// error again.
    fn step(&mut self, at: StepArgs) -> Result<LocalStep, LocalError> {
        self.step_and_exchange(at)
    }
}
