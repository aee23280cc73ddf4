//! One evaluation: publishes the point to every rank, and returns the closure's gradients.

use crate::plan::overlap::{overlap, overlapping};
use crate::{Combine, Error, Fault, MicroBatch, NotForLbfgs, Optimizer};
use meshstep_optim::Loss;
use meshstep_tensor::{DType, Slice, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// Error of a caller's closure.
pub(crate) type EvaluationFailed = Box<dyn std::error::Error + Send + Sync>;

/// Layout of each bucket's owned elements in this rank's vector.
#[derive(Debug)]
pub(super) struct Spread {
    /// First element of each bucket.
    firsts: Vec<usize>,
    len: usize,
    dtype: DType,
}

impl Spread {
    /// Lays this rank's owned elements end to end.
    pub(super) fn new(opt: &Optimizer) -> Result<Self, Error> {
        let plans = || opt.reducer.config.buckets.iter().map(|kept| &kept.plan);
        let first = plans().next().map_or(DType::F32, |plan| plan.update);
        if let Some(other) = plans().map(|plan| plan.update).find(|&dtype| dtype != first) {
            return Err(NotForLbfgs::Types { first, other }.into());
        }
        let (mut firsts, mut len) = (Vec::new(), 0);
        for owned in &opt.params.buckets {
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

    /// Returns the elements that this rank adds to sums: all ranks together count each element once.
    pub(super) fn counted(&self, opt: &Optimizer) -> Vec<Range<usize>> {
        let mut counted = Vec::new();
        for ((kept, owned), first) in
            opt.reducer.config.buckets.iter().zip(&opt.params.buckets).zip(&self.firsts)
        {
            // If several ranks hold a range, one of them counts it.
            for (range, place) in owned.ranges().filter(|_| kept.among.counts_in_norm) {
                let both = overlapping(&kept.counted, range, Range::clone);
                let both = both.iter().filter_map(|c| overlap(c, range));
                let here = |c: Range<usize>| {
                    first + place.start + c.start - range.start..first + place.start + c.end - range.start
                };
                counted.extend(both.map(here));
            }
        }
        counted
    }

    /// Returns the number of collectives that gather the parameters, and of those that reduce the gradients.
    pub(super) fn collectives(&self, opt: &Optimizer) -> (u64, u64) {
        let buckets = &opt.reducer.config.buckets;
        let gathers: usize = buckets.iter().map(|kept| kept.gathered.len()).sum();
        let full = buckets.iter().filter(|kept| kept.plan.params.iter().any(|param| param.len > 0));
        let reductions: usize = full.map(|kept| 1 + kept.among.extra_reductions.len()).sum();
        (gathers as u64, reductions as u64)
    }

    /// Fills `x` from the parameters.
    pub(super) fn read_params(&self, opt: &Optimizer, mut x: SliceMut<'_>) -> Result<(), Error> {
        for (b, owned) in opt.params.buckets.iter().enumerate() {
            owned.collect(owned.params.as_slice(), x.reborrow().slice(self.part(b))?)?;
        }
        Ok(())
    }

    /// Writes `x` into the parameters this rank owns, and gathers all parameters on all ranks. Collective.
    pub(super) fn publish(&self, opt: &mut Optimizer, x: Slice<'_>) -> Result<(), Error> {
        // After an error, abort: other ranks must not wait for buckets that do not come, nor this rank for theirs.
        let sent = self.send(opt, x).map_err(|error| opt.reducer.abort_with(error));
        let landed = opt.gatherer.in_flight.land(&opt.reducer.config.queue, &mut opt.params.buckets);
        sent.and(landed.map_err(|error| opt.reducer.abort_with(error)))
    }

    fn send(&self, opt: &mut Optimizer, x: Slice<'_>) -> Result<(), Error> {
        let fixed = &opt.reducer.config;
        for (b, owned) in opt.params.buckets.iter_mut().enumerate() {
            owned.set_params(x.slice(self.part(b))?)?;
            let bucket = (b, &fixed.buckets[b]);
            opt.gatherer.in_flight.send(&fixed.queue, fixed.options.stage, bucket, &mut owned.params)?;
        }
        Ok(())
    }

    /// Fills `grad` from the reduced gradients.
    fn read_grads(&self, opt: &mut Optimizer, mut grad: SliceMut<'_>) -> Result<(), Error> {
        for (b, owned) in opt.params.buckets.iter().enumerate() {
            let to = grad.reborrow().slice(self.part(b))?;
            if let Some(grads) = opt.reducer.grads(b) {
                owned.collect(grads.as_slice(), to)?;
            }
        }
        Ok(())
    }

    /// Returns the first element of bucket `b` in this rank's vector.
    pub(super) fn first(&self, b: usize) -> usize {
        self.firsts[b]
    }

    /// Returns bucket `b`'s range in this rank's vector.
    fn part(&self, b: usize) -> Range<usize> {
        self.firsts[b]..self.firsts.get(b + 1).copied().unwrap_or(self.len)
    }
}

/// Evaluations of one step.
#[derive(Debug)]
pub(super) struct Evaluation<'a> {
    pub(super) opt: &'a mut Optimizer,
    pub(super) spread: &'a Spread,
    /// Error with which this rank has ended the run on all ranks.
    pub(super) cause: Option<Error>,
}

impl Evaluation<'_> {
    /// Evaluates the closure at `x`: writes this rank's reduced gradient to `grad` and returns its loss. Collective even if it
    /// fails: an error that the ranks do not exchange afterwards aborts the run.
    pub(super) fn run<E: Into<EvaluationFailed>>(
        &mut self,
        x: Slice<'_>,
        grad: SliceMut<'_>,
        closure: &mut impl FnMut(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Loss, Error> {
        let loss = self.evaluate(x, grad, closure);
        if self.opt.reducer.healthy().is_err() {
            self.cause = loss.as_ref().err().cloned();
        }
        loss
    }

    fn evaluate<E: Into<EvaluationFailed>>(
        &mut self,
        x: Slice<'_>,
        grad: SliceMut<'_>,
        closure: &mut impl FnMut(&MicroBatch<'_>) -> Result<f64, E>,
    ) -> Result<Loss, Error> {
        self.spread.publish(self.opt, x)?;
        let told = backward(self.opt, 1, closure);
        let told = told.and_then(|loss| missing(self.opt).map_or(Ok(loss), Err));
        if let (Err(error), Err(failure)) = (&told, self.opt.reducer.healthy()) {
            // The closure may only have met the failure that had ended the run already.
            return Err(if matches!(error, Error::Closure { .. }) { failure } else { error.clone() });
        }
        self.opt.reducer.settle()?;
        let extra_reductions = self.opt.reducer.second_reduce();
        extra_reductions.map_err(|error| self.opt.reducer.abort_with(error))?;
        let read = self.spread.read_grads(self.opt, grad);
        let forgotten = self.opt.reducer.forget();
        read.and(forgotten)?;
        let value = told?;
        // Among ranks that compute the same micro-batch, the first one's loss counts.
        let counts = self.opt.reducer.config.place.first;
        let value = if counts { value } else { 0.0 };
        Ok(match self.opt.options().combine {
            Combine::Sum => Loss::Part(value),
            Combine::Mean | Combine::Weighted => Loss::Mean { value, weight: u64::from(counts) },
        })
    }
}

/// Runs one micro-batch through the closure; its buckets are in flight afterwards, even after a failure.
pub(crate) fn backward<E: Into<EvaluationFailed>>(
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
        opt.reducer.finish_dropped()?;
    }
    told
}

/// Returns the error of a micro-batch with a missing gradient.
fn missing(opt: &Optimizer) -> Option<Error> {
    let param = opt.reducer.progress.missing()?;
    let fault = Fault::MissingGradient { name: opt.params.name(param) };
    Some(Error::Fault { rank: opt.comm().rank(), fault })
}
