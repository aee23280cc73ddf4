//! Memory in which a rank at stage 2 or 3 collects the gradients in flight.

use crate::plan::bucket_chain::BucketChain;
use crate::reduce::double_ended::{DoubleEnded, From};
use meshstep_tensor::{Buffer, Category, Error, Meter, Queue};

/// One stretch per series: memory for the bucket that fills and for the previous one, which is in flight.
#[derive(Debug)]
pub(crate) struct Pool {
    stretches: Vec<DoubleEnded>,
    queue: Queue,
    meter: Meter,
    grown: u64,
}

impl Pool {
    /// Makes a pool without series.
    pub(crate) fn new(queue: &Queue, meter: &Meter) -> Self {
        Pool { stretches: Vec::new(), queue: queue.clone(), meter: meter.clone(), grown: 0 }
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
