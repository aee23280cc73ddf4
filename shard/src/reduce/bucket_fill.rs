//! One bucket of gradients: cut into its parameters' places while it fills, whole while it travels or rests.

use crate::error::Error;
use crate::plan::bucket::BucketPlan;
use crate::reduce::double_ended::From;
use crate::reduce::slot_sums::SlotSums;
use meshstep_comm::InFlight;
use meshstep_tensor::{Buffer, Queue};

/// Gradients of a bucket, and their progress.
#[derive(Debug)]
pub(crate) struct BucketFill {
    places: Vec<GradPlace>,
    /// Number of places that still wait for their gradient in this micro-batch.
    waiting: usize,
    /// The whole bucket, unless it is cut into places or in flight.
    pub(crate) whole: Option<Buffer>,
    /// Origin of a pooled buffer.
    pub(crate) from: Option<From>,
    pub(crate) flight: Option<InFlight>,
    /// This rank's reduced chunk, if the bucket itself goes back to the pool (stages 2 and 3).
    pub(crate) shard: Option<Buffer>,
    /// True if `shard` holds nothing of this step yet.
    pub(crate) shard_is_fresh: bool,
    open: bool,
    /// True if all ranks have filled it in this step, and none has sent it: its reduction is part of the update.
    pub(crate) unreduced: bool,
    /// Sums of this rank's slots, and their memory, if the step has slots.
    pub(crate) sums: Option<SlotSums>,
}

/// Place of one parameter in its bucket, including the padding after it.
#[derive(Debug)]
struct GradPlace {
    buffer: Option<Buffer>,
    /// True if this micro-batch's gradient is in, or if the parameter has no elements.
    filled: bool,
    /// True if the place holds nothing of this step yet.
    fresh: bool,
    empty: bool,
    /// True while the parameter is frozen: its gradient is zeros.
    frozen: bool,
}

/// A place lent for writing.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) buffer: Buffer,
    /// True: overwrite the content; false: add to it.
    pub(crate) fresh: bool,
}

impl BucketFill {
    /// A bucket with gradients that stay (`whole`), or are collected in pooled buffers and end in `shard`.
    pub(crate) fn new(
        plan: &BucketPlan,
        whole: Option<Buffer>,
        shard: Option<Buffer>,
        sums: Option<SlotSums>,
    ) -> Self {
        let place = |len: usize| GradPlace {
            buffer: None,
            filled: len == 0,
            fresh: true,
            empty: len == 0,
            frozen: false,
        };
        let places: Vec<GradPlace> = plan.params.iter().map(|p| place(p.len)).collect();
        let waiting = places.iter().filter(|p| !p.empty).count();
        BucketFill {
            places,
            waiting,
            whole,
            from: None,
            flight: None,
            shard,
            shard_is_fresh: true,
            open: false,
            unreduced: false,
            sums,
        }
    }

    /// Returns true if the bucket is cut into places.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Returns true if the bucket's reduction has finished and its result is not taken yet.
    pub(crate) fn has_arrived(&self) -> bool {
        self.flight.as_ref().is_some_and(InFlight::is_done)
    }

    /// Returns true if every gradient of this micro-batch is in.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting == 0
    }

    /// Returns true if place `i` has this micro-batch's gradient.
    pub(crate) fn is_filled(&self, i: usize) -> bool {
        self.places[i].filled
    }

    /// Cuts `buffer` into places; `from` is its origin if it is pooled. Elements that no parameter covers, and those of frozen
    /// parameters, are zeroed, because a pooled buffer holds another bucket's gradients, and a reduce-scatter leaves other ranks'
    /// chunks unspecified.
    pub(crate) fn open(
        &mut self,
        plan: &BucketPlan,
        mut buffer: Buffer,
        from: Option<From>,
        queue: &Queue,
    ) -> Result<(), meshstep_tensor::Error> {
        self.from = from;
        zero_pads(plan, &mut buffer, queue)?;
        for (place, param) in self.places.iter().zip(&plan.params).filter(|(place, _)| place.frozen) {
            queue.zero(buffer.as_mut().slice(param.range())?)?;
            debug_assert!(place.fresh, "a parameter is frozen between steps");
        }
        for i in (0..self.places.len()).rev() {
            self.places[i].buffer = Some(buffer.split_off(plan.params[i].start)?);
            self.places[i].fresh |= from.is_some();
        }
        self.open = true;
        Ok(())
    }

    /// Lends place `i` for writing; `None` if it is filled or being written.
    pub(crate) fn lend(&mut self, i: usize) -> Option<Lent> {
        let place = &mut self.places[i];
        let buffer = if place.filled { None } else { place.buffer.take() }?;
        Some(Lent { buffer, fresh: place.fresh })
    }

    /// Expects no gradient for place `i` in this micro-batch, and leaves its content; returns false if it is filled or being
    /// written.
    pub(crate) fn pass(&mut self, i: usize) -> bool {
        let place = &mut self.places[i];
        if place.filled || self.open && place.buffer.is_none() {
            return false;
        }
        place.filled = true;
        self.waiting -= 1;
        true
    }

    /// Takes place `i` back with its gradient.
    pub(crate) fn fill(&mut self, i: usize, buffer: Buffer) {
        let place = &mut self.places[i];
        place.buffer = Some(buffer);
        place.fresh = false;
        place.filled = true;
        self.waiting -= 1;
    }

    /// Takes place `i` back unfilled: its content is unchanged, or does not count.
    pub(crate) fn give_back(&mut self, i: usize, buffer: Buffer) {
        self.places[i].buffer = Some(buffer);
    }

    /// Joins the places into the whole bucket.
    ///
    /// # Panics
    /// If a place is lent out: a bug, since only full or abandoned buckets close.
    pub(crate) fn close(&mut self) -> Buffer {
        let parts = self.places.iter_mut().map(|p| p.buffer.take());
        let whole = parts.reduce(|whole, part| whole?.join(part?).ok()).flatten();
        self.open = false;
        assert!(whole.is_some(), "a bucket closes with all its places back");
        whole.unwrap_or_else(|| unreachable!("asserted above"))
    }

    /// Returns each place with gradients of this step, including its zero padding, while the bucket is cut.
    pub(crate) fn held(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.places.iter_mut().filter(|place| !place.fresh).filter_map(|place| place.buffer.as_mut())
    }

    /// Returns true if some parameter of the bucket has gradients, so that it is sent.
    pub(crate) fn travels(&self) -> bool {
        self.places.iter().any(|place| !place.empty && !place.frozen)
    }

    /// Adds the gradients of the slot that is complete to the sums of this rank, and takes memory for the next slot.
    pub(crate) fn add_slot(&mut self, queue: &Queue) -> Result<(), Error> {
        if !self.open {
            return Ok(()); // only parameters without elements, and frozen ones
        }
        if self.sums.as_mut().is_some_and(SlotSums::pair) {
            return Ok(());
        }
        let slot = self.close();
        let Some(sums) = &mut self.sums else { return Ok(()) };
        sums.add(slot, queue)?;
        self.whole = sums.take_spare();
        Ok(())
    }

    /// Expects every place's gradient again.
    pub(crate) fn next_micro_batch(&mut self) {
        self.waiting = 0;
        for place in &mut self.places {
            place.filled = place.empty || place.frozen;
            // A slot has a vector of its own until it is added to others, or is added to the one before it.
            place.fresh |= self.sums.as_ref().is_some_and(|sums| !sums.is_paired());
            self.waiting += usize::from(!place.filled);
        }
    }

    /// Expects no gradient for place `i` from now on, or expects it again. Only between steps. Returns true if the bucket now
    /// expects none at all, and expected one before: it will not travel any more.
    pub(crate) fn freeze(&mut self, i: usize, frozen: bool) -> bool {
        let travelled = !self.is_full();
        let place = &mut self.places[i];
        place.frozen = frozen;
        self.waiting += usize::from(place.filled);
        place.filled = place.empty || frozen;
        self.waiting -= usize::from(place.filled);
        travelled && self.is_full()
    }

    /// Forgets the step's gradients. A bucket that never travelled is whole again.
    pub(crate) fn next_step(&mut self) {
        let rests =
            self.open && self.from.is_none() && self.places.iter().all(|place| place.buffer.is_some());
        if rests {
            self.whole = Some(self.close());
        }
        if let Some(sums) = &mut self.sums {
            self.whole = sums.forget(self.whole.take());
        }
        self.next_micro_batch();
        self.shard_is_fresh = true;
        self.unreduced = false;
        self.places.iter_mut().for_each(|p| p.fresh = true);
    }
}

fn zero_pads(plan: &BucketPlan, buffer: &mut Buffer, queue: &Queue) -> Result<(), meshstep_tensor::Error> {
    for (i, param) in plan.params.iter().enumerate() {
        queue.zero(buffer.as_mut().slice(param.range().end..plan.place_end(i))?)?;
    }
    Ok(())
}
