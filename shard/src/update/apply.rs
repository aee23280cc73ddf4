//! The update: one step on this rank's shard, then the parameters are gathered.

use crate::config::options::StepArgs;
use crate::optimizer::layout_state::ParamEntry;
use crate::step::exchange::{Brought, FIELDS};
use crate::step::hooks::UpdateHooks;
use crate::step::{matrix, reported};
use crate::update::owned_bucket::ParamUpdate;
use crate::{Error, NonFinite, Optimizer};
use meshstep_optim::Scalars;

impl Optimizer {
    /// Updates this rank's shard bucket by bucket as they arrive, and sends each while the next is updated. Returns the norm if
    /// the step was decided without it.
    pub(crate) fn apply(
        &mut self,
        at: &StepArgs,
        [factor, coef]: [f64; 2],
        hooks: &mut dyn UpdateHooks,
    ) -> Result<Option<f64>, Error> {
        let scalars =
            &Scalars { lr: at.lr, grad_scale: factor * coef, zero_grads: false, ..Scalars::default() };
        let skips_some = self.options.missing.counts();
        for (p, (entry, due)) in self.entries.iter_mut().zip(&mut self.room.due).enumerate() {
            let skipped = skips_some && self.exchange.present_on(p) == 0;
            *due = if skipped || entry.paused || entry.param.frozen() { 0 } else { entry.t + 1 };
        }
        let updated = hooks.before(self).and_then(|()| self.update(scalars, hooks));
        // A rule refused checked arguments: a bug. Abort, so that the other ranks do not wait.
        let norm = updated.and_then(|()| self.norm_afterwards(factor));
        let norm = norm.map_err(|error| self.reducer.abort_with(error));
        let landed = self.room.gathering.land(&self.reducer.config.queue, &mut self.buckets);
        norm.and_then(|norm| landed.map(|()| norm))
    }

    /// Updates every parameter that is due, and runs the hooks before parameters are sent.
    fn update(&mut self, scalars: &Scalars, hooks: &mut dyn UpdateHooks) -> Result<(), Error> {
        let holds = hooks.holds();
        self.measure(scalars)?;
        for b in 0..self.buckets.len() {
            self.update_bucket(b, scalars)?;
            if !holds {
                self.send_updated(b)?;
            }
        }
        for (entry, &due) in self.entries.iter_mut().zip(&self.room.due) {
            entry.t = entry.t.max(due);
        }
        hooks.after(self, true)?;
        if holds { self.send_all() } else { Ok(()) }
    }

    /// Returns the norm of all ranks' gradients, now that all have arrived, if the step was decided without it. Collective.
    fn norm_afterwards(&mut self, factor: f64) -> Result<Option<f64>, Error> {
        if self.options.non_finite == NonFinite::Skip {
            return Ok(None);
        }
        let norm = self.reducer.norm()?;
        let mine = Brought { norm: &norm, weight: 0, balance: 0, fault: 0, fields: [0; FIELDS.len()] };
        let known = self.exchange.run(&**self.reducer.config.words(), mine)?;
        Ok(Some(reported(factor, &known.norm)))
    }

    /// Computes the sums over whole tensors that some rules need. Collective if tensors are cut.
    fn measure(&mut self, scalars: &Scalars) -> Result<(), Error> {
        if !self.totals.needed() {
            return Ok(());
        }
        self.reducer.settle()?;
        let sums = self.totals.begin();
        for (b, owned) in self.buckets.iter_mut().enumerate() {
            // If several ranks own the same range, one of them counts it.
            let counts = self.reducer.config.buckets[b].among.counts_in_norm;
            if let Some(grads) = self.reducer.grads(b).filter(|_| counts) {
                let due = |p: usize| due(self.room.due[p], &self.entries[p], 1.0);
                owned.measure(grads, &self.groups, due, scalars, sums)?;
            }
        }
        let group = |p: usize| &self.groups[self.entries[p].group];
        self.totals.finish(group, scalars.lr)
    }

    fn update_bucket(&mut self, b: usize, scalars: &Scalars) -> Result<(), Error> {
        self.reducer.settle_one(b)?;
        let _span = tracing::debug_span!("update", bucket = b).entered();
        let owned = &mut self.buckets[b];
        if let Some(grads) = self.reducer.grads(b) {
            let due = |p: usize| due(self.room.due[p], &self.entries[p], self.totals.ratio(p));
            owned.update(grads, &self.groups, due, scalars)?;
        }
        Ok(())
    }

    /// Sends bucket `b` to every rank, after its update.
    pub(crate) fn send_updated(&mut self, b: usize) -> Result<(), Error> {
        let fixed = &self.reducer.config;
        let (bucket, params) = ((b, &fixed.buckets[b]), &mut self.buckets[b].params);
        self.room.gathering.send(&fixed.queue, fixed.stage, bucket, params)
    }
}

/// Returns the update of a parameter at `t`; none at 0.
fn due(t: u64, entry: &ParamEntry, ratio: f64) -> Option<ParamUpdate> {
    (t > 0).then_some(ParamUpdate { t, ratio, matrix: matrix(entry) })
}
