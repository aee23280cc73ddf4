//! Clipping a rank's own gradients before they are combined with other ranks'.

use crate::config::options::At;
use crate::{Combine, Error, Optimizer};
use meshstep_optim::{NormSum, clip_coef, scale};

/// What clipping before the reduction did on this rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalClip {
    /// The norm of this rank's own gradients, its micro-batches together, unscaled; of the finite ones, where some are not.
    pub norm: f64,
    /// What they were scaled by; 1 where they were short enough or not finite.
    pub coef: f64,
}

impl Optimizer {
    /// What the last step's [`Clip::BeforeReduce`](crate::Clip::BeforeReduce) did on this rank, where a bound was given.
    pub fn local_clip(&self) -> Option<LocalClip> {
        self.progress.local_clip
    }

    /// Scales what this rank has collected down to `at`'s norm. What is not finite stays as it is: the exchange finds it.
    pub(crate) fn clip_held(&mut self, at: &At) -> Result<(), Error> {
        let Some(max_norm) = at.max_norm else { return Ok(()) };
        let queue = self.options.queue.clone();
        let mut sum = NormSum::new(self.options.norm, &queue, &self.options.meter)?;
        self.handover.held().try_for_each(|grads| sum.add(grads.as_slice(), &queue))?;
        let sum = sum.read(&queue)?;
        let norm = self.unscale(at) * self.own_share() * sum.finish();
        let coef = if sum.non_finite() > 0 { 1.0 } else { clip_coef(norm, max_norm)? };
        if coef < 1.0 {
            self.handover.held().try_for_each(|grads| scale(grads.as_mut(), coef, &queue))?;
        }
        self.progress.local_clip = Some(LocalClip { norm, coef });
        Ok(())
    }

    /// What makes one gradient of what this rank's micro-batches have added up to.
    fn own_share(&self) -> f64 {
        match self.options.combine {
            Combine::Mean => 1.0 / self.progress.batches.max(1) as f64,
            Combine::Sum => 1.0,
            Combine::Weighted => 1.0 / self.progress.weight.max(1) as f64,
        }
    }
}
