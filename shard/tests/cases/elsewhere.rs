//! A rule that can change after the ranks have compared it.

use super::adamw;
use meshstep_optim::cuda::Hyper;
use meshstep_optim::{AdamW, Flat, Isa, Rule, Scalars, Segment, StateSlot};
use meshstep_tensor::Queue;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// AdamW with beta1 in shared memory, with its kernels or without.
#[derive(Debug)]
pub struct Elsewhere {
    pub beta1: Arc<AtomicU64>,
    pub kernels: bool,
}

impl Elsewhere {
    fn rule(&self) -> AdamW {
        AdamW { beta1: f64::from_bits(self.beta1.load(SeqCst)), ..adamw() }
    }
}

impl Rule for Elsewhere {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn state(&self) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn check(&self) -> Result<(), meshstep_optim::Error> {
        self.rule().check()
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        self.rule().each_hyperparameter(each);
    }

    fn slot(&self, slot: usize) -> StateSlot {
        self.rule().slot(slot)
    }

    fn on_device(&self) -> Option<Hyper> {
        self.rule().on_device().filter(|_| self.kernels)
    }

    fn update_on(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), meshstep_optim::Error> {
        self.rule().update_on(isa, flat, segments, scalars, queue)
    }
}
