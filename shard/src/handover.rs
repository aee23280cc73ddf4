//! Gradients in, by parameter, in any order, from any thread; reduced buckets out, in index order.

use crate::among::know;
use crate::filling::{Filling, Lent};
use crate::fixed::{Fixed, Kept};
use crate::meeting::Meeting;
use crate::pool::{Pool, Shelf};
use crate::{Error, Stage};
use meshstep_comm::{InFlight, Op};
use meshstep_optim::{NormAccumulator, NormSum};
use meshstep_tensor::{Buffer, DType, Meter, Queue};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// Collects one step's gradients. Every method locks for bookkeeping only; bytes are copied, reduced and waited for
/// outside the lock.
#[derive(Debug)]
pub(crate) struct Handover {
    pub(crate) fixed: Fixed,
    state: Mutex<State>,
    /// This rank's part of the norm.
    pub(crate) norm: Mutex<NormSum>,
    pub(crate) meeting: Meeting,
    /// Told whenever a bucket comes to rest.
    rested: Condvar,
    /// The communication failure after which nothing goes on.
    failure: OnceLock<meshstep_comm::Error>,
}

#[derive(Debug)]
struct State {
    fillings: Vec<Filling>,
    pool: Pool,
    /// The bucket to travel next.
    next: usize,
    /// Whether this micro-batch's buckets travel.
    travels: bool,
    /// Whether this is the step's last micro-batch, after which sums are final.
    last: bool,
    launches: u64,
    /// Buckets that some thread waits for.
    retiring: usize,
}

impl State {
    /// The first bucket of a gradient type that travels in a pooled buffer.
    fn travelling(&self, dtype: DType) -> Option<usize> {
        let of_type = |f: &Filling| f.spare.as_ref().is_some_and(|s| s.dtype() == dtype);
        self.fillings.iter().position(|f| f.flight.is_some() && of_type(f))
    }
}

impl Handover {
    pub(crate) fn new(fixed: Fixed, pool: Pool, meter: &Meter) -> Result<Self, Error> {
        let norm = NormSum::new(fixed.norm, &fixed.queue, meter)?;
        let fillings = Vec::new();
        let state = State { fillings, pool, next: 0, travels: false, last: false, launches: 0, retiring: 0 };
        let (state, norm) = (Mutex::new(state), Mutex::new(norm));
        let (meeting, rested, failure) =
            (Meeting::new(&fixed.queue, meter)?, Condvar::new(), OnceLock::new());
        Ok(Handover { fixed, state, norm, meeting, rested, failure })
    }

    /// An error once communication has failed.
    pub(crate) fn healthy(&self) -> Result<(), Error> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone().into()))
    }

    /// Records that nothing can go on, on any rank: none is to wait for what this one will not say.
    pub(crate) fn poison(&self, failure: meshstep_comm::Error) {
        self.failure.get_or_init(|| failure);
        self.fixed.comms.iter().chain(&self.fixed.gathers).for_each(|comm| comm.abort());
    }

    /// Gives up on every rank, for a reason that only this one knows.
    pub(crate) fn abort(&self) {
        self.poison(meshstep_comm::Error::Aborted { rank: self.fixed.comm.rank() });
    }

    /// Gives up on every rank because of an error that the others do not have. The error.
    pub(crate) fn alone(&self, error: Error) -> Error {
        match &error {
            Error::Comm(failure) => self.poison(failure.clone()),
            _ => self.abort(),
        }
        error
    }

    /// Begins a micro-batch; `last`: no other follows in this step; `held`: its buckets wait for another call.
    pub(crate) fn begin(&mut self, last: bool, held: bool) {
        let pooled = self.pooled();
        let state = self.exclusive();
        state.next = 0;
        state.last = last;
        state.travels = (last && !held) || pooled;
        state.fillings.iter_mut().for_each(Filling::next_micro_batch);
    }

    /// Lends the place of parameter `i` of bucket `b`; `None` if its gradient is in, or being written.
    ///
    /// A thread waits for the memory of a bucket that travels: of the ranks that wait so, the one with the fewest buckets sent
    /// waits for what every rank has sent, or will send without it. Where none travels, the pool grows.
    pub(crate) fn lend(&self, b: usize, i: usize) -> Result<Option<Lent>, Error> {
        let mut state = self.lock();
        loop {
            self.healthy()?;
            if state.fillings[b].is_filled(i) {
                return Ok(None);
            }
            if state.fillings[b].is_open() || self.open(&mut state, b)? {
                return Ok(state.fillings[b].lend(i));
            }
            if !self.pooled() {
                return Ok(None);
            }
            let dtype = self.fixed.buckets[b].plan.grads;
            match state.travelling(dtype) {
                Some(oldest) => {
                    self.retire(state, oldest)?;
                    state = self.lock();
                }
                None if state.retiring > 0 => {
                    state = self.rested.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                None => state.pool.grow(dtype)?,
            }
        }
    }

    /// Takes a place back with its gradient, and sends off every bucket that can go.
    pub(crate) fn fill(&self, b: usize, i: usize, buffer: Buffer) -> Result<(), Error> {
        let mut state = self.lock();
        state.fillings[b].fill(i, buffer);
        let first = state.next;
        self.send_off(&mut state)?;
        let last = state.next;
        drop(state);
        let travelling = if self.fixed.overlap { 0..0 } else { first..last };
        travelling.into_iter().try_for_each(|b| self.retire(self.lock(), b))
    }

    /// Takes a place back without a gradient.
    pub(crate) fn give_back(&self, b: usize, i: usize, buffer: Buffer) {
        self.lock().fillings[b].give_back(i, buffer);
    }

    /// Fills every place that still waits with zeros, telling `missing` which; afterwards all buckets are on their way.
    /// Tells whether the micro-batch was the step's last. A place that was never given back is an error on every rank.
    pub(crate) fn complete(&self, mut missing: impl FnMut(usize)) -> Result<bool, Error> {
        let State { travels, last, .. } = *self.lock();
        self.meeting.begin(&self.fixed.gathers).inspect_err(|failure| self.poison(failure.clone()))?;
        for (b, bucket) in self.fixed.buckets.iter().enumerate() {
            for (i, param) in bucket.plan.params.iter().enumerate() {
                if self.lock().fillings[b].is_filled(i) {
                    continue;
                }
                missing(param.param);
                if !travels {
                    continue;
                }
                let Some(mut lent) = self.lend(b, i)? else {
                    self.abort();
                    return Err(Error::SlotLeaked { name: bucket.names[i].clone() });
                };
                if lent.fresh {
                    self.fixed.queue.zero(lent.buffer.as_mut().slice(0..param.len)?)?;
                }
                self.fill(b, i, lent.buffer)?;
            }
        }
        // Another micro-batch is to fill the same buckets again.
        if travels && !last {
            self.settle()?;
        }
        Ok(last)
    }

    /// Waits until no bucket travels, and no rank gathers for the micro-batches that have ended.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        let settled = (0..self.fixed.buckets.len()).try_for_each(|b| self.settle_one(b));
        let met = self.meeting.end().inspect_err(|failure| self.poison(failure.clone()));
        settled?;
        Ok(met?)
    }

    /// Waits until bucket `b` does not travel.
    pub(crate) fn settle_one(&self, b: usize) -> Result<(), Error> {
        self.retire(self.lock(), b)
    }

    /// The reduced gradients of bucket `b` that this rank holds: the whole bucket, or its own chunk at stages 2 and 3.
    pub(crate) fn grads(&mut self, b: usize) -> Option<&mut Buffer> {
        let pooled = self.pooled();
        let filling = &mut self.exclusive().fillings[b];
        if pooled { filling.shard.as_mut() } else { filling.whole.as_mut() }
    }

    /// This rank's part of the norm, once settled.
    pub(crate) fn norm(&mut self) -> Result<NormAccumulator, Error> {
        let norm = self.norm.get_mut().unwrap_or_else(PoisonError::into_inner);
        Ok(norm.read(&self.fixed.queue)?)
    }

    /// Where this rank's part of the norm is added up.
    #[cfg(feature = "cuda")]
    pub(crate) fn norm_sum(&mut self) -> &NormSum {
        self.norm.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// A digest of every bucket sent off so far, in order.
    pub(crate) fn launches(&mut self) -> u64 {
        self.exclusive().launches
    }

    /// Pool buffers beyond the plan.
    pub(crate) fn grown(&mut self) -> u64 {
        self.exclusive().pool.grown()
    }

    /// Every gradient of this step that has been collected and not sent, its pad with it.
    pub(crate) fn held(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.exclusive().fillings.iter_mut().flat_map(Filling::held)
    }

    /// Forgets the step's gradients.
    pub(crate) fn next_step(&mut self) -> Result<(), Error> {
        self.exclusive().fillings.iter_mut().for_each(Filling::next_step);
        let norm = self.norm.get_mut().unwrap_or_else(PoisonError::into_inner);
        Ok(norm.reset(&self.fixed.queue)?)
    }

    /// Adds buckets, with a pool for all of them. Only between steps.
    pub(crate) fn extend(&mut self, added: Vec<(Kept, Filling)>, shelves: Vec<Shelf>) {
        for (kept, _) in &added {
            kept.among.comms().chain(&kept.gathers).for_each(|comm| know(&mut self.fixed.comms, comm));
            kept.gathers.iter().for_each(|comm| know(&mut self.fixed.gathers, comm));
        }
        let (kept, fillings): (Vec<Kept>, Vec<Filling>) = added.into_iter().unzip();
        self.fixed.buckets.extend(kept);
        let state = self.exclusive();
        state.fillings.extend(fillings);
        state.pool.replace(shelves);
    }

    /// Pool shelves that are longer or fuller than the ones there are, for buckets of these sizes.
    pub(crate) fn shelves_for(
        &self,
        sizes: &[(DType, usize, usize)],
        meter: &Meter,
    ) -> Result<Vec<Shelf>, Error> {
        Ok(self.lock().pool.shelves_for(sizes, meter)?)
    }

    /// Bytes sent so far by every communicator.
    pub(crate) fn sent(&self) -> u64 {
        self.fixed.comms.iter().map(|comm| comm.stats().total().bytes).sum()
    }

    fn pooled(&self) -> bool {
        self.fixed.stage.cuts_grads()
    }

    // A thread that panicked while it held the lock was between two complete states: bookkeeping does not unwind.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn exclusive(&mut self) -> &mut State {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens bucket `b`, if there is memory for it.
    fn open(&self, state: &mut State, b: usize) -> Result<bool, Error> {
        let plan = &self.fixed.buckets[b].plan;
        let buffer = if self.pooled() { state.pool.take(plan.grads) } else { state.fillings[b].whole.take() };
        let Some(buffer) = buffer else { return Ok(false) };
        state.fillings[b].open(plan, buffer, self.pooled(), &self.fixed.queue)?;
        Ok(true)
    }

    /// Sends off full buckets, strictly in index order.
    fn send_off(&self, state: &mut State) -> Result<(), Error> {
        while state.travels && state.next < state.fillings.len() && state.fillings[state.next].is_full() {
            let b = state.next;
            state.next += 1;
            let op = self.op();
            let filling = &mut state.fillings[b];
            if !filling.is_open() {
                continue; // nothing in it but parameters without elements
            }
            let whole = filling.close();
            state.launches = digest(state.launches, b, whole.len());
            match self.fixed.buckets[b].among.shards.start(op, whole, &self.fixed.queue) {
                Ok(flight) => filling.flight = Some(flight),
                Err((whole, error)) => {
                    self.rest(state, b, whole);
                    self.poison(error.clone());
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    fn op(&self) -> Op {
        match self.fixed.stage {
            Stage::Replicated | Stage::WholeParams(_) => Op::all_reduce(self.fixed.reduction),
            Stage::Zero1 | Stage::Zero2 | Stage::Zero3 => Op::reduce_scatter(self.fixed.reduction),
        }
    }

    /// Waits for bucket `b`, if it travels, and takes in what it brings.
    fn retire(&self, mut state: MutexGuard<'_, State>, b: usize) -> Result<(), Error> {
        let Some(flight) = state.fillings[b].flight.take() else { return Ok(()) };
        let fresh = std::mem::take(&mut state.fillings[b].shard_is_fresh);
        let mut shard = state.fillings[b].shard.take();
        let last = state.last;
        state.retiring += 1;
        drop(state);
        let (whole, arrived) = wait(flight, &self.fixed.queue, b);
        let taken =
            arrived.map_err(Error::from).and_then(|()| self.take_in(b, &whole, shard.as_mut(), fresh, last));
        let mut state = self.lock();
        state.fillings[b].shard = shard;
        self.rest(&mut state, b, whole);
        state.retiring -= 1;
        drop(state);
        // The other ranks have this bucket.
        let taken = taken.map_err(|error| self.alone(error));
        self.rested.notify_all();
        taken
    }

    /// Puts an idle bucket where it belongs.
    fn rest(&self, state: &mut State, b: usize, whole: Buffer) {
        let filling = &mut state.fillings[b];
        match filling.spare.take() {
            Some(spare) => match whole.join(spare) {
                Ok(buffer) => state.pool.put(buffer),
                Err(_) => unreachable!("a pooled buffer was cut where it is joined"),
            },
            None => filling.whole = Some(whole),
        }
    }
}

fn wait(flight: InFlight, queue: &Queue, b: usize) -> (Buffer, Result<(), meshstep_comm::Error>) {
    let _span = tracing::debug_span!("reduce", bucket = b).entered();
    flight.wait(queue)
}

/// Mixes one more event into a digest (a multiply and a rotation, as in FxHash: cheap, and order counts).
pub(crate) fn digest(so_far: u64, a: usize, b: usize) -> u64 {
    let mix = |h: u64, x: u64| (h.rotate_left(5) ^ x).wrapping_mul(0x517c_c1b7_2722_0a95);
    mix(mix(so_far, (a as u64).wrapping_add(1)), b as u64)
}
