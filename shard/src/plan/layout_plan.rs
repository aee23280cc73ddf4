//! One layout shared by some ranks: its buckets, the owner of each range, and the bytes needed. Arithmetic only.

mod cut_tensors;
mod uncut;

use crate::plan::bucket::{self, BucketPlan, Placed};
use crate::plan::bucket_chain::{self, BucketChain};
use crate::plan::bytes::{VectorSpec, alike, ring_all_reduce, ring_broadcast};
use crate::plan::slot_tree::{self, SlotTree};
use crate::plan::tensor_cuts::TensorCuts;
use crate::plan::units::Units;
use crate::{Error, Memory, Options, RankRoles, Stage};
use meshstep_tensor::{Category, DType, Layout, Param};
use std::ops::Range;
use std::sync::Arc;

/// Parameters that the same ranks share in the same way, and their places. The part is equal on these ranks.
///
/// ```
/// use meshstep_optim::AdamW;
/// use meshstep_shard::{BucketPlan, Options, Part, Placed, Plan, Seat, Seats, Sizes, Stage, Wire};
/// use meshstep_tensor::{DType, Layout};
///
/// // A layer on 4 ranks that divide its state, with replicas of it on another 4.
/// let layout = Layout::builder().param("w", &[64, 8], DType::F32).build()?;
/// let options = Options { stage: Stage::Zero1, ..Options::default() };
/// let sizes = Sizes { shards: 4, extra_reductions: vec![2] };
/// let part = Part::new(layout, sizes, [], &options)?;
/// let bucket: &BucketPlan = &part.buckets()[0];
/// let Placed { start, len, .. } = bucket.params[0];
/// assert_eq!((start, len, part.owned(0, 3)), (0, 512, vec![384..512]));
/// let plan = Plan::of(8, vec![part], &options)?;
/// let seats = Seats { world: 7, parts: vec![Seat { shard: 3, extra_reductions: vec![1], ..Seat::default() }] };
/// let wire: Wire = plan.wire(seats, &AdamW::default());
/// assert!(wire.extra_reductions > 0 && wire.total() > wire.reduce + wire.gather);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    layout: Layout,
    sizes: Sizes,
    stage: Stage,
    slots: Option<Arc<SlotTree>>,
    cuts_grads: bool,
    buckets: Vec<BucketPlan>,
    units: Units,
    positions: Option<Vec<usize>>,
    wholes: Option<Vec<usize>>,
    uncut: bool,
    cuts: Option<Arc<TensorCuts>>,
}

/// Sizes of the groups that share parameters: [`RankRoles`] in numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Number of ranks that divide the state.
    pub shards: usize,
    /// Sizes of the groups of the further reductions, in order.
    pub extra_reductions: Vec<usize>,
}

/// Index of a rank in each group that shares a part with it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Seat {
    /// Index among the ranks that divide the state.
    pub shard: usize,
    /// Index in the group of each further reduction.
    pub extra_reductions: Vec<usize>,
    /// Index among the ranks that hold cut tensors together ([`TensorCuts::ranks`]); unused for a part without.
    pub tensors: usize,
}

impl Sizes {
    /// Returns the sizes of one group of ranks.
    pub fn all(ranks: usize) -> Sizes {
        Sizes { shards: ranks, extra_reductions: Vec::new() }
    }
}

impl From<&RankRoles> for Sizes {
    fn from(among: &RankRoles) -> Sizes {
        let extra_reductions = among.extra_reductions.iter().map(|(comm, _)| comm.world_size()).collect();
        Sizes { shards: among.shards.world_size(), extra_reductions }
    }
}

impl Part {
    /// Plans a layout on groups of these sizes, or returns the option that contradicts it. Under [`Stage::WholeParams`] its
    /// parameters are balanced with those of `earlier` parts that the same ranks divide.
    pub fn new<'p>(
        layout: Layout,
        sizes: Sizes,
        earlier: impl IntoIterator<Item = &'p Part>,
        options: &Options,
    ) -> Result<Part, Error> {
        let earlier: Vec<&BucketPlan> = earlier.into_iter().flat_map(Part::buckets).collect();
        Part::after(layout, sizes, earlier, options)
    }

    /// Plans a layout after some buckets.
    pub(crate) fn after<'b>(
        layout: Layout,
        sizes: Sizes,
        earlier: impl IntoIterator<Item = &'b BucketPlan>,
        options: &Options,
    ) -> Result<Part, Error> {
        if sizes.shards == 0 || sizes.extra_reductions.contains(&0) {
            return Err(Error::NoRanks);
        }
        if options.bucket_len == Some(0) {
            return Err(Error::EmptyBuckets);
        }
        if layout.params().iter().all(|p| p.frozen()) {
            return Err(Error::NothingTrains);
        }
        let buckets = bucket::cut(earlier, &layout, sizes.shards, options)?;
        let (stage, units) = (options.stage, Units::new(&layout, &buckets));
        let (slots, cuts_grads) =
            (slot_tree::of(&sizes, &buckets, options)?.map(Arc::new), options.cuts_grads());
        if stage.cuts_params() {
            units.check()?;
        }
        let (positions, wholes, uncut, cuts) = (None, None, false, None);
        Ok(Part { layout, sizes, stage, slots, cuts_grads, buckets, units, positions, wholes, uncut, cuts })
    }

    /// Sets each parameter's position among those of all parts that are added together, in the order a forward pass uses them. By
    /// default parameters stand in units, in the order in which units begin, and within a unit part by part.
    pub fn at(self, positions: Vec<usize>) -> Result<Part, Error> {
        let params = self.layout.params().len();
        if positions.len() != params || !positions.is_sorted_by(|a, b| a < b) {
            let what = format!("positions {positions:?} of {params} parameters");
            return Err(Error::Shared { what, works: "one for each parameter, ascending" });
        }
        Ok(Part { positions: Some(positions), ..self })
    }

    /// Returns the positions that [`at`](Self::at) has set.
    pub fn positions(&self) -> Option<&[usize]> {
        self.positions.as_deref()
    }

    /// Sets the number of elements that each parameter has before a mesh cuts it, so that selections by a parameter's share of
    /// the model do not depend on the cut. By default parameters are whole.
    pub fn cut_from(self, wholes: Vec<usize>) -> Result<Part, Error> {
        let params = self.layout.params();
        let fits = |(param, &whole): (&Param, &usize)| match param.len() {
            0 => whole == 0,
            len => whole > 0 && whole % len == 0,
        };
        if wholes.len() != params.len() || !params.iter().zip(&wholes).all(fits) {
            let what = format!(
                "whole parameters of {wholes:?} elements, for {} that are cut from them",
                params.len()
            );
            return Err(Error::Shared { what, works: "for each parameter a multiple of its own elements" });
        }
        Ok(Part { wholes: Some(wholes), ..self })
    }

    /// Returns the position of parameter `index` among all, and its number of elements before a cut.
    pub fn in_model(&self, index: usize) -> (usize, usize) {
        let position = self.positions.as_ref().map_or(index, |positions| positions[index]);
        let len = self.layout.params()[index].len();
        (position, self.wholes.as_ref().map_or(len, |wholes| wholes[index]))
    }

    /// Returns the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the sizes of the groups that share the part.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Returns the sharding stage.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Returns the buckets in the order they travel; buckets of other parts may travel between them. Parameter indices are the
    /// layout's.
    pub fn buckets(&self) -> &[BucketPlan] {
        &self.buckets
    }

    /// Returns the series of buckets that share memory.
    pub(crate) fn series(&self) -> Vec<BucketChain> {
        if self.cuts_grads { bucket_chain::of(&self.buckets) } else { Vec::new() }
    }

    /// Returns the units, which are gathered together.
    pub(crate) fn units(&self) -> &Units {
        &self.units
    }

    /// Returns the units, and keeps none.
    pub(crate) fn take_units(&mut self) -> Units {
        std::mem::take(&mut self.units)
    }

    /// Returns the ranges of bucket `bucket` updated by the rank at `place` among the ranks that divide the state.
    ///
    /// # Panics
    /// If there is no such bucket or place.
    pub fn owned(&self, bucket: usize, place: usize) -> Vec<Range<usize>> {
        let plan = &self.buckets[bucket];
        match self.stage {
            Stage::Replicated => std::iter::once(0..plan.len).collect(),
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 => {
                vec![plan.partition(self.sizes.shards).range(place)]
            }
            Stage::WholeParams(_) => {
                plan.params.iter().filter(|p| p.owner == place && p.len > 0).map(Placed::range).collect()
            }
        }
    }

    /// Returns the elements of those ranges.
    fn owned_len(&self, bucket: usize, place: usize) -> usize {
        match self.stage {
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 => self.buckets[bucket].len / self.sizes.shards,
            Stage::Replicated | Stage::WholeParams(_) => {
                self.owned(bucket, place).iter().map(|range| range.len()).sum()
            }
        }
    }

    /// Returns the vectors that have as many elements as the rank at `place` owns of bucket `bucket`, for a rule with `states`
    /// state vectors.
    pub(crate) fn owned_vectors(
        &self,
        bucket: usize,
        place: usize,
        states: usize,
    ) -> impl Iterator<Item = VectorSpec> {
        let BucketPlan { dtype, grads, master, state, .. } = self.buckets[bucket];
        let len = self.owned_len(bucket, place);
        let params = self.stage.cuts_params().then_some((dtype, Category::Params));
        let grads = self.cuts_grads.then_some((grads, Category::Grads));
        let master = master.map(|master| (master, Category::Master));
        let states = std::iter::repeat_n((state, Category::State), states);
        let all = params.into_iter().chain(grads).chain(master).chain(states);
        all.map(move |(dtype, category)| VectorSpec { dtype, category, len })
    }

    /// Returns the ranges of bucket `bucket` that this rank adds to the norm: the ranks that divide the state count every element
    /// once.
    ///
    /// # Panics
    /// If there is no such bucket or place.
    pub fn counted(&self, bucket: usize, place: usize) -> Vec<Range<usize>> {
        match self.stage {
            Stage::Replicated => vec![self.buckets[bucket].partition(self.sizes.shards).range(place)],
            _ => self.owned(bucket, place),
        }
    }

    /// Returns the parts of bucket `bucket` that travel to all ranks after an update: none at stages 0 and 3, all of it at 1 and
    /// 2, under [`Stage::WholeParams`] the neighbours of each owner together, padding included.
    ///
    /// # Panics
    /// If there is no such bucket.
    pub fn gathered(&self, bucket: usize) -> Vec<(usize, Range<usize>)> {
        let plan = &self.buckets[bucket];
        match self.stage {
            _ if plan.len == 0 => Vec::new(),
            Stage::Replicated | Stage::Zero3 => Vec::new(),
            Stage::Zero1 | Stage::Zero2 => vec![(0, 0..plan.len)],
            Stage::WholeParams(_) => plan.runs(),
        }
    }

    /// Returns the bytes of the part on the rank at `place` among the ranks that divide the state, for a rule with `states` state
    /// vectors, without the memory that parts share.
    pub fn memory(&self, place: usize, states: usize) -> Memory {
        let frozen = |d: DType| (self.layout.len(d) - self.layout.trainable_len(d)) * d.size();
        let params = self.layout.dtypes().map(frozen).sum::<usize>() as u64;
        let vectors = self.grad_vectors(place);
        let of_bucket = |(i, bucket): (usize, &BucketPlan)| {
            let owned = self.owned_len(i, place);
            Memory {
                params: (if self.stage.cuts_params() { owned } else { bucket.len } * bucket.dtype.size())
                    as u64,
                grads: (if self.cuts_grads { owned } else { vectors * bucket.len } * bucket.grads.size())
                    as u64,
                state: (owned * bucket.state.size() * states) as u64,
                master: (owned * bucket.master.map_or(0, DType::size)) as u64,
                ..Memory::default()
            }
        };
        let trained: Memory = self.buckets.iter().enumerate().map(of_bucket).sum();
        trained + Memory { params, ..Memory::default() }
    }

    /// Returns the bytes that a rank sends to reduce its gradients over the ranks that divide the state: the same on each of
    /// them.
    pub fn reduce_bytes(&self) -> u64 {
        let n = self.sizes.shards;
        let once = |b: &BucketPlan| ((b.len - b.len / n) * b.grads.size()) as u64;
        let sum: u64 = self.buckets.iter().map(once).sum();
        let rounds = self.slots.as_ref().map_or(1, |tree| tree.rounds() as u64);
        match self.stage {
            Stage::Replicated | Stage::WholeParams(_) => (rounds + 1) * sum,
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 => rounds * sum,
        }
    }

    /// Returns the whole vectors of gradients that the rank at `place` among the ranks that divide the state has for each bucket: one, or
    /// with slots one for each sum that it keeps.
    pub(crate) fn grad_vectors(&self, place: usize) -> usize {
        match &self.slots {
            _ if self.cuts_grads => 0,
            Some(tree) => tree.vectors(place),
            None => 1,
        }
    }

    /// Returns the sums over slots, if a step has slots.
    pub(crate) fn slots(&self) -> Option<&SlotTree> {
        self.slots.as_deref()
    }

    /// Returns true if a rank keeps only its chunks of the reduced gradients.
    pub(crate) fn cuts_grads(&self) -> bool {
        self.cuts_grads
    }

    /// Returns the bytes that the rank at `place` sends in further reduction `round`.
    ///
    /// # Panics
    /// If there is no such group.
    pub fn further_bytes(&self, round: usize, place: usize) -> u64 {
        let n = self.sizes.extra_reductions[round];
        let of_bucket = |b: &BucketPlan| ring_all_reduce(self.further_len(b), n, place, b.grads.size());
        self.buckets.iter().map(of_bucket).sum()
    }

    /// Returns the elements of a bucket that are reduced further.
    fn further_len(&self, bucket: &BucketPlan) -> usize {
        match self.stage {
            Stage::Replicated | Stage::WholeParams(_) => bucket.len,
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 => bucket.len / self.sizes.shards,
        }
    }

    /// Returns the bytes that the rank at `place` among the ranks that divide the state sends to gather parameters: once after
    /// the update; at stage 3 each unit twice, for the forward and for the backward pass.
    pub fn gather_bytes(&self, place: usize) -> u64 {
        let n = self.sizes.shards;
        let of_bucket = |(i, bucket): (usize, &BucketPlan)| -> u64 {
            let size = bucket.dtype.size();
            match self.stage {
                Stage::Replicated => 0,
                Stage::Zero1 | Stage::Zero2 => ((bucket.len - bucket.len / n) * size) as u64,
                Stage::Zero3 => 2 * ((bucket.len - bucket.len / n) * size) as u64,
                Stage::WholeParams(_) => {
                    let runs = self.gathered(i).into_iter();
                    runs.map(|(owner, run)| ring_broadcast(owner, run.len(), n, place, size)).sum()
                }
            }
        };
        self.buckets.iter().enumerate().map(of_bucket).sum()
    }

    /// Returns the first seat that holds and sends as many bytes as `seat`, where ranks exchange as much as the
    /// first one that `exchanging` has for each.
    pub(crate) fn kind(&self, seat: &Seat, exchanging: &[usize]) -> Seat {
        let whole = matches!(self.stage, Stage::WholeParams(_));
        let lens = || self.buckets.iter().map(|bucket| self.further_len(bucket));
        let extra_reductions = self.sizes.extra_reductions.iter().zip(&seat.extra_reductions);
        let (mut shard, mut tensors) =
            if whole { (seat.shard, seat.tensors) } else { self.first_alike(seat, exchanging) };
        if self.grad_vectors(shard) != self.grad_vectors(seat.shard) {
            (shard, tensors) = (seat.shard, seat.tensors);
        }
        Seat {
            shard,
            tensors,
            extra_reductions: extra_reductions.map(|(&n, &place)| alike(lens(), n, place)).collect(),
        }
    }
}
