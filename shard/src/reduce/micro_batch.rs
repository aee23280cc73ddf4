//! Micro-batches: every gradient is handed over once, by name, in any order, from any thread.

use crate::optimizer::layout_state::ParamPlace;
use crate::reduce::bucket_fill::Lent;
use crate::reduce::weights::weighed;
use crate::{Clip, Combine, Error, Missing, Optimizer, WeightError};
use meshstep_comm::name_calls;
use meshstep_optim::{accumulate, scale};
use meshstep_tensor::{Buffer, DType, Slice, SliceMut};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// Weights up to this are exact in f32, in which gradients are multiplied by them.
const MAX_WEIGHT: u64 = 1 << 24;

/// A micro-batch, which takes gradients until [`finish`](Self::finish). Dropping it unfinished makes the step an error on every
/// rank, because the other ranks wait for its buckets.
#[derive(Debug)]
#[must_use = "a micro-batch that is not finished makes the step an error on every rank"]
pub struct MicroBatch<'a> {
    pub(crate) optimizer: &'a Optimizer,
    weight: f64,
}

/// Place of a parameter in its bucket: the gradient is written into it directly.
#[derive(Debug)]
pub struct Slot<'a> {
    micro_batch: &'a MicroBatch<'a>,
    param: usize,
    bucket: usize,
    index: usize,
    len: usize,
    dtype: DType,
    /// `None` for a parameter without elements.
    buffer: Option<Buffer>,
}

impl Optimizer {
    /// Begins the step's last micro-batch, usually its only one: its buckets are sent as they fill. `weight` is its number of
    /// samples or tokens. [`Combine::Weighted`] multiplies by it: there it is at most 2^24, and a micro-batch of weight 0 counts as
    /// zeros whatever its gradients are, because the mean over no tokens is NaN. Other combinations do not use it.
    pub fn micro_batch(&mut self, weight: u64) -> Result<MicroBatch<'_>, Error> {
        self.begin(weight, true)
    }

    /// Begins a micro-batch that is not the step's last. Its gradients are added up locally before they are sent. At stages 2 and
    /// 3, however, every micro-batch is reduced and only this rank's chunk is kept: k micro-batches send (k+1)/2 times the bytes,
    /// and sums are rounded after each reduction instead of before the only one, so that the bits may differ from other stages'.
    /// At these stages every rank makes the same number of micro-batches.
    pub fn accumulate(&mut self, weight: u64) -> Result<MicroBatch<'_>, Error> {
        self.begin(weight, false)
    }

    fn begin(&mut self, weight: u64, last: bool) -> Result<MicroBatch<'_>, Error> {
        let _name = name_calls("Optimizer::micro_batch");
        self.check_some()?;
        self.reducer.healthy()?;
        self.check_weight(weight)?;
        self.finish_dropped()?;
        let progress = &mut self.progress;
        if *progress.due.get_mut() {
            return Err(Error::StepDue);
        }
        progress.weight = progress.weight.saturating_add(weight);
        progress.weights = weighed(progress.weights, weight);
        progress.batches += 1;
        *progress.unfinished.get_mut() = true;
        self.reducer.begin(last, self.options.clip == Clip::BeforeReduce);
        let weighted = self.options.combine == Combine::Weighted;
        Ok(MicroBatch { optimizer: self, weight: if weighted { weight as f64 } else { 1.0 } })
    }

    /// Refuses weights by which gradients cannot be multiplied exactly.
    pub(crate) fn check_weight(&self, weight: u64) -> Result<(), Error> {
        if self.options.combine == Combine::Weighted && weight > MAX_WEIGHT {
            return Err(WeightError::TooLarge { weight, max: MAX_WEIGHT }.into());
        }
        Ok(())
    }

    /// Completes a dropped micro-batch with zeros, so that this rank sends as many buckets as the others; the step will be an
    /// error on every rank.
    pub(crate) fn finish_dropped(&mut self) -> Result<(), Error> {
        if std::mem::take(self.progress.unfinished.get_mut()) {
            self.progress.dropped = true;
            let last = self.complete_unfilled()?;
            *self.progress.due.get_mut() |= last;
        }
        Ok(())
    }

    /// Sends the buckets that the other ranks wait for, as they are, on a rank that will not fill them.
    pub(crate) fn send_unfilled(&mut self) -> Result<(), Error> {
        self.finish_dropped()?;
        if !*self.progress.due.get_mut() {
            self.reducer.begin(true, self.options.clip == Clip::BeforeReduce);
            self.complete_unfilled()?;
        }
        Ok(())
    }

    /// Sends the buckets that the other ranks wait for; an error aborts the run, because nothing retries.
    fn complete_unfilled(&self) -> Result<bool, Error> {
        self.reducer.complete(|_| {}).map_err(|error| self.reducer.abort_with(error))
    }

    /// Waits for the steps launched on a GPU, and returns an error that the caller has not read.
    pub(crate) fn check_heard(&mut self) -> Result<(), Error> {
        #[cfg(feature = "cuda")]
        self.poll_outcomes(true)?;
        Ok(())
    }

    /// Checks that there are parameters to step; the result is the same on every rank.
    pub(crate) fn check_some(&self) -> Result<(), Error> {
        if self.entries.is_empty() { Err(Error::NothingTrains) } else { Ok(()) }
    }

    /// Checks that no micro-batch is under way and no step is due.
    pub(crate) fn check_idle(&self) -> Result<(), Error> {
        if self.progress.batches == 0 { Ok(()) } else { Err(Error::StepDue) }
    }
}

impl MicroBatch<'_> {
    /// Returns the values of a parameter; if they are sharded, [`gather`](Self::gather) its unit instead.
    pub fn param(&self, name: &str) -> Result<Slice<'_>, Error> {
        self.optimizer.param(name)
    }

    /// Hands over the gradient of `name`, in row-major order, by copying it.
    pub fn grad<'g>(&self, name: &str, grad: impl Into<Slice<'g>>) -> Result<(), Error> {
        let _name = name_calls("MicroBatch::grad");
        let grad = grad.into();
        let Wanted { param, bucket, index, len, dtype } = self.wanted(name)?;
        if grad.dtype() != dtype {
            return Err(Error::GradDType { name: name.to_owned(), expected: dtype, given: grad.dtype() });
        }
        if grad.len() != len {
            let shape = self.optimizer.entries[param].param.shape().to_vec();
            return Err(Error::GradLen { name: name.to_owned(), shape, expected: len, given: grad.len() });
        }
        if len == 0 {
            self.optimizer.progress.present[param].store(true, Relaxed);
            return Ok(());
        }
        let mut lent = self.lend(name, bucket, index)?;
        let queue = &self.optimizer.options.queue;
        let copied = lent.buffer.as_mut().slice(0..len).map_err(Error::from).and_then(|place| {
            match self.weight {
                0.0 if lent.fresh => queue.zero(place)?,
                0.0 => {}
                weight => accumulate(place, grad, weight, lent.fresh, queue)?,
            }
            Ok(())
        });
        if let Err(error) = copied {
            self.optimizer.reducer.give_back(bucket, index, lent.buffer);
            return Err(error);
        }
        self.optimizer.progress.copied.fetch_add((grad.len() * grad.dtype().size()) as u64, Relaxed);
        self.filled(param, bucket, index, lent.buffer)
    }

    /// Declares that this rank has no gradient for `name` in this micro-batch, as soon as that is known.
    /// [`Options::missing`](crate::Options::missing) decides the consequence, as for a gradient that is missing at `finish`, but
    /// the bucket need not wait for `finish`. [`Error::GradTwice`] if the gradient is in.
    pub fn none(&self, name: &str) -> Result<(), Error> {
        let _name = name_calls("MicroBatch::none");
        let Wanted { param, bucket, index, len, .. } = self.wanted(name)?;
        if len > 0 && !self.optimizer.reducer.none(bucket, index)? {
            return Err(Error::GradTwice { name: name.to_owned() });
        }
        if len > 0 && self.optimizer.options.missing == Missing::Error {
            self.optimizer.progress.missing.fetch_min(param, SeqCst);
        }
        Ok(())
    }

    /// Lends the place of `name`'s gradient: overwrite all of it, then [`fill`](Slot::fill) it; nothing is copied. Where
    /// gradients of earlier micro-batches accumulate in place (stages 0 and 1), only the step's first micro-batch has slots.
    pub fn slot(&self, name: &str) -> Result<Slot<'_>, Error> {
        let Wanted { param, bucket, index, len, dtype } = self.wanted(name)?;
        let mut slot = Slot { micro_batch: self, param, bucket, index, len, dtype, buffer: None };
        if len == 0 {
            return Ok(slot);
        }
        let Lent { buffer, fresh } = self.lend(name, bucket, index)?;
        slot.buffer = Some(buffer);
        // Dropping the slot gives the place back.
        if fresh { Ok(slot) } else { Err(Error::SlotTaken { name: name.to_owned() }) }
    }

    /// Ends the micro-batch. Gradients that are missing now are recorded, and the step reports them to every rank.
    pub fn finish(self) -> Result<(), Error> {
        let _name = name_calls("MicroBatch::finish");
        let Optimizer { reducer, progress, options, .. } = self.optimizer;
        let strict = options.missing == Missing::Error;
        let completed = reducer.complete(|param| {
            if strict {
                progress.missing.fetch_min(param, SeqCst);
            }
        });
        progress.due.store(completed?, SeqCst);
        progress.unfinished.store(false, SeqCst);
        Ok(())
    }

    /// Returns the place for the gradient of `name`, or why there is none.
    fn wanted(&self, name: &str) -> Result<Wanted, Error> {
        let param = self.optimizer.index(name)?;
        let entry = &self.optimizer.entries[param];
        let (ParamPlace::Bucket { bucket, index, .. }, false) = (&entry.place, entry.paused) else {
            return Err(Error::FrozenParam { name: name.to_owned() });
        };
        let (bucket, index) = (*bucket, *index);
        let dtype = self.optimizer.reducer.config.buckets[bucket].plan.grads;
        Ok(Wanted { param, bucket, index, len: entry.param.len(), dtype })
    }

    fn lend(&self, name: &str, bucket: usize, index: usize) -> Result<Lent, Error> {
        let lent = self.optimizer.reducer.lend(bucket, index)?;
        lent.ok_or_else(|| Error::GradTwice { name: name.to_owned() })
    }

    fn filled(&self, param: usize, bucket: usize, index: usize, buffer: Buffer) -> Result<(), Error> {
        self.optimizer.progress.present[param].store(true, Relaxed);
        self.optimizer.reducer.fill(bucket, index, buffer)
    }
}

/// Place, length and type of a parameter's gradient.
struct Wanted {
    param: usize,
    bucket: usize,
    index: usize,
    len: usize,
    dtype: DType,
}

impl Slot<'_> {
    /// Returns the place to overwrite; its previous content is unspecified.
    pub fn as_mut(&mut self) -> Result<SliceMut<'_>, Error> {
        match &mut self.buffer {
            Some(buffer) => Ok(buffer.as_mut().slice(0..self.len)?),
            None => Ok(SliceMut::empty(self.dtype, self.micro_batch.optimizer.options.queue.place())),
        }
    }

    /// Hands the gradient over. A slot dropped without `fill` counts as never taken.
    pub fn fill(mut self) -> Result<(), Error> {
        let _name = name_calls("Slot::fill");
        let weight = self.micro_batch.weight;
        let queue = &self.micro_batch.optimizer.options.queue;
        match weight {
            0.0 => queue.zero(self.as_mut()?)?,
            1.0 => {}
            weight => scale(self.as_mut()?, weight, queue)?,
        }
        match self.buffer.take() {
            Some(buffer) => self.micro_batch.filled(self.param, self.bucket, self.index, buffer),
            None => {
                self.micro_batch.optimizer.progress.present[self.param].store(true, Relaxed);
                Ok(())
            }
        }
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.micro_batch.optimizer.reducer.give_back(self.bucket, self.index, buffer);
        }
    }
}
