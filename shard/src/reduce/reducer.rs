//! Gradient reducer: takes gradients by parameter, in any order, from any thread; returns reduced buckets in index order.

mod memory;
mod sending;
mod unreduced;

use crate::error::Error;
use crate::plan::bucket_chain::BucketChain;
use crate::plan::bucket_order::append;
use crate::ranks::roles::know;
use crate::reduce::bucket_fill::{BucketFill, Lent};
use crate::reduce::double_ended::DoubleEnded;
use crate::reduce::gather_barrier::GatherBarrier;
use crate::reduce::pool::Pool;
use crate::reduce::progress::GradProgress;
use crate::reduce::reducer_config::{BucketInfo, ReducerConfig};
use crate::reduce::wait_budget::WaitBudget;
use meshstep_optim::{NormAccumulator, NormSum, scale};
use meshstep_tensor::{Buffer, Meter};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// Collects and reduces one step's gradients. Methods hold the lock for bookkeeping, and to add the slots of this rank;
/// copies, reductions and waits happen outside it.
#[derive(Debug)]
pub(crate) struct GradReducer {
    pub(crate) config: ReducerConfig,
    state: Mutex<State>,
    /// This rank's part of the norm.
    pub(crate) norm: Mutex<NormSum>,
    pub(crate) gather_barrier: GatherBarrier,
    pub(crate) progress: GradProgress,
    /// Notified when a bucket's memory is back.
    rested: Condvar,
    /// Communication failure that has poisoned the reducer.
    failure: OnceLock<meshstep_comm::Error>,
}

#[derive(Debug)]
struct State {
    fills: Vec<BucketFill>,
    pool: Pool,
    /// Order in which buckets travel: by index, but buckets that lacked a gradient in the last step go last.
    order: Vec<usize>,
    /// For each bucket: `deferred` if it travels last, `lacked` if this rank lacked one of its gradients in this step.
    deferred: Vec<bool>,
    lacked: Vec<bool>,
    /// Number of buckets of `order` that were sent.
    next: usize,
    /// True if this micro-batch's buckets are sent.
    travels: bool,
    /// True in the step's last micro-batch, after which sums are final.
    last: bool,
    /// True if buckets that are reduced in one pass with their update stay here until then.
    keeps_back: bool,
    launches: u64,
    /// Buckets for which some thread waits.
    retiring: Vec<usize>,
    /// Wait budget of such a thread.
    wait_budget: WaitBudget,
}

type Guard<'s> = MutexGuard<'s, State>;

impl GradReducer {
    pub(crate) fn new(config: ReducerConfig) -> Result<Self, Error> {
        let meter = &config.options.meter.clone();
        let pool = Pool::new(&config.queue, meter);
        let norm = NormSum::new(config.options.norm, &config.queue, meter)?;
        let state = State {
            fills: Vec::new(),
            pool,
            order: Vec::new(),
            deferred: Vec::new(),
            lacked: Vec::new(),
            next: 0,
            travels: false,
            last: false,
            keeps_back: false,
            launches: 0,
            retiring: Vec::new(),
            wait_budget: WaitBudget::new(config.options.wait_budget),
        };
        let (state, norm) = (Mutex::new(state), Mutex::new(norm));
        let (gather_barrier, rested, failure) =
            (GatherBarrier::new(&config.queue, meter)?, Condvar::new(), OnceLock::new());
        let progress = GradProgress::new();
        Ok(GradReducer { config, state, norm, gather_barrier, progress, rested, failure })
    }

    /// Returns an error once communication has failed.
    pub(crate) fn healthy(&self) -> Result<(), Error> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone().into()))
    }

    /// Records a failure that ends the run, and aborts every communicator so that no rank waits for this one.
    pub(crate) fn poison(&self, failure: meshstep_comm::Error) {
        self.failure.get_or_init(|| failure);
        self.config.comms.iter().chain(&self.config.gathers).for_each(|comm| comm.abort());
    }

    /// Aborts the run on every rank, for a reason that only this rank knows.
    pub(crate) fn abort(&self) {
        self.poison(meshstep_comm::Error::Aborted { rank: self.config.comm.rank() });
    }

    /// Aborts the run because of an error that the other ranks do not have, and returns the error.
    pub(crate) fn abort_with(&self, error: Error) -> Error {
        match &error {
            Error::Comm(failure) => self.poison(failure.clone()),
            _ => self.abort(),
        }
        error
    }

    /// Begins a micro-batch. `last`: no other follows in this step; `held`: a later call sends its buckets.
    pub(crate) fn begin(&mut self, last: bool, held: bool) {
        let pooled = self.pooled();
        let state = self.exclusive();
        state.next = 0;
        state.last = last;
        state.keeps_back = false;
        state.travels = (last && !held) || pooled;
        state.wait_budget.begin();
        state.fills.iter_mut().for_each(BucketFill::next_micro_batch);
    }

    /// Lends the place of parameter `i` of bucket `b`; `None` if its gradient is in, or being written.
    ///
    /// If the series has no free memory, the thread waits within the wait budget for one of its buckets in flight. Among
    /// these ranks, the one that has sent the fewest buckets waits for a bucket that every rank has sent, or will send without
    /// it; so the wait ends, unless the model has collectives of its own ([`WaitBudget`]). If no bucket is in flight, or the budget
    /// is spent, the pool grows.
    pub(crate) fn lend(&self, b: usize, i: usize) -> Result<Option<Lent>, Error> {
        let mut state = self.lock();
        loop {
            self.healthy()?;
            if state.fills[b].is_filled(i) {
                return Ok(None);
            }
            if state.fills[b].is_open() || self.open(&mut state, b)? {
                return Ok(state.fills[b].lend(i));
            }
            if !self.pooled() {
                return Ok(None);
            }
            state = self.make_room(state, b)?;
        }
    }

    /// Takes a place back with its gradient, and sends every bucket that can go.
    pub(crate) fn fill(&self, b: usize, i: usize, buffer: Buffer) -> Result<(), Error> {
        let mut state = self.lock();
        state.fills[b].fill(i, buffer);
        let first = state.next;
        self.send_off(&mut state)?;
        let last = state.next;
        drop(state);
        let travelling = if self.config.options.overlap { 0..0 } else { first..last };
        travelling.into_iter().try_for_each(|place| {
            let state = self.lock();
            let b = state.order[place];
            self.retire_in_time(state, b)
        })
    }

    /// Closes the place of parameter `i` of bucket `b` without a gradient; it counts as zeros. Returns false if its gradient is
    /// in, or being written.
    pub(crate) fn none(&self, b: usize, i: usize) -> Result<bool, Error> {
        let mut state = self.lock();
        if !state.travels && self.config.slots.is_none() {
            return Ok(state.fills[b].pass(i));
        }
        drop(state);
        let Some(mut lent) = self.lend(b, i)? else { return Ok(false) };
        if lent.fresh {
            let len = self.config.buckets[b].plan.params[i].len;
            if let Err(error) = self.write_absent(&mut lent.buffer, len) {
                self.give_back(b, i, lent.buffer);
                return Err(error);
            }
        }
        self.fill(b, i, lent.buffer)?;
        Ok(true)
    }

    /// Writes zeros in the place of a gradient that is missing. Those of a slot are negative: any number keeps its bits when they are added,
    /// as it does when nothing is.
    fn write_absent(&self, place: &mut Buffer, len: usize) -> Result<(), Error> {
        let queue = &self.config.queue;
        queue.zero(place.as_mut().slice(0..len)?)?;
        if self.config.slots.is_some() {
            scale(place.as_mut().slice(0..len)?, -1.0, queue)?;
        }
        Ok(())
    }

    /// Takes a place back without a gradient.
    pub(crate) fn give_back(&self, b: usize, i: usize, buffer: Buffer) {
        self.lock().fills[b].give_back(i, buffer);
    }

    /// Fills every waiting place with zeros and calls `missing` with its parameter; afterwards all buckets are in flight. Returns
    /// true if the micro-batch was the step's last. A place that was never given back is an error on every rank.
    pub(crate) fn complete(&self, mut missing: impl FnMut(usize)) -> Result<bool, Error> {
        let (travels, last) = {
            let State { travels, last, wait_budget, fills, .. } = &mut *self.lock();
            wait_budget.judge(|b| fills[b].flight.is_none() || fills[b].has_arrived());
            (*travels, *last)
        };
        if travels {
            let begun = self.gather_barrier.begin(&self.config.gathers);
            begun.inspect_err(|failure| self.poison(failure.clone()))?;
        }
        for place in 0..self.config.buckets.len() {
            let b = self.lock().order[place];
            let bucket = &self.config.buckets[b];
            for (i, param) in bucket.plan.params.iter().enumerate() {
                let mut state = self.lock();
                if state.fills[b].is_filled(i) {
                    continue;
                }
                state.lacked[b] = true;
                drop(state);
                missing(param.param);
                // Each slot is a vector of its own, with zeros for what is missing.
                if !travels && self.config.slots.is_none() {
                    continue;
                }
                let Some(mut lent) = self.lend(b, i)? else {
                    self.abort();
                    return Err(Error::SlotLeaked { name: bucket.names[i].to_string() });
                };
                if lent.fresh {
                    self.write_absent(&mut lent.buffer, param.len)?;
                }
                self.fill(b, i, lent.buffer)?;
            }
        }
        // The next micro-batch fills the same buckets again.
        if travels && !last {
            self.settle()?;
        }
        if !travels && self.config.slots.is_some() {
            let queue = &self.config.queue;
            self.lock().fills.iter_mut().try_for_each(|fill| fill.add_slot(queue))?;
        }
        Ok(last)
    }

    /// Waits until no bucket is in flight, and no rank gathers for the micro-batches that have ended.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        let settled = (0..self.config.buckets.len()).try_for_each(|b| self.settle_one(b));
        let met = self.gather_barrier.end().inspect_err(|failure| self.poison(failure.clone()));
        settled?;
        Ok(met?)
    }

    /// Waits until bucket `b` is not in flight.
    pub(crate) fn settle_one(&self, b: usize) -> Result<(), Error> {
        self.retire(self.lock(), b)
    }

    /// Returns the number of buckets up to the last one in flight.
    pub(crate) fn in_flight(&mut self) -> usize {
        self.exclusive().fills.iter().rposition(|fill| fill.flight.is_some()).map_or(0, |last| last + 1)
    }

    /// Returns the reduced gradients of bucket `b` on this rank: the whole bucket, or its own chunk at stages 2 and 3.
    pub(crate) fn grads(&mut self, b: usize) -> Option<&mut Buffer> {
        let pooled = self.pooled();
        let fill = &mut self.exclusive().fills[b];
        if pooled { fill.shard.as_mut() } else { fill.whole.as_mut() }
    }

    /// Returns true if bucket `b` is sent in a step.
    pub(crate) fn travels(&self, b: usize) -> bool {
        self.lock().fills[b].travels()
    }

    /// Returns this rank's part of the norm, once the buckets are settled.
    pub(crate) fn norm(&mut self) -> Result<NormAccumulator, Error> {
        let norm = self.norm.get_mut().unwrap_or_else(PoisonError::into_inner);
        Ok(norm.read(&self.config.queue)?)
    }

    /// Returns the accumulator of this rank's part of the norm, and the progress of the gradients.
    #[cfg(feature = "cuda")]
    pub(crate) fn norm_and_progress(&mut self) -> (&NormSum, &GradProgress) {
        (self.norm.get_mut().unwrap_or_else(PoisonError::into_inner), &self.progress)
    }

    /// Returns for each bucket whether this rank lacked one of its gradients in this step.
    pub(crate) fn lacked(&mut self) -> &[bool] {
        &self.exclusive().lacked
    }

    /// Defers buckets from the next micro-batch on: they travel after the others. All ranks defer the same buckets.
    pub(crate) fn defer(&mut self, last: impl Fn(usize) -> bool) {
        let State { order, deferred, .. } = self.exclusive();
        deferred.iter_mut().enumerate().for_each(|(b, deferred)| *deferred = last(b));
        order.sort_unstable_by_key(|&b| (deferred[b], b));
    }

    /// Returns a digest of all buckets sent so far, in order.
    pub(crate) fn launches(&mut self) -> u64 {
        self.exclusive().launches
    }

    /// Returns the number of pool buffers allocated beyond the plan.
    pub(crate) fn grown(&mut self) -> u64 {
        self.exclusive().pool.grown()
    }

    /// Returns all collected gradients of this step that were not sent, with their padding.
    pub(crate) fn held(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.exclusive().fills.iter_mut().flat_map(BucketFill::held)
    }

    /// Forgets the step's gradients.
    pub(crate) fn next_step(&mut self) -> Result<(), Error> {
        let state = self.exclusive();
        state.fills.iter_mut().for_each(BucketFill::next_step);
        state.lacked.fill(false);
        let norm = self.norm.get_mut().unwrap_or_else(PoisonError::into_inner);
        Ok(norm.reset(&self.config.queue)?)
    }

    /// Expects no gradient for parameter `i` of bucket `b` from now on, or expects it again. Only between steps.
    pub(crate) fn freeze(&mut self, b: usize, i: usize, frozen: bool) -> Result<(), Error> {
        if self.exclusive().fills[b].freeze(i, frozen) {
            // The bucket does not travel, and what reads its reduced gradients finds zeros.
            let queue = self.config.queue.clone();
            self.grads(b).map_or(Ok(()), |grads| queue.zero(grads.as_mut()))?;
        }
        Ok(())
    }

    /// Adds buckets, with memory for their series. Only between steps.
    pub(crate) fn extend(
        &mut self,
        (added, fills): (Vec<BucketInfo>, Vec<BucketFill>),
        room: Vec<DoubleEnded>,
    ) {
        let ReducerConfig { buckets, comms, gathers, .. } = &mut self.config;
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let first = buckets.len();
        for kept in &added {
            kept.among.comms().chain(&kept.gathers).for_each(|comm| know(comms, comm));
            kept.gathers.iter().for_each(|comm| know(gathers, comm));
        }
        append(buckets, added);
        append(&mut state.fills, fills);
        state.order.extend(first..buckets.len());
        state.deferred.resize(buckets.len(), false);
        state.lacked.resize(buckets.len(), false);
        state.pool.extend(room);
        state.pool.expect(buckets[first..].iter().map(|kept| kept.series));
    }

    /// Returns the number of series.
    pub(crate) fn series(&self) -> usize {
        self.lock().pool.series()
    }

    /// Allocates memory for more series.
    pub(crate) fn room_for(&self, series: &[BucketChain], meter: &Meter) -> Result<Vec<DoubleEnded>, Error> {
        Ok(self.lock().pool.room_for(series, meter)?)
    }

    /// Returns the bytes sent so far on all communicators.
    pub(crate) fn sent(&self) -> u64 {
        self.config.comms.iter().map(|comm| comm.stats().total().bytes).sum()
    }

    fn pooled(&self) -> bool {
        self.config.options.cuts_grads()
    }

    /// Returns the state, also after a panic (decision 119): a thread that panicked while it held the lock was between two complete states,
    /// as bookkeeping does not unwind.
    fn lock(&self) -> Guard<'_> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn exclusive(&mut self) -> &mut State {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}
