//! Updated parameters on their way to every rank.

use crate::handover::Kept;
use crate::{Error, Stage};
use meshstep_comm::{Communicator, InFlight, Op};
use meshstep_tensor::{Buffer, Queue};

/// Buckets of parameters that travel while others are still being updated.
#[derive(Debug, Default)]
pub(crate) struct Gathering {
    flights: Vec<(usize, Started)>,
}

type Started = Result<InFlight, (Buffer, meshstep_comm::Error)>;

impl Gathering {
    /// Room for `pieces` collectives at once.
    pub(crate) fn reserve(&mut self, pieces: usize) {
        self.flights.reserve(pieces);
    }

    /// Sends off bucket `b`; until [`land`](Self::land) its parameters are away.
    pub(crate) fn send(
        &mut self,
        comm: &dyn Communicator,
        queue: &Queue,
        stage: Stage,
        (b, bucket): (usize, &Kept),
        params: &mut Buffer,
    ) -> Result<(), Error> {
        for (owner, range) in &bucket.gathered {
            let mut part = params.take();
            *params = part.split_off(range.len())?;
            let op = match stage {
                Stage::WholeParams(_) => Op::broadcast(*owner),
                _ => Op::all_gather(),
            };
            self.flights.push((b, comm.start(op, part, queue)));
        }
        Ok(())
    }

    /// Waits for every bucket and puts its parameters back into `buckets`.
    pub(crate) fn land(&mut self, queue: &Queue, buckets: &mut [crate::owned::Owned]) -> Result<(), Error> {
        let _span = tracing::debug_span!("gather").entered();
        let mut landed = Ok(());
        for (b, started) in self.flights.drain(..) {
            let (part, arrived) = match started {
                Ok(flight) => flight.wait(queue),
                Err((part, error)) => (part, Err(error)),
            };
            buckets[b].put_back(part);
            landed = landed.and(arrived);
        }
        Ok(landed?)
    }
}
