//! Comparison and averaging of values over all ranks, block by block: on the CPU, for values on any device.

use crate::ranks::host_words;
use crate::{Error, Options};
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_optim::{ordered, unordered};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut};
use std::sync::Arc;

/// Buffers for a block's reductions.
pub(super) struct Room {
    world: Arc<dyn Communicator>,
    queue: Queue,
    meter: Meter,
    /// This rank's values, on the CPU.
    values: Buffer,
    /// Words in the order of the values, such that the two zeros differ and NaN equals NaN.
    high: Buffer,
    low: Buffer,
    /// Buffers that travel: words, and values.
    words: Buffer,
    sums: Buffer,
}

/// Result of comparing a block: the number of elements that differ, and the one that differs most.
pub(super) struct Spread {
    pub(super) differing: u64,
    pub(super) furthest: Option<(usize, f64)>,
    pub(super) not_finite: Option<usize>,
}

impl Room {
    /// Allocates buffers for `len` elements.
    pub(super) fn new(world: Arc<dyn Communicator>, options: &Options, len: usize) -> Result<Self, Error> {
        let Options { queue, meter, .. } = options;
        let here = |dtype| Buffer::zeroed(len, dtype, meter, Category::Staging);
        let there = |dtype| Buffer::zeroed_on(queue, len, dtype, meter, Category::Staging);
        Ok(Room {
            values: here(DType::F64)?,
            high: here(DType::U64)?,
            low: here(DType::U64)?,
            words: there(DType::U64)?,
            sums: there(DType::F64)?,
            queue: queue.clone(),
            meter: meter.clone(),
            world,
        })
    }

    /// Compares the ranks' `values`.
    pub(super) fn spread(&mut self, values: Slice<'_>) -> Result<Spread, Error> {
        let (high, low) = self.bounds(values)?;
        let mut spread = Spread { differing: 0, furthest: None, not_finite: None };
        for (i, (high, low)) in high.iter().zip(low).enumerate().filter(|(_, (high, low))| high != low) {
            let apart = unordered(*high) - unordered(*low);
            spread.differing += 1;
            if !apart.is_finite() {
                spread.not_finite = spread.not_finite.or(Some(i));
            } else if spread.furthest.is_none_or(|(_, most)| apart > most) {
                spread.furthest = Some((i, apart));
            }
        }
        Ok(spread)
    }

    /// Replaces elements that differ between ranks by their mean.
    pub(super) fn average(&mut self, values: SliceMut<'_>) -> Result<(), Error> {
        let len = values.len();
        let (high, low) = self.bounds(values.as_slice())?;
        let differs: Vec<bool> = high.iter().zip(low).map(|(high, low)| high != low).collect();
        if !differs.contains(&true) {
            return Ok(());
        }
        let own = self.values.typed::<f64>()?[..len].to_vec();
        let mut means = self.means(&own, 1.0)?;
        if means.iter().any(|mean| !mean.is_finite()) {
            // A sum left f64's range, the same on every rank; sums of values times 1 / ranks or less cannot.
            let part = 1.0 / self.world.world_size().next_power_of_two() as f64;
            let small = self.means(&own, part)?;
            let overflowed = means.iter_mut().zip(small).filter(|(mean, _)| !mean.is_finite());
            overflowed.for_each(|(mean, small)| *mean = small / part);
        }
        // Elements that are equal everywhere keep their bits: a mean of more than two ranks may round.
        let own = &mut self.values.typed_mut::<f64>()?[..len];
        for ((own, mean), _) in own.iter_mut().zip(means).zip(differs).filter(|(_, differs)| *differs) {
            *own = mean;
        }
        let means = self.values.as_slice().slice(0..len)?;
        Ok(host_words::fill(&self.queue, &self.meter, values, |mut values| values.cast_from(means))?)
    }

    /// Returns the means over all ranks of `values` times `part`, divided here because backends divide in different ways.
    fn means(&mut self, values: &[f64], part: f64) -> Result<Vec<f64>, Error> {
        let mut sums: Vec<f64> = values.iter().map(|value| value * part).collect();
        reduce(&*self.world, &self.queue, &mut self.sums, (&mut sums[..]).into(), Reduction::Sum)?;
        let ranks = self.world.world_size() as f64;
        sums.iter_mut().for_each(|sum| *sum /= ranks);
        Ok(sums)
    }

    /// Returns the largest and the smallest of each element over all ranks.
    fn bounds(&mut self, values: Slice<'_>) -> Result<(&[u64], &[u64]), Error> {
        let Room { world, queue, meter, values: own, words, .. } = self;
        let len = values.len();
        host_words::read(queue, meter, values, |values| own.as_mut().slice(0..len)?.cast_from(values))?;
        let own = &own.typed::<f64>()?[..len];
        for (bound, reduction) in [(&mut self.high, Reduction::Max), (&mut self.low, Reduction::Min)] {
            let bound = &mut bound.typed_mut::<u64>()?[..len];
            bound.iter_mut().zip(own).for_each(|(word, value)| *word = ordered(*value));
            reduce(&**world, queue, words, bound.into(), reduction)?;
        }
        Ok((&self.high.typed::<u64>()?[..len], &self.low.typed::<u64>()?[..len]))
    }
}

/// Replaces each element by its reduction over all ranks, in the first elements of `room`, at the queue's place.
fn reduce(
    world: &dyn Communicator,
    queue: &Queue,
    room: &mut Buffer,
    mut block: SliceMut<'_>,
    reduction: Reduction,
) -> Result<(), Error> {
    let mut part = room.take();
    let rest = part.split_off(block.len())?;
    let reduced = queue.upload(block.as_slice(), part.as_mut()).map_err(Error::from).and_then(|()| {
        host_words::run(world, queue, Op::all_reduce(reduction), &mut part)?;
        queue.download(part.as_slice(), block.reborrow())?;
        Ok(world.sound()?)
    });
    *room = part.join(rest).unwrap_or_else(|_| unreachable!("a part joins the rest it was cut from"));
    reduced
}
