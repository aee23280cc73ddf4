//! Gathers of updated parameters in flight.

use crate::config::stage::Stage;
use crate::error::Error;
use crate::ranks::host_words;
use crate::reduce::reducer_config::BucketInfo;
use crate::update::owned_bucket::Owned;
use meshstep_comm::{InFlight, Op};
use meshstep_tensor::{Buffer, Queue};

/// Buckets of parameters that travel while others are still being updated.
#[derive(Debug, Default)]
pub(crate) struct Gathering {
    flights: Vec<(usize, Started)>,
}

type Started = Result<InFlight, (Buffer, meshstep_comm::Error)>;

impl Gathering {
    /// Reserves space for `pieces` collectives at once.
    pub(crate) fn reserve(&mut self, pieces: usize) {
        self.flights.reserve(pieces);
    }

    /// Sends bucket `b`; its parameters are away until [`land`](Self::land).
    pub(crate) fn send(
        &mut self,
        queue: &Queue,
        stage: Stage,
        (b, bucket): (usize, &BucketInfo),
        params: &mut Buffer,
    ) -> Result<(), Error> {
        let mut failed = None;
        for (owner, range) in &bucket.gathered {
            let mut part = params.take();
            *params = part.split_off(range.len())?;
            let op = match stage {
                Stage::WholeParams(_) => Op::broadcast(*owner),
                _ => Op::all_gather(),
            };
            let started = match &failed {
                None => bucket.among.shards.start(op, part, queue),
                // The other ranks' call must not meet this rank's next one.
                Some(error) => Err((part, meshstep_comm::Error::clone(error))),
            };
            failed = started.as_ref().err().map(|(_, error)| error.clone());
            self.flights.push((b, started));
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Waits for every bucket and puts its parameters back into `buckets`.
    pub(crate) fn land(&mut self, queue: &Queue, buckets: &mut [Owned]) -> Result<(), Error> {
        let _span = tracing::debug_span!("gather").entered();
        let mut landed = Ok(());
        for (b, started) in self.flights.drain(..) {
            let (part, arrived) = host_words::land(started, queue);
            buckets[b].put_back(part);
            landed = landed.and(arrived);
        }
        Ok(landed?)
    }

    /// Puts every bucket's parameters back into `buckets` while they are in flight. `side_stream`, a stream with no other work, waits
    /// for them; the first later use of the parameters waits for its event.
    #[cfg(feature = "cuda")]
    pub(crate) fn land_later(
        &mut self,
        side_stream: &meshstep_tensor::cuda::Stream,
        buckets: &mut [Owned],
    ) -> Result<(), Error> {
        let (queue, mut landed) = (Queue::cuda(side_stream.clone()), Ok(()));
        for (b, started) in self.flights.drain(..) {
            let (part, arrived) = host_words::land(started, &queue);
            buckets[b].put_back(part);
            landed = landed.and(arrived.map_err(Error::from));
            let expected = side_stream.record().map(|event| buckets[b].expect(event));
            landed = landed.and(expected.map_err(|error| meshstep_tensor::Error::from(error).into()));
        }
        landed
    }
}
