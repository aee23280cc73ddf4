//! Steps of a group.

use super::CrossShard;
use crate::{Error, Guarded, Optimizer, Pending, Step, StepArgs};

/// Every call is collective over the group, and errors name ranks of the [`group`](CrossShard::group). Groups are independent:
/// [`minimize`](Step::minimize) is decided by the group's losses, so groups may stop after different steps, and
/// [`verify`](Step::verify) compares the replicas of one group; [`compare_state`](CrossShard::compare_state) compares the groups.
impl Step for CrossShard {
    type Outcome = Pending;
    type Error = Error;

    fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    fn guarded(&mut self) -> Guarded<'_> {
        Guarded::new(&mut self.optimizer)
    }

    fn step(&mut self, at: StepArgs) -> Result<Pending, Error> {
        self.optimizer.step(at)
    }
}
