//! A whole step of one rank, clipped if nothing else is said, for the benchmark of this crate and for `cargo xtask bench`.

pub mod slots;

use std::sync::Arc;

use anyhow::{Result, ensure};
use meshstep_comm::Communicator;
use meshstep_optim::AdamW;
use meshstep_shard::{Error, NonFinite, Optimizer, Options, Outcome, Stage, StepArgs};
use meshstep_tensor::{Layout, Meter, Param, SliceMut, Threads};

use crate::copies::{MemoryPass, MovedBytes, Pages};
use crate::ranks::{OURS, Player, pass_of};

/// Returns the bytes that `ranks` move for a parameter at stage 1: each rank's gradient is read and its parameter written, one rank
/// reads the reduced gradient and updates the parameter and two moments in place.
pub fn moved_a_param(ranks: usize) -> MovedBytes {
    MovedBytes { read: 4 * ranks + 4, written: 4 * ranks, in_place: 24 }
}

/// Returns their sum.
pub fn bytes_a_param(ranks: usize) -> usize {
    moved_a_param(ranks).total()
}

/// An optimizer with AdamW.
pub struct Case {
    pub opt: Optimizer,
    /// Parameters and their units, in backward order.
    params: Vec<(String, Option<String>)>,
    max_norm: Option<f64>,
}

impl Case {
    /// Creates an optimizer with its own meter, and runs one step so that all of its memory is touched. Steps are clipped, unless
    /// gradients of any size and kind are taken. Collective.
    pub fn new(comm: Arc<dyn Communicator>, layout: Layout, options: Options) -> Result<Self, Error> {
        let max_norm = (options.non_finite == NonFinite::Skip).then_some(1.0);
        let options = Options { meter: Meter::new(), ..options };
        let named = |param: &Param| (param.name().to_owned(), param.unit().map(str::to_owned));
        let params = layout.params().iter().rev().map(named).collect();
        let opt = Optimizer::new(comm, layout, AdamW::default(), first, options)?;
        let mut case = Case { opt, params, max_norm };
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
        self.opt.step(StepArgs { max_norm: self.max_norm, ..StepArgs::default() })?.outcome()
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
        let options = |stage: &Stage| Options { stage: *stage, ..Options::default() };
        Self::with(comm, layout, grads, stages.iter().map(options))
    }

    /// Creates unclipped steps at stage 1: the first reduces before it updates, the second at once.
    pub fn unclipped(comm: &Arc<dyn Communicator>, layout: &Layout) -> Result<Self> {
        let options = |reduce_in_step| Options {
            stage: Stage::Zero1,
            non_finite: NonFinite::Propagate,
            reduce_in_step,
            ..Options::default()
        };
        Self::with(comm, layout, Grads::There, [false, true].map(options))
    }

    fn with(
        comm: &Arc<dyn Communicator>,
        layout: &Layout,
        grads: Grads,
        each: impl IntoIterator<Item = Options>,
    ) -> Result<Self> {
        let make = |options| Ok(Case::new(Arc::clone(comm), layout.clone(), options)?);
        Ok(Steps { cases: each.into_iter().map(make).collect::<Result<_>>()?, grads })
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

/// A rank's step, and reference passes on rank 0 with the bytes of all ranks.
pub struct StepAndCopy {
    steps: Steps,
    pages: Option<Pages>,
}

impl StepAndCopy {
    /// Creates the step of one stage, and a copy in place that moves `bytes`.
    pub fn new(comm: &Arc<dyn Communicator>, stage: Stage, layout: &Layout, bytes: usize) -> Result<Self> {
        // Half of the bytes, because each is read and written.
        let pages = (comm.rank() == 0).then(|| Pages::new(bytes / 2)).transpose()?;
        Ok(StepAndCopy { steps: Steps::new(comm, &[stage], layout, Grads::There)?, pages })
    }
}

impl Player for StepAndCopy {
    fn play(&mut self, turn: usize) -> Result<()> {
        match (turn, &mut self.pages) {
            (OURS, _) => return self.steps.play(0),
            (_, Some(pages)) => pages.pass(pass_of(turn).unwrap_or(MemoryPass::InPlace), &Threads::shared()),
            (_, None) => (),
        }
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
