//! Plan of everything that a group of ranks holds and sends: parts, the step's exchange, and shared buffers. Arithmetic only.

use crate::plan::bucket::BucketPlan;
use crate::plan::bucket_chain::{self, BucketChain, PoolModel};
use crate::plan::bucket_order;
use crate::plan::bytes::fold_words;
use crate::plan::bytes::{alike, ring_all_reduce};
use crate::plan::matrix_exchange::longest;
use crate::plan::rule_parts::{self, PlanRules};
use crate::plan::units::Units;
use crate::{Clip, Error, Groups, Memory, Missing, NonFinite, Options, Part, Seat, Sizes, Stage, Wire};
use meshstep_optim::{ExactSum, LossScale, Sees};
use meshstep_tensor::{Layout, Place};
use std::borrow::Cow;
use std::collections::HashSet;

/// Number of ranks that a word of the step's exchange can name.
const MAX_RANKS: usize = 1 << 24;

/// u64 words before the norm's in the summed vector of the step's exchange: non-finite count and weight.
pub(crate) const SUM_HEAD: usize = 2;
/// u64 words after the presence counts: the balance of weights, 0 if ranks agree.
pub(crate) const SUM_TAIL: usize = 1;
/// u64 words of the maximised vector before those of parameters: largest gradient, fault, digest and its complement.
pub(crate) const MAX_HEAD: usize = 4;

/// Names of the values that change from step to step and must agree between ranks.
pub(crate) const FIELDS: [&str; 10] = [
    "step",
    "lr",
    "max_norm",
    "grad_scale",
    "loss_scale",
    "growth_tracker of loss_scale",
    "hysteresis_tracker of loss_scale",
    "micro-batches",
    "buckets and gathers sent",
    "hyperparameters",
];

/// Plan of a step's memory and traffic: the same on every rank that decides with the others.
///
/// On one group of ranks there is one part, and a rank has the same index in every role:
///
/// ```
/// use meshstep_optim::AdamW;
/// use meshstep_shard::{Options, Plan, Stage};
/// use meshstep_tensor::{DType, Layout};
///
/// let layout = Layout::builder().param("w", &[1000, 1000], DType::F32).build()?;
/// let plan = Plan::new(&layout, 8, &Options { stage: Stage::Zero1, ..Options::default() })?;
/// let memory = plan.memory(3, &AdamW::default());
/// assert_eq!([memory.params, memory.state], [4_001_792, 1_000_448]); // pads: 64 elements times 8 ranks
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    world_size: usize,
    parts: Vec<Part>,
    order: Vec<(usize, usize)>,
    /// Words of the two vectors of the step's exchange.
    exchange: [usize; 2],
    exchanges: u64,
}

/// Index of a rank in every group of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Seats {
    /// Index among all ranks.
    pub world: usize,
    /// Index in the groups of each part; empty: each part is divided among all ranks.
    pub parts: Vec<Seat>,
}

/// Seats of a rank if all ranks share all parameters alike.
impl From<usize> for Seats {
    fn from(rank: usize) -> Seats {
        Seats { world: rank, parts: Vec::new() }
    }
}

impl Plan {
    /// Plans a layout on `world_size` ranks, or returns the option that contradicts it.
    pub fn new(layout: &Layout, world_size: usize, options: &Options) -> Result<Plan, Error> {
        check_options(world_size, options)?;
        let part = Part::new(layout.clone(), Sizes::all(world_size), [], options)?;
        options.precision.check_used(part.buckets().iter().map(|bucket| bucket.dtype))?;
        Plan::of(world_size, vec![part], options)
    }

    /// Plans a layout as an optimizer with these rules does: one part for each rule, without cut parameters for rules that see whole
    /// matrices. Returns the option or the group that contradicts it.
    ///
    /// ```
    /// use meshstep_optim::{AdamW, Muon};
    /// use meshstep_shard::{Groups, Options, Plan, hidden_matrices};
    /// use meshstep_tensor::{DType::F32, Layout};
    ///
    /// let layout = Layout::builder().param("embedding", &[640, 64], F32);
    /// let layout = (0..8).fold(layout, |b, i| b.param(format!("h.{i}.w"), &[64, 64], F32)).build()?;
    /// let rules = Groups::new(AdamW::default()).with(Muon::default(), hidden_matrices);
    /// let plan = Plan::for_rules(&layout, 4, rules.clone(), &Options::default())?;
    /// // On each rank two moments of a quarter of the embedding, and one of two whole matrices.
    /// assert_eq!(plan.memory(0, &rules).state, (2 * 160 + 2 * 64) * 64 * 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn for_rules(
        layout: &Layout,
        world_size: usize,
        rules: impl Into<Groups>,
        options: &Options,
    ) -> Result<Plan, Error> {
        check_options(world_size, options)?;
        let planned =
            rule_parts::plan((layout.clone(), rules.into()), &Sizes::all(world_size), &[], options)?;
        planned.iter().try_for_each(|(part, rules)| rules.check(part, true, options))?;
        let parts: Vec<Part> = planned.into_iter().map(|(part, _)| part).collect();
        options.precision.check_used(parts.iter().flat_map(Part::buckets).map(|bucket| bucket.dtype))?;
        Plan::of(world_size, parts, options)
    }

    /// Plans parts that several groups of ranks share, made with the same options and added to an optimizer at once. `world_size`
    /// ranks decide their steps together.
    pub fn of(world_size: usize, parts: Vec<Part>, options: &Options) -> Result<Plan, Error> {
        check_options(world_size, options)?;
        let params = parts.iter().map(|part| part.layout().params().len()).sum();
        let buckets = parts.iter().map(|part| part.buckets().len()).sum();
        let exchange = exchange_words(params, buckets, options);
        let exchanges = if options.non_finite == NonFinite::Propagate { 2 } else { 1 };
        let order = bucket_order::of(&parts.iter().collect::<Vec<_>>())?;
        let plan = Plan { world_size, parts, order, exchange, exchanges };
        if plan.parts.len() > 1 {
            plan.check_names()?;
        }
        Ok(plan)
    }

    /// Checks that no two parameters have one name, nor a parameter and the unit by which it would be gathered.
    fn check_names(&self) -> Result<(), Error> {
        let mut names = HashSet::new();
        let mut params = self.parts.iter().flat_map(|part| part.layout().params());
        if let Some(twice) = params.find(|param| !names.insert(param.name())) {
            return Err(Error::NameTaken { name: twice.name().to_owned() });
        }
        if self.stage().cuts_params() {
            self.units().check()?;
        }
        Ok(())
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the parts, one per layout.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Returns the buckets of all parts in the order they travel: the order in which they fill when gradients come in reverse
    /// registration order ([`Part::at`]), except that the buckets of one part keep their order.
    pub fn buckets(&self) -> impl Iterator<Item = &BucketPlan> {
        self.order.iter().map(|&(part, b)| &self.parts[part].buckets()[b])
    }

    /// Returns the buckets in that order, as pairs of part and index in the part.
    pub fn order(&self) -> &[(usize, usize)] {
        &self.order
    }

    /// Returns the peak bytes of a rank, for parameters updated by `rules`: one rule, or [`Groups`]. Assumes that one thread hands over gradients in the
    /// order of a backward pass or of the buckets, and gathers units in order, forward and back, each while the previous one is
    /// read. Excludes the words of a verification.
    pub fn memory(&self, rank: impl Into<Seats>, rules: &(impl PlanRules + ?Sized)) -> Memory {
        let seats = rank.into();
        let of_part = |(part, seat): (&Part, Cow<'_, Seat>)| part.memory(seat.shard, rules.states(part));
        let of_parts: Memory = self.seated(&seats).map(of_part).sum();
        let words = self.exchange.iter().sum::<usize>() + self.fold_words(rules);
        let staging = (words * 8) as u64 + self.scratch_bytes(&seats, rules);
        let buckets = self.parts.iter().map(|part| bucket_chain::bytes(&part.series())).sum();
        let gathered = self.gathered_bytes();
        of_parts + Memory { staging, buckets, gathered, ..Memory::default() }
    }

    /// Returns the bytes in which matrices of all parts are exchanged.
    fn scratch_bytes(&self, seats: &Seats, rules: &(impl PlanRules + ?Sized)) -> u64 {
        let of_part = |(part, seat): (&Part, Cow<'_, Seat>)| {
            rules.matrix_exchange(part).scratch(part.exchange_rank(&seat))
        };
        let longest = longest(self.seated(seats).flat_map(of_part));
        longest.iter().map(|(dtype, len)| (len * dtype.size()) as u64).sum()
    }

    /// Returns the bytes of gathered units ([`Memory::gathered`]).
    fn gathered_bytes(&self) -> u64 {
        if !self.stage().cuts_params() {
            return 0;
        }
        let buckets: Vec<&BucketPlan> = self.buckets().collect();
        self.units().room(|b| buckets[b]).iter().map(|(dtype, len)| (len * dtype.size()) as u64).sum()
    }

    /// Returns the units of all parts.
    fn units(&self) -> Units {
        let mut units = Units::default();
        for (part, places) in self.parts.iter().zip(bucket_order::places(&self.order, self.parts.len(), 0)) {
            units.extend(part.units().clone(), &places);
        }
        units
    }

    /// Returns the bytes of gradients in flight ([`Memory::buckets`]) when one thread hands them over in `order`: parameters by
    /// registration index, those of later parts after those of earlier ones. For each part and type that is the longest two
    /// consecutive buckets, one that fills while the other travels. It is more if a bucket begins before the earlier ones are
    /// full, as in registration order: then the waiting buckets add their memory. A backward pass and bucket order never need
    /// more.
    pub fn pool_bytes(&self, order: impl IntoIterator<Item = usize>) -> u64 {
        let trains = |b: &BucketPlan| b.params.iter().filter(|p| p.len > 0).count();
        let mut waiting: Vec<usize> = self.buckets().map(trains).collect();
        let (mut begun, mut sent) = (vec![false; waiting.len()], 0);
        let (buckets, mut rooms) = (self.bucket_of_params(), self.rooms());
        for param in order {
            let bucket = buckets.get(param).copied().flatten();
            let Some(b) = bucket.filter(|_| self.parts.iter().any(Part::cuts_grads)) else { continue };
            if !std::mem::replace(&mut begun[b], true) {
                rooms.begin(b, sent);
            }
            waiting[b] -= 1;
            sent += waiting[sent..].iter().take_while(|&&left| left == 0).count();
        }
        rooms.peak()
    }

    /// Returns the pool model for gradients in flight.
    fn rooms(&self) -> PoolModel<'_> {
        let of_parts: Vec<Vec<BucketChain>> = self.parts.iter().map(Part::series).collect();
        let firsts = firsts(of_parts.iter().map(Vec::len));
        let series = |(part, bucket): (usize, &BucketPlan)| {
            let own = of_parts[part].iter().position(|series| series.dtype == bucket.dtype);
            firsts[part] + own.unwrap_or(0)
        };
        let parts = self.order.iter().map(|&(part, _)| part);
        let buckets =
            parts.zip(self.buckets()).map(|(part, bucket)| (bucket, series((part, bucket)))).collect();
        PoolModel::new(of_parts.concat(), buckets)
    }

    /// Returns the bucket of each parameter that has elements and trains, by registration index; those of later parts follow
    /// those of earlier ones.
    fn bucket_of_params(&self) -> Vec<Option<usize>> {
        let counts = self.parts.iter().map(|part| part.layout().params().len());
        let mut of = vec![None; counts.clone().sum()];
        let firsts = firsts(counts);
        for (b, (&(part, _), bucket)) in self.order.iter().zip(self.buckets()).enumerate() {
            let full = bucket.params.iter().filter(|p| p.len > 0);
            full.for_each(|p| of[firsts[part] + p.param] = Some(b));
        }
        of
    }

    /// Returns the bytes that a rank sends in a step with one micro-batch, for parameters updated by `rules`: one rule, or
    /// [`Groups`].
    pub fn wire(&self, rank: impl Into<Seats>, rules: &(impl PlanRules + ?Sized)) -> Wire {
        let seats = rank.into();
        let of_part = |(part, seat): (&Part, Cow<'_, Seat>)| Wire {
            reduce: part.reduce_bytes(),
            extra_reductions: seat
                .extra_reductions
                .iter()
                .enumerate()
                .map(|(i, &place)| part.further_bytes(i, place))
                .sum(),
            gather: part.gather_bytes(seat.shard),
            matrices: rules.matrix_exchange(part).sent_bytes(part.exchange_rank(&seat)),
            exchange: 0,
        };
        let of_parts: Wire = self.seated(&seats).map(of_part).sum();
        of_parts + Wire { exchange: self.exchange_bytes(seats.world, rules), ..Wire::default() }
    }

    /// Returns the bytes that `rank` sends in the step's decision, which covers all parts at once.
    pub fn exchange_bytes(&self, rank: usize, rules: &(impl PlanRules + ?Sized)) -> u64 {
        let sent = |words| ring_all_reduce(words, self.world_size, rank, 8);
        self.exchanges * sent(self.exchange.iter().sum()) + sent(self.fold_words(rules))
    }

    /// Returns the first seats that hold and send as many bytes, so that one rank of each kind represents the others.
    pub fn kind(&self, rank: impl Into<Seats>, rules: &(impl PlanRules + ?Sized)) -> Seats {
        self.kinds([rank.into()], rules).next().unwrap_or_default()
    }

    /// Returns the kind of each rank. Plans the exchange of matrices once for all of them.
    pub fn kinds(
        &self,
        ranks: impl IntoIterator<Item = Seats>,
        rules: &(impl PlanRules + ?Sized),
    ) -> impl Iterator<Item = Seats> {
        let words = [self.exchange.iter().sum(), self.fold_words(rules)];
        let exchanging: Vec<Vec<usize>> =
            self.parts.iter().map(|part| rules.matrix_exchange(part).alike()).collect();
        ranks.into_iter().map(move |seats| {
            let parts = self.seated(&seats).zip(&exchanging);
            let parts = parts.map(|((part, seat), exchanging)| part.kind(&seat, exchanging));
            Seats { world: alike(words, self.world_size, seats.world), parts: parts.collect() }
        })
    }

    fn seated<'p>(&'p self, seats: &'p Seats) -> impl Iterator<Item = (&'p Part, Cow<'p, Seat>)> {
        let all = Seat { shard: seats.world, ..Seat::default() };
        let seat = move |i| seats.parts.get(i).map_or_else(|| Cow::Owned(all.clone()), Cow::Borrowed);
        self.parts.iter().enumerate().map(move |(i, part)| (part, seat(i)))
    }

    fn stage(&self) -> Stage {
        self.parts.first().map_or(Stage::default(), Part::stage)
    }

    /// Returns the words of the sums over whole tensors: of all parameters, if the rule of any part needs them.
    fn fold_words(&self, rules: &(impl PlanRules + ?Sized)) -> usize {
        let params = self.parts.iter().map(|part| part.layout().params().len()).sum();
        let sums = self.parts.iter().map(|part| rules.sees(part)).find(|&sees| sees == Sees::TensorSums);
        fold_words(sums.unwrap_or(Sees::Elements), self.stage(), params)
    }
}

/// Returns the sum of all earlier counts, for each count.
fn firsts(counts: impl Iterator<Item = usize>) -> Vec<usize> {
    counts.scan(0, |next, count| Some(std::mem::replace(next, *next + count))).collect()
}

/// Refuses options that contradict each other or the number of ranks.
pub(crate) fn check_options(world_size: usize, options: &Options) -> Result<(), Error> {
    let propagates = options.non_finite == NonFinite::Propagate;
    match () {
        () if world_size == 0 => Err(Error::NoRanks),
        () if world_size > MAX_RANKS => Err(Error::TooManyRanks { world_size, max: MAX_RANKS }),
        () if options.bucket_len == Some(0) => Err(Error::EmptyBuckets),
        () if options.clip == Clip::BeforeReduce && options.cuts_grads() => Err(Error::ClipNeedsGradients),
        () if options.reduce_in_step && options.cuts_grads() => Err(Error::StepNeedsGradients),
        () if propagates && matches!(options.loss_scale, Some(LossScale::Dynamic(_))) => {
            Err(Error::ScaleNeedsSkips)
        }
        () => Ok(()),
    }
}

/// Returns the lengths, in u64 words, of the two vectors of the step's exchange. The summed vector has the norm; if ranks count
/// gradients, two parameters a word: on how many ranks each has a gradient; if buckets can be deferred, two buckets a word: how
/// many ranks lacked a gradient of each; and one last word. The maximised vector has, under [`Missing::AllOrNone`], one word per
/// parameter for a rank that lacks it. A GPU exchanges only once, so there the values that must agree follow with their
/// complements.
pub(crate) fn exchange_words(params: usize, buckets: usize, options: &Options) -> [usize; 2] {
    let counts = if options.missing.counts() { params.div_ceil(2) } else { 0 };
    let lacking = if options.missing == Missing::AllOrNone { params } else { 0 };
    let fields = if options.queue.place() == Place::Cpu { 0 } else { 2 * FIELDS.len() };
    let deferred = if options.defers() { buckets.div_ceil(2) } else { 0 };
    [SUM_HEAD + ExactSum::WORDS + counts + deferred + SUM_TAIL, MAX_HEAD + lacking + fields]
}
