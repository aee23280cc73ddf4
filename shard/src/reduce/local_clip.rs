//! Clipping of a rank's own gradients before they are combined with other ranks'.

use crate::config::options::StepArgs;
use crate::{Combine, Error, Optimizer};
use meshstep_optim::{NormSum, clip_coef, scale};

/// Result of clipping before the reduction, on this rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalClip {
    /// Norm of this rank's own gradients over all its micro-batches, unscaled; of the finite elements if some are not finite.
    pub norm: f64,
    /// Factor on the gradients; 1 if their norm was within the bound, or if some are not finite.
    pub coef: f64,
}

impl Optimizer {
    /// Returns what [`Clip::BeforeReduce`](crate::Clip::BeforeReduce) did on this rank in the last step, if a bound was given.
    pub fn local_clip(&self) -> Option<LocalClip> {
        self.progress.local_clip
    }

    /// Scales the gradients collected on this rank down to `at`'s norm. Non-finite gradients stay as they are: the exchange finds
    /// them.
    pub(crate) fn clip_held(&mut self, at: &StepArgs) -> Result<(), Error> {
        let Some(max_norm) = at.max_norm else { return Ok(()) };
        let queue = self.options.queue.clone();
        let mut sum = NormSum::new(self.options.norm, &queue, &self.options.meter)?;
        self.reducer.held().try_for_each(|grads| sum.add(grads.as_slice(), &queue))?;
        let sum = sum.read(&queue)?;
        let norm = self.unscale(at) * self.own_share() * sum.finish();
        let coef = if sum.non_finite() > 0 { 1.0 } else { clip_coef(norm, max_norm)? };
        if coef < 1.0 {
            self.reducer.held().try_for_each(|grads| scale(grads.as_mut(), coef, &queue))?;
        }
        self.progress.local_clip = Some(LocalClip { norm, coef });
        Ok(())
    }

    /// Returns the factor that turns the sum of this rank's micro-batches into one gradient.
    fn own_share(&self) -> f64 {
        match self.options.combine {
            Combine::Mean => 1.0 / self.progress.batches.max(1) as f64,
            Combine::Sum => 1.0,
            Combine::Weighted => 1.0 / self.progress.weight.max(1) as f64,
        }
    }
}
