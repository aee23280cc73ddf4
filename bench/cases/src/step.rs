//! A whole clipped step of one rank, as it is measured here and by `cargo xtask bench`.

use meshstep_comm::Communicator;
use meshstep_optim::AdamW;
use meshstep_shard::{At, Error, Optimizer, Options, Outcome};
use meshstep_tensor::{Layout, Meter, Param, SliceMut};
use std::sync::Arc;

/// An optimizer with AdamW.
pub struct Case {
    pub opt: Optimizer,
    /// Parameters and their units, in backward order.
    params: Vec<(String, Option<String>)>,
}

impl Case {
    /// One with a meter of its own, which has taken a step, so that all of its memory was touched. Collective.
    pub fn new(comm: Arc<dyn Communicator>, layout: Layout, options: Options) -> Result<Self, Error> {
        let options = Options { meter: Meter::new(), ..options };
        let named = |param: &Param| (param.name().to_owned(), param.unit().map(str::to_owned));
        let params = layout.params().iter().rev().map(named).collect();
        let opt = Optimizer::new(comm, layout, AdamW::default(), first, options)?;
        let mut case = Case { opt, params };
        case.step(|grad| fill(grad, 777, -0.5))?;
        Ok(case)
    }

    /// A step whose gradients `write` leaves where they travel from. Collective.
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
        self.opt.step(At { max_norm: Some(1.0), ..At::default() })?.outcome()
    }
}

fn first(_: &Param, mut values: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    fill(values.typed_mut::<f32>()?, 1000, 0.0);
    Ok(())
}

/// From `least` up to 1 more, over and over.
fn fill(values: &mut [f32], period: u16, least: f32) {
    let steps = (0..period).cycle();
    values.iter_mut().zip(steps).for_each(|(x, i)| *x = f32::from(i) / f32::from(period) + least);
}
