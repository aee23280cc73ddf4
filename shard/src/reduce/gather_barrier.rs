//! Barrier between unit gathers and the end of micro-batches.

use meshstep_comm::{Communicator, Error, InFlight, Op};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue};
use std::sync::{Arc, Mutex, PoisonError};

/// Barrier at the end of each micro-batch, on the communicators that gather units. It meets a gather only if ranks make different
/// calls, and communicators that compare calls then return an error on all ranks. A GPU's communicators do not compare.
#[derive(Debug)]
pub(crate) struct GatherBarrier {
    /// True if communicators compare calls.
    compares: bool,
    away: Mutex<Away>,
}

#[derive(Debug)]
struct Away {
    /// Empty buffer that barriers move.
    nothing: Buffer,
    flights: Vec<InFlight>,
}

impl GatherBarrier {
    /// Makes a barrier that no rank has entered.
    pub(crate) fn new(queue: &Queue, meter: &Meter) -> Result<Self, meshstep_tensor::Error> {
        let nothing = Buffer::zeroed(0, DType::U64, meter, Category::Staging)?;
        let away = Mutex::new(Away { nothing, flights: Vec::new() });
        Ok(GatherBarrier { compares: queue.place() == Place::Cpu, away })
    }

    /// Returns an empty buffer for a barrier.
    pub(crate) fn nothing(&self) -> Result<Buffer, meshstep_tensor::Error> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner).nothing.split_off(0)
    }

    /// Announces that this rank gathers no more in this micro-batch. Does not wait; further calls before [`end`](Self::end) do
    /// nothing.
    pub(crate) fn begin(&self, gathers: &[Arc<dyn Communicator>]) -> Result<(), Error> {
        let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = !away.flights.is_empty();
        for comm in gathers.iter().filter(|_| self.compares && !begun) {
            let nothing = away.nothing.split_off(0)?;
            let started = comm.start(Op::barrier(), nothing, &Queue::cpu());
            away.flights.push(started.map_err(|(_, error)| error)?);
        }
        Ok(())
    }

    /// Waits until no rank gathers any more.
    pub(crate) fn end(&self) -> Result<(), Error> {
        let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        let mut met = Ok(());
        for flight in away.flights.drain(..) {
            met = met.and(flight.wait(&Queue::cpu()).1);
        }
        met
    }
}
