//! An exchange of local updates beside its bare collectives.

use std::sync::Arc;

use anyhow::{Result, ensure};
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_local::{LocalOptimizer, LocalPlan, Workers};
use meshstep_optim::AdamW;
use meshstep_shard::{Optimizer, Options, Outcome, Step, StepArgs};
use meshstep_tensor::{Buffer, Category, DType, Layout, Meter, Param, SliceMut};

use crate::ranks::{Player, together};
use crate::samples::Samples;

/// Vectors that an exchange averages: parameters and both moments of Adam.
pub const VECTORS: usize = 3;
/// Parameters of the model.
const PARAMS: usize = 8;

/// One-rank workers, each a thread.
pub struct Worker {
    /// Takes steps without exchange and with one.
    optimizers: [LocalOptimizer; 2],
    /// As long as all parameters together, one for each vector.
    vectors: Vec<Buffer>,
    world: Arc<dyn Communicator>,
}

/// Measurements taken in turns.
#[derive(Debug)]
pub struct Turns {
    /// A step without exchange.
    pub step: Samples,
    /// A step with the exchange of all vectors.
    pub exchange: Samples,
    /// The mean of each vector by an all-reduce, without a step.
    pub collectives: Samples,
}

impl Turns {
    /// Times of `rounds` rounds of `workers` workers of one rank each, with `len` elements of parameters.
    pub fn measure(workers: usize, len: usize, rounds: usize) -> Result<Self> {
        let samples = together(workers, (3, rounds), |world| Worker::new(world, len))?;
        let [step, exchange, collectives] = <[Samples; 3]>::try_from(samples)
            .map_err(|samples| anyhow::anyhow!("3 turns have {} results", samples.len()))?;
        Ok(Turns { step, exchange, collectives })
    }

    /// Round by round, the time of the exchange alone as a multiple of its collectives' time.
    pub fn over_collectives(&self) -> Samples {
        self.exchange.less(&self.step).over(&self.collectives)
    }
}

impl Worker {
    fn new(world: Arc<dyn Communicator>, len: usize) -> Result<Self> {
        let meter = Meter::new();
        let vector = || Buffer::from_slice(&vec![1.0f32; len], &meter, Category::Grads);
        let vectors = (0..VECTORS).map(|_| vector()).collect::<Result<_, _>>()?;
        let optimizers = [local(&world, len, u64::MAX)?, local(&world, len, 1)?];
        Ok(Worker { optimizers, vectors, world })
    }

    fn step(&mut self, turn: usize) -> Result<()> {
        let optimizer = &mut self.optimizers[turn];
        let batch = optimizer.micro_batch(1)?;
        // Gradients of the last step are those of this one.
        for i in (0..PARAMS).rev() {
            batch.slot(&name(i))?.fill()?;
        }
        batch.finish()?;
        let step = optimizer.step(StepArgs::default())?;
        ensure!(matches!(step.outcome, Outcome::Applied { .. }), "a step was skipped: {:?}", step.outcome);
        ensure!(step.exchanged.merged.len() == turn * VECTORS, "what was exchanged: {:?}", step.exchanged);
        Ok(())
    }
}

impl Player for Worker {
    fn play(&mut self, turn: usize) -> Result<()> {
        if turn < self.optimizers.len() {
            return self.step(turn);
        }
        for vector in &mut self.vectors {
            self.world.run(Op::all_reduce(Reduction::Mean), vector)?;
        }
        Ok(())
    }
}

/// A worker that exchanges parameters and both moments every `period` steps.
fn local(world: &Arc<dyn Communicator>, len: usize, period: u64) -> Result<LocalOptimizer> {
    let (inside, workers) = Workers::split(Arc::clone(world), world.rank() as u32)?;
    let cut = |i: usize| len / PARAMS + usize::from(i < len % PARAMS);
    let layout =
        (0..PARAMS).fold(Layout::builder(), |layout, i| layout.param(name(i), &[cut(i)], DType::F32));
    let options = Options { meter: Meter::new(), ..Options::default() };
    let optimizer = Optimizer::new(inside, layout.build()?, AdamW::default(), first, options)?;
    Ok(LocalOptimizer::new(optimizer, workers, LocalPlan::local_adam(period))?)
}

fn name(i: usize) -> String {
    format!("p{i}")
}

fn first(_: &Param, mut values: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    values
        .typed_mut::<f32>()?
        .iter_mut()
        .zip((0u16..1000).cycle())
        .for_each(|(x, i)| *x = f32::from(i) / 1e3);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_collectives_take_turns() {
        let turns = Turns::measure(2, 1001, 2).unwrap();
        let all = [&turns.step, &turns.exchange, &turns.collectives];
        assert!(all.iter().all(|samples| samples.median().rounds == 2 && samples.median().low > 0.0));
        assert_eq!(turns.over_collectives().median().rounds, 2);
    }
}
