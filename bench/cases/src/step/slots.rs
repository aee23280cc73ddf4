//! Steps over slots beside ordinary ones: the same gradients, summed in the tree of slots and in the order of the ranks.

use std::sync::Arc;

use anyhow::{Result, ensure};
use meshstep_comm::Communicator;
use meshstep_optim::AdamW;
use meshstep_shard::{Optimizer, Options, Outcome, SlotRuns, Stage, StepArgs};
use meshstep_tensor::{Layout, Meter, Param};

use crate::ranks::Player;

/// Gradients of a rank, and two optimizers that take them: the first without slots.
pub struct SlotSteps {
    optimizers: [Optimizer; 2],
    /// Names and lengths, in backward order.
    params: Vec<(String, usize)>,
    grads: Vec<f32>,
    batches: usize,
}

impl SlotSteps {
    /// Creates optimizers at stage 1 for steps of `batches` micro-batches on each rank, and runs a step of each. Collective.
    pub fn new(comm: &Arc<dyn Communicator>, layout: &Layout, batches: usize) -> Result<Self> {
        let ranks = comm.world_size();
        let make = |slots| {
            let options = Options { stage: Stage::Zero1, slots, meter: Meter::new(), ..Options::default() };
            Optimizer::new(Arc::clone(comm), layout.clone(), AdamW::default(), |_, _| Ok(()), options)
        };
        let optimizers = [make(None)?, make(Some(SlotRuns::even(batches * ranks, ranks)?))?];
        let named = |param: &Param| (param.name().to_owned(), param.len());
        let params = layout.params().iter().rev().map(named).collect();
        let longest = layout.params().iter().map(Param::len).max().unwrap_or(0);
        let grads = (0u16..1000).cycle().take(longest).map(|i| f32::from(i) / 1000.0 - 0.5).collect();
        let mut steps = SlotSteps { optimizers, params, grads, batches };
        (0..2).try_for_each(|turn| steps.play(turn))?;
        Ok(steps)
    }
}

impl Player for SlotSteps {
    fn play(&mut self, turn: usize) -> Result<()> {
        let SlotSteps { optimizers, params, grads, batches } = self;
        let opt = &mut optimizers[turn];
        for index in 1..=*batches {
            let batch = if index == *batches { opt.micro_batch(1)? } else { opt.accumulate(1)? };
            for (name, len) in &*params {
                // In place if there is no earlier micro-batch to add to.
                match *batches {
                    1 => batch.slot(name)?.fill()?,
                    _ => batch.grad(name, &grads[..*len])?,
                }
            }
            batch.finish()?;
        }
        let args = StepArgs { max_norm: Some(1.0), ..StepArgs::default() };
        let outcome = opt.step(args)?.outcome()?;
        ensure!(matches!(outcome, Outcome::Applied { .. }), "a step was skipped: {outcome:?}");
        Ok(())
    }
}
