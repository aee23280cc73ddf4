//! Interface for crates that exchange values of several optimizers: steps with hooks, and this rank's vectors by bucket.

use crate::extend::shard::OptimizerShard;
use crate::update::hooks::UpdateHooks;
use crate::update::owned_bucket::Owned;
use crate::update::params::{ParamPlace, Params};
use crate::update::values::VectorKind;
use crate::{BucketPlan, Error, Optimizer, Options, Pending, StepArgs};
use meshstep_optim::Rule;
use meshstep_tensor::{Buffer, Slice, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// Parts of an [`Optimizer`] for a wrapper that exchanges values with other optimizers.
pub trait OptimizerExchange: OptimizerShard {
    /// Returns the parameters and state of this rank.
    fn own_params(&self) -> &Params;

    /// Returns the parameters and state of this rank, for changes between two steps.
    fn own_params_mut(&mut self) -> &mut Params;

    /// Returns the plan of each bucket, and the names of its parameters.
    fn bucket_plans(&self) -> impl Iterator<Item = (&BucketPlan, &[Arc<str>])>;

    /// Takes the step with hooks around its update. Collective, like [`Optimizer::step`].
    fn step_with_hooks(&mut self, at: StepArgs, hooks: &mut dyn UpdateHooks) -> Result<Pending, Error>;

    /// Returns the weight of this step's micro-batches; 0 on a rank whose weight another rank counts.
    fn own_weight(&self) -> u64;

    /// Returns an error in the middle of a step.
    fn check_idle(&self) -> Result<(), Error>;

    /// Ends the run on every rank because of an error that the other ranks do not have, and returns the error.
    fn abort_with(&self, error: Error) -> Error;

    /// Gathers all parameters on every rank, after their owners have changed them. Collective.
    fn gather_all(&mut self) -> Result<(), Error>;

    /// Keeps hashes of the vectors that no other rank holds, if the next step verifies.
    fn keep_if_due(&mut self) -> Result<(), Error>;

    /// Returns the number of steps, followed by the number of updates of each parameter, once launched steps are decided.
    fn update_counts(&mut self) -> Result<Vec<u64>, Error>;

    /// Sets the counts that [`update_counts`](Self::update_counts) returns, on the device too. Missing counts stay as they are.
    fn set_update_counts(&mut self, counts: &[u64]) -> Result<(), Error>;
}

impl OptimizerExchange for Optimizer {
    fn own_params(&self) -> &Params {
        &self.params
    }

    fn own_params_mut(&mut self) -> &mut Params {
        &mut self.params
    }

    fn bucket_plans(&self) -> impl Iterator<Item = (&BucketPlan, &[Arc<str>])> {
        self.reducer.config.buckets.iter().map(|kept| (&kept.plan, &kept.names[..]))
    }

    fn step_with_hooks(&mut self, at: StepArgs, hooks: &mut dyn UpdateHooks) -> Result<Pending, Error> {
        Optimizer::step_with_hooks(self, at, hooks)
    }

    fn own_weight(&self) -> u64 {
        self.reducer.weight()
    }

    fn check_idle(&self) -> Result<(), Error> {
        self.reducer.check_idle()
    }

    fn abort_with(&self, error: Error) -> Error {
        self.reducer.abort_with(error)
    }

    fn gather_all(&mut self) -> Result<(), Error> {
        self.gatherer.gather_all(&mut self.params, &self.reducer)
    }

    fn keep_if_due(&mut self) -> Result<(), Error> {
        Optimizer::keep_if_due(self)
    }

    fn update_counts(&mut self) -> Result<Vec<u64>, Error> {
        self.count_launched()?;
        let ts = self.params.entries.iter().map(|entry| entry.t);
        Ok(std::iter::once(self.decider.progress.steps).chain(ts).collect())
    }

    fn set_update_counts(&mut self, counts: &[u64]) -> Result<(), Error> {
        let ts = self.params.entries.iter_mut().map(|entry| &mut entry.t);
        let all = std::iter::once(&mut self.decider.progress.steps).chain(ts);
        all.zip(counts).for_each(|(place, count)| *place = *count);
        self.publish_counters()
    }
}

/// Elements of a parameter that this rank owns, and their ranges in the vectors of its bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedPart {
    /// Index of the bucket.
    pub bucket: usize,
    /// Elements, counted from the first that was asked for.
    pub within: Range<usize>,
    /// Range in the master and in each state vector.
    pub state: Range<usize>,
    /// Range in the parameters.
    pub params: Range<usize>,
}

/// Access by the index of a parameter, in registration order, or of a bucket.
impl Params {
    /// Returns the options that the optimizer was built with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Returns the text that describes how the model is cut into these parameters ([`Optimizer::arranged`]).
    pub fn arrangement(&self) -> &str {
        &self.arrangement
    }

    /// Returns the number of parameters.
    pub fn count(&self) -> usize {
        self.entries.len()
    }

    /// Returns the number of updates of a parameter.
    pub fn t(&self, param: usize) -> u64 {
        self.entries[param].t
    }

    /// Sets the number of updates of a parameter.
    pub fn set_t(&mut self, param: usize, t: u64) {
        self.entries[param].t = t;
    }

    /// Returns the rule that updates a parameter.
    pub fn rule(&self, param: usize) -> &Arc<dyn Rule> {
        &self.group_of(param).rule
    }

    /// Returns the position of a parameter among all, in the order a forward pass uses them.
    pub fn position(&self, param: usize) -> usize {
        self.entries[param].position
    }

    /// Returns the number of elements of a parameter before a mesh cuts it.
    pub fn whole_len(&self, param: usize) -> usize {
        self.entries[param].whole
    }

    /// Returns the bucket of a parameter; `None` for a frozen one.
    pub fn bucket_of(&self, param: usize) -> Option<usize> {
        match self.entries[param].place {
            ParamPlace::Bucket { bucket, .. } => Some(bucket),
            ParamPlace::Frozen { .. } => None,
        }
    }

    /// Returns the elements that this rank owns among `elements` of a parameter.
    pub fn owned_part(&self, param: usize, elements: &Range<usize>) -> Option<OwnedPart> {
        let ParamPlace::Bucket { bucket, range, .. } = &self.entries[param].place else { return None };
        let wanted = range.start + elements.start..range.start + elements.end;
        let (within, state, params) = self.buckets[*bucket].part_of(&wanted)?;
        Some(OwnedPart { bucket: *bucket, within, state, params })
    }

    /// Returns the number of buckets.
    pub fn bucket_count(&self) -> usize {
        self.buckets.len()
    }

    /// Returns a vector of a bucket, if there is one of this kind. Parameters may still arrive from the last step: call
    /// [`wait`](Self::wait) first.
    pub fn bucket_vector(&self, bucket: usize, kind: VectorKind) -> Option<Slice<'_>> {
        let owned = &self.buckets[bucket];
        match kind {
            VectorKind::Params => Some(owned.params.as_slice()),
            VectorKind::Master => owned.master().map(Buffer::as_slice),
            VectorKind::State(slot) => owned.state().get(slot).map(Buffer::as_slice),
        }
    }

    /// Returns the same vector for writing.
    pub fn bucket_vector_mut(&mut self, bucket: usize, kind: VectorKind) -> Option<SliceMut<'_>> {
        let owned = &mut self.buckets[bucket];
        match kind {
            VectorKind::Params => Some(owned.params.as_mut()),
            VectorKind::Master => owned.master_mut().map(Buffer::as_mut),
            VectorKind::State(slot) => owned.state_mut().get_mut(slot).map(Buffer::as_mut),
        }
    }

    /// Returns for each bucket the vectors that an update starts from: the master (the parameters if there is none), then the
    /// state.
    pub fn update_vectors_mut(&mut self) -> impl Iterator<Item = impl Iterator<Item = SliceMut<'_>>> {
        self.buckets.iter_mut().map(Owned::vectors_mut)
    }

    /// Returns the buffers of all buckets, each bucket's parameters first. A caller that takes a buffer puts one of the same
    /// length, type and place back.
    pub fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.buckets.iter_mut().flat_map(Owned::vectors_whole)
    }

    /// Rounds the master of a bucket into its parameters, if it has one.
    pub fn follow_master(&mut self, bucket: usize) -> Result<(), Error> {
        self.buckets[bucket].follow_master()
    }
}
