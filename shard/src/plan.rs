//! Which parameters travel together, who owns what of them, and the bytes that takes. Arithmetic only.

use crate::bucket_plan::{self, BucketPlan, Placed};
use crate::exchange::FIELDS;
use crate::tensor_totals::fold_words;
use crate::units::Units;
use crate::{Clip, Error, Missing, NonFinite, Options, Stage};
use meshstep_optim::{ExactSum, LossScale, Rule};
use meshstep_tensor::{DType, Layout, Place};
use std::ops::Range;

/// Buffers a rank at stage 2 or 3 keeps for gradients on their way: one that fills while one travels.
const POOL: usize = 2;

/// Ranks a word of the step's exchange can name.
const MAX_RANKS: usize = 1 << 24;

/// u64 words before the norm's in the summed vector of the step's exchange: non-finite count and weight.
pub(crate) const SUM_HEAD: usize = 2;
/// u64 words of the maximised vector before those of parameters: largest gradient, fault, digest and its complement.
pub(crate) const MAX_HEAD: usize = 4;

/// Where everything goes: the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    world_size: usize,
    stage: Stage,
    buckets: Vec<BucketPlan>,
    units: Units,
    frozen_bytes: usize,
    /// Words of the two vectors of the step's exchange.
    exchange: [usize; 2],
    exchanges: u64,
    params: usize,
}

/// Bytes one rank holds, by category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Memory {
    /// Parameters.
    pub params: u64,
    /// Sharded parameters that are gathered: room for any two units after each other, one that is read and the next on its way.
    pub gathered: u64,
    /// Gradients that stay.
    pub grads: u64,
    /// Optimizer state.
    pub state: u64,
    /// f32 masters of 16-bit parameters, or what is kept instead of them.
    pub master: u64,
    /// Gradients on their way, when they are handed over in bucket order.
    pub buckets: u64,
    /// The vectors of the step's exchange.
    pub staging: u64,
}

impl Memory {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.params + self.gathered + self.grads + self.state + self.master + self.buckets + self.staging
    }
}

/// Bytes one rank sends in a step with one micro-batch, as ring algorithms send them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Wire {
    /// Reducing gradients.
    pub reduce: u64,
    /// Bringing updated parameters to everyone; at stage 3 each unit's twice, for the forward and for the backward pass.
    pub gather: u64,
    /// The step's exchange of scalars: two with [`NonFinite::Propagate`].
    pub exchange: u64,
}

impl Wire {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.reduce + self.gather + self.exchange
    }
}

impl Plan {
    /// The plan for a layout on `world_size` ranks, or what in the options contradicts it.
    pub fn new(layout: &Layout, world_size: usize, options: &Options) -> Result<Plan, Error> {
        let plan = Self::after([], layout, world_size, options)?;
        options.precision.check_used(plan.buckets.iter().map(|bucket| bucket.dtype))?;
        Ok(plan)
    }

    /// The same for a layout that joins earlier buckets, so that whole parameters stay balanced.
    pub(crate) fn after<'b>(
        earlier: impl IntoIterator<Item = &'b BucketPlan>,
        layout: &Layout,
        world_size: usize,
        options: &Options,
    ) -> Result<Plan, Error> {
        if world_size == 0 {
            return Err(Error::NoRanks);
        }
        if world_size > MAX_RANKS {
            return Err(Error::TooManyRanks { world_size, max: MAX_RANKS });
        }
        if options.bucket_len == Some(0) {
            return Err(Error::EmptyBuckets);
        }
        if options.clip == Clip::BeforeReduce && options.stage.cuts_grads() {
            return Err(Error::ClipNeedsGradients);
        }
        let propagates = options.non_finite == NonFinite::Propagate;
        if propagates && matches!(options.loss_scale, Some(LossScale::Dynamic(_))) {
            return Err(Error::ScaleNeedsSkips);
        }
        if layout.params().iter().all(|p| p.frozen()) {
            return Err(Error::NothingTrains);
        }
        let earlier: Vec<&BucketPlan> = earlier.into_iter().collect();
        let buckets = bucket_plan::cut(earlier.iter().copied(), layout, world_size, options)?;
        let frozen_bytes =
            layout.dtypes().map(|d| (layout.len(d) - layout.trainable_len(d)) * d.size()).sum::<usize>();
        Ok(Plan {
            world_size,
            stage: options.stage,
            units: Units::new(layout, &buckets),
            buckets,
            frozen_bytes,
            exchange: exchange_words(layout.params().len(), options),
            exchanges: if propagates { 2 } else { 1 },
            params: layout.params().len(),
        })
    }

    /// Ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// What is divided among them.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The buckets, in the order they travel.
    pub fn buckets(&self) -> &[BucketPlan] {
        &self.buckets
    }

    /// What is gathered together.
    pub(crate) fn units(&self) -> &Units {
        &self.units
    }

    /// The ranges of bucket `bucket` that `rank` updates.
    ///
    /// # Panics
    /// If there is no such bucket or rank.
    pub fn owned(&self, bucket: usize, rank: usize) -> Vec<Range<usize>> {
        let plan = &self.buckets[bucket];
        match self.stage {
            Stage::Replicated => std::iter::once(0..plan.len).collect(),
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 => vec![plan.partition(self.world_size).range(rank)],
            Stage::WholeParams(_) => {
                plan.params.iter().filter(|p| p.owner == rank && p.len > 0).map(Placed::range).collect()
            }
        }
    }

    /// The ranges of bucket `bucket` that `rank` adds to the norm: over all ranks every element once.
    ///
    /// # Panics
    /// If there is no such bucket or rank.
    pub fn counted(&self, bucket: usize, rank: usize) -> Vec<Range<usize>> {
        match self.stage {
            Stage::Replicated => vec![self.buckets[bucket].partition(self.world_size).range(rank)],
            _ => self.owned(bucket, rank),
        }
    }

    /// The parts of bucket `bucket` that travel to everyone after an update: nothing at stages 0 and 3, all of it at 1 and 2,
    /// under [`Stage::WholeParams`] the neighbours of one owner together, pads included.
    pub fn gathered(&self, bucket: usize) -> Vec<(usize, Range<usize>)> {
        let plan = &self.buckets[bucket];
        match self.stage {
            _ if plan.len == 0 => Vec::new(),
            Stage::Replicated | Stage::Zero3 => Vec::new(),
            Stage::Zero1 | Stage::Zero2 => vec![(0, 0..plan.len)],
            Stage::WholeParams(_) => plan.runs(),
        }
    }

    /// The bytes `rank` holds at its peak, for parameters that are updated by `rule`, when gradients are handed over in bucket
    /// order by one thread, and units gathered in their order, forth and back, each from when the one before it is read.
    pub fn memory(&self, rank: usize, rule: &dyn Rule) -> Memory {
        let states = rule.state().len();
        let mut memory = Memory {
            params: self.frozen_bytes as u64,
            staging: ((self.exchange.iter().sum::<usize>() + self.fold_words(rule)) * 8) as u64,
            buckets: self.pool_bytes([]),
            ..Memory::default()
        };
        for (i, bucket) in self.buckets.iter().enumerate() {
            let owned: usize = self.owned(i, rank).iter().map(|r| r.len()).sum();
            let kept = if self.stage.cuts_grads() { owned } else { bucket.len };
            let params = if self.stage.cuts_params() { owned } else { bucket.len };
            memory.params += (params * bucket.dtype.size()) as u64;
            memory.grads += (kept * bucket.grads.size()) as u64;
            memory.state += (owned * bucket.state.size() * states) as u64;
            memory.master += (owned * bucket.master.map_or(0, DType::size)) as u64;
        }
        if self.stage.cuts_params() {
            let room = self.units.room(|b| &self.buckets[b]);
            memory.gathered = room.iter().map(|(dtype, len)| (len * dtype.size()) as u64).sum();
        }
        memory
    }

    /// The bytes of gradients on their way ([`Memory::buckets`]) when one thread hands them over in `order`, parameters by
    /// registration index. In bucket order that is two buckets of each gradient type, or one where there is only one; in
    /// registration order it is all of them; in another order it is at least this, since no thread waits for memory that
    /// early gradients need.
    pub fn pool_bytes(&self, order: impl IntoIterator<Item = usize>) -> u64 {
        let mut waiting: Vec<usize> =
            self.buckets.iter().map(|b| b.params.iter().filter(|p| p.len > 0).count()).collect();
        let (mut begun, mut sent) = (vec![false; waiting.len()], 0);
        let mut pool = pool_sizes(self.stage, &self.buckets);
        for param in order {
            let holds = |b: &BucketPlan| b.params.iter().any(|p| p.param == param && p.len > 0);
            let Some(b) = self.buckets.iter().position(holds) else { continue };
            begun[b] = true;
            let filling =
                |dtype| (sent..begun.len()).filter(|&i| begun[i] && self.buckets[i].grads == dtype).count();
            for (dtype, _, count) in &mut pool {
                *count = (*count).max(filling(*dtype));
            }
            waiting[b] -= 1;
            sent += waiting[sent..].iter().take_while(|&&left| left == 0).count();
        }
        pool.iter().map(|(dtype, len, count)| (len * dtype.size() * count) as u64).sum()
    }

    /// Words of the sums over whole tensors that `rule` needs.
    fn fold_words(&self, rule: &dyn Rule) -> usize {
        fold_words(rule.sees(), self.stage, self.params)
    }

    /// The bytes `rank` sends in a step with one micro-batch, for parameters that are updated by `rule`.
    pub fn wire(&self, rank: usize, rule: &dyn Rule) -> Wire {
        let n = self.world_size;
        let once: u64 = self.exchange.map(|words| ring_all_reduce(words, n, rank, 8)).iter().sum();
        let mut wire = Wire { exchange: self.exchanges * once, ..Wire::default() };
        wire.exchange += ring_all_reduce(self.fold_words(rule), n, rank, 8);
        for (b, bucket) in self.buckets.iter().enumerate() {
            let others = bucket.len - bucket.len / n;
            let grads = (others * bucket.grads.size()) as u64;
            let params = (others * bucket.dtype.size()) as u64;
            match self.stage {
                Stage::Replicated => wire.reduce += 2 * grads,
                Stage::Zero1 | Stage::Zero2 => {
                    wire.reduce += grads;
                    wire.gather += params;
                }
                Stage::Zero3 => {
                    wire.reduce += grads;
                    wire.gather += 2 * params;
                }
                Stage::WholeParams(_) => {
                    wire.reduce += 2 * grads;
                    let size = bucket.dtype.size();
                    wire.gather +=
                        self.gathered(b).iter().map(|run| ring_broadcast(run, n, rank, size)).sum::<u64>();
                }
            }
        }
        wire
    }
}

/// For each gradient type a rank at stage 2 or 3 pools: the length of its longest bucket, and how many buffers of that length.
pub(crate) fn pool_sizes<'b>(
    stage: Stage,
    buckets: impl IntoIterator<Item = &'b BucketPlan>,
) -> Vec<(DType, usize, usize)> {
    let mut pool: Vec<(DType, usize, usize)> = Vec::new();
    for bucket in buckets.into_iter().filter(|b| stage.cuts_grads() && b.len > 0) {
        match pool.iter_mut().find(|(dtype, ..)| *dtype == bucket.grads) {
            Some((_, len, count)) => (*len, *count) = ((*len).max(bucket.len), POOL),
            None => pool.push((bucket.grads, bucket.len, 1)),
        }
    }
    pool
}

/// u64 words of the two vectors of the step's exchange. Where the policy asks, after the norm two parameters a word, how many
/// ranks have a gradient for each; after what else is maximised a word for each, which rank has none. On a GPU, which is asked
/// once, what must be the same follows with its complement.
pub(crate) fn exchange_words(params: usize, options: &Options) -> [usize; 2] {
    let counts = if options.missing.counts() { params.div_ceil(2) } else { 0 };
    let lacking = if options.missing == Missing::AllOrNone { params } else { 0 };
    let fields = if options.queue.place() == Place::Cpu { 0 } else { 2 * FIELDS.len() };
    [SUM_HEAD + ExactSum::WORDS + counts, MAX_HEAD + lacking + fields]
}

/// What `rank` sends to all-reduce `len` elements on a ring: all chunks but its own, twice; `len` need not divide.
fn ring_all_reduce(len: usize, n: usize, rank: usize, size: usize) -> u64 {
    let own = len / n + usize::from(rank < len % n);
    (2 * (len - own) * size) as u64
}

/// What `rank` forwards of a broadcast: everything, unless it is the last of the ring.
fn ring_broadcast((owner, range): &(usize, Range<usize>), n: usize, rank: usize, size: usize) -> u64 {
    let last = (owner + n - 1) % n;
    if rank == last { 0 } else { (range.len() * size) as u64 }
}
