//! Buckets that fill one after another, and the memory they take if it is returned once they have travelled. Arithmetic only.

use crate::plan::bucket::BucketPlan;
use meshstep_tensor::DType;
use std::collections::{BTreeMap, BTreeSet};

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

impl BucketChain {
    fn bytes(&self) -> u64 {
        (self.room * self.grads.size()) as u64
    }
}

/// Returns the bytes of memory for series.
pub(crate) fn bytes(series: &[BucketChain]) -> u64 {
    series.iter().map(BucketChain::bytes).sum()
}

/// Model of a pool while one thread hands gradients over.
#[derive(Debug)]
pub(crate) struct PoolModel<'p> {
    /// Buckets, with the index of their series.
    buckets: Vec<(&'p BucketPlan, usize)>,
    series: Vec<PoolSeries>,
    /// Bytes allocated outside the series' memory, and their maximum.
    outside: u64,
    most: u64,
}

/// Memory of a series, and the buckets that have begun and whose memory is not known to be back.
#[derive(Debug)]
struct PoolSeries {
    chain: BucketChain,
    /// Buckets in the series' memory, at most two, and their elements.
    inside: BTreeMap<usize, usize>,
    outside: BTreeSet<usize>,
}

impl<'p> PoolModel<'p> {
    /// Makes a model with memory for these series, all of it free.
    pub(crate) fn new(series: Vec<BucketChain>, buckets: Vec<(&'p BucketPlan, usize)>) -> Self {
        let free = |chain| PoolSeries { chain, inside: BTreeMap::new(), outside: BTreeSet::new() };
        PoolModel { series: series.into_iter().map(free).collect(), buckets, outside: 0, most: 0 }
    }

    /// Begins bucket `b`, which holds no memory yet, while the buckets before the `sent`th travel.
    pub(crate) fn begin(&mut self, b: usize, sent: usize) {
        let (plan, series) = self.buckets[b];
        while !self.series[series].fits(plan.len) {
            match self.series[series].oldest().filter(|&oldest| oldest < sent) {
                Some(oldest) => self.wait_for(oldest),
                None => return self.grow(b),
            }
        }
        self.series[series].inside.insert(b, plan.len);
    }

    /// Returns the peak bytes.
    pub(crate) fn peak(&self) -> u64 {
        self.series.iter().map(|series| series.chain.bytes()).sum::<u64>() + self.most
    }

    fn wait_for(&mut self, b: usize) {
        let (plan, series) = self.buckets[b];
        let PoolSeries { inside, outside, .. } = &mut self.series[series];
        inside.remove(&b);
        self.outside -= if outside.remove(&b) { bytes_of(plan) } else { 0 };
    }

    fn grow(&mut self, b: usize) {
        let (plan, series) = self.buckets[b];
        self.series[series].outside.insert(b);
        self.outside += bytes_of(plan);
        self.most = self.most.max(self.outside);
    }
}

impl PoolSeries {
    fn fits(&self, len: usize) -> bool {
        self.inside.len() < 2 && self.inside.values().sum::<usize>() + len <= self.chain.room
    }

    fn oldest(&self) -> Option<usize> {
        let inside = self.inside.first_key_value().map(|(b, _)| b);
        inside.into_iter().chain(self.outside.first()).min().copied()
    }
}

fn bytes_of(plan: &BucketPlan) -> u64 {
    (plan.len * plan.grads.size()) as u64
}
