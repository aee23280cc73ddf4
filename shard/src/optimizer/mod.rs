//! Sharded optimizer: all ranks build it together, then step it together.

pub(crate) mod add_params;
pub(crate) mod freeze;
pub(crate) mod initial_chunks;
pub(crate) mod initial_values;
pub(crate) mod layout_state;
pub(crate) mod read;
pub(crate) mod values;

use crate::config::param_groups::RuleGroup;
use crate::gather::unit_memory::GatherRoom;
use crate::optimizer::layout_state::ParamEntry;
use crate::plan::units::Units;
use crate::ranks::agree;
use crate::reduce::pool::Pool;
use crate::reduce::reducer::GradReducer;
use crate::reduce::reducer_config::{BucketInfo, ReducerConfig};
use crate::step::exchange::Exchange;
use crate::update::owned_bucket::Owned;
use crate::update::tensor_norms::TensorTotals;
use crate::verify::Verifying;
use crate::{Combine, DataRank, Error, Groups, LocalClip, Options, ParamGroup, Part, RankRoles, Sizes};
use meshstep_comm::{Communicator, Reduction, name_calls};
use meshstep_optim::LossScaleState;
use meshstep_tensor::{Layout, Param, SliceMut};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};

/// Parameters, gradients and optimizer state on one rank of a group.
///
/// One step is one [`micro_batch`](Self::micro_batch) (or several [`accumulate`](Self::accumulate)s and a last `micro_batch`),
/// every gradient handed over, and [`step`](Self::step). All ranks make the same calls, in the same order.
#[derive(Debug)]
pub struct Optimizer {
    pub(crate) entries: Vec<ParamEntry>,
    pub(crate) by_name: HashMap<String, usize>,
    /// Text that describes how the model is cut into this rank's parameters.
    pub(crate) arrangement: String,
    pub(crate) groups: Vec<RuleGroup>,
    pub(crate) buckets: Vec<Owned>,
    pub(crate) frozen: Vec<meshstep_tensor::Buffer>,
    pub(crate) reducer: GradReducer,
    pub(crate) exchange: Exchange,
    pub(crate) options: Options,
    pub(crate) progress: Progress,
    pub(crate) room: StepScratch,
    pub(crate) totals: TensorTotals,
    pub(crate) units: Units,
    pub(crate) gather_room: Mutex<GatherRoom>,
    pub(crate) verifying: Verifying,
}

/// Progress of the current step.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Steps taken or skipped.
    pub(crate) steps: u64,
    /// Steps skipped in a row.
    pub(crate) skips: u32,
    /// Skips in a row since the loss scale could last fall.
    pub(crate) skips_at_min_scale: u32,
    /// Loss scale of this step, if there is one.
    pub(crate) loss_scale: Option<LossScaleState>,
    /// Micro-batches begun in this step.
    pub(crate) batches: u64,
    /// Sum of their weights.
    pub(crate) weight: u64,
    /// Digest of their weights, in order.
    pub(crate) weights: u64,
    /// True while a micro-batch is begun and not finished.
    pub(crate) unfinished: AtomicBool,
    /// True if a micro-batch was dropped and completed with zeros.
    pub(crate) dropped: bool,
    /// Norm of this rank's own gradients in the last step, and the factor that clipped them.
    pub(crate) local_clip: Option<LocalClip>,
    /// True once the step's last micro-batch is finished.
    pub(crate) due: AtomicBool,
    /// First parameter with a missing gradient; `usize::MAX`: no gradient is missing.
    pub(crate) missing: AtomicUsize,
    /// True for each parameter that has a gradient; read if ranks count gradients.
    pub(crate) present: Vec<AtomicBool>,
    /// Gradient bytes copied into buckets.
    pub(crate) copied: AtomicU64,
    /// Bytes the communicator had sent when the last step ended.
    pub(crate) sent_before: u64,
}

/// Buffers kept from step to step, so that steps allocate nothing.
#[derive(Debug, Default)]
pub(crate) struct StepScratch {
    /// `t` of each parameter's update in this step; 0: no update.
    pub(crate) due: Vec<u64>,
    pub(crate) gathering: crate::gather::param_gather::Gathering,
    /// Decision state on the GPU, made by the first step.
    #[cfg(feature = "cuda")]
    pub(crate) gpu: Option<crate::step::gpu::GpuStep>,
    /// Failed steps with an outcome that the caller has not read yet.
    #[cfg(feature = "cuda")]
    pub(crate) unreported: Vec<Arc<crate::step::gpu::Ticket>>,
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
            let told = agree::same_everywhere(&*comm, &options, &layout_state::objection(Some(error)));
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
        let text = layout_state::objection(made.as_ref().err());
        let same = agree::same_everywhere(&*world, &options, &text);
        let optimizer = made?;
        same?;
        place.check_everywhere(&*world, &options)?;
        Ok(optimizer)
    }

    fn with_room(comm: Arc<dyn Communicator>, place: DataRank, options: Options) -> Result<Self, Error> {
        let reduction = match options.combine {
            Combine::Sum | Combine::Weighted => Reduction::Sum,
            Combine::Mean => Reduction::Mean,
        };
        let config = ReducerConfig {
            comms: vec![Arc::clone(&comm)],
            gathers: Vec::new(),
            comm,
            decision_comm: None,
            place,
            queue: options.queue.clone(),
            stage: options.stage,
            reduction,
            overlap: options.overlap,
            wait_budget: options.wait_budget,
            norm: options.norm,
            buckets: Vec::new(),
        };
        let pool = Pool::new(&options.queue, &options.meter);
        let loss_scale = options.loss_scale.map(|rule| rule.start());
        Ok(Optimizer {
            entries: Vec::new(),
            by_name: HashMap::new(),
            arrangement: String::new(),
            groups: Vec::new(),
            buckets: Vec::new(),
            frozen: Vec::new(),
            reducer: GradReducer::new(config, pool, &options.meter)?,
            exchange: Exchange::new([0, 0], &options)?,
            units: Units::default(),
            gather_room: Mutex::new(GatherRoom::new(&options)),
            options,
            progress: Progress { missing: AtomicUsize::new(usize::MAX), loss_scale, ..Progress::default() },
            room: StepScratch::default(),
            totals: TensorTotals::default(),
            verifying: Verifying::default(),
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
        let rules = rules.into();
        // Whole parameters are balanced over the ranks that share them.
        let along = |k: &&BucketInfo| Arc::ptr_eq(&k.among.shards, &among.shards);
        let alike = self.reducer.config.buckets.iter().filter(along).map(|k| &k.plan);
        let part = self
            .options
            .precision
            .check_rules(&rules)
            .and_then(|()| Part::after(layout, Sizes::from(&among), alike, &self.options));
        self.add(part.map(|part| vec![ParamGroup { part, rules, among }]), initial)
    }

    /// Adds several parts of a plan at once. Their common buffers are allocated once, as the plan says; their buckets travel in
    /// the plan's order, after the existing ones.
    pub fn add_parts(
        &mut self,
        parts: Vec<ParamGroup>,
        initial: impl FnMut(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error>,
    ) -> Result<(), Error> {
        let _name = name_calls("Optimizer::add_parts");
        self.add(Ok(parts), initial)
    }

    /// Makes `alias` another name of the parameter `name`, for gradients and all other calls. Messages and checkpoints keep the
    /// first name only. Call it between two steps, the same on every rank.
    pub fn also_called(&mut self, alias: &str, name: &str) -> Result<(), Error> {
        let index = self.index(name)?;
        self.check_alias(&self.units, alias, index)?;
        match self.by_name.get(alias) {
            Some(&other) if other != index => Err(Error::NameTaken { name: alias.to_owned() }),
            _ => {
                self.by_name.insert(alias.to_owned(), index);
                Ok(())
            }
        }
    }

    /// Describes how a model's parameters are cut into the ones here, in `key = value` lines. Optimizers that exchange owned
    /// ranges, as [workers](crate::local) do, must agree on this text in addition to the parameters. All ranks pass the same
    /// text.
    pub fn arranged(&mut self, text: impl Into<String>) {
        self.arrangement = text.into();
    }

    /// Returns the communicator of all ranks that step together.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.reducer.config.comm
    }

    /// Returns the options that the optimizer was built with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) fn index(&self, name: &str) -> Result<usize, Error> {
        let unknown = || Error::UnknownParam { name: name.to_owned(), count: self.entries.len() };
        self.by_name.get(name).copied().ok_or_else(unknown)
    }
}
