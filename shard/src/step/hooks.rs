//! What else happens to a step's parameters and state, on what this rank owns and before parameters are gathered.

use crate::{Error, Optimizer};

/// Something around the update of a step, once it is decided. It is the same on every rank of the optimizer whether it is asked;
/// an error is this rank's alone, and ends the run.
pub(crate) trait Around {
    /// Whether updated parameters wait for [`after`](Self::after) before they go to the other ranks.
    fn holds(&self) -> bool {
        false
    }

    /// Whether it has something to do in this step, so that the host of a GPU waits for the decision. Else a GPU decides and
    /// updates without it, and neither [`before`](Self::before) nor [`after`](Self::after) is called.
    #[cfg(feature = "cuda")]
    fn waits(&self) -> bool {
        false
    }

    /// Before the update, or where it would be.
    fn before(&mut self, _optimizer: &mut Optimizer) -> Result<(), Error> {
        Ok(())
    }

    /// After the update, or after it was skipped.
    fn after(&mut self, _optimizer: &mut Optimizer, _applied: bool) -> Result<(), Error> {
        Ok(())
    }

    /// Whether parameters have changed, so that they must go to the other ranks where no update has.
    fn changed(&self) -> bool {
        false
    }
}

/// Nothing.
impl Around for () {}

impl Optimizer {
    /// What is around the update of a step that is skipped.
    pub(crate) fn pass_by(&mut self, around: &mut dyn Around) -> Result<(), Error> {
        let passed = around.before(self).and_then(|()| around.after(self, false));
        passed.map_err(|error| self.handover.alone(error))?;
        if around.changed() { self.gather_all() } else { Ok(()) }
    }

    /// Brings everybody's parameters to every rank.
    pub(crate) fn gather_all(&mut self) -> Result<(), Error> {
        let sent = self.send_all().map_err(|error| self.handover.alone(error));
        let landed = self.room.gathering.land(&self.handover.fixed.queue, &mut self.buckets);
        sent.and(landed)
    }

    /// Sends every bucket to every rank.
    pub(crate) fn send_all(&mut self) -> Result<(), Error> {
        (0..self.buckets.len()).try_for_each(|b| self.send_updated(b))
    }
}
