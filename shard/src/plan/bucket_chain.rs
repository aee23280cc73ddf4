//! Buckets that fill one after another, and the memory they take if it is returned once they have travelled. Arithmetic only.

use crate::plan::bucket::BucketPlan;
use meshstep_tensor::DType;

/// Buckets of one part and one type of parameters: a backward pass fills them one after another, in the order they travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BucketChain {
    /// Type of the parameters.
    pub(crate) dtype: DType,
    /// Type of the gradients.
    pub(crate) grads: DType,
    /// Elements of the longest two consecutive buckets: one fills while the one before it travels.
    pub(crate) room: usize,
}

/// Returns the series of a part, by their first buckets.
pub(crate) fn of(buckets: &[BucketPlan]) -> Vec<BucketChain> {
    let mut series: Vec<(BucketChain, usize)> = Vec::new();
    for &BucketPlan { dtype, grads, len, .. } in buckets.iter().filter(|bucket| bucket.len > 0) {
        match series.iter_mut().find(|(series, _)| series.dtype == dtype) {
            Some((series, before)) => {
                series.room = series.room.max(*before + len);
                *before = len;
            }
            None => series.push((BucketChain { dtype, grads, room: len }, len)),
        }
    }
    series.into_iter().map(|(series, _)| series).collect()
}

/// Returns the bytes of memory for series.
pub(crate) fn bytes(series: &[BucketChain]) -> u64 {
    series.iter().map(|series| (series.room * series.grads.size()) as u64).sum()
}

/// Model of a pool while one thread hands gradients over.
#[derive(Debug)]
pub(crate) struct PoolModel<'p> {
    series: Vec<BucketChain>,
    /// Buckets, with the index of their series.
    buckets: Vec<(&'p BucketPlan, usize)>,
    held: Vec<Held>,
    /// Bytes allocated outside the series' memory, and their maximum.
    outside: u64,
    most: u64,
}

/// A bucket that has begun, with memory that is not known to be back.
#[derive(Clone, Copy, Debug)]
struct Held {
    bucket: usize,
    outside: bool,
}

impl<'p> PoolModel<'p> {
    /// Makes a model with memory for these series, all of it free.
    pub(crate) fn new(series: Vec<BucketChain>, buckets: Vec<(&'p BucketPlan, usize)>) -> Self {
        PoolModel { series, buckets, held: Vec::new(), outside: 0, most: 0 }
    }

    /// Begins bucket `b`, which holds no memory yet, while the buckets before the `sent`th travel.
    pub(crate) fn begin(&mut self, b: usize, sent: usize) {
        while !self.fits(b) {
            let oldest = self.alike(b).filter(|held| held.bucket < sent).map(|held| held.bucket).min();
            match oldest {
                Some(oldest) => self.wait_for(oldest),
                None => return self.hold(b, true),
            }
        }
        self.hold(b, false);
    }

    /// Returns the peak bytes.
    pub(crate) fn peak(&self) -> u64 {
        bytes(&self.series) + self.most
    }

    /// Returns the buckets of the same series that hold memory.
    fn alike(&self, b: usize) -> impl Iterator<Item = &Held> {
        self.held.iter().filter(move |held| self.buckets[held.bucket].1 == self.buckets[b].1)
    }

    fn fits(&self, b: usize) -> bool {
        let inside = || self.alike(b).filter(|held| !held.outside);
        let taken: usize = inside().map(|held| self.buckets[held.bucket].0.len).sum();
        let (plan, series) = self.buckets[b];
        inside().count() < 2 && taken + plan.len <= self.series[series].room
    }

    fn wait_for(&mut self, b: usize) {
        let outside = self.held.iter().any(|held| held.bucket == b && held.outside);
        self.outside -= if outside { self.bytes_of(b) } else { 0 };
        self.held.retain(|held| held.bucket != b);
    }

    fn hold(&mut self, b: usize, outside: bool) {
        self.held.push(Held { bucket: b, outside });
        self.outside += if outside { self.bytes_of(b) } else { 0 };
        self.most = self.most.max(self.outside);
    }

    fn bytes_of(&self, b: usize) -> u64 {
        let plan = self.buckets[b].0;
        (plan.len * plan.grads.size()) as u64
    }
}
