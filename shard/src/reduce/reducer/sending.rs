//! Full buckets on their way: one reduction each, or an exchange for each sum over this rank's slots.

use super::{GradReducer, State};
use crate::config::digest::digest;
use crate::error::Error;
use meshstep_comm::Op;
use meshstep_tensor::Buffer;

impl GradReducer {
    /// Sends full buckets, strictly in order.
    pub(super) fn send_off(&self, state: &mut State) -> Result<(), Error> {
        while state.travels && state.order.get(state.next).is_some_and(|&b| state.fills[b].is_full()) {
            let b = state.order[state.next];
            state.next += 1;
            let op = self.config.op();
            let fill = &mut state.fills[b];
            if !fill.is_open() {
                continue; // only parameters without elements, and frozen ones
            }
            let whole = fill.close();
            state.launches = digest(state.launches, b as u64, whole.len() as u64);
            if state.keeps_back && self.config.buckets[b].one_pass {
                state.fills[b].unreduced = true;
                self.rest(state, b, whole);
                continue;
            }
            let sent = match &self.config.slots {
                Some(slots) => self.send_sums(state, b, whole, slots.rounds()),
                None => self.send(state, b, op, whole),
            };
            sent?;
        }
        Ok(())
    }

    /// Starts the reduction of a bucket.
    fn send(&self, state: &mut State, b: usize, op: Op, whole: Buffer) -> Result<(), Error> {
        match self.config.buckets[b].start(op, whole, &self.config.queue, state.last) {
            Ok(flight) => {
                self.put_flight(state, b, flight);
                Ok(())
            }
            Err((whole, error)) => {
                self.rest(state, b, whole);
                self.poison(error.clone());
                Err(error.into())
            }
        }
    }

    /// Adds the last slot of this rank to its sums, and starts their exchanges.
    fn send_sums(&self, state: &mut State, b: usize, slot: Buffer, rounds: usize) -> Result<(), Error> {
        let (op, queue) = (self.config.op(), &self.config.queue);
        let Some(sums) = &mut state.fills[b].sums else { return Ok(()) };
        sums.add(slot, queue)?;
        let mut all = sums.take(rounds).into_iter();
        let Some(first) = all.next() else { return Ok(()) };
        self.send(state, b, op, first)?;
        for sum in all {
            let started = self.config.buckets[b].start(op, sum, queue, true);
            let Some(sums) = &mut state.fills[b].sums else { return Ok(()) };
            match started {
                Ok(flight) => sums.more.push(flight),
                Err((sum, error)) => {
                    sums.put_back([sum]);
                    self.poison(error.clone());
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }
}
