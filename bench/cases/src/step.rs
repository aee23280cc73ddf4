//! A whole clipped step of one rank, for the benchmark of this crate and for `cargo xtask bench`.

use std::sync::Arc;

use anyhow::{Result, ensure};
use meshstep_comm::Communicator;
use meshstep_optim::AdamW;
use meshstep_shard::{Error, Optimizer, Options, Outcome, Stage, StepArgs};
use meshstep_tensor::{Layout, Meter, Param, SliceMut};

use crate::copies;
use crate::ranks::Player;

/// Returns the minimum number of bytes that `ranks` must move for a parameter: 8 for the gradients and parameters of each
/// rank, and 28 for the update on one of them; the sum of a step's passes at stage 1.
pub fn bytes_a_param(ranks: usize) -> usize {
    8 * ranks + 28
}

/// An optimizer with AdamW.
pub struct Case {
    pub opt: Optimizer,
    /// Parameters and their units, in backward order.
    params: Vec<(String, Option<String>)>,
}

impl Case {
    /// Creates an optimizer with its own meter, and runs one step so that all of its memory is touched. Collective.
    pub fn new(comm: Arc<dyn Communicator>, layout: Layout, options: Options) -> Result<Self, Error> {
        let options = Options { meter: Meter::new(), ..options };
        let named = |param: &Param| (param.name().to_owned(), param.unit().map(str::to_owned));
        let params = layout.params().iter().rev().map(named).collect();
        let opt = Optimizer::new(comm, layout, AdamW::default(), first, options)?;
        let mut case = Case { opt, params };
        case.step(|grad| fill(grad, 777, -0.5))?;
        Ok(case)
    }

    /// Runs a step; `write` writes the gradients into their slots in the communication buffer. Collective.
    pub fn step(&mut self, write: impl Fn(&mut [f32])) -> Result<Outcome, Error> {
        let batch = self.opt.micro_batch(1)?;
        for (name, unit) in &self.params {
            let gathered = unit.as_deref().map(|unit| batch.gather(unit)).transpose()?;
            let mut slot = batch.slot(name)?;
            write(slot.as_mut()?.into_typed::<f32>()?);
            slot.fill()?;
            drop(gathered);
        }
        batch.finish()?;
        self.opt.step(StepArgs { max_norm: Some(1.0), ..StepArgs::default() })?.outcome()
    }
}

fn first(_: &Param, mut values: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    fill(values.typed_mut::<f32>()?, 1000, 0.0);
    Ok(())
}

/// Fills with values from `least` up to `least + 1`, repeated with `period`.
fn fill(values: &mut [f32], period: u16, least: f32) {
    let steps = (0..period).cycle();
    values.iter_mut().zip(steps).for_each(|(x, i)| *x = f32::from(i) / f32::from(period) + least);
}

/// Source of the gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Grads {
    /// The slots already contain them: only the step is timed.
    There,
    /// Each element is computed by this number of multiplications, to simulate a backward pass.
    Computed(usize),
}

/// Optimizers of a rank, one for each stage.
pub struct Steps {
    cases: Vec<Case>,
    grads: Grads,
}

impl Steps {
    pub fn new(
        comm: &Arc<dyn Communicator>,
        stages: &[Stage],
        layout: &Layout,
        grads: Grads,
    ) -> Result<Self> {
        let make = |stage: &Stage| -> Result<Case> {
            let options = Options { stage: *stage, ..Options::default() };
            Ok(Case::new(Arc::clone(comm), layout.clone(), options)?)
        };
        Ok(Steps { cases: stages.iter().map(make).collect::<Result<_>>()?, grads })
    }
}

impl Player for Steps {
    fn play(&mut self, turn: usize) -> Result<()> {
        let outcome = match self.grads {
            Grads::There => self.cases[turn].step(|_| ()),
            Grads::Computed(count) => self.cases[turn].step(|values| compute(values, count)),
        };
        let outcome = outcome?;
        ensure!(matches!(outcome, Outcome::Applied { .. }), "a step was skipped: {outcome:?}");
        Ok(())
    }
}

/// Computes values at the cost of a backward pass.
fn compute(values: &mut [f32], count: usize) {
    for (value, i) in values.iter_mut().zip((0u16..1000).cycle()) {
        let x = f32::from(i) / 1000.0;
        *value = (0..count).fold(x, |y, _| y * x + 0.25) - 0.5;
    }
}

/// A rank's step, and a copy on rank 0 of the bytes of all ranks.
pub struct StepAndCopy {
    steps: Steps,
    copied: Vec<u64>,
}

impl StepAndCopy {
    /// Creates the step of one stage, and a copy that moves `bytes`.
    pub fn new(comm: &Arc<dyn Communicator>, stage: Stage, layout: &Layout, bytes: usize) -> Result<Self> {
        // Half of the bytes, because each is read and written.
        let copied = if comm.rank() == 0 { bytes / 2 / size_of::<u64>() } else { 0 };
        Ok(StepAndCopy { steps: Steps::new(comm, &[stage], layout, Grads::There)?, copied: vec![1; copied] })
    }
}

impl Player for StepAndCopy {
    fn play(&mut self, turn: usize) -> Result<()> {
        if turn == 0 {
            return self.steps.play(0);
        }
        copies::in_place(&mut self.copied);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_cost_as_much_as_they_are_asked_to() {
        let mut values = vec![0f32; 3];
        compute(&mut values, 1);
        assert_eq!(values[2], 0.002f32 * 0.002 + 0.25 - 0.5);
    }
}
