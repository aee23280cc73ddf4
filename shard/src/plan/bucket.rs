//! Buckets cut from a layout: parameters that travel together, and the owner of each parameter.

use crate::config::precision::Kept;
use crate::{Combine, Error, Options, Owners, Partition, Stage};
use meshstep_tensor::{ALIGN, DType, Layout, Param};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::ops::Range;

/// Default elements of a bucket, unless a million per rank is more: enough that a collective's latency is small beside its bytes
/// (Megatron-Core's default).
const BUCKET_LEN: usize = 40_000_000;
const BUCKET_LEN_PER_RANK: usize = 1_000_000;

/// With sharded gradients, two buckets are all that a rank holds of the gradients in flight: a bucket closes at 1/80 of the
/// elements, so that two buckets of 16-bit gradients are 2.5 % of 16-bit parameters.
const SHARE: usize = 80;
/// Small models have fewer and larger buckets: 1/16 of the elements, up to `SMALL_BUCKET_LEN`. Buckets below `LEAST_BUCKET_LEN`
/// cost more than they save.
const SMALL_SHARE: usize = 16;
const SMALL_BUCKET_LEN: usize = 4 << 20;
const LEAST_BUCKET_LEN: usize = 1 << 20;

/// Ratio of a rank's load to the even share above which a warning is logged.
const UNEVEN: f64 = 1.5;

/// Padding of buckets without cut parameters, as a share of their elements: a bucket closes late enough for that, unless the caller sets
/// its length.
const LEAST_PADDING: usize = 10;

/// A bucket: gradients that travel together, and their parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    /// Type of the parameters.
    pub dtype: DType,
    /// Type of the gradients.
    pub grads: DType,
    /// Type that a rule computes in: f32 for 16-bit parameters, else the parameters' own.
    pub update: DType,
    /// Type of the master: f32, u16 for remainders of bf16 parameters, or none.
    pub master: Option<DType>,
    /// Type of the state.
    pub state: DType,
    /// Parameters, by ascending start.
    pub params: Vec<Placed>,
    /// Elements, padding included: a multiple of 64 times the world size.
    pub len: usize,
}

/// A parameter's place in its bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Index in registration order.
    pub param: usize,
    /// First element in the bucket, a multiple of 64.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
    /// Rank that owns the whole parameter, under [`Stage::WholeParams`] and in a part without cut parameters
    /// ([`Part::uncut`](crate::Part::uncut)).
    pub owner: usize,
}

impl BucketPlan {
    /// Returns its equal parts, one per rank.
    pub fn partition(&self, world_size: usize) -> Partition {
        Partition::new(self.len, world_size)
    }

    /// Returns the ranges of neighbouring parameters with one owner, padding included.
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

    /// Returns the start of the next parameter, or the end of the bucket: padding belongs to the parameter before it.
    pub(crate) fn place_end(&self, i: usize) -> usize {
        self.params.get(i + 1).map_or(self.len, |next| next.start)
    }
}

impl Placed {
    /// Returns its elements in the bucket.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// Cuts a layout into buckets, each of one type and padded to 64 elements times the world size, in the order in which they fill
/// when gradients come in reverse registration order.
pub(crate) fn cut<'b>(
    earlier: impl IntoIterator<Item = &'b BucketPlan>,
    layout: &Layout,
    world_size: usize,
    options: &Options,
) -> Result<Vec<BucketPlan>, Error> {
    let mut buckets = Vec::new();
    for dtype in dtypes(layout) {
        let limit = limit(layout, dtype, world_size, options);
        fill_buckets(&mut buckets, layout, dtype, limit, options)?;
    }
    for bucket in &mut buckets {
        bucket.len = Partition::new(bucket.len, world_size).padded_len();
    }
    in_order(&mut buckets);
    if let Stage::WholeParams(owners) = options.stage {
        assign_owners(&mut buckets, owners, earlier, layout, world_size);
    }
    Ok(buckets)
}

/// Cuts a layout into buckets as [`cut`] does, but no border between two ranks' chunks cuts a parameter. A rank's chunk has as many
/// elements as the longest, so short chunks end with padding: buckets are longer than [`cut`]'s where that saves padding.
pub(crate) fn cut_between_params(
    layout: &Layout,
    world_size: usize,
    options: &Options,
) -> Result<Vec<BucketPlan>, Error> {
    let mut all = Vec::new();
    for dtype in dtypes(layout) {
        let mut limit = limit(layout, dtype, world_size, options);
        loop {
            let mut buckets = Vec::new();
            fill_buckets(&mut buckets, layout, dtype, limit, options)?;
            let before: usize = buckets.iter().map(|bucket| bucket.len).sum();
            let mut owned = vec![0; world_size];
            buckets.iter_mut().for_each(|bucket| share_out(bucket, &mut owned));
            let padded: usize = buckets.iter().map(|bucket| bucket.len).sum();
            if options.bucket_len.is_some() || buckets.len() < 2 || padded - before <= before / LEAST_PADDING
            {
                all.append(&mut buckets);
                break;
            }
            limit = limit.saturating_mul(2);
        }
    }
    in_order(&mut all);
    Ok(all)
}

/// Moves each parameter of a bucket into the chunk of its owner: the largest first, each to the rank with the fewest elements in the
/// bucket, and among these to the one that has `owned` the fewest. The first chunk has a parameter, so that all padding comes after one.
fn share_out(bucket: &mut BucketPlan, owned: &mut [usize]) {
    let lens: Vec<usize> = bucket.params.iter().map(|param| param.len.next_multiple_of(ALIGN)).collect();
    let mut largest_first: Vec<usize> = (0..lens.len()).collect();
    largest_first.sort_by_key(|&i| Reverse(lens[i]));
    let all_own = lens.iter().filter(|len| **len > 0).count() >= owned.len();
    let before = |owned: usize| if all_own { owned } else { 0 };
    let mut loads: BinaryHeap<_> =
        owned.iter().enumerate().map(|(rank, &owned)| Reverse((0, before(owned), rank))).collect();
    for i in largest_first {
        if let Some(Reverse((load, owned, rank))) = loads.pop() {
            (bucket.params[i].owner, bucket.params[i].start) = (rank, load);
            loads.push(Reverse((load + lens[i], owned + lens[i], rank)));
        }
    }
    let chunk = loads.iter().map(|Reverse((load, ..))| *load).max().unwrap_or(0);
    loads.into_iter().for_each(|Reverse((load, _, rank))| owned[rank] += load);
    bucket.params.iter_mut().for_each(|param| param.start += param.owner * chunk);
    bucket.params.sort_by_key(|param| param.start);
    bucket.len = chunk * owned.len();
}

/// Warns of parts with whole parameters that are much longer than they were.
pub(crate) fn warn_of_padding(before: usize, padded: usize) {
    if padded as f64 > UNEVEN * before as f64 {
        tracing::warn!(
            elements = before,
            padded,
            "whole parameters are too few or too unequal for this number of ranks: memory and traffic are those of the padded elements"
        );
    }
}

/// Sorts buckets by the order in which they fill; those of one type are already in this order.
fn in_order(buckets: &mut [BucketPlan]) {
    let last = |bucket: &BucketPlan| bucket.params.iter().filter(|p| p.len > 0).map(|p| p.param).min();
    buckets.sort_by_key(|bucket| Reverse(last(bucket).unwrap_or(usize::MAX)));
}

fn dtypes(layout: &Layout) -> BTreeSet<DType> {
    layout.params().iter().map(|p| p.dtype()).collect()
}

/// Returns the length at which a bucket of this type closes.
fn limit(layout: &Layout, dtype: DType, world_size: usize, options: &Options) -> usize {
    options.bucket_len.unwrap_or_else(|| default_len(layout, dtype, world_size, options.stage))
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
    let even = lens.iter().chain(&loads).sum::<usize>().div_ceil(world_size);
    assigned.iter().zip(&lens).for_each(|(&owner, len)| loads[owner] += len);
    let most = loads.iter().copied().max().unwrap_or(0);
    // A parameter is never cut, so no assignment is better than the longest parameter.
    let best = even.max(lens.iter().copied().max().unwrap_or(0));
    if owners == Owners::RoundRobin && most as f64 > UNEVEN * best as f64 {
        tracing::warn!(
            most,
            even,
            "Owners::RoundRobin gives one rank more than 1.5 times its even share of elements; Owners::SortedGreedy shares better"
        );
    }
    for placed in buckets.iter_mut().flat_map(|b| &mut b.params) {
        if let Ok(i) = trained.binary_search(&placed.param) {
            placed.owner = assigned[i];
        }
    }
}

/// Returns the default length at which a bucket of this type closes.
fn default_len(layout: &Layout, dtype: DType, world_size: usize, stage: Stage) -> usize {
    let len = BUCKET_LEN.max(BUCKET_LEN_PER_RANK.saturating_mul(world_size));
    if !stage.cuts_grads() {
        return len;
    }
    let all = layout.trainable_len(dtype);
    len.min((all / SHARE).max(SMALL_BUCKET_LEN.min(all / SMALL_SHARE)).max(LEAST_BUCKET_LEN))
}

fn fill_buckets(
    buckets: &mut Vec<BucketPlan>,
    layout: &Layout,
    dtype: DType,
    limit: usize,
    options: &Options,
) -> Result<(), Error> {
    let params = layout.flat_order(dtype).into_iter().filter(|&param| !layout.params()[param].frozen());
    let lens: Vec<usize> = params.clone().map(|param| layout.params()[param].padded_range().len()).collect();
    // At stage 3 a bucket belongs to one unit.
    let unit = |param: usize| layout.params()[param].unit().filter(|_| options.stage.cuts_params());
    let units: Vec<Option<&str>> = params.clone().map(unit).collect();
    let mut runs = runs(&lens, limit, |i| units[i - 1] != units[i]);
    if options.stage.cuts_grads() && options.bucket_len.is_none() {
        runs = apart_from_long(runs, &lens, limit);
    }
    let params: Vec<usize> = params.collect();
    for run in runs {
        let mut bucket = BucketPlan::empty(&layout.params()[params[run.start]], options)?;
        bucket.params.reserve_exact(run.len());
        for i in run {
            let len = layout.params()[params[i]].len();
            bucket.params.push(Placed { param: params[i], start: bucket.len, len, owner: 0 });
            bucket.len += lens[i];
        }
        buckets.push(bucket);
    }
    Ok(())
}

/// Groups neighbours of at most `limit` elements together, or one longer alone; a run ends where `begins` holds.
fn runs(lens: &[usize], limit: usize, begins: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut sum = 0;
    for (i, &len) in lens.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if !begins(i) && (sum == 0 || len == 0 || sum + len <= limit) => {
                run.end = i + 1;
                sum += len;
            }
            _ => {
                runs.push(i..i + 1);
                sum = len;
            }
        }
    }
    runs
}

/// Cuts the runs beside a parameter longer than a bucket, so that the two take no more memory than two buckets, or little more
/// than the parameter.
fn apart_from_long(runs: Vec<Range<usize>>, lens: &[usize], limit: usize) -> Vec<Range<usize>> {
    let len = |run: &Range<usize>| lens[run.clone()].iter().sum::<usize>();
    let room = runs.iter().map(len).max().unwrap_or(0).max(limit.saturating_mul(2));
    let mut cut: Vec<Range<usize>> = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        let beside = |other: Option<&Range<usize>>| other.map_or(0, len);
        let (before, after) = (beside(i.checked_sub(1).map(|i| &runs[i])), beside(runs.get(i + 1)));
        let mut run = run.clone();
        if before > limit && before + len(&run) > room {
            let end = run.start + fitting(run.clone().map(|i| lens[i]), room - before);
            cut.push(run.start..end);
            run.start = end;
        }
        let tail = (after > limit && !run.is_empty() && after + len(&run) > room)
            .then(|| run.end - fitting(run.clone().rev().map(|i| lens[i]), room - after));
        cut.extend(tail.map(|start| run.start..start));
        cut.push(tail.unwrap_or(run.start)..run.end);
    }
    cut.retain(|run| !run.is_empty());
    cut
}

/// Returns how many of these fit into `room`, at least one.
fn fitting(lens: impl Iterator<Item = usize>, room: usize) -> usize {
    let sums = lens.scan(0, |sum, len| {
        *sum += len;
        Some(*sum)
    });
    sums.take_while(|&sum| sum <= room).count().max(1)
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
}
