//! Gradients handed over by a rank, with the reads of a model whose parameters are sharded.

use super::{Error, Gathered, MicroBatch, Optimizer, Run, Stage, hash, name, put, with_dtype};

impl Run {
    /// Returns the number of micro-batches that a rank computes in a step.
    pub fn batches(&self, rank: usize) -> usize {
        self.options.slots.as_ref().map_or(self.micro_batches, |slots| slots.run(rank).len())
    }

    pub fn hand_over(&self, opt: &mut Optimizer, t: u64, batch: usize) -> Result<(), Error> {
        let rank = opt.comm().rank();
        let last = batch + 1 == self.batches(rank);
        let mb = if last { opt.micro_batch(1)? } else { opt.accumulate(1)? };
        self.order(t, rank).into_iter().try_for_each(|i| self.grad(&mb, (t, batch, rank), i))?;
        mb.finish()
    }

    fn grad(
        &self,
        mb: &MicroBatch<'_>,
        (t, batch, rank): (u64, usize, usize),
        i: usize,
    ) -> Result<(), Error> {
        let grad = match &self.options.slots {
            Some(slots) => self.gradient(t, slots.run(rank).start + batch, 0, i),
            None => self.gradient(t, batch, rank, i),
        };
        // With slots only the first micro-batch of a run has places to write into.
        if self.in_place && (batch == 0 || self.options.slots.is_none()) {
            let mut slot = mb.slot(&name(i))?;
            let place = slot.as_mut()?;
            with_dtype(self.grads, &grad, |grad| self.options.queue.upload(grad, place))?;
            slot.fill()
        } else {
            with_dtype(self.grads, &grad, |grad| {
                let there = put(grad, &self.options.queue);
                mb.grad(&name(i), there.as_slice())
            })
        }
    }

    /// Hands gradients over as [`hand_over`](Self::hand_over) does if parameters are whole. Otherwise acts like a model: reads
    /// every unit forwards, then backwards, handing over the unit's gradients, each unit while the next is in flight.
    pub fn read_and_hand_over(&self, opt: &mut Optimizer, t: u64, batch: usize) -> Result<(), Error> {
        if self.options.stage != Stage::Zero3 {
            return self.hand_over(opt, t, batch);
        }
        let rank = opt.comm().rank();
        let of = |i: usize| opt.unit_of(&name(i)).unwrap().unwrap().to_owned();
        let of: Vec<String> = (0..self.lens.len()).map(of).collect();
        let mut units: Vec<String> = opt.units().map(str::to_owned).collect();
        let last = batch + 1 == self.batches(rank);
        let mb = if last { opt.micro_batch(1)? } else { opt.accumulate(1)? };
        // A rank with fewer slots than others gathers as often.
        let longest = self.options.slots.as_ref().map_or(0, |slots| slots.longest());
        for _ in (self.batches(rank)..longest).filter(|_| last) {
            pass(&mb, &units, |_| Ok(()))?;
            units.reverse();
            pass(&mb, &units, |_| Ok(()))?;
            units.reverse();
        }
        pass(&mb, &units, |unit| {
            let own = (0..self.lens.len()).filter(|&i| of[i] == unit.unit());
            own.into_iter().for_each(|i| assert_eq!(unit.param(&name(i)).unwrap().len(), self.lens[i]));
            Ok(())
        })?;
        units.reverse();
        pass(&mb, &units, |unit| {
            let own = self.order(t, rank).into_iter().filter(|&i| of[i] == unit.unit());
            own.into_iter().try_for_each(|i| self.grad(&mb, (t, batch, rank), i))
        })?;
        mb.finish()
    }

    /// Reverse registration order, as in a backward pass; or shuffled, differently on each rank.
    fn order(&self, t: u64, rank: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.lens.len()).rev().collect();
        if self.shuffle {
            order.sort_by_key(|&i| hash(&[self.seed, t, rank as u64, i as u64, 99]));
        }
        order
    }
}

/// Reads the units in this order, each while the next is in flight.
pub fn pass(
    mb: &MicroBatch<'_>,
    units: &[String],
    mut read: impl FnMut(&Gathered<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut next = None;
    for (i, unit) in units.iter().enumerate() {
        let here = next.take().map_or_else(|| mb.start_gather(unit), Ok)?.wait()?;
        next = units.get(i + 1).map(|unit| mb.start_gather(unit)).transpose()?;
        read(&here)?;
    }
    Ok(())
}
