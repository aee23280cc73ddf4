//! Updates of a step on a GPU: one launch prepares the rows of all buckets, then one launch updates each bucket.

use crate::step::gpu::There;
use crate::{Error, NonFinite, Optimizer};
use meshstep_optim::cuda::{Answer, Tables, Update};
use std::sync::Arc;

impl Optimizer {
    /// Updates this rank's shard, if the device decides so, bucket by bucket as they arrive, and sends it to every rank. Returns
    /// the answer with the norm, if the step was decided without it.
    pub(crate) fn apply_there(&mut self, there: &mut There) -> Result<Option<Answer>, Error> {
        let mut updated = self.prepare_there(there);
        for b in 0..self.buckets.len() {
            updated = updated.and_then(|()| self.update_there(b, there));
            updated = updated.and_then(|()| self.send_updated(b));
        }
        let updated = updated.and_then(|()| self.join_tables(there));
        if updated.is_err() {
            // The other ranks must not wait for buckets that will not come.
            self.handover.abort();
        }
        let norm = updated.and_then(|()| self.norm_there(there));
        let landed = self.room.gathering.land_later(&there.aside, &mut self.buckets);
        norm.and_then(|norm| landed.map(|()| norm))
    }

    /// Updates this rank's whole shard, if the device decides so, and sends nothing. Returns the answer with the norm, if the
    /// step was decided without it.
    pub(crate) fn update_all_there(&mut self) -> Result<Option<Answer>, Error> {
        self.with_there(|all, there| {
            all.prepare_there(there)?;
            (0..all.buckets.len()).try_for_each(|b| all.update_there(b, there))?;
            all.join_tables(there)?;
            all.norm_there(there)
        })
    }

    /// Prepares the rows that earlier steps have built.
    fn prepare_there(&self, There { decision, tables, .. }: &mut There) -> Result<(), Error> {
        let Some(tables) = tables else { return Ok(()) };
        Ok(tables.prepare(decision.step(), &self.options.queue)?)
    }

    fn update_there(&mut self, b: usize, there: &There) -> Result<(), Error> {
        self.handover.settle_one(b)?;
        let owned = &mut self.buckets[b];
        if let Some(grads) = self.handover.grads(b) {
            let next = |p: usize| self.entries[p].t + 1;
            let step = (there.decision.step(), there.tables.as_ref());
            owned.update_there(grads, &self.groups, next, step, &self.options.meter)?;
        }
        Ok(())
    }

    /// Joins the rows of all buckets, if a step has built new ones.
    fn join_tables(&mut self, there: &mut There) -> Result<(), Error> {
        let mut updates: Vec<&mut Update> =
            self.buckets.iter_mut().flat_map(|owned| owned.updates()).collect();
        if there.tables.as_ref().is_some_and(|tables| updates.iter().all(|update| tables.has(update))) {
            return Ok(());
        }
        let (queue, meter) = (&self.options.queue, &self.options.meter);
        there.tables = Some(Tables::join(&mut updates, queue, meter)?);
        Ok(())
    }

    /// Makes the next step read each parameter's `t` again.
    pub(crate) fn recount(&mut self) {
        self.buckets.iter_mut().for_each(|owned| owned.recount());
        if let Some(there) = &mut self.room.there {
            there.tables = None;
        }
    }

    fn norm_there(&mut self, there: &mut There) -> Result<Option<Answer>, Error> {
        if self.options.non_finite == NonFinite::Skip {
            return Ok(None);
        }
        let comm = Arc::clone(self.handover.fixed.words());
        let norm = self.handover.norm_sum();
        self.exchange.norm_there(&*comm, norm, &mut there.decision, &there.aside).map(Some)
    }
}
