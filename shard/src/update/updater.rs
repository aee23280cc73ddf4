//! The update of one step on this rank's shard, bucket by bucket.

use crate::config::param_groups::RuleGroup;
use crate::error::Error;
use crate::reduce::reducer::GradReducer;
#[cfg(feature = "cuda")]
use crate::update::gpu_matrices::GpuMatrices;
#[cfg(feature = "cuda")]
use crate::update::matrix_exchange::GpuMatrixStep;
use crate::update::matrix_exchange::{MatrixStep, MatrixUpdates, PartExchange};
use crate::update::owned_bucket::ParamUpdate;
use crate::update::params::{ParamEntry, Params};
use crate::update::tensor_norms::TensorTotals;
use meshstep_comm::Communicator;
use meshstep_optim::Scalars;
#[cfg(feature = "cuda")]
use meshstep_optim::cuda::StepBlock;
use meshstep_tensor::SliceMut;
use std::sync::Arc;

/// Updates the parameters that are due. Its vectors are kept from step to step, so that steps allocate nothing.
#[derive(Debug, Default)]
pub(crate) struct Updater {
    /// `t` of each parameter's update in this step; 0: no update.
    due: Vec<u64>,
    totals: TensorTotals,
    /// Matrices that several ranks hold.
    matrices: MatrixUpdates,
}

impl Updater {
    /// Makes an updater of `count` parameters of these groups.
    pub(crate) fn new<'g>(
        count: usize,
        groups: impl Iterator<Item = &'g RuleGroup>,
        comm: &Arc<dyn Communicator>,
        exchanges: Vec<Arc<PartExchange>>,
        params: &Params,
    ) -> Result<Self, Error> {
        let totals = TensorTotals::new(count, groups, params.options.stage, comm, &params.options.meter)?;
        let matrices = MatrixUpdates::new(exchanges, &params.options)?;
        Ok(Updater { due: vec![0; count], totals, matrices })
    }

    /// Selects the parameters of this step's update: all that train, except those without a gradient on any rank.
    pub(crate) fn select(&mut self, params: &Params, has_gradient: impl Fn(usize) -> bool) {
        for (p, (entry, due)) in params.entries.iter().zip(&mut self.due).enumerate() {
            *due = if entry.rests() || !has_gradient(p) { 0 } else { entry.t + 1 };
        }
    }

    /// Computes the sums over whole tensors that some rules need. Collective if tensors are cut.
    pub(crate) fn measure(
        &mut self,
        params: &mut Params,
        reducer: &mut GradReducer,
        scalars: &Scalars,
    ) -> Result<(), Error> {
        if !self.totals.needed() {
            return Ok(());
        }
        reducer.settle()?;
        let Params { buckets, entries, groups, .. } = params;
        let sums = self.totals.begin();
        for (b, owned) in buckets.iter_mut().enumerate() {
            // If several ranks own the same range, one of them counts it.
            let counts = reducer.config.buckets[b].among.counts_in_norm;
            if let Some(grads) = reducer.grads(b).filter(|_| counts) {
                let due = |p: usize| due(self.due[p], &entries[p], 1.0);
                owned.measure(grads, groups, due, scalars, sums)?;
            }
        }
        self.totals.finish(|p| &groups[entries[p].group], scalars.lr)
    }

    /// Returns the exchanges of matrices, one for each part.
    pub(crate) fn exchanges(&self) -> impl Iterator<Item = Arc<PartExchange>> {
        self.matrices.exchanges()
    }

    /// Returns the buckets with parameters that [`exchange`](Self::exchange) updates.
    pub(crate) fn exchanged(&self) -> &[usize] {
        self.matrices.buckets()
    }

    /// Updates the matrices that several ranks hold, once all gradients have arrived. Collective.
    pub(crate) fn exchange(
        &mut self,
        params: &mut Params,
        reducer: &mut GradReducer,
        scalars: &Scalars,
    ) -> Result<(), Error> {
        let Params { buckets, entries, groups, options, .. } = params;
        let t = &self.due;
        self.matrices.run(&mut MatrixStep {
            buckets,
            groups,
            group: &|p| entries[p].group,
            reducer,
            due: |p: usize| due(t[p], &entries[p], 1.0),
            scalars,
            queue: &options.queue,
        })
    }

    /// Returns the matrices that several ranks hold.
    #[cfg(feature = "cuda")]
    pub(crate) fn matrices(&self) -> &MatrixUpdates {
        &self.matrices
    }

    /// Same as [`exchange`](Self::exchange) on a GPU, as the device's step decides. Collective.
    #[cfg(feature = "cuda")]
    pub(crate) fn exchange_on_gpu(
        &mut self,
        params: &mut Params,
        reducer: &mut GradReducer,
        (step, matrices): (&StepBlock, &GpuMatrices),
    ) -> Result<(), Error> {
        let Params { buckets, options, .. } = params;
        let queue = &options.queue;
        self.matrices.run_on_gpu(&mut GpuMatrixStep { buckets, reducer, step, matrices, queue })
    }

    /// Updates this rank's range of bucket `b`, once its gradients have arrived, except for matrices that are exchanged.
    pub(crate) fn update(
        &self,
        b: usize,
        params: &mut Params,
        reducer: &mut GradReducer,
        scalars: &Scalars,
    ) -> Result<(), Error> {
        reducer.settle_one(b)?;
        let _span = tracing::debug_span!("update", bucket = b).entered();
        let Params { buckets, entries, groups, .. } = params;
        if let Some(grads) = reducer.grads(b) {
            let due = |p: usize| match self.matrices.updates(p) {
                true => None,
                false => due(self.due[p], &entries[p], self.totals.ratio(p)),
            };
            buckets[b].update(grads, groups, due, scalars)?;
        }
        Ok(())
    }

    /// Updates elements of this rank's only range of bucket `b`, from `first` on, whose parameters are `values`.
    pub(crate) fn update_part(
        &self,
        (b, first): (usize, usize),
        values: SliceMut<'_>,
        params: &mut Params,
        reducer: &mut GradReducer,
        scalars: &Scalars,
    ) -> Result<(), Error> {
        let Some(grads) = reducer.grads(b) else { return Ok(()) };
        let grads = params.buckets[b].grads_of(&(first..first + values.len()), grads)?;
        self.update_with((b, first), (values, grads), params, scalars)
    }

    /// Updates elements of this rank's only range of bucket `b`, from `first` on, with these parameters and gradients.
    pub(crate) fn update_with(
        &self,
        (b, first): (usize, usize),
        (values, grads): (SliceMut<'_>, SliceMut<'_>),
        params: &mut Params,
        scalars: &Scalars,
    ) -> Result<(), Error> {
        let Params { buckets, entries, groups, .. } = params;
        let due = |p: usize| due(self.due[p], &entries[p], self.totals.ratio(p));
        let part = first..first + values.len();
        buckets[b].update_part(&part, (values, grads), groups, due, scalars)
    }

    /// Counts the updates.
    pub(crate) fn count(&self, params: &mut Params) {
        for (entry, &due) in params.entries.iter_mut().zip(&self.due) {
            entry.t = entry.t.max(due);
        }
    }
}

/// Returns the update of a parameter at `t`; none at 0.
fn due(t: u64, entry: &ParamEntry, ratio: f64) -> Option<ParamUpdate> {
    (t > 0).then_some(ParamUpdate { t, ratio, matrix: entry.matrix })
}
