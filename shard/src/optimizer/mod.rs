//! Sharded optimizer: all ranks build it together, then step it together.

pub(crate) mod add_params;
mod first_values;
#[cfg(feature = "cuda")]
mod gpu_step;
mod initial_chunks;
pub(crate) mod layout_state;
pub(crate) mod micro_batch;
mod step;
mod update_and_gather;
mod values;
mod verify;

use crate::config::options::Options;
use crate::config::param_groups::Groups;
use crate::error::Error;
use crate::gather::gatherer::Gatherer;
use crate::optimizer::add_params::{ParamGroup, add};
use crate::plan::layout_plan::Sizes;
use crate::plan::rule_parts;
use crate::ranks::agree;
use crate::ranks::data_rank::DataRank;
use crate::ranks::roles::{RankRoles, know};
use crate::reduce::reducer::GradReducer;
use crate::reduce::reducer_config::{BucketInfo, ReducerConfig};
use crate::reduce::together::objection;
use crate::step::decider::Decider;
use crate::update::evaluation::TrainedValues;
use crate::update::params::Params;
use crate::update::updater::Updater;
use crate::verify::Verifier;
use meshstep_comm::{Communicator, name_calls};
use meshstep_tensor::{Layout, Param, SliceMut};
use std::sync::Arc;

/// Parameters, gradients and optimizer state on one rank of a group.
///
/// One step is one [`micro_batch`](Self::micro_batch) (or several [`accumulate`](Self::accumulate)s and a last `micro_batch`),
/// every gradient handed over, and [`step`](Self::step). All ranks make the same calls, in the same order.
#[derive(Debug)]
pub struct Optimizer {
    /// Parameters and state of this rank.
    pub(crate) params: Params,
    /// Gradients in: buckets that fill, and their reduction.
    pub(crate) reducer: GradReducer,
    /// The decision of each step, and the run's counters.
    pub(crate) decider: Decider,
    /// The update of this rank's shard.
    pub(crate) updater: Updater,
    /// Parameters out: buckets after the update, units before they are read.
    pub(crate) gatherer: Gatherer,
    /// Comparison of ranks that hold the same.
    pub(crate) verifier: Verifier,
    /// Trained parameters, while the model is evaluated elsewhere.
    trained: Option<TrainedValues>,
}

impl Optimizer {
    /// Builds an optimizer for the parameters of `layout`, updated by `rules`. Collective: every rank passes the same arguments,
    /// which the ranks compare; an error on one rank is an error on all.
    ///
    /// `initial` supplies each parameter's first value (on rank 0 alone under [`Initial::Broadcast`](crate::Initial::Broadcast)).
    pub fn new(
        comm: Arc<dyn Communicator>,
        layout: Layout,
        rules: impl Into<Groups>,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
        options: Options,
    ) -> Result<Self, Error> {
        let _name = name_calls("Optimizer::new");
        let empty = Self::with_room(Arc::clone(&comm), DataRank::OWN, options.clone());
        if let Err(error) = &empty {
            // The other ranks compare their arguments now: report this rank's error to them.
            let told = agree::same_everywhere(&*comm, &options, &objection(Some(error)));
            tracing::debug!(?told, "no optimizer");
        }
        let mut optimizer = empty?;
        optimizer.add_param_group(layout, rules, initial)?;
        Ok(optimizer)
    }

    /// Builds an optimizer without parameters, to add some later; all ranks of `world` decide its steps together. `place` says
    /// which micro-batches this rank computes: ranks that compute the same ones give them the same weights, and the weights of
    /// one rank count. Collective like [`new`](Self::new); contradictory places are [`Error::Place`] on every rank.
    pub fn empty(world: Arc<dyn Communicator>, place: DataRank, options: Options) -> Result<Self, Error> {
        let _name = name_calls("Optimizer::empty");
        let made = place.check().map_err(Error::from);
        let made = made.and_then(|()| Self::with_room(Arc::clone(&world), place, options.clone()));
        let text = objection(made.as_ref().err());
        let same = agree::same_everywhere(&*world, &options, &text);
        let optimizer = made?;
        same?;
        place.check_everywhere(&*world, &options)?;
        Ok(optimizer)
    }

    fn with_room(comm: Arc<dyn Communicator>, place: DataRank, options: Options) -> Result<Self, Error> {
        Ok(Optimizer {
            decider: Decider::new(&options)?,
            updater: Updater::default(),
            gatherer: Gatherer::new(&options),
            verifier: Verifier::default(),
            trained: None,
            reducer: GradReducer::new(ReducerConfig::new(comm, place, options.clone()))?,
            params: Params::new(options),
        })
    }

    /// Adds parameters with rules of their own, between two steps. Collective, and checked like [`new`](Self::new). An error
    /// changes nothing on any rank, except that [`Error::Comm`] ends the run.
    pub fn add_param_group(
        &mut self,
        layout: Layout,
        rules: impl Into<Groups>,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        let _name = name_calls("Optimizer::add_param_group");
        let all = RankRoles::all(Arc::clone(self.comm()));
        self.add_shared(layout, rules, all, initial)
    }

    /// Adds parameters that the groups of ranks in `among` share.
    pub fn add_shared(
        &mut self,
        layout: Layout,
        rules: impl Into<Groups>,
        among: RankRoles,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        let _name = name_calls("Optimizer::add_shared");
        // Whole parameters are balanced over the ranks that share them.
        let along = |k: &&BucketInfo| Arc::ptr_eq(&k.among.shards, &among.shards);
        let alike: Vec<_> = self.reducer.config.buckets.iter().filter(along).map(|k| &k.plan).collect();
        let planned = rule_parts::plan((layout, rules.into()), &Sizes::from(&among), &alike, self.options());
        let group = |(part, rules)| ParamGroup { part, rules, among: among.clone() };
        add(self, planned.map(|parts| parts.into_iter().map(group).collect()), initial)
    }

    /// Adds several parts of a plan at once. Their common buffers are allocated once, as the plan says; their buckets travel in
    /// the plan's order, after the existing ones.
    pub fn add_parts(
        &mut self,
        parts: Vec<ParamGroup>,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        let _name = name_calls("Optimizer::add_parts");
        add(self, Ok(parts), initial)
    }

    /// Makes `alias` another name of the parameter `name`, for gradients and all other calls. Messages and checkpoints keep the
    /// first name only. Call it between two steps, the same on every rank.
    pub fn also_called(&mut self, alias: &str, name: &str) -> Result<(), Error> {
        self.params.alias(alias, name)
    }

    /// Describes how a model's parameters are cut into the ones here, in `key = value` lines. Optimizers that exchange owned
    /// ranges, as the workers of `meshstep-local` do, must agree on this text in addition to the parameters. All ranks pass the same
    /// text.
    pub fn arranged(&mut self, text: impl Into<String>) {
        self.params.arrangement = text.into();
    }

    /// Returns the communicator of all ranks that step together.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.reducer.config.comm
    }

    /// Returns the options that the optimizer was built with.
    pub fn options(&self) -> &Options {
        &self.params.options
    }

    /// Returns all parameters, in registration order; those of one layout with different rules stand rule by rule ([`Groups`]).
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.params.entries.iter().map(|e| &e.param)
    }

    /// Runs `call` on every rank between two steps, and returns the bytes that this rank sends in it, which no step counts: for
    /// communication beside the optimizer. An error of this rank alone ends the run: every communicator of the optimizer is
    /// aborted, including those of [`end_with`](Self::end_with).
    pub fn apart_from_steps<T>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<(T, u64), Error> {
        let before = self.reducer.sent();
        let called = call(self);
        let sent = self.reducer.exclude_from_step(before);
        Ok((self.reducer.end_if_alone(called)?, sent))
    }

    /// Registers communicators to abort together with the optimizer's, so that no rank waits there for one that has failed.
    pub fn end_with(&mut self, comms: impl IntoIterator<Item = Arc<dyn Communicator>>) {
        comms.into_iter().for_each(|comm| know(&mut self.reducer.config.comms, &comm));
    }

    /// Checks that this rank is between two steps: none is under way, and the outcome of every earlier one is known.
    pub(crate) fn check_between_steps(&mut self) -> Result<(), Error> {
        self.reducer.finish_dropped()?;
        self.check_outcomes()?;
        self.reducer.check_idle()
    }

    /// Waits for the steps launched on a GPU, and counts their updates.
    pub(crate) fn count_launched(&mut self) -> Result<(), Error> {
        self.decider.take_notes(&mut self.params, &self.reducer, true)
    }

    /// Sends changed counters of parameters and of the run to the device, if there is one.
    pub(crate) fn publish_counters(&mut self) -> Result<(), Error> {
        self.decider.recount(&mut self.params);
        self.decider.publish(&self.params)
    }

    /// Waits for the steps launched on a GPU, and returns an error that the caller has not read.
    pub(crate) fn check_outcomes(&mut self) -> Result<(), Error> {
        self.decider.poll_outcomes(&mut self.params, &self.reducer, true)
    }
}
