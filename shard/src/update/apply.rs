//! The update: what this rank owns is one step further, and parameters go out.

use crate::config::options::At;
use crate::optimizer::layout_state::Entry;
use crate::step::exchange::{Brought, FIELDS};
use crate::step::hooks::Around;
use crate::step::{matrix, reported};
use crate::update::owned_bucket::Due;
use crate::{Error, NonFinite, Optimizer};
use meshstep_optim::Scalars;

impl Optimizer {
    /// Updates what this rank owns, bucket by bucket as they arrive, each sent off while the next is updated. The norm of all
    /// of them, where it was not known before.
    pub(crate) fn apply(
        &mut self,
        at: &At,
        [factor, coef]: [f64; 2],
        around: &mut dyn Around,
    ) -> Result<Option<f64>, Error> {
        let scalars =
            &Scalars { lr: at.lr, grad_scale: factor * coef, zero_grads: false, ..Scalars::default() };
        let skips_some = self.options.missing.counts();
        for (p, (entry, due)) in self.entries.iter_mut().zip(&mut self.room.due).enumerate() {
            let skipped = skips_some && self.exchange.present_on(p) == 0;
            *due = if skipped || entry.param.frozen() { 0 } else { entry.t + 1 };
        }
        let updated = around.before(self).and_then(|()| self.update(scalars, around));
        // A rule refused what was checked: a bug. The other ranks are not to wait for what will not come.
        let norm = updated.and_then(|()| self.norm_afterwards(factor));
        let norm = norm.map_err(|error| self.handover.alone(error));
        let landed = self.room.gathering.land(&self.handover.fixed.queue, &mut self.buckets);
        norm.and_then(|norm| landed.map(|()| norm))
    }

    /// One update of all that is due, and whatever follows on it before parameters are sent.
    fn update(&mut self, scalars: &Scalars, around: &mut dyn Around) -> Result<(), Error> {
        let holds = around.holds();
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
        around.after(self, true)?;
        if holds { self.send_all() } else { Ok(()) }
    }

    /// The norm of all ranks' gradients, now that all are there, if the step was decided without it. Collective.
    fn norm_afterwards(&mut self, factor: f64) -> Result<Option<f64>, Error> {
        if self.options.non_finite == NonFinite::Skip {
            return Ok(None);
        }
        let norm = self.handover.norm()?;
        let mine = Brought { norm: &norm, weight: 0, balance: 0, fault: 0, fields: [0; FIELDS.len()] };
        let known = self.exchange.run(&**self.handover.fixed.words(), mine)?;
        Ok(Some(reported(factor, &known.norm)))
    }

    /// Takes the sums over whole tensors that some rules need. Collective where tensors are cut.
    fn measure(&mut self, scalars: &Scalars) -> Result<(), Error> {
        if !self.totals.needed() {
            return Ok(());
        }
        self.handover.settle()?;
        let sums = self.totals.begin();
        for (b, owned) in self.buckets.iter_mut().enumerate() {
            // What other ranks own too counts on one of them.
            let counts = self.handover.fixed.buckets[b].among.counts;
            if let Some(grads) = self.handover.grads(b).filter(|_| counts) {
                let due = |p: usize| due(self.room.due[p], &self.entries[p], 1.0);
                owned.measure(grads, &self.groups, due, scalars, sums)?;
            }
        }
        let group = |p: usize| &self.groups[self.entries[p].group];
        self.totals.finish(group, scalars.lr)
    }

    fn update_bucket(&mut self, b: usize, scalars: &Scalars) -> Result<(), Error> {
        self.handover.settle_one(b)?;
        let _span = tracing::debug_span!("update", bucket = b).entered();
        let owned = &mut self.buckets[b];
        if let Some(grads) = self.handover.grads(b) {
            let due = |p: usize| due(self.room.due[p], &self.entries[p], self.totals.ratio(p));
            owned.update(grads, &self.groups, due, scalars)?;
        }
        Ok(())
    }

    /// Sends bucket `b` to every rank, once it is updated.
    pub(crate) fn send_updated(&mut self, b: usize) -> Result<(), Error> {
        let fixed = &self.handover.fixed;
        let (bucket, params) = ((b, &fixed.buckets[b]), &mut self.buckets[b].params);
        self.room.gathering.send(&fixed.queue, fixed.stage, bucket, params)
    }
}

/// How a parameter is updated at `t`; not at all at 0.
fn due(t: u64, entry: &Entry, ratio: f64) -> Option<Due> {
    (t > 0).then_some(Due { t, ratio, matrix: matrix(entry) })
}
