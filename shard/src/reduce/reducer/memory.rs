//! Memory for buckets that fill: lent by the pool, waited for, or allocated beyond the plan.

use super::{BucketInfo, GradReducer, Guard, State};
use crate::error::Error;
use crate::plan::slot_tree::MAX_ROUNDS;
use arrayvec::ArrayVec;
use meshstep_comm::InFlight;
use meshstep_tensor::{Buffer, Place, Queue};
use std::sync::PoisonError;
use std::time::Duration;

impl GradReducer {
    /// Opens bucket `b`, if there is memory for it.
    pub(super) fn open(&self, state: &mut State, b: usize) -> Result<bool, Error> {
        let BucketInfo { plan, series, .. } = &self.config.buckets[b];
        let buffer = if self.pooled() {
            // Deferred buckets must not take memory from the others while others are still to come. The deferred ones are together:
            // others come before them, and those added since the last step after them.
            let coming = &state.order[state.next..];
            let before_others =
                coming.first().into_iter().chain(coming.last()).any(|&other| !state.deferred[other]);
            let apart = (state.deferred[b] && before_others).then(|| state.pool.grow(*series, plan.len).ok());
            let apart = apart.flatten();
            let lent = apart.or_else(|| state.pool.lend(*series, plan.len));
            lent.map(|(buffer, from)| (buffer, Some(from)))
        } else {
            state.fills[b].whole.take().map(|whole| (whole, None))
        };
        let Some((buffer, from)) = buffer else { return Ok(false) };
        state.fills[b].open(plan, buffer, from, &self.config.queue)?;
        Ok(true)
    }

    /// Waits for memory of bucket `b`'s series, or opens the bucket in memory beyond the plan.
    pub(super) fn make_room<'s>(&'s self, mut state: Guard<'s>, b: usize) -> Result<Guard<'s>, Error> {
        let BucketInfo { plan, series, .. } = &self.config.buckets[b];
        let oldest = state.pool.oldest(*series);
        // On a GPU the queue waits instead of the host.
        let there = self.config.queue.place() != Place::Cpu;
        let waits = |b: usize| there || !state.wait_budget.left().is_zero() || state.fills[b].has_arrived();
        match oldest {
            Some(oldest) if waits(oldest) => {
                self.retire_in_time(state, oldest)?;
                return Ok(self.lock());
            }
            None if state.retiring.iter().any(|&b| self.config.buckets[b].series == *series) => {
                return Ok(self.rested.wait(state).unwrap_or_else(PoisonError::into_inner));
            }
            _ => {}
        }
        match (state.pool.grow(*series, plan.len), oldest) {
            (Ok((buffer, from)), _) => {
                state.fills[b].open(plan, buffer, Some(from), &self.config.queue)?;
                Ok(state)
            }
            // Allocation failed: wait for the buckets in flight, which hold all memory there is.
            (Err(_), Some(oldest)) => {
                self.retire(state, oldest)?;
                Ok(self.lock())
            }
            (Err(error), None) => Err(error.into()),
        }
    }

    /// Waits as [`retire`](Self::retire) does, but leaves the bucket in flight when the wait budget ends.
    pub(super) fn retire_in_time(&self, mut state: Guard<'_>, b: usize) -> Result<(), Error> {
        let wait_budget = state.wait_budget.left();
        if wait_budget == Duration::MAX || self.config.queue.place() != Place::Cpu {
            return self.retire(state, b);
        }
        let Some(flight) = self.take_flight(&mut state, b) else { return Ok(()) };
        state.retiring.push(b);
        drop(state);
        let arrived = flight.ends_within(wait_budget);
        let mut state = self.lock();
        state.retiring.retain(|&other| other != b);
        self.put_flight(&mut state, b, flight);
        if arrived {
            return self.retire(state, b);
        }
        state.wait_budget.spend(b);
        drop(state);
        self.rested.notify_all();
        Ok(())
    }

    /// Waits for bucket `b`, if it is in flight, and accumulates its reduced gradients.
    pub(super) fn retire(&self, mut state: Guard<'_>, b: usize) -> Result<(), Error> {
        let Some(flight) = self.take_flight(&mut state, b) else { return Ok(()) };
        let fresh = std::mem::take(&mut state.fills[b].shard_is_fresh);
        let mut shard = state.fills[b].shard.take();
        let more = state.fills[b].sums.as_mut().map(|sums| std::mem::take(&mut sums.more));
        let last = state.last;
        state.retiring.push(b);
        drop(state);
        let (whole, arrived) = wait(flight, &self.config.queue, b);
        let (mut vectors, arrived) = self.land_sums(b, whole, arrived, more.unwrap_or_default());
        let taken = arrived
            .and_then(|()| self.add_up(b, &mut vectors))
            .and_then(|()| self.take_in(b, &vectors[0], shard.as_mut(), fresh, last));
        let whole = vectors.swap_remove(0);
        let mut state = self.lock();
        state.fills[b].shard = shard;
        if let Some(sums) = &mut state.fills[b].sums {
            sums.put_back(vectors);
        }
        self.rest(&mut state, b, whole);
        state.retiring.retain(|&other| other != b);
        drop(state);
        // The other ranks have this bucket, so an error here ends the run.
        let taken = taken.map_err(|error| self.abort_with(error));
        self.rested.notify_all();
        taken
    }

    /// Waits for the further sums of a bucket, even after a failure, so that all memory comes back. Returns all its vectors.
    fn land_sums(
        &self,
        b: usize,
        first: Buffer,
        mut arrived: Result<(), meshstep_comm::Error>,
        more: Vec<InFlight>,
    ) -> (ArrayVec<Buffer, MAX_ROUNDS>, Result<(), Error>) {
        let mut vectors = ArrayVec::new();
        vectors.push(first);
        for flight in more {
            let (vector, landed) = wait(flight, &self.config.queue, b);
            vectors.push(vector);
            arrived = arrived.and(landed);
        }
        (vectors, arrived.map_err(Error::from))
    }

    /// Adds up the sums of all ranks' slots, if the step has slots.
    fn add_up(&self, b: usize, vectors: &mut [Buffer]) -> Result<(), Error> {
        let _span = tracing::debug_span!("slots", bucket = b).entered();
        let rank = self.config.buckets[b].among.shards.rank();
        let slots = self.config.slots.as_ref().filter(|_| self.config.adds_up());
        slots.map_or(Ok(()), |slots| slots.add_up(vectors, rank, &self.config.queue))
    }

    /// Records that bucket `b` is in flight.
    pub(super) fn put_flight(&self, state: &mut State, b: usize, flight: InFlight) {
        state.fills[b].flight = Some(flight);
        state.pool.depart(self.config.buckets[b].series, b);
    }

    /// Takes the flight of bucket `b`, for which nobody else waits then.
    fn take_flight(&self, state: &mut State, b: usize) -> Option<InFlight> {
        let flight = state.fills[b].flight.take()?;
        state.pool.arrive(self.config.buckets[b].series, b);
        Some(flight)
    }

    /// Returns an idle bucket's memory to the pool, or to the bucket itself.
    pub(super) fn rest(&self, state: &mut State, b: usize, whole: Buffer) {
        let fill = &mut state.fills[b];
        match fill.from.take() {
            Some(from) => state.pool.put(self.config.buckets[b].series, whole, from),
            None => fill.whole = Some(whole),
        }
    }
}

fn wait(flight: InFlight, queue: &Queue, b: usize) -> (Buffer, Result<(), meshstep_comm::Error>) {
    let _span = tracing::debug_span!("reduce", bucket = b).entered();
    flight.wait(queue)
}
