//! Adding parameters to an optimizer: arguments are compared, memory allocated, first values set; all parameters or none.

use crate::optimizer::layout_state::{self, Before, LayoutState, ParamPlace};
use crate::plan::bucket_order;
use crate::plan::step_plan::{check_options, exchange_words};
use crate::plan::units::Units;
use crate::reduce::double_ended::DoubleEnded;
use crate::step::exchange::Exchange;
use crate::update::tensor_norms::TensorTotals;
use crate::{BucketPlan, Combine, Error, Groups, NonFinite, Optimizer, Options, Part, RankRoles, Sizes};
use meshstep_comm::Communicator;
use meshstep_tensor::{Param, SliceMut};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A parameter group: a part of a plan, its rules, and the ranks that share it.
#[derive(Clone, Debug)]
pub struct ParamGroup {
    /// Stored and owned ranges, planned with the optimizer's options.
    pub part: Part,
    /// Update rules.
    pub rules: Groups,
    /// Communicators of the part's [`Sizes`].
    pub among: RankRoles,
}

impl ParamGroup {
    /// Returns the text that must agree on all ranks.
    fn describe(&self, options: &Options) -> String {
        let mut text = layout_state::describe(self.part.layout(), &self.rules, options);
        layout_state::describe_roles(&self.among, &mut text);
        let (units, positions) = (self.part.layout().units(), self.part.positions());
        text + &format!("units in order = {units:?}\npositions = {positions:?}\n")
    }
}

/// Everything that new parameters need, built beside the unchanged optimizer.
#[derive(Debug)]
struct Added {
    layout_states: Vec<LayoutState>,
    /// Buckets of the families in the order they travel, each as its family and its index there.
    order: Vec<(usize, usize)>,
    room: Vec<DoubleEnded>,
    /// Units of all parameters.
    units: Units,
    /// Exchange for all parameters.
    exchange: Exchange,
    /// Sums of all parameters.
    totals: TensorTotals,
    /// Communicator of all ranks for decisions made while buckets are in flight, if one is split off now.
    decision_comm: Option<Arc<dyn Communicator>>,
}

/// Families, the order of their buckets, pool memory for them, and all units.
type Prepared = (Vec<LayoutState>, Vec<(usize, usize)>, Vec<DoubleEnded>, Units);

impl Optimizer {
    /// Builds the additions, compares the arguments on all ranks, and commits. Every error is the same on all ranks, and leaves them
    /// unchanged except for [`Error::Comm`].
    pub(crate) fn add(
        &mut self,
        parts: Result<Vec<ParamGroup>, Error>,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        self.reducer.healthy()?;
        self.apart_from_steps(|all| all.barrier_all())?;
        let among: Vec<RankRoles> = parts.iter().flatten().map(|shared| shared.among.clone()).collect();
        let added = self.try_add(parts, initial);
        if let Err(Error::Comm(failure)) = &added {
            self.reducer.poison(failure.clone());
        }
        if self.reducer.healthy().is_err() {
            // Some rank may wait for this one in groups that the optimizer does not know yet.
            among.iter().flat_map(RankRoles::comms).for_each(|comm| comm.abort());
        }
        added
    }

    fn try_add(
        &mut self,
        parts: Result<Vec<ParamGroup>, Error>,
        mut initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        // An unread error of an earlier step counts for all ranks too, because other ranks may have returned it already.
        let ready = self.check_heard().and_then(|()| self.check_idle());
        let comm = Arc::clone(self.comm());
        let mut text = String::new();
        let mut made = ready.and(parts).and_then(|parts| {
            text = parts.iter().map(|shared| shared.describe(&self.options)).collect();
            self.make(parts)
        });
        if let Err(error) = &made {
            text = layout_state::objection(Some(error));
        }
        let room = made.as_mut().ok().map(|added| added.exchange.room());
        let same = self.tell(&*comm, &text, room);
        let mut added = made?;
        same?;
        added.layout_states.iter().try_for_each(|layout_state| layout_state.register(&self.options))?;
        added.decision_comm = self.split_decision_comm()?;
        for i in 0..added.layout_states.len() {
            let (earlier, layout_state) = added.layout_states.split_at_mut(i);
            let gathers = self.gathers_among(&layout_state[0].among, earlier)?;
            layout_state[0].kept.iter_mut().for_each(|kept| kept.gathers.clone_from(&gathers));
        }
        let Added { layout_states, exchange, .. } = &mut added;
        layout_states
            .iter_mut()
            .try_for_each(|layout_state| self.first_values(layout_state, exchange, &mut initial))?;
        self.commit(added);
        Ok(())
    }

    /// Allocates all memory, so that nothing can fail once the ranks have agreed.
    fn make(&self, parts: Vec<ParamGroup>) -> Result<Added, Error> {
        let (layout_states, order, room, units) = self.prepare(parts)?;
        let count = self.entries.len()
            + layout_states.iter().map(|layout_state| layout_state.entries.len()).sum::<usize>();
        let buckets = self.buckets.len() + order.len();
        let exchange = Exchange::new(exchange_words(count, buckets, &self.options), &self.options)?;
        let (stage, meter) = (self.options.stage, &self.options.meter);
        let groups = self
            .groups
            .iter()
            .chain(layout_states.iter().flat_map(|layout_state| &layout_state.groups.groups));
        let totals = TensorTotals::new(count, groups, stage, self.comm(), meter)?;
        Ok(Added { layout_states, order, room, units, exchange, totals, decision_comm: None })
    }

    fn split_decision_comm(&self) -> Result<Option<Arc<dyn Communicator>>, Error> {
        let there = self.reducer.config.decision_comm.is_some();
        if there || self.options.non_finite != NonFinite::Propagate {
            return Ok(None);
        }
        Ok(self.comm().split(Some(0), self.comm().rank() as i64)?)
    }

    fn check_parts(&self, parts: &[ParamGroup]) -> Result<(), Error> {
        check_options(self.comm().world_size(), &self.options)?;
        self.options.norm.check()?;
        self.options.loss_scale.map_or(Ok(()), |rule| rule.check())?;
        for (i, shared) in parts.iter().enumerate() {
            self.check_part(shared, &parts[..i])?;
        }
        let spans =
            |among: &RankRoles| Arc::ptr_eq(&among.shards, self.comm()) && among.extra_reductions.is_empty();
        if parts.iter().all(|shared| spans(&shared.among)) {
            // The parameters of several groups may come in several calls.
            let earlier = self.reducer.config.buckets.iter().map(|k| &k.plan);
            let added = parts.iter().flat_map(|shared| shared.part.buckets());
            self.options.precision.check_used(earlier.chain(added).map(|bucket| bucket.dtype))?;
        }
        Ok(())
    }

    fn prepare(&self, parts: Vec<ParamGroup>) -> Result<Prepared, Error> {
        self.check_parts(&parts)?;
        let order = bucket_order::of(&parts.iter().map(|shared| &shared.part).collect::<Vec<_>>())?;
        let places = bucket_order::places(&order, parts.len(), self.buckets.len());
        let (mut layout_states, mut units): (Vec<LayoutState>, Units) = (Vec::new(), self.units.clone());
        let (before_all, mut series) = (self.reducer.series(), Vec::new());
        for (ParamGroup { part, rules, among }, places) in parts.into_iter().zip(places) {
            let position = self.entries.iter().map(|entry| entry.position + 1).max().unwrap_or(0);
            let (params, vectors, groups) = (self.entries.len(), self.frozen.len(), self.groups.len());
            let mut before = Before { params, vectors, groups, position };
            layout_states.iter().for_each(|layout_state| before.count(layout_state));
            if part.positions().is_none() {
                before.position += before.params - params;
            }
            units.extend(&part.units(), &places);
            let seat = (among.shards.rank(), &Arc::new(among));
            let mut layout_state = LayoutState::new(&part, rules, before, seat, &self.options)?;
            layout_state.kept.iter_mut().for_each(|kept| kept.series += before_all + series.len());
            series.extend(part.series());
            layout_states.push(layout_state);
        }
        let added = order.iter().map(|&(layout_state, b)| &layout_states[layout_state].kept[b]);
        let kept: Vec<&BucketPlan> =
            self.reducer.config.buckets.iter().chain(added).map(|k| &k.plan).collect();
        let room = self.reducer.room_for(&series, &self.options.meter)?;
        self.reserve_for(&units, &kept)?;
        Ok((layout_states, order, room, units))
    }

    /// Checks that the part can be added after `others`, which are added with it.
    fn check_part(
        &self,
        ParamGroup { part, rules, among }: &ParamGroup,
        others: &[ParamGroup],
    ) -> Result<(), Error> {
        let taken = |name: &str| {
            self.by_name.contains_key(name)
                || others.iter().any(|other| other.part.layout().get(name).is_some())
        };
        if let Some(p) = part.layout().params().iter().find(|p| taken(p.name())) {
            return Err(Error::NameTaken { name: p.name().to_owned() });
        }
        among.check_parts(part.layout())?;
        if *part.sizes() != Sizes::from(among) || part.stage() != self.options.stage {
            let what = format!("a part for {:?} at {:?}", part.sizes(), part.stage());
            return Err(Error::Shared { what, works: "a part that is planned for these ranks and options" });
        }
        let alike = among.extra_reductions.is_empty()
            && among.parts.is_empty()
            && among.comms().all(|comm| Arc::ptr_eq(comm, self.comm()));
        rules.check(part.layout(), alike, &self.options)?;
        let unweighed = Arc::ptr_eq(&among.shards, self.comm()) && !self.reducer.config.place.first;
        if unweighed && self.options.combine == Combine::Weighted {
            let what = "weights of ranks that compute the same micro-batch".to_owned();
            return Err(Error::Shared { what, works: "groups of ranks with other micro-batches each" });
        }
        Ok(())
    }

    /// Commits everything; cannot fail.
    fn commit(&mut self, added: Added) {
        let Added { layout_states, order, room, units, exchange, totals, decision_comm } = added;
        (self.exchange, self.totals, self.units) = (exchange, totals, units);
        if decision_comm.is_some() {
            self.reducer.config.comms.extend(decision_comm.clone());
            self.reducer.config.decision_comm = decision_comm;
        }
        #[cfg(feature = "cuda")]
        {
            // Its list of names is incomplete now.
            self.room.gpu = None;
        }
        let (places, mut buckets) =
            (bucket_order::places(&order, layout_states.len(), self.buckets.len()), Vec::new());
        for (mut layout_state, places) in layout_states.into_iter().zip(places) {
            for (index, entry) in (self.entries.len()..).zip(&mut layout_state.entries) {
                if let ParamPlace::Bucket { bucket, .. } = &mut entry.place {
                    *bucket = places[*bucket];
                }
                self.by_name.insert(entry.param.name().to_owned(), index);
            }
            self.entries.append(&mut layout_state.entries);
            self.groups.append(&mut layout_state.groups.groups);
            self.verifying.frozen.extend(layout_state.frozen.iter().map(|_| Arc::clone(&layout_state.among)));
            self.frozen.append(&mut layout_state.frozen);
            buckets.push(layout_state.kept.into_iter().zip(layout_state.fills).zip(layout_state.buckets));
        }
        let in_order = order.iter().filter_map(|&(layout_state, _)| buckets[layout_state].next());
        let (added, owned): (Vec<_>, Vec<_>) = in_order.unzip();
        self.buckets.extend(owned);
        self.reducer.extend(added, room);
        self.progress.present.resize_with(self.entries.len(), AtomicBool::default);
        self.room.due.resize(self.entries.len(), 0);
        let pieces = self.reducer.config.buckets.iter().map(|k| k.gathered.len()).sum();
        self.room.gathering.reserve(pieces);
        self.progress.sent_before = self.reducer.sent();
    }
}
