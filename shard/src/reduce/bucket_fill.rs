//! One bucket of gradients: cut into its parameters' places while it fills, whole while it travels or rests.

use crate::plan::bucket::BucketPlan;
use crate::reduce::double_ended::From;
use meshstep_comm::InFlight;
use meshstep_tensor::{Buffer, Queue};

/// A bucket's gradients and how far they have come.
#[derive(Debug)]
pub(crate) struct Filling {
    places: Vec<Place>,
    /// Places that still wait for their gradient in this micro-batch.
    waiting: usize,
    /// The whole bucket, while it is neither cut into places nor travelling.
    pub(crate) whole: Option<Buffer>,
    /// Where a pooled buffer comes from.
    pub(crate) from: Option<From>,
    pub(crate) flight: Option<InFlight>,
    /// This rank's reduced chunk, where the bucket itself is given back (stages 2 and 3).
    pub(crate) shard: Option<Buffer>,
    /// Whether `shard` holds nothing of this step yet.
    pub(crate) shard_is_fresh: bool,
    open: bool,
}

/// One parameter's place in its bucket, the pad after it included.
#[derive(Debug)]
struct Place {
    buffer: Option<Buffer>,
    /// Whether this micro-batch's gradient is in, or needs not come: no elements.
    filled: bool,
    /// Whether the place holds nothing of this step yet.
    fresh: bool,
    empty: bool,
}

/// A place handed out for writing.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) buffer: Buffer,
    /// Whether to overwrite what is there; otherwise it is to be added to.
    pub(crate) fresh: bool,
}

impl Filling {
    /// A bucket whose gradients stay (`whole`) or are collected in pooled buffers and end in `shard`.
    pub(crate) fn new(plan: &BucketPlan, whole: Option<Buffer>, shard: Option<Buffer>) -> Self {
        let place = |len: usize| Place { buffer: None, filled: len == 0, fresh: true, empty: len == 0 };
        let places: Vec<Place> = plan.params.iter().map(|p| place(p.len)).collect();
        let waiting = places.iter().filter(|p| !p.empty).count();
        Filling { places, waiting, whole, from: None, flight: None, shard, shard_is_fresh: true, open: false }
    }

    /// Whether the bucket is cut into places.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Whether the bucket travels, and has come to its end.
    pub(crate) fn has_arrived(&self) -> bool {
        self.flight.as_ref().is_some_and(InFlight::is_done)
    }

    /// Whether every gradient of this micro-batch is in.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting == 0
    }

    /// Whether place `i` has this micro-batch's gradient.
    pub(crate) fn is_filled(&self, i: usize) -> bool {
        self.places[i].filled
    }

    /// Cuts `buffer` into places; `from`: where it comes from, if from the pool. What no parameter covers is zeroed, since a
    /// pooled buffer holds another bucket's gradients, and a reduce-scatter leaves other ranks' chunks unspecified.
    pub(crate) fn open(
        &mut self,
        plan: &BucketPlan,
        mut buffer: Buffer,
        from: Option<From>,
        queue: &Queue,
    ) -> Result<(), meshstep_tensor::Error> {
        self.from = from;
        zero_pads(plan, &mut buffer, queue)?;
        for i in (0..self.places.len()).rev() {
            self.places[i].buffer = Some(buffer.split_off(plan.params[i].start)?);
            self.places[i].fresh |= from.is_some();
        }
        self.open = true;
        Ok(())
    }

    /// Hands out place `i` for writing; `None` if it is filled or being written.
    pub(crate) fn lend(&mut self, i: usize) -> Option<Lent> {
        let place = &mut self.places[i];
        let buffer = if place.filled { None } else { place.buffer.take() }?;
        Some(Lent { buffer, fresh: place.fresh })
    }

    /// Expects no gradient for place `i` in this micro-batch, and leaves it as it is; `false` if it is filled or being written.
    pub(crate) fn pass(&mut self, i: usize) -> bool {
        let place = &mut self.places[i];
        if place.filled || self.open && place.buffer.is_none() {
            return false;
        }
        place.filled = true;
        self.waiting -= 1;
        true
    }

    /// Takes place `i` back, its gradient in it.
    pub(crate) fn fill(&mut self, i: usize, buffer: Buffer) {
        let place = &mut self.places[i];
        place.buffer = Some(buffer);
        place.fresh = false;
        place.filled = true;
        self.waiting -= 1;
    }

    /// Takes place `i` back as it was: nothing was written, or what was written counts for nothing.
    pub(crate) fn give_back(&mut self, i: usize, buffer: Buffer) {
        self.places[i].buffer = Some(buffer);
    }

    /// The whole bucket from its places.
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

    /// Each place that holds something of this step, its pad of zeros included, while the bucket is cut.
    pub(crate) fn held(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.places.iter_mut().filter(|place| !place.fresh).filter_map(|place| place.buffer.as_mut())
    }

    /// Expects every place's gradient anew.
    pub(crate) fn next_micro_batch(&mut self) {
        self.waiting = 0;
        for place in &mut self.places {
            place.filled = place.empty;
            self.waiting += usize::from(!place.empty);
        }
    }

    /// Forgets the step's gradients.
    pub(crate) fn next_step(&mut self) {
        self.next_micro_batch();
        self.shard_is_fresh = true;
        self.places.iter_mut().for_each(|p| p.fresh = true);
    }
}

fn zero_pads(plan: &BucketPlan, buffer: &mut Buffer, queue: &Queue) -> Result<(), meshstep_tensor::Error> {
    for (i, param) in plan.params.iter().enumerate() {
        queue.zero(buffer.as_mut().slice(param.range().end..plan.place_end(i))?)?;
    }
    Ok(())
}
