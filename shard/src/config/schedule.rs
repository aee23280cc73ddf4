//! Learning rate of a sharded step by a schedule: every rank computes it from the same step.

use crate::config::options::StepArgs;
use crate::{Error, Optimizer};
use meshstep_optim::schedule::Schedule;

impl Optimizer {
    /// Returns the steps taken or skipped so far, for [`Options::schedule`](crate::Options::schedule) and for checkpoints. On a
    /// GPU this includes launched steps that are not decided yet.
    pub fn steps(&self) -> u64 {
        #[cfg(feature = "cuda")]
        let unheard = self.unheard();
        #[cfg(not(feature = "cuda"))]
        let unheard = 0;
        self.progress.steps + unheard
    }

    /// Restores a saved count of steps, between two steps. All ranks restore the same count, which the next step compares.
    pub fn restore_steps(&mut self, steps: u64) -> Result<(), Error> {
        self.check_idle()?;
        #[cfg(feature = "cuda")]
        self.take_notes(true)?;
        self.progress.steps = steps;
        #[cfg(feature = "cuda")]
        self.publish_to_gpu()?;
        Ok(())
    }

    /// Returns arguments for the next step: the rate that [`Options::schedule`](crate::Options::schedule) has for it, and no
    /// clipping.
    ///
    /// On a GPU a failed step counts until its outcome is known: after an error, read the outcome before calling this.
    ///
    /// ```
    /// # use meshstep_optim::{AdamW, schedule::{Cosine, Schedule}};
    /// # use meshstep_shard::{StepArgs, Error, Optimizer, Options};
    /// # use meshstep_tensor::{DType, Layout};
    /// # meshstep_comm::loopback::spawn(2, |comm| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// # let layout = Layout::builder().param("w", &[3], DType::F32).build()?;
    /// let schedule = Schedule::new(3e-4, Cosine::new(100, 10_000))?;
    /// let options = Options { schedule: Some(schedule), ..Options::default() };
    /// let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), options)?;
    /// # let mb = opt.micro_batch(1)?;
    /// # mb.grad("w", &[1f32; 3][..])?;
    /// # mb.finish()?;
    /// let at = StepArgs { max_norm: Some(1.0), ..opt.scheduled()? };
    /// opt.step(at)?.outcome()?;
    /// assert_eq!(opt.scheduled()?.lr, 3e-4 * 0.01);
    /// # Ok(())
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    pub fn scheduled(&mut self) -> Result<StepArgs, Error> {
        #[cfg(feature = "cuda")]
        self.take_notes(false)?;
        let lr = self.scheduled_lr().ok_or(Error::NoSchedule)?;
        Ok(StepArgs { lr, max_norm: None, grad_scale: 1.0 })
    }

    /// Returns the scheduled rate of the next step.
    pub(crate) fn scheduled_lr(&self) -> Option<f64> {
        self.options.schedule.as_ref().map(|schedule| schedule.at(self.steps()))
    }
}

/// Returns lines for ranks to compare.
pub(crate) fn describe(schedule: Option<&Schedule>) -> String {
    let Some(schedule) = schedule else { return "schedule = none\n".to_owned() };
    let line = |(name, value): (&str, String)| format!("{name} of schedule = {value}\n");
    std::iter::once("schedule = some\n".to_owned()).chain(schedule.parameters().map(line)).collect()
}
