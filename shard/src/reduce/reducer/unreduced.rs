//! Buckets whose reduction is part of their update.

use super::GradReducer;
use crate::config::digest::digest;
use crate::error::Error;
use crate::plan::overlap::{overlap, overlapping};
use meshstep_optim::{Isa, NormAccumulator};
use meshstep_tensor::{Buffer, Slice};
use std::ops::Range;
use std::sync::PoisonError;

/// Stands for dropped gradients in the digest of what was sent; no bucket has this index.
const DISCARDED: u64 = u64::MAX >> 1;

impl GradReducer {
    /// Keeps the buckets back that are reduced in one pass with their update. Before they are completed.
    pub(crate) fn keep_back(&mut self) {
        self.exclusive().keeps_back = true;
    }

    /// Takes the gradients of bucket `b`, if they are to be reduced in one pass with its update.
    pub(crate) fn take_unreduced(&mut self, b: usize) -> Option<Buffer> {
        let fill = &mut self.exclusive().fills[b];
        if std::mem::take(&mut fill.unreduced) { fill.whole.take() } else { None }
    }

    /// Sends all buckets that were kept back; returns true if there was one.
    pub(crate) fn send_kept_back(&mut self) -> Result<bool, Error> {
        let mut any = false;
        for b in 0..self.config.buckets.len() {
            if let Some(grads) = self.take_unreduced(b) {
                self.send_late(b, grads)?;
                any = true;
            }
        }
        Ok(any)
    }

    /// Sends gradients that were kept back.
    pub(crate) fn send_late(&mut self, b: usize, grads: Buffer) -> Result<(), Error> {
        let started = self.config.buckets[b].start(self.config.op(), grads, &self.config.queue, true);
        let mut state = self.lock();
        match started {
            Ok(flight) => {
                self.put_flight(&mut state, b, flight);
                Ok(())
            }
            Err((grads, error)) => {
                self.rest(&mut state, b, grads);
                drop(state);
                self.poison(error.clone());
                Err(error.into())
            }
        }
    }

    /// Notes that gradients which were never sent are dropped, so that the exchange finds a rank that has not dropped its own.
    pub(crate) fn note_discarded(&mut self) {
        if self.holds() {
            let state = self.exclusive();
            state.launches = digest(state.launches, DISCARDED, DISCARDED);
        }
    }

    /// Takes the memory of a bucket back that was reduced in one pass, and counts its norm.
    pub(crate) fn take_back(&mut self, b: usize, grads: Buffer, norm: &NormAccumulator) -> Result<(), Error> {
        self.exclusive().fills[b].whole = Some(grads);
        let sum = self.norm.get_mut().unwrap_or_else(PoisonError::into_inner);
        Ok(sum.merge(norm)?)
    }

    /// Adds reduced gradients of bucket `b` from element `first` on to `norm`, as far as this rank counts them.
    pub(crate) fn count_part(
        &self,
        (b, first): (usize, usize),
        values: Slice<'_>,
        norm: &mut NormAccumulator,
    ) -> Result<(), Error> {
        let (bucket, range) = (&self.config.buckets[b], first..first + values.len());
        let threads = self.config.queue.threads();
        for counted in overlapping(&bucket.counted, &range, Range::clone) {
            let Some(both) = overlap(counted, &range) else { continue };
            let part = values.slice(both.start - first..both.end - first)?;
            match bucket.among.counts_in_norm {
                true => norm.add_on(Isa::detect(), threads, part)?,
                false => norm.watch_on(threads, part)?,
            }
        }
        Ok(())
    }
}
