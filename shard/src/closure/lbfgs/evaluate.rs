//! One evaluation: the point out to every rank, the closure's gradients back.

use crate::{Combine, Error, Fault, MicroBatch, Missing, NotForLbfgs, Optimizer};
use meshstep_optim::Loss;
use meshstep_tensor::{DType, Slice, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// What a closure's error becomes.
pub(crate) type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Where each bucket's owned elements lie in this rank's one vector.
#[derive(Debug)]
pub(super) struct Spread {
    /// The first element of each bucket.
    firsts: Vec<usize>,
    len: usize,
    dtype: DType,
}

impl Spread {
    /// What this rank owns, end to end.
    pub(super) fn new(opt: &Optimizer) -> Result<Self, Error> {
        let plans = || opt.handover.fixed.buckets.iter().map(|kept| &kept.plan);
        let first = plans().next().map_or(DType::F32, |plan| plan.update);
        if let Some(other) = plans().map(|plan| plan.update).find(|&dtype| dtype != first) {
            return Err(NotForLbfgs::Types { first, other }.into());
        }
        let (mut firsts, mut len) = (Vec::new(), 0);
        for owned in &opt.buckets {
            firsts.push(len);
            len += owned.ranges().map(|(range, _)| range.len()).sum::<usize>();
        }
        Ok(Spread { firsts, len, dtype: first })
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The elements that this rank adds to sums: over all ranks every one once.
    pub(super) fn counted(&self, opt: &Optimizer) -> Vec<Range<usize>> {
        let mut counted = Vec::new();
        for ((kept, owned), first) in opt.handover.fixed.buckets.iter().zip(&opt.buckets).zip(&self.firsts) {
            // Of ranks that hold the same one counts it.
            for (range, place) in owned.ranges().filter(|_| kept.among.counts) {
                let both = kept.counted.iter().map(|c| c.start.max(range.start)..c.end.min(range.end));
                let here = |c: Range<usize>| {
                    first + place.start + c.start - range.start..first + place.start + c.end - range.start
                };
                counted.extend(both.filter(|c| c.start < c.end).map(here));
            }
        }
        counted
    }

    /// Collectives that gather the parameters, and that reduce the gradients.
    pub(super) fn collectives(&self, opt: &Optimizer) -> (u64, u64) {
        let buckets = &opt.handover.fixed.buckets;
        let gathers: usize = buckets.iter().map(|kept| kept.gathered.len()).sum();
        let full = buckets.iter().filter(|kept| kept.plan.params.iter().any(|param| param.len > 0));
        let reductions: usize = full.map(|kept| 1 + kept.among.further.len()).sum();
        (gathers as u64, reductions as u64)
    }

    /// Fills `x` from the parameters.
    pub(super) fn read_params(&self, opt: &Optimizer, mut x: SliceMut<'_>) -> Result<(), Error> {
        for (b, owned) in opt.buckets.iter().enumerate() {
            owned.collect(owned.params.as_slice(), x.reborrow().slice(self.part(b))?)?;
        }
        Ok(())
    }

    /// Writes `x` into the parameters this rank owns, and brings everybody's to everyone. Collective.
    pub(super) fn publish(&self, opt: &mut Optimizer, x: Slice<'_>) -> Result<(), Error> {
        // Nobody is to wait for a bucket that does not come, this rank itself for others' parts of earlier ones neither.
        let sent = self.send(opt, x).map_err(|error| opt.handover.alone(error));
        let landed = opt.room.gathering.land(&opt.handover.fixed.queue, &mut opt.buckets);
        sent.and(landed.map_err(|error| opt.handover.alone(error)))
    }

    fn send(&self, opt: &mut Optimizer, x: Slice<'_>) -> Result<(), Error> {
        let fixed = &opt.handover.fixed;
        for (b, owned) in opt.buckets.iter_mut().enumerate() {
            owned.set_params(x.slice(self.part(b))?)?;
            let bucket = (b, &fixed.buckets[b]);
            opt.room.gathering.send(&fixed.queue, fixed.stage, bucket, &mut owned.params)?;
        }
        Ok(())
    }

    /// Fills `grad` from the reduced gradients.
    fn read_grads(&self, opt: &mut Optimizer, mut grad: SliceMut<'_>) -> Result<(), Error> {
        for (b, owned) in opt.buckets.iter().enumerate() {
            let to = grad.reborrow().slice(self.part(b))?;
            if let Some(grads) = opt.handover.grads(b) {
                owned.collect(grads.as_slice(), to)?;
            }
        }
        Ok(())
    }

    /// The first element of bucket `b` in this rank's vector.
    #[cfg(feature = "checkpoint")]
    pub(super) fn first(&self, b: usize) -> usize {
        self.firsts[b]
    }

    /// Bucket `b`'s part of this rank's vector.
    fn part(&self, b: usize) -> Range<usize> {
        self.firsts[b]..self.firsts.get(b + 1).copied().unwrap_or(self.len)
    }
}

/// Evaluations of one step.
#[derive(Debug)]
pub(super) struct Evaluation<'a> {
    pub(super) opt: &'a mut Optimizer,
    pub(super) spread: &'a Spread,
    /// What this rank has ended it by for all.
    pub(super) cause: Option<Error>,
}

impl Evaluation<'_> {
    /// The closure at `x`: this rank's reduced gradient into `grad`, its loss back. Collective, whatever fails: what the other
    /// ranks are not told of afterwards ends it for them.
    pub(super) fn run<E: Into<Failed>>(
        &mut self,
        x: Slice<'_>,
        grad: SliceMut<'_>,
        closure: &mut impl FnMut(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Loss, Error> {
        let loss = self.evaluate(x, grad, closure);
        if self.opt.handover.healthy().is_err() {
            self.cause = loss.as_ref().err().cloned();
        }
        loss
    }

    fn evaluate<E: Into<Failed>>(
        &mut self,
        x: Slice<'_>,
        grad: SliceMut<'_>,
        closure: &mut impl FnMut(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Loss, Error> {
        self.spread.publish(self.opt, x)?;
        let told = backward(self.opt, 1, closure);
        let told = told.and_then(|loss| missing(self.opt).map_or(Ok(loss), Err));
        if let (Err(error), Err(failure)) = (&told, self.opt.handover.healthy()) {
            // A closure may have met no more than what had ended it already.
            return Err(if matches!(error, Error::Closure { .. }) { failure } else { error.clone() });
        }
        self.opt.handover.settle()?;
        let further = self.opt.handover.reduce_further();
        further.map_err(|error| self.opt.handover.alone(error))?;
        let read = self.spread.read_grads(self.opt, grad);
        let forgotten = self.opt.forget();
        read.and(forgotten)?;
        let value = told?;
        // Of ranks that compute the same micro-batch the first one's loss counts.
        let counts = self.opt.handover.fixed.place.first;
        let value = if counts { value } else { 0.0 };
        Ok(match self.opt.options().combine {
            Combine::Sum => Loss::Part(value),
            Combine::Mean | Combine::Weighted => Loss::Mean { value, weight: u64::from(counts) },
        })
    }
}

/// One micro-batch through the closure; its buckets are on their way afterwards, also where it failed.
pub(crate) fn backward<E: Into<Failed>>(
    opt: &mut Optimizer,
    weight: u64,
    closure: impl FnOnce(&MicroBatch<'_>) -> Result<f64, E>,
) -> Result<f64, Error> {
    let micro_batch = opt.micro_batch(weight)?;
    let told = match closure(&micro_batch) {
        Ok(loss) => micro_batch.finish().map(|()| loss),
        Err(error) => {
            drop(micro_batch);
            Err(Error::Closure { source: Arc::from(error.into()) })
        }
    };
    if told.is_err() {
        opt.finish_dropped()?;
    }
    told
}

/// What is wrong with a micro-batch in which a gradient is missing.
fn missing(opt: &mut Optimizer) -> Option<Error> {
    let first = *opt.progress.missing.get_mut();
    let entry = opt.entries.get(first).filter(|_| opt.options.missing == Missing::Error)?;
    let fault = Fault::MissingGradient { name: entry.param.name().to_owned() };
    Some(Error::Fault { rank: opt.comm().rank(), fault })
}
