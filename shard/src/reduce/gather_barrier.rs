//! Where ranks that gather and ranks that have ended their micro-batch find out about each other.

use meshstep_comm::{Communicator, Error, InFlight, Op};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue};
use std::sync::{Arc, Mutex, PoisonError};

/// A barrier at the end of each micro-batch, where units are gathered: it meets no gather unless ranks have parted, and then
/// communicators that compare calls tell all of them. A GPU's do not compare.
#[derive(Debug)]
pub(crate) struct Meeting {
    /// Whether communicators compare calls.
    compares: bool,
    away: Mutex<Away>,
}

#[derive(Debug)]
struct Away {
    /// What barriers move.
    nothing: Buffer,
    flights: Vec<InFlight>,
}

impl Meeting {
    /// Nobody meets yet.
    pub(crate) fn new(queue: &Queue, meter: &Meter) -> Result<Self, meshstep_tensor::Error> {
        let nothing = Buffer::zeroed(0, DType::U64, meter, Category::Staging)?;
        let away = Mutex::new(Away { nothing, flights: Vec::new() });
        Ok(Meeting { compares: queue.place() == Place::Cpu, away })
    }

    /// What a barrier moves.
    pub(crate) fn nothing(&self) -> Result<Buffer, meshstep_tensor::Error> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner).nothing.split_off(0)
    }

    /// This rank gathers no more in this micro-batch. Waits for nobody; told again before the end, it is told already.
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
