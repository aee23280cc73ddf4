//! Micro-batches: every gradient is handed over once, by name, in any order, from any thread.

use crate::error::Error;
use crate::gather::unit_gather::{Gathered, PendingGather, UnitSource};
use crate::reduce::bucket_fill::Lent;
use crate::reduce::reducer::GradReducer;
use crate::step::decider::Decider;
use crate::update::params::{ParamPlace, Params};
use meshstep_comm::name_calls;
use meshstep_optim::{accumulate, scale};
use meshstep_tensor::{Buffer, DType, Queue, Slice, SliceMut};

/// A micro-batch, which takes gradients until [`finish`](Self::finish). Dropping it unfinished makes the step an error on every
/// rank, because the other ranks wait for its buckets.
#[derive(Debug)]
#[must_use = "a micro-batch that is not finished makes the step an error on every rank"]
pub struct MicroBatch<'a> {
    pub(crate) from: UnitSource<'a>,
    pub(crate) decider: &'a Decider,
    /// Factor on the gradients.
    pub(crate) weight: f64,
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

impl<'a> MicroBatch<'a> {
    /// Returns the values of a parameter; if they are sharded, [`gather`](Self::gather) its unit instead.
    pub fn param(&self, name: &str) -> Result<Slice<'_>, Error> {
        self.params().param(name)
    }

    /// Returns the slot of the step that this micro-batch computes, if the step has slots ([`SlotRuns`](crate::SlotRuns)).
    pub fn slot_index(&self) -> Option<usize> {
        self.reducer().slot()
    }

    /// Returns the queue that orders the copies of gradients ([`Options::queue`](crate::Options::queue)).
    pub fn queue(&self) -> &'a Queue {
        &self.params().options.queue
    }

    /// Returns the type in which the gradient of `name` is handed over ([`Options::grads`](crate::Options::grads)).
    pub fn grad_dtype(&self, name: &str) -> Result<DType, Error> {
        Ok(self.wanted(name)?.dtype)
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
            let shape = self.params().entries[param].param.shape().to_vec();
            return Err(Error::GradLen { name: name.to_owned(), shape, expected: len, given: grad.len() });
        }
        if len == 0 {
            self.reducer().progress.set_present(param);
            return Ok(());
        }
        let mut lent = self.lend(name, bucket, index)?;
        let queue = &self.params().options.queue;
        let copied = lent.buffer.as_mut().slice(0..len).map_err(Error::from).and_then(|place| {
            match self.weight {
                0.0 if lent.fresh => queue.zero(place)?,
                0.0 => {}
                weight => accumulate(place, grad, weight, lent.fresh, queue)?,
            }
            Ok(())
        });
        if let Err(error) = copied {
            self.reducer().give_back(bucket, index, lent.buffer);
            return Err(error);
        }
        self.reducer().progress.add_copied(grad.len() * grad.dtype().size());
        self.filled(param, bucket, index, lent.buffer)
    }

    /// Declares that this rank has no gradient for `name` in this micro-batch, as soon as that is known.
    /// [`Options::missing`](crate::Options::missing) decides the consequence, as for a gradient that is missing at `finish`, but
    /// the bucket need not wait for `finish`. [`Error::GradTwice`] if the gradient is in.
    pub fn none(&self, name: &str) -> Result<(), Error> {
        let _name = name_calls("MicroBatch::none");
        let Wanted { param, bucket, index, len, .. } = self.wanted(name)?;
        if len > 0 && !self.reducer().none(bucket, index)? {
            return Err(Error::GradTwice { name: name.to_owned() });
        }
        if len > 0 {
            self.reducer().progress.miss(param, self.params().options.missing);
        }
        Ok(())
    }

    /// Lends the place of `name`'s gradient: overwrite all of it, then [`fill`](Slot::fill) it; nothing is copied. Where
    /// gradients of earlier micro-batches accumulate on this rank (stages 0 and 1, [`Accumulate::Local`](crate::Accumulate), and
    /// [`SlotRuns`](crate::SlotRuns)), only the step's first micro-batch has such places.
    pub fn slot(&self, name: &str) -> Result<Slot<'_>, Error> {
        let Wanted { param, bucket, index, len, dtype } = self.wanted(name)?;
        let mut slot = Slot { micro_batch: self, param, bucket, index, len, dtype, buffer: None };
        if len == 0 {
            return Ok(slot);
        }
        let Lent { buffer, fresh } = self.lend(name, bucket, index)?;
        slot.buffer = Some(buffer);
        // Dropping the slot gives the place back.
        if fresh && self.reducer().writes_in_place() {
            Ok(slot)
        } else {
            Err(Error::SlotTaken { name: name.to_owned() })
        }
    }

    /// Gathers a unit as [`Optimizer::gather`](crate::Optimizer::gather) does, while gradients are handed over.
    pub fn gather(&self, unit: &str) -> Result<Gathered<'a>, Error> {
        self.start_gather(unit)?.wait()
    }

    /// Starts a gather as [`Optimizer::start_gather`](crate::Optimizer::start_gather) does, while gradients are handed over.
    pub fn start_gather(&self, unit: &str) -> Result<PendingGather<'a>, Error> {
        let _name = name_calls("Optimizer::gather");
        self.from.start(unit)
    }

    /// Ends the micro-batch. Gradients that are missing now are recorded, and the step reports them to every rank.
    pub fn finish(self) -> Result<(), Error> {
        let _name = name_calls("MicroBatch::finish");
        self.reducer().finish_micro_batch()
    }

    /// Returns the factor on this micro-batch's loss: [`Optimizer::loss_scale`](crate::Optimizer::loss_scale).
    pub fn loss_scale(&self) -> f64 {
        self.decider.loss_factor(&self.params().options)
    }

    fn params(&self) -> &'a Params {
        self.from.params
    }

    fn reducer(&self) -> &'a GradReducer {
        self.from.reducer
    }

    /// Returns the place for the gradient of `name`, or why there is none.
    fn wanted(&self, name: &str) -> Result<Wanted, Error> {
        let param = self.params().index(name)?;
        let entry = &self.params().entries[param];
        let (ParamPlace::Bucket { bucket, index, .. }, false) = (&entry.place, entry.paused) else {
            return Err(Error::FrozenParam { name: name.to_owned() });
        };
        let (bucket, index) = (*bucket, *index);
        let dtype = self.reducer().config.buckets[bucket].plan.grads;
        Ok(Wanted { param, bucket, index, len: entry.param.len(), dtype })
    }

    fn lend(&self, name: &str, bucket: usize, index: usize) -> Result<Lent, Error> {
        let lent = self.reducer().lend(bucket, index)?;
        lent.ok_or_else(|| Error::GradTwice { name: name.to_owned() })
    }

    fn filled(&self, param: usize, bucket: usize, index: usize, buffer: Buffer) -> Result<(), Error> {
        self.reducer().progress.set_present(param);
        self.reducer().fill(bucket, index, buffer)
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
            None => Ok(SliceMut::empty(self.dtype, self.micro_batch.params().options.queue.place())),
        }
    }

    /// Hands the gradient over. A slot dropped without `fill` counts as never taken.
    pub fn fill(mut self) -> Result<(), Error> {
        let _name = name_calls("Slot::fill");
        let weight = self.micro_batch.weight;
        let queue = &self.micro_batch.params().options.queue;
        match weight {
            0.0 => queue.zero(self.as_mut()?)?,
            1.0 => {}
            weight => scale(self.as_mut()?, weight, queue)?,
        }
        match self.buffer.take() {
            Some(buffer) => self.micro_batch.filled(self.param, self.bucket, self.index, buffer),
            None => {
                self.micro_batch.reducer().progress.set_present(self.param);
                Ok(())
            }
        }
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.micro_batch.reducer().give_back(self.bucket, self.index, buffer);
        }
    }
}
