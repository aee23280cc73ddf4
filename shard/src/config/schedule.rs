//! The learning rate of a sharded step where a schedule gives it: every rank's from the same step.

use crate::config::options::At;
use crate::{Error, Optimizer};
use meshstep_optim::schedule::Schedule;

impl Optimizer {
    /// Steps taken or skipped so far, which is what [`Options::schedule`](crate::Options::schedule) goes by; to be saved. On a
    /// GPU those are among them that were launched and are not decided yet.
    pub fn steps(&self) -> u64 {
        #[cfg(feature = "cuda")]
        let unheard = self.unheard();
        #[cfg(not(feature = "cuda"))]
        let unheard = 0;
        self.progress.steps + unheard
    }

    /// Goes on from a saved count of steps, between two of them. Every rank restores the same: the next step compares.
    pub fn restore_steps(&mut self, steps: u64) -> Result<(), Error> {
        self.check_idle()?;
        #[cfg(feature = "cuda")]
        self.take_notes(true)?;
        self.progress.steps = steps;
        #[cfg(feature = "cuda")]
        self.tell_there()?;
        Ok(())
    }

    /// What the next step is taken with: the rate that [`Options::schedule`](crate::Options::schedule) has for it, and no
    /// clipping.
    ///
    /// On a GPU a step that was an error counts until its outcome is known: who goes on after one asks for it first.
    ///
    /// ```
    /// # use meshstep_optim::{AdamW, schedule::{Cosine, Schedule}};
    /// # use meshstep_shard::{At, Error, Optimizer, Options};
    /// # use meshstep_tensor::{DType, Layout};
    /// # meshstep_comm::loopback::spawn(2, |comm| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// # let layout = Layout::builder().param("w", &[3], DType::F32).build()?;
    /// let schedule = Schedule::new(3e-4, Cosine::new(100, 10_000))?;
    /// let options = Options { schedule: Some(schedule), ..Options::default() };
    /// let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), options)?;
    /// # let mb = opt.micro_batch(1)?;
    /// # mb.grad("w", &[1f32; 3][..])?;
    /// # mb.finish()?;
    /// let at = At { max_norm: Some(1.0), ..opt.scheduled()? };
    /// opt.step(at)?.outcome()?;
    /// assert_eq!(opt.scheduled()?.lr, 3e-4 * 0.01);
    /// # Ok(())
    /// # }).unwrap().into_iter().for_each(|rank| rank.unwrap());
    /// ```
    pub fn scheduled(&mut self) -> Result<At, Error> {
        #[cfg(feature = "cuda")]
        self.take_notes(false)?;
        let lr = self.scheduled_lr().ok_or(Error::NoSchedule)?;
        Ok(At { lr, max_norm: None, grad_scale: 1.0 })
    }

    /// The rate that a schedule has for the next step.
    pub(crate) fn scheduled_lr(&self) -> Option<f64> {
        self.options.schedule.as_ref().map(|schedule| schedule.at(self.steps()))
    }
}

/// Lines for ranks to compare.
pub(crate) fn describe(schedule: Option<&Schedule>) -> String {
    let Some(schedule) = schedule else { return "schedule = none\n".to_owned() };
    let line = |(name, value): (&str, String)| format!("{name} of schedule = {value}\n");
    std::iter::once("schedule = some\n".to_owned()).chain(schedule.parameters().map(line)).collect()
}
