//! The sharded optimizer: made together by all ranks, then one step after another.

use crate::exchange::Exchange;
use crate::family::{self, Before, Entry, Family};
use crate::gather_room::GatherRoom;
use crate::groups::Group;
use crate::handover::{Fixed, Handover, Kept};
use crate::owned::Owned;
use crate::plan::{Plan, exchange_words, pool_sizes};
use crate::pool::{Pool, Shelf};
use crate::tensor_totals::TensorTotals;
use crate::units::Units;
use crate::{Among, Clip, Combine, Error, Groups, Initial, LocalClip, NonFinite, Options, agree};
use meshstep_comm::{Communicator, Reduction};
use meshstep_optim::{LossScaleState, Sees};
use meshstep_tensor::{Layout, Param, SliceMut};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};

/// Parameters, their gradients and their optimizer state on one rank of a group.
///
/// A step is: one [`micro_batch`](Self::micro_batch) (or several [`accumulate`](Self::accumulate)s and one last
/// `micro_batch`), every gradient handed over, [`step`](Self::step). All ranks do the same, in the same order.
#[derive(Debug)]
pub struct Optimizer {
    pub(crate) entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    pub(crate) groups: Vec<Group>,
    pub(crate) buckets: Vec<Owned>,
    pub(crate) frozen: Vec<meshstep_tensor::Buffer>,
    pub(crate) handover: Handover,
    pub(crate) exchange: Exchange,
    pub(crate) options: Options,
    pub(crate) progress: Progress,
    pub(crate) room: Room,
    pub(crate) totals: TensorTotals,
    pub(crate) units: Units,
    pub(crate) gather_room: Mutex<GatherRoom>,
}

/// How far the current step has come.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Steps taken or skipped.
    pub(crate) steps: u64,
    /// Skipped in a row.
    pub(crate) skips: u32,
    /// Of these, the ones since the loss scale could last fall.
    pub(crate) hopeless: u32,
    /// The loss scale of this step, where there is one.
    pub(crate) loss_scale: Option<LossScaleState>,
    /// Micro-batches of this step.
    pub(crate) batches: u64,
    /// Their weights' sum.
    pub(crate) weight: u64,
    /// A micro-batch was begun and not finished.
    pub(crate) unfinished: AtomicBool,
    /// A micro-batch was dropped and completed with zeros.
    pub(crate) dropped: bool,
    /// The norm of this rank's own gradients in the last step, and the factor they were clipped by.
    pub(crate) local_clip: Option<LocalClip>,
    /// The last micro-batch was finished.
    pub(crate) due: AtomicBool,
    /// The first parameter whose gradient is missing; `usize::MAX` if none is.
    pub(crate) missing: AtomicUsize,
    /// Which parameters have a gradient, where that counts.
    pub(crate) present: Vec<AtomicBool>,
    /// Gradient bytes copied into buckets.
    pub(crate) copied: AtomicU64,
    /// Bytes the communicator had sent when the last step ended.
    pub(crate) sent_before: u64,
}

/// Room that is kept from step to step, so that steps allocate nothing.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// The `t` of each parameter's update in this step; 0: none.
    pub(crate) due: Vec<u64>,
    pub(crate) gathering: crate::gather::Gathering,
    /// What a GPU decides by, once there was a step.
    #[cfg(feature = "cuda")]
    pub(crate) there: Option<crate::there::There>,
    /// Steps that were errors for which nobody has asked yet.
    #[cfg(feature = "cuda")]
    pub(crate) untold: Vec<Arc<crate::there::Ticket>>,
}

impl Optimizer {
    /// An optimizer for the parameters of `layout`, updated by `rules`. Collective: every rank passes the same, which is
    /// checked; what one rank cannot do is an error on all.
    ///
    /// `initial` is asked for each parameter's first value (on rank 0 alone under [`Initial::Broadcast`]).
    pub fn new(
        comm: Arc<dyn Communicator>,
        layout: Layout,
        rules: impl Into<Groups>,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
        options: Options,
    ) -> Result<Self, Error> {
        let mut optimizer = Self::empty(comm, true, options)?;
        optimizer.add_param_group(layout, rules, initial)?;
        Ok(optimizer)
    }

    /// An optimizer without parameters, to add to, whose steps all ranks of `world` decide together. `weighs`: whether this
    /// rank's weights of micro-batches count; where several ranks compute the same micro-batch, one of them does. Collective as
    /// [`new`](Self::new) is.
    pub fn empty(world: Arc<dyn Communicator>, weighs: bool, options: Options) -> Result<Self, Error> {
        let empty = Self::with_room(Arc::clone(&world), weighs, options.clone());
        if let Err(error) = &empty {
            // Where the other ranks compare what they add.
            let told = agree::same_everywhere(&*world, &options, &family::objection(Some(error)));
            tracing::debug!(?told, "no optimizer");
        }
        empty
    }

    fn with_room(comm: Arc<dyn Communicator>, weighs: bool, options: Options) -> Result<Self, Error> {
        let reduction = match options.combine {
            Combine::Sum | Combine::Weighted => Reduction::Sum,
            Combine::Mean => Reduction::Mean,
        };
        let fixed = Fixed {
            comms: vec![Arc::clone(&comm)],
            gathers: Vec::new(),
            comm,
            aside: None,
            weighs,
            queue: options.queue.clone(),
            stage: options.stage,
            reduction,
            overlap: options.overlap,
            norm: options.norm,
            buckets: Vec::new(),
        };
        let pool = Pool::new(&options.queue, &options.meter);
        let loss_scale = options.loss_scale.map(|rule| rule.start());
        Ok(Optimizer {
            entries: Vec::new(),
            by_name: HashMap::new(),
            groups: Vec::new(),
            buckets: Vec::new(),
            frozen: Vec::new(),
            handover: Handover::new(fixed, pool, &options.meter)?,
            exchange: Exchange::new([0, 0], &options)?,
            units: Units::default(),
            gather_room: Mutex::new(GatherRoom::new(&options)),
            options,
            progress: Progress { missing: AtomicUsize::new(usize::MAX), loss_scale, ..Progress::default() },
            room: Room::default(),
            totals: TensorTotals::default(),
        })
    }

    /// Adds parameters, with rules of their own, between two steps. Collective, and checked as [`new`](Self::new) is; on
    /// an error nothing has changed.
    pub fn add_param_group(
        &mut self,
        layout: Layout,
        rules: impl Into<Groups>,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        let all = Among::all(Arc::clone(self.comm()));
        self.add_shared(layout, rules, all, initial)
    }

    /// The same for parameters that are shared among some ranks each, in several groups.
    pub fn add_shared(
        &mut self,
        layout: Layout,
        rules: impl Into<Groups>,
        among: Among,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        self.handover.healthy()?;
        let among = Arc::new(among);
        // An error of an earlier step too is every rank's, as others may have been told of it before.
        let heard = self.check_heard();
        let groups = rules.into();
        let comm = Arc::clone(&self.handover.fixed.comm);
        let mut text = family::describe(&layout, &groups, &self.options);
        family::describe_among(&among, &mut text);
        let ready = heard.and_then(|()| self.check_idle());
        let prepared = ready.and_then(|()| self.prepare(&layout, groups, &among));
        if let Err(error) = &prepared {
            text = family::objection(Some(error));
        }
        let (mut family, shelves, units) = self.agreed(&*comm, prepared, &text)?;
        if self.options.non_finite == NonFinite::Propagate && self.handover.fixed.aside.is_none() {
            let aside = comm.split(Some(0), comm.rank() as i64)?;
            self.handover.fixed.comms.extend(aside.clone());
            self.handover.fixed.aside = aside;
        }
        let gathers = self.gathers_among(&among)?;
        family.kept.iter_mut().for_each(|kept| kept.gathers.clone_from(&gathers));
        self.first_values(&*comm, &among, &mut family, initial)?;
        // Not until here, so that staging peaks at what the plan says.
        let words = exchange_words(self.entries.len() + family.entries.len(), &self.options);
        self.exchange = Exchange::new(words, &self.options)?;
        #[cfg(feature = "cuda")]
        {
            // Its names are no longer all.
            self.room.there = None;
        }
        let count = self.entries.len() + family.entries.len();
        let groups = self.groups.iter().chain(&family.groups.groups);
        self.totals = TensorTotals::new(count, groups, self.options.stage, &comm, &self.options.meter)?;
        self.units = units;
        self.commit(family, shelves);
        Ok(())
    }

    fn prepare(
        &self,
        layout: &Layout,
        groups: Groups,
        among: &Arc<Among>,
    ) -> Result<(Family, Vec<Shelf>, Units), Error> {
        if let Some(p) = layout.params().iter().find(|p| self.by_name.contains_key(p.name())) {
            return Err(Error::NameTaken { name: p.name().to_owned() });
        }
        self.options.norm.check()?;
        self.options.loss_scale.map_or(Ok(()), |rule| rule.check())?;
        self.options.precision.check_rules(&groups)?;
        let earlier = || self.handover.fixed.buckets.iter().map(|k| &k.plan);
        // Whole parameters are balanced over the ranks that share them.
        let along = |k: &&Kept| Arc::ptr_eq(&k.among.shards, &among.shards);
        let alike = self.handover.fixed.buckets.iter().filter(along).map(|k| &k.plan);
        let world_size = among.shards.world_size();
        let before = Before {
            params: self.entries.len(),
            buckets: self.buckets.len(),
            vectors: self.frozen.len(),
            groups: self.groups.len(),
        };
        let plan = Plan::after(alike, layout, world_size, &self.options)?;
        if Arc::ptr_eq(&among.shards, self.comm()) && among.further.is_empty() {
            // Of several groups' parameters others may follow.
            let dtypes = earlier().chain(plan.buckets()).map(|bucket| bucket.dtype);
            self.options.precision.check_used(dtypes)?;
        }
        groups.check_sight(layout, self.options.stage)?;
        self.check_shared(&groups, among)?;
        groups.check_place(&self.options)?;
        let family = Family::new(layout, groups, &plan, before, (among.shards.rank(), among), &self.options)?;
        let kept = earlier().chain(family.kept.iter().map(|k| &k.plan));
        let sizes = pool_sizes(self.options.stage, kept);
        let shelves = self.handover.shelves_for(&sizes, &self.options.meter)?;
        Ok((family, shelves, self.units_with(&plan)?))
    }

    /// What takes all ranks to share all parameters alike.
    fn check_shared(&self, groups: &Groups, among: &Among) -> Result<(), Error> {
        let Options { stage, clip, combine, .. } = self.options;
        let all = among.further.is_empty() && among.comms().all(|comm| Arc::ptr_eq(comm, self.comm()));
        let rule = |sees| groups.groups.iter().map(|g| &g.rule).find(|rule| rule.sees() == sees);
        let works = match (rule(Sees::TensorSums), rule(Sees::Matrix)) {
            // Folded over all ranks, each element once.
            (Some(rule), _) if !stage.cuts_state() => Some((
                format!("sums over whole tensors, for {}", rule.name()),
                "Stage::Zero1, Zero2 or Zero3",
            )),
            (_, Some(rule)) => {
                Some((format!("whole matrices, for {}", rule.name()), "a rule that sees less"))
            }
            _ if clip == Clip::BeforeReduce => Some(("Clip::BeforeReduce".to_owned(), "Clip::AfterReduce")),
            _ => None,
        };
        let unweighed = Arc::ptr_eq(&among.shards, self.comm()) && !self.handover.fixed.weighs;
        match works {
            Some((what, works)) if !all => Err(Error::Shared { what, works }),
            _ if unweighed && combine == Combine::Weighted => {
                let what = "weights of ranks that compute the same micro-batch".to_owned();
                Err(Error::Shared { what, works: "groups of ranks with other micro-batches each" })
            }
            _ => Ok(()),
        }
    }

    /// What was prepared, once all ranks have shown that theirs is the same.
    pub(crate) fn agreed<T>(
        &self,
        comm: &dyn Communicator,
        prepared: Result<T, Error>,
        text: &str,
    ) -> Result<T, Error> {
        let same = agree::same_everywhere(comm, &self.options, text);
        let prepared = prepared?;
        same?;
        Ok(prepared)
    }

    fn first_values(
        &self,
        comm: &dyn Communicator,
        among: &Among,
        family: &mut Family,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        if self.options.stage.cuts_params() {
            self.first_chunks(comm, among, family, initial)?;
            return family.buckets.iter_mut().try_for_each(Owned::fill_masters);
        }
        let compare = self.options.initial == Initial::Compare;
        let first = among.copies.rank() == 0;
        let mut filled = if compare || first { family.fill(&self.options, initial) } else { Ok(()) };
        if compare {
            let mut text = family::objection(filled.as_ref().err());
            if filled.is_ok() {
                family.describe_values(&self.options, &mut text)?;
            }
            filled = self.agreed(&*among.copies, filled, &text);
        }
        // Other ranks hold other parameters, and hear of it too.
        self.agreed(comm, filled.as_ref().map_err(Clone::clone), &family::objection(filled.as_ref().err()))?;
        if !compare {
            family.broadcast(&*among.copies, &self.options.queue)?;
        }
        family.buckets.iter_mut().try_for_each(Owned::fill_masters)
    }

    /// Takes in what was prepared; cannot fail.
    fn commit(&mut self, mut family: Family, shelves: Vec<Shelf>) {
        for entry in &family.entries {
            self.by_name.insert(entry.param.name().to_owned(), self.by_name.len());
        }
        self.entries.append(&mut family.entries);
        self.groups.append(&mut family.groups.groups);
        self.buckets.append(&mut family.buckets);
        self.frozen.append(&mut family.frozen);
        self.handover.extend(family.kept, family.fillings, shelves);
        self.progress.present.resize_with(self.entries.len(), AtomicBool::default);
        self.room.due.resize(self.entries.len(), 0);
        let pieces = self.handover.fixed.buckets.iter().map(|k| k.gathered.len()).sum();
        self.room.gathering.reserve(pieces);
        self.progress.sent_before = self.handover.sent();
    }

    /// The communicator the ranks step with.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.handover.fixed.comm
    }

    /// What the optimizer was made with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) fn index(&self, name: &str) -> Result<usize, Error> {
        let unknown = || Error::UnknownParam { name: name.to_owned(), count: self.entries.len() };
        self.by_name.get(name).copied().ok_or_else(unknown)
    }
}
