//! Adding parameters to an optimizer: arguments are compared, memory allocated, first values set; all parameters or none.

use crate::config::options::{Combine, NonFinite, Options};
use crate::config::param_groups::Groups;
use crate::config::stage::Stage;
use crate::error::Error;
use crate::optimizer::Optimizer;
use crate::optimizer::first_values::FirstValues;
use crate::optimizer::layout_state::{self, Before, LayoutState};
use crate::plan::bucket::BucketPlan;
use crate::plan::bucket_order::{self, append};
use crate::plan::layout_plan::{Part, Sizes};
use crate::plan::step_plan::{check_options, exchange_words};
use crate::plan::tensor_cuts::TensorCuts;
use crate::plan::units::Units;
use crate::ranks::roles::RankRoles;
use crate::reduce::double_ended::DoubleEnded;
use crate::reduce::together::objection;
use crate::step::exchange::Exchange;
use crate::update::matrix_exchange::PartExchange;
use crate::update::params::ParamPlace;
use crate::update::updater::Updater;
use meshstep_comm::Communicator;
use meshstep_tensor::{Param, SliceMut};
use std::collections::HashSet;
use std::sync::Arc;

/// A parameter group: a part of a plan, its rules, and the ranks that share it.
///
/// ```
/// use meshstep_shard::prelude::*;
/// use meshstep_shard::{ParamGroup, Part, Sizes};
///
/// // Two ranks that compute the same micro-batches, each with a half of "up", which no other rank has.
/// let ranks = loopback::spawn(2, |world| -> Result<f32, meshstep_shard::Error> {
///     let rank = world.rank();
///     let place = DataRank { index: 0, ranks: 2, first: rank == 0 };
///     let options = Options { stage: Stage::Zero1, ..Options::default() };
///     let own = loopback::world(loopback::Config::new(1))?.remove(0); // the group of this rank alone
///     let mut opt = Optimizer::empty(world, place, options.clone())?;
///     let layout = Layout::builder().param("up", &[2], DType::F32).build()?;
///     let part = Part::new(layout, Sizes::all(1), [], &options)?;
///     let group = ParamGroup { part, rules: Sgd::default().into(), among: RankRoles::all(own) };
///     opt.add_parts(vec![group], |_, _| Ok(()))?;
///     let mb = opt.micro_batch(1)?;
///     mb.grad("up", &[3f32, if rank == 0 { 0.0 } else { 4.0 }])?;
///     mb.finish()?;
///     let outcome = opt.step(StepArgs { lr: 1.0, max_norm: Some(1e3), ..StepArgs::default() })?.outcome()?;
///     let Outcome::Applied { norm, .. } = outcome else { panic!("finite gradients") };
///     assert!((norm - 34f64.sqrt()).abs() < 1e-9); // of both halves
///     Ok(opt.param("up")?.typed::<f32>()?[1])
/// })?;
/// assert_eq!(ranks.into_iter().collect::<Result<Vec<_>, _>>()?, [0.0, -4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
        let uncut = self.part.is_uncut();
        if let Some(TensorCuts { shapes, ranks, .. }) = self.part.cuts() {
            text += &format!("tensors that a mesh cuts = {shapes:?} on {ranks:?}\n");
        }
        text + &format!(
            "units in order = {units:?}\npositions = {positions:?}\nno parameter is cut = {uncut}\n"
        )
    }
}

/// Returns a line for the rule of each parameter of parts with positions, in their order, if the parts have different rules: ranks that
/// divide a layout in different ways compare these lines first.
fn describe_rules(parts: &[ParamGroup]) -> String {
    let of_part = |ParamGroup { part, rules, .. }: &ParamGroup| {
        let (positions, rule) = (part.positions().unwrap_or_default().to_vec(), rules.rule().name());
        let names = part.layout().params().iter().map(|param| param.name().to_owned());
        positions.into_iter().zip(names).map(|(at, name)| (at, name, rule)).collect::<Vec<_>>()
    };
    let mut rules: Vec<_> = parts.iter().flat_map(of_part).collect();
    rules.sort();
    if rules.iter().all(|(.., rule)| *rule == rules[0].2) {
        return String::new();
    }
    rules.iter().map(|(_, name, rule)| format!("rule of {name:?} = {rule}\n")).collect()
}

/// Everything that new parameters need, built beside the unchanged optimizer.
#[derive(Debug)]
struct Added {
    layout_states: Vec<LayoutState>,
    /// Buckets of the layouts in the order they travel, each as its layout and its index there.
    order: Vec<(usize, usize)>,
    room: Vec<DoubleEnded>,
    /// Units of all parameters.
    units: Units,
    /// Exchange for all parameters.
    exchange: Exchange,
    /// Updater of all parameters.
    updater: Updater,
    /// Communicator of all ranks for decisions made while buckets are in flight, if one is split off now.
    decision_comm: Option<Arc<dyn Communicator>>,
}

/// Layouts, the order of their buckets, pool memory for them, and all units.
type Prepared = (Vec<LayoutState>, Vec<(usize, usize)>, Vec<DoubleEnded>, Units);

/// Builds the additions, compares the arguments on all ranks, and commits. Every error is the same on all ranks, and leaves them
/// unchanged except for [`Error::Comm`].
pub(super) fn add(
    opt: &mut Optimizer,
    parts: Result<Vec<ParamGroup>, Error>,
    initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
) -> Result<(), Error> {
    opt.reducer.healthy()?;
    opt.reducer.apart(|reducer| reducer.barrier_all())?;
    let among: Vec<RankRoles> = parts.iter().flatten().map(|shared| shared.among.clone()).collect();
    let added = try_add(opt, parts, initial);
    if let Err(Error::Comm(failure)) = &added {
        opt.reducer.poison(failure.clone());
    }
    if opt.reducer.healthy().is_err() {
        // Some rank may wait for this one in groups that the optimizer does not know yet.
        among.iter().flat_map(RankRoles::comms).for_each(|comm| comm.abort());
    }
    added
}

fn try_add(
    opt: &mut Optimizer,
    parts: Result<Vec<ParamGroup>, Error>,
    mut initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
) -> Result<(), Error> {
    // An unread error of an earlier step counts for all ranks too, because other ranks may have returned it already.
    let ready = opt.check_outcomes().and_then(|()| opt.reducer.check_idle());
    let mut text = String::new();
    let mut made = ready.and(parts).and_then(|parts| {
        // A rank alone has no other to agree with.
        if opt.comm().world_size() > 1 {
            text = describe_rules(&parts);
            text.extend(parts.iter().map(|shared| shared.describe(opt.options())));
        }
        make(opt, parts)
    });
    if let Err(error) = &made {
        text = objection(Some(error));
    }
    let room = made.as_mut().ok().map(|added| added.exchange.room());
    let first = FirstValues { options: &opt.params.options, reducer: &opt.reducer, gatherer: &opt.gatherer };
    let same = first.compare(&**opt.comm(), &text, room);
    let mut added = made?;
    same?;
    added.layout_states.iter_mut().try_for_each(|layout_state| layout_state.register(opt.options()))?;
    added.decision_comm = split_decision_comm(opt)?;
    for i in 0..added.layout_states.len() {
        let (earlier, layout_state) = added.layout_states.split_at_mut(i);
        let gathers = gathers_among(opt, &layout_state[0].among, earlier)?;
        layout_state[0].kept.iter_mut().for_each(|kept| kept.gathers.clone_from(&gathers));
    }
    let Added { layout_states, exchange, .. } = &mut added;
    layout_states.iter_mut().try_for_each(|layout_state| first.set(layout_state, exchange, &mut initial))?;
    commit(opt, added);
    Ok(())
}

/// Allocates all memory, so that nothing can fail once the ranks have agreed.
fn make(opt: &Optimizer, parts: Vec<ParamGroup>) -> Result<Added, Error> {
    let (layout_states, order, room, units) = prepare(opt, parts)?;
    let (params, options) = (&opt.params, opt.options());
    let added: usize = layout_states.iter().map(|layout_state| layout_state.entries.len()).sum();
    let (count, buckets) = (params.entries.len() + added, params.buckets.len() + order.len());
    let exchange = Exchange::new(exchange_words(count, buckets, options), options)?;
    let added = layout_states.iter().flat_map(|layout_state| &layout_state.groups.groups);
    let exchanges = layout_states.iter().filter_map(|layout_state| layout_state.exchange.clone());
    let exchanges = opt.updater.exchanges().chain(exchanges).collect();
    let updater = Updater::new(count, params.groups.iter().chain(added), opt.comm(), exchanges, params)?;
    Ok(Added { layout_states, order, room, units, exchange, updater, decision_comm: None })
}

fn split_decision_comm(opt: &Optimizer) -> Result<Option<Arc<dyn Communicator>>, Error> {
    let exists = opt.reducer.config.decision_comm.is_some();
    if exists || opt.options().non_finite != NonFinite::Propagate {
        return Ok(None);
    }
    Ok(opt.comm().split(Some(0), opt.comm().rank() as i64)?)
}

/// Returns the communicator that gathers the parameters shared among these ranks, if parameters are sharded. It is a communicator
/// of its own, because gathers and reductions have no common order. The buckets of `added` are about to be added before them.
/// Collective.
fn gathers_among(
    opt: &Optimizer,
    among: &RankRoles,
    added: &[LayoutState],
) -> Result<Option<Arc<dyn Communicator>>, Error> {
    if !opt.options().stage.cuts_params() {
        return Ok(None);
    }
    let known = &opt.reducer.config.buckets;
    let mut known = known.iter().chain(added.iter().flat_map(|layout_state| &layout_state.kept));
    let known = known.find(|kept| Arc::ptr_eq(&kept.among.shards, &among.shards));
    match known {
        Some(known) => Ok(known.gathers.clone()),
        None => Ok(among.shards.split(Some(0), among.shards.rank() as i64)?),
    }
}

fn check_parts(opt: &Optimizer, parts: &[ParamGroup]) -> Result<(), Error> {
    let options = opt.options();
    check_options(opt.comm().world_size(), options)?;
    options.norm.check()?;
    options.loss_scale.map_or(Ok(()), |rule| rule.check())?;
    let mut names = HashSet::new();
    for (i, shared) in parts.iter().enumerate() {
        check_part(opt, shared, &names)?;
        // The last part's names are compared with nothing.
        let own = shared.part.layout().params().iter().filter(|_| i + 1 < parts.len());
        names.extend(own.map(Param::name));
    }
    check_slots(opt, parts)?;
    let spans =
        |among: &RankRoles| Arc::ptr_eq(&among.shards, opt.comm()) && among.extra_reductions.is_empty();
    if parts.iter().all(|shared| spans(&shared.among)) {
        // The parameters of several groups may come in several calls.
        let earlier = opt.reducer.config.buckets.iter().map(|k| &k.plan);
        let added = parts.iter().flat_map(|shared| shared.part.buckets());
        options.precision.check_used(earlier.chain(added).map(|bucket| bucket.dtype))?;
    }
    Ok(())
}

/// Refuses slots of a rank that has different positions in the groups that reduce its gradients: it computes one run of slots.
fn check_slots(opt: &Optimizer, parts: &[ParamGroup]) -> Result<(), Error> {
    let known = opt.reducer.config.buckets.iter().map(|bucket| bucket.among.shards.rank());
    let mut ranks = known.chain(parts.iter().map(|shared| shared.among.shards.rank()));
    let first = ranks.next();
    if opt.options().slots.is_some() && ranks.any(|rank| Some(rank) != first) {
        let what = "slots of a rank that has different positions in two groups".to_owned();
        return Err(Error::Shared { what, works: "groups whose ranks have one order" });
    }
    Ok(())
}

fn prepare(opt: &Optimizer, parts: Vec<ParamGroup>) -> Result<Prepared, Error> {
    check_parts(opt, &parts)?;
    let params = &opt.params;
    let order = bucket_order::of(&parts.iter().map(|shared| &shared.part).collect::<Vec<_>>())?;
    let places = bucket_order::places(&order, parts.len(), params.buckets.len());
    let (mut layout_states, mut units): (Vec<LayoutState>, Units) = (Vec::new(), params.units.clone());
    let (before_all, mut series) = (opt.reducer.series(), Vec::new());
    let mut so_far = Before::of(params);
    for (ParamGroup { mut part, rules, among }, places) in parts.into_iter().zip(places) {
        let mut before = so_far;
        if part.positions().is_none() {
            before.position += before.params - params.entries.len();
        }
        units.extend(part.take_units(), &places);
        // Matrices travel between the shards, or between all ranks that hold cut ones together.
        let exchanging =
            Arc::clone(among.tensors.as_ref().filter(|_| part.cuts().is_some()).unwrap_or(&among.shards));
        let seat = (among.shards.rank(), &Arc::new(among));
        let mut layout_state = LayoutState::new(&part, rules.clone(), before, seat, opt.options())?;
        layout_state.exchange = PartExchange::new(
            (&part, &rules),
            (&layout_state.buckets, &exchanging),
            (&places, so_far.params),
        )?;
        layout_state.kept.iter_mut().for_each(|kept| kept.series += before_all + series.len());
        series.extend(part.series());
        so_far.count(&layout_state);
        layout_states.push(layout_state);
    }
    let added = order.iter().map(|&(layout_state, b)| &layout_states[layout_state].kept[b]);
    let kept: Vec<&BucketPlan> = opt.reducer.config.buckets.iter().chain(added).map(|k| &k.plan).collect();
    let room = opt.reducer.room_for(&series, &opt.options().meter)?;
    opt.gatherer.reserve(params, &units, &kept)?;
    Ok((layout_states, order, room, units))
}

/// Checks that the part can be added after parameters with these `names`, which are added with it.
fn check_part(
    opt: &Optimizer,
    ParamGroup { part, rules, among }: &ParamGroup,
    names: &HashSet<&str>,
) -> Result<(), Error> {
    let taken = |name: &str| opt.params.has(name) || names.contains(name);
    if let Some(p) = part.layout().params().iter().find(|p| taken(p.name())) {
        return Err(Error::NameTaken { name: p.name().to_owned() });
    }
    among.check_parts(part.layout())?;
    if *part.sizes() != Sizes::from(among) || part.stage() != opt.options().stage {
        let what = format!("a part for {:?} at {:?}", part.sizes(), part.stage());
        return Err(Error::Shared { what, works: "a part that is planned for these ranks and options" });
    }
    let (slots, cuts_grads) = (opt.reducer.config.slots.as_ref(), opt.options().cuts_grads());
    if part.slots() != slots || part.cuts_grads() != cuts_grads {
        let what = "a part that is planned for other sums of gradients".to_owned();
        return Err(Error::Shared {
            what,
            works: "a part with this optimizer's Options::slots, accumulate and combine",
        });
    }
    let alike = among.extra_reductions.is_empty()
        && among.parts.is_empty()
        && among.comms().all(|comm| Arc::ptr_eq(comm, opt.comm()));
    rules.check(part, alike, opt.options())?;
    if rules.see_matrices() {
        check_tensors(part, rules, among, opt.comm().world_size())?;
    }
    let unweighed = Arc::ptr_eq(&among.shards, opt.comm()) && !opt.reducer.config.place.first;
    if unweighed && opt.options().combine == Combine::Weighted {
        let what = "weights of ranks that compute the same micro-batch".to_owned();
        return Err(Error::Shared { what, works: "groups of ranks with other micro-batches each" });
    }
    Ok(())
}

/// Checks that matrices are whole on one rank, or are exchanged between the ranks that hold them. All of `ranks` ranks hold a matrix, or a
/// part of it.
fn check_tensors(part: &Part, rules: &Groups, among: &RankRoles, ranks: usize) -> Result<(), Error> {
    let rule = rules.rule().name();
    if !part.is_uncut() && !rules.update_pieces() {
        return Err(Error::NeedsWholeParams { rule, stage: part.stage() });
    }
    let refused =
        |of: String, works| Err(Error::Shared { what: format!("whole matrices, for {rule}, {of}"), works });
    match part.cuts() {
        None if !among.parts.is_empty() || among.replicas.world_size() < ranks => {
            refused("of parameters that other ranks have in part".to_owned(), "Part::with_cuts")
        }
        None => Ok(()),
        Some(TensorCuts { ranks, .. }) => {
            let own = among.tensors.as_ref().filter(|comm| comm.world_size() == ranks.len());
            let expected = if part.stage() == Stage::Replicated { 0 } else { among.shards.rank() };
            if own.is_some_and(|comm| ranks[comm.rank()].shard == expected) {
                return Ok(());
            }
            refused(format!("on the ranks {ranks:?}"), "RankRoles::tensors with these ranks in this order")
        }
    }
}

/// Commits everything; cannot fail.
fn commit(opt: &mut Optimizer, added: Added) {
    let Added { layout_states, order, room, units, exchange, updater, decision_comm } = added;
    let Optimizer { params, reducer, decider, gatherer, verifier, .. } = opt;
    (decider.exchange, opt.updater, params.units) = (exchange, updater, units);
    if decision_comm.is_some() {
        reducer.config.comms.extend(decision_comm.clone());
        reducer.config.decision_comm = decision_comm;
    }
    // The device's list of names is incomplete now.
    decider.launched.reset();
    let places = bucket_order::places(&order, layout_states.len(), params.buckets.len());
    let (mut owned, mut kept, mut fills) = (Vec::new(), Vec::new(), Vec::new());
    for (mut layout_state, places) in layout_states.into_iter().zip(places) {
        for entry in &mut layout_state.entries {
            if let ParamPlace::Bucket { bucket, .. } = &mut entry.place {
                *bucket = places[*bucket];
            }
        }
        params.extend(layout_state.entries);
        params.groups.append(&mut layout_state.groups.groups);
        verifier.frozen.extend(layout_state.frozen.iter().map(|_| Arc::clone(&layout_state.among)));
        params.frozen.append(&mut layout_state.frozen);
        owned.push(layout_state.buckets);
        kept.push(layout_state.kept);
        fills.push(layout_state.fills);
    }
    append(&mut params.buckets, bucket_order::sorted(&order, owned));
    let added = (bucket_order::sorted(&order, kept), bucket_order::sorted(&order, fills));
    reducer.extend(added, room);
    reducer.progress.resize(params.entries.len());
    gatherer.in_flight.reserve(reducer.config.buckets.iter().map(|k| k.gathered.len()).sum());
    reducer.progress.sent_before = reducer.sent();
}
