//! Exchanges in flight between workers, as a checkpoint saves them: their values land early, and wait for the step at which they count.

use crate::exchange::engine::Engine;
use crate::exchange::fragment_state::Parts;
use crate::exchange::in_flight::{Flight, Landed, Sent};
use crate::{LocalPlan, Placement};
use meshstep_checkpoint::CheckpointError;
use meshstep_shard::extend::{OptimizerExchange, host_words, mix_digest};
use meshstep_shard::{Optimizer, Options};
use meshstep_tensor::{Buffer, Category, DType, Error, Slice, SliceMut};

impl Flight {
    /// Waits for the values of the exchange; they count only once it arrives.
    pub(super) fn settle(&mut self, options: &Options) {
        self.early = Some(self.land(options));
    }

    /// Returns the error of the exchange, if it is known to have failed.
    pub(super) fn failure(&self) -> Result<(), CheckpointError> {
        match &self.early {
            Some((_, Err(error))) => Err(CheckpointError::OnItsWay { message: error.to_string() }),
            _ => Ok(()),
        }
    }

    /// Returns the values of the exchange, if they have landed.
    pub(super) fn brings(&self) -> impl Iterator<Item = Slice<'_>> {
        self.early.iter().flat_map(|(landed, _)| landed.vectors())
    }

    /// Returns the landed values of the `i`th spot, of `len` elements.
    pub(super) fn landed(&self, sent: &Sent, i: usize, len: usize) -> Result<Option<Slice<'_>>, Error> {
        self.early.as_ref().map(|(landed, _)| landed.of(sent, i, len)).transpose()
    }

    /// Same as [`landed`](Self::landed) for fragment `sent` of this flight, for writing.
    pub(super) fn landed_mut(
        &mut self,
        sent: usize,
        i: usize,
        len: usize,
    ) -> Result<Option<SliceMut<'_>>, Error> {
        let (lane, start) = self.sent[sent].places[i];
        let lane = self.early.as_mut().and_then(|(landed, _)| landed.0[lane].as_mut());
        lane.map(|lane| lane.as_mut().slice(start..start + len)).transpose()
    }

    /// Allocates a flight for a saved exchange, with each spot in a lane of its own.
    pub(super) fn resumed(
        fragments: Vec<usize>,
        arrives: (u64, Placement),
        (plan, parts): (&LocalPlan, &Parts),
        options: &Options,
    ) -> Result<Flight, Error> {
        let Options { queue, meter, .. } = options;
        let zeroed = |len, dtype: DType| Buffer::zeroed_on(queue, len, dtype, meter, Category::Staging);
        let (mut landed, mut all) = (Vec::new(), Vec::new());
        for &f in &fragments {
            let mut sent = Sent::default();
            for spot in &parts.of(f).spots {
                let len = spot.range.len();
                sent.places.push((landed.len(), 0));
                landed.push(Some(zeroed(len, spot.wire)?));
                if plan.fragments[f].keeps_sent() {
                    sent.snapshots.push((zeroed(len, spot.own)?, 0));
                }
            }
            all.push(sent);
        }
        Ok(Flight { fragments, arrives, sent: all, lanes: Vec::new(), early: Some((Landed(landed), Ok(()))) })
    }
}

impl Engine {
    /// Returns a digest of all state shared by the workers. Vectors in GPU memory are copied to the host.
    pub(super) fn digest(
        &mut self,
        flights: &[Flight],
        options: &Options,
    ) -> Result<u64, meshstep_shard::Error> {
        let mut digest = 0;
        let mut add = |values: Slice<'_>| -> Result<(), meshstep_shard::Error> {
            let hash = host_words::digest(&options.queue, &options.meter, values)?;
            digest = mix_digest(digest, hash, 0);
            Ok(())
        };
        self.parts.buffers().try_for_each(|buffer| add(buffer.as_slice()))?;
        flights.iter().flat_map(Flight::brings).try_for_each(add)?;
        Ok(digest)
    }
}

/// Returns the number of updates of each parameter, now and when each fragment in flight was sent; 0 for a parameter that this rank has no
/// part of.
pub(super) fn updates(inner: &Optimizer, parts: &Parts, flights: &[Flight]) -> (Vec<u64>, Vec<Vec<u64>>) {
    let params = inner.own_params();
    let now = (0..params.count()).map(|param| params.t(param)).collect();
    let sent = |(f, sent): (&usize, &Sent)| {
        let mut then = vec![0; params.count()];
        for (spot, (_, t)) in parts.of(*f).spots.iter().zip(&sent.snapshots) {
            then[spot.entry] = *t;
        }
        then
    };
    (now, flights.iter().flat_map(|flight| flight.fragments.iter().zip(&flight.sent)).map(sent).collect())
}
