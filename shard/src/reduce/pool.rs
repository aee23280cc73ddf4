//! Memory in which a rank at stage 2 or 3 collects the gradients in flight, and the buckets that travel.

use crate::plan::bucket_chain::BucketChain;
use crate::reduce::double_ended::{DoubleEnded, From};
use meshstep_tensor::{Buffer, Category, Error, Meter, Queue};
use std::collections::VecDeque;

/// One stretch per series: memory for the bucket that fills and for the previous one, which is in flight.
#[derive(Debug)]
pub(crate) struct Pool {
    stretches: Vec<DoubleEnded>,
    /// Buckets of each series that travel, in ascending order.
    travelling: Vec<VecDeque<usize>>,
    queue: Queue,
    meter: Meter,
    grown: u64,
}

impl Pool {
    /// Makes a pool without series.
    pub(crate) fn new(queue: &Queue, meter: &Meter) -> Self {
        let (stretches, travelling) = (Vec::new(), Vec::new());
        Pool { stretches, travelling, queue: queue.clone(), meter: meter.clone(), grown: 0 }
    }

    /// Returns the number of series.
    pub(crate) fn series(&self) -> usize {
        self.stretches.len()
    }

    /// Allocates memory for more series.
    pub(crate) fn room_for(&self, series: &[BucketChain], meter: &Meter) -> Result<Vec<DoubleEnded>, Error> {
        let stretch = |s: &BucketChain| {
            Ok(DoubleEnded::new(Buffer::zeroed_on(&self.queue, s.room, s.grads, meter, Category::Buckets)?))
        };
        series.iter().map(stretch).collect()
    }

    /// Adds the memory of more series, after the existing ones.
    pub(crate) fn extend(&mut self, stretches: Vec<DoubleEnded>) {
        self.stretches.extend(stretches);
        self.travelling.resize_with(self.stretches.len(), VecDeque::new);
    }

    /// Expects buckets of these series, one for each, so that no step allocates. Stages without series have no pool.
    pub(crate) fn expect(&mut self, series: impl Iterator<Item = usize>) {
        let mut counts = vec![0; self.travelling.len()];
        series.for_each(|series| counts.get_mut(series).into_iter().for_each(|count| *count += 1));
        for (travelling, count) in self.travelling.iter_mut().zip(counts) {
            travelling.reserve_exact(travelling.capacity() + count);
        }
    }

    /// Records that bucket `b` of this series travels.
    pub(crate) fn depart(&mut self, series: usize, b: usize) {
        let Some(travelling) = self.travelling.get_mut(series) else { return };
        let place = travelling.partition_point(|&other| other < b);
        travelling.insert(place, b);
    }

    /// Records that bucket `b` of this series travels no more.
    pub(crate) fn arrive(&mut self, series: usize, b: usize) {
        let Some(travelling) = self.travelling.get_mut(series) else { return };
        travelling.binary_search(&b).ok().and_then(|place| travelling.remove(place));
    }

    /// Returns the first bucket of this series that travels.
    pub(crate) fn oldest(&self, series: usize) -> Option<usize> {
        self.travelling.get(series)?.front().copied()
    }

    /// Lends `len` elements for a bucket of this series, if they are free.
    pub(crate) fn lend(&mut self, series: usize, len: usize) -> Option<(Buffer, From)> {
        self.stretches[series].lend(len)
    }

    /// Allocates `len` elements beyond the plan, until they come back.
    pub(crate) fn grow(&mut self, series: usize, len: usize) -> Result<(Buffer, From), Error> {
        let dtype = self.stretches[series].dtype();
        let buffer = Buffer::zeroed_on(&self.queue, len, dtype, &self.meter, Category::Buckets)?;
        self.grown += 1;
        if self.grown == 1 {
            tracing::warn!(
                "gradients come out of bucket order, or other ranks lack some: the bucket pool grows temporarily (logged once)"
            );
        }
        Ok((buffer, From::Outside))
    }

    /// Takes a buffer back; memory beyond the plan is freed.
    pub(crate) fn put(&mut self, series: usize, buffer: Buffer, from: From) {
        self.stretches[series].put(buffer, from);
    }

    /// Returns the number of buffers added beyond the plan.
    pub(crate) fn grown(&self) -> u64 {
        self.grown
    }
}
