//! Updates of a step on a GPU: one launch prepares the rows of all buckets, then one launch updates each bucket.

use crate::step::gpu::GpuStep;
use crate::{Error, NonFinite, Optimizer};
use meshstep_optim::cuda::{Answer, Tables, Update};
use std::sync::Arc;

impl Optimizer {
    /// Updates this rank's shard, if the device decides so, bucket by bucket as they arrive, and sends it to every rank. Returns
    /// the answer with the norm, if the step was decided without it.
    pub(crate) fn apply_on_gpu(&mut self, gpu: &mut GpuStep) -> Result<Option<Answer>, Error> {
        let mut updated = self.prepare_on_gpu(gpu);
        for b in 0..self.buckets.len() {
            updated = updated.and_then(|()| self.update_on_gpu(b, gpu));
            updated = updated.and_then(|()| self.send_updated(b));
        }
        let updated = updated.and_then(|()| self.join_tables(gpu));
        if updated.is_err() {
            // The other ranks must not wait for buckets that will not come.
            self.reducer.abort();
        }
        let norm = updated.and_then(|()| self.norm_on_gpu(gpu));
        let landed = self.room.gathering.land_later(&gpu.side_stream, &mut self.buckets);
        norm.and_then(|norm| landed.map(|()| norm))
    }

    /// Updates this rank's whole shard, if the device decides so, and sends nothing. Returns the answer with the norm, if the
    /// step was decided without it.
    pub(crate) fn update_all_on_gpu(&mut self) -> Result<Option<Answer>, Error> {
        self.with_gpu(|all, gpu| {
            all.prepare_on_gpu(gpu)?;
            (0..all.buckets.len()).try_for_each(|b| all.update_on_gpu(b, gpu))?;
            all.join_tables(gpu)?;
            all.norm_on_gpu(gpu)
        })
    }

    /// Prepares the rows that earlier steps have built.
    fn prepare_on_gpu(&self, GpuStep { decision, tables, .. }: &mut GpuStep) -> Result<(), Error> {
        let Some(tables) = tables else { return Ok(()) };
        Ok(tables.prepare(decision.step(), &self.options.queue)?)
    }

    fn update_on_gpu(&mut self, b: usize, gpu: &GpuStep) -> Result<(), Error> {
        self.reducer.settle_one(b)?;
        let owned = &mut self.buckets[b];
        if let Some(grads) = self.reducer.grads(b) {
            let next = |p: usize| self.entries[p].t + 1;
            let step = (gpu.decision.step(), gpu.tables.as_ref());
            owned.update_on_gpu(grads, &self.groups, next, step, &self.options.meter)?;
        }
        Ok(())
    }

    /// Joins the rows of all buckets, if a step has built new ones.
    fn join_tables(&mut self, gpu: &mut GpuStep) -> Result<(), Error> {
        let mut updates: Vec<&mut Update> =
            self.buckets.iter_mut().flat_map(|owned| owned.updates()).collect();
        if gpu.tables.as_ref().is_some_and(|tables| updates.iter().all(|update| tables.has(update))) {
            return Ok(());
        }
        let (queue, meter) = (&self.options.queue, &self.options.meter);
        gpu.tables = Some(Tables::join(&mut updates, queue, meter)?);
        Ok(())
    }

    /// Makes the next step read each parameter's `t` again.
    pub(crate) fn recount(&mut self) {
        self.buckets.iter_mut().for_each(|owned| owned.recount());
        if let Some(gpu) = &mut self.room.gpu {
            gpu.tables = None;
        }
    }

    fn norm_on_gpu(&mut self, gpu: &mut GpuStep) -> Result<Option<Answer>, Error> {
        if self.options.non_finite == NonFinite::Skip {
            return Ok(None);
        }
        let comm = Arc::clone(self.reducer.config.words());
        let norm = self.reducer.norm_sum();
        self.exchange.norm_on_gpu(&*comm, norm, &mut gpu.decision, &gpu.side_stream).map(Some)
    }
}
