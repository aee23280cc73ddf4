//! Which parameters travel together: buckets cut from a layout, and who owns each parameter.

use crate::precision::Kept;
use crate::{Combine, Error, Options, Owners, Partition, Stage};
use meshstep_tensor::{DType, Layout, Param};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

/// Buckets hold at least this many elements unless told otherwise, and a million per rank: enough that a collective's
/// latency is small beside its bytes (Megatron-Core's default).
const BUCKET_LEN: usize = 40_000_000;
const BUCKET_LEN_PER_RANK: usize = 1_000_000;

/// Gradients that travel together, and the parameters they belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    /// Type of the parameters.
    pub dtype: DType,
    /// Type of the gradients.
    pub grads: DType,
    /// Type a rule computes in: f32 for 16-bit parameters, else the parameters' own.
    pub update: DType,
    /// Type of the master: f32, u16 for remainders of bf16 parameters, none.
    pub master: Option<DType>,
    /// Type of the state.
    pub state: DType,
    /// The parameters, by ascending place.
    pub params: Vec<Placed>,
    /// Elements, pads included: a multiple of 64 times the world size.
    pub len: usize,
}

/// A parameter's place in its bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Its index in registration order.
    pub param: usize,
    /// Its first element in the bucket, a multiple of 64.
    pub start: usize,
    /// Its elements.
    pub len: usize,
    /// The rank that owns it, under [`Stage::WholeParams`].
    pub owner: usize,
}

impl BucketPlan {
    /// Its equal parts.
    pub fn partition(&self, world_size: usize) -> Partition {
        Partition::new(self.len, world_size)
    }

    /// Neighbours of one owner, pads included.
    pub(crate) fn runs(&self) -> Vec<(usize, Range<usize>)> {
        let mut runs: Vec<(usize, Range<usize>)> = Vec::new();
        for (i, param) in self.params.iter().enumerate() {
            let end = self.place_end(i);
            match runs.last_mut() {
                Some((owner, range)) if *owner == param.owner => range.end = end,
                _ => runs.push((param.owner, param.start..end)),
            }
        }
        runs
    }

    /// Where the next parameter's place begins, or the bucket ends: pads go with the parameter before them.
    pub(crate) fn place_end(&self, i: usize) -> usize {
        self.params.get(i + 1).map_or(self.len, |next| next.start)
    }
}

impl Placed {
    /// Its elements in the bucket.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// The buckets of a layout, each of one type and padded to 64 elements times the world size, in the order they are full when
/// gradients come in reverse registration order.
pub(crate) fn cut<'b>(
    earlier: impl IntoIterator<Item = &'b BucketPlan>,
    layout: &Layout,
    world_size: usize,
    options: &Options,
) -> Result<Vec<BucketPlan>, Error> {
    let limit = options.bucket_len.unwrap_or(BUCKET_LEN.max(BUCKET_LEN_PER_RANK.saturating_mul(world_size)));
    let mut buckets = Vec::new();
    for dtype in layout.params().iter().map(|p| p.dtype()).collect::<BTreeSet<_>>() {
        fill_buckets(&mut buckets, layout, dtype, limit, world_size, options)?;
    }
    // Those of each type are in this order already.
    let last = |bucket: &BucketPlan| bucket.params.iter().filter(|p| p.len > 0).map(|p| p.param).min();
    buckets.sort_by_key(|bucket| Reverse(last(bucket).unwrap_or(usize::MAX)));
    if let Stage::WholeParams(owners) = options.stage {
        assign_owners(&mut buckets, owners, earlier, layout, world_size);
    }
    Ok(buckets)
}

fn assign_owners<'b>(
    buckets: &mut [BucketPlan],
    owners: Owners,
    earlier: impl IntoIterator<Item = &'b BucketPlan>,
    layout: &Layout,
    world_size: usize,
) {
    let (mut loads, mut count) = (vec![0; world_size], 0);
    for param in earlier.into_iter().flat_map(|b| &b.params) {
        loads[param.owner] += param.len;
        count += 1;
    }
    let trained: Vec<usize> = (0..layout.params().len()).filter(|&i| !layout.params()[i].frozen()).collect();
    let lens: Vec<usize> = trained.iter().map(|&i| layout.params()[i].len()).collect();
    let assigned = owners.assign_after(&lens, &loads, count);
    for placed in buckets.iter_mut().flat_map(|b| &mut b.params) {
        if let Ok(i) = trained.binary_search(&placed.param) {
            placed.owner = assigned[i];
        }
    }
}

fn fill_buckets(
    buckets: &mut Vec<BucketPlan>,
    layout: &Layout,
    dtype: DType,
    limit: usize,
    world_size: usize,
    options: &Options,
) -> Result<(), Error> {
    let mut open: Option<BucketPlan> = None;
    for param in layout.flat_order(dtype) {
        let info = &layout.params()[param];
        if info.frozen() {
            continue;
        }
        let padded = info.padded_range().len();
        // What is gathered is one unit's.
        let other = |b: &BucketPlan| {
            options.stage.cuts_params() && layout.params()[b.params[0].param].unit() != info.unit()
        };
        if let Some(full) = open.take_if(|b| other(b) || b.len > 0 && padded > 0 && b.len + padded > limit) {
            buckets.push(full.padded(world_size));
        }
        let bucket = match &mut open {
            Some(bucket) => bucket,
            None => open.insert(BucketPlan::empty(info, options)?),
        };
        bucket.params.push(Placed { param, start: bucket.len, len: info.len(), owner: 0 });
        bucket.len += padded;
    }
    buckets.extend(open.map(|b| b.padded(world_size)));
    Ok(())
}

impl BucketPlan {
    fn empty(param: &Param, options: &Options) -> Result<Self, Error> {
        let (dtype, name) = (param.dtype(), || param.name().to_owned());
        let grads = options.grads.filter(|_| dtype != DType::F64).unwrap_or(dtype);
        let Kept { update, master, state } = options.precision.kept(param.name(), dtype)?;
        if !grads.is_float() || (grads == DType::F64) != (dtype == DType::F64) {
            return Err(Error::GradType { name: name(), dtype, grads });
        }
        if grads == DType::F16 && options.combine == Combine::Weighted {
            return Err(Error::WeightedF16);
        }
        Ok(BucketPlan { dtype, grads, update, master, state, params: Vec::new(), len: 0 })
    }

    fn padded(mut self, world_size: usize) -> Self {
        self.len = Partition::new(self.len, world_size).padded_len();
        self
    }
}
