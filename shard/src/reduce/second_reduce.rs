//! Further reductions: reduced gradients are reduced again along other ranks before they count.

use crate::ranks::host_words;
use crate::reduce::reducer::Handover;
use crate::reduce::reducer_config::Kept;
use crate::{Error, Stage};
use meshstep_comm::{Communicator, InFlight, Op};
use meshstep_tensor::Buffer;
use std::sync::{Arc, PoisonError};

/// This rank's part of a bucket in flight, and the memory before and after it.
struct Away {
    bucket: usize,
    started: Result<InFlight, (Buffer, meshstep_comm::Error)>,
    around: Option<(Buffer, Buffer)>,
}

impl Handover {
    /// Reduces this rank's part of each bucket over the further ranks that share it, once every bucket has arrived, and adds it
    /// to the norm. Collective, in the same order on every rank.
    pub(crate) fn reduce_further(&mut self) -> Result<(), Error> {
        let rounds = self.fixed.buckets.iter().map(|kept| kept.among.further.len()).max().unwrap_or(0);
        for round in 0..rounds {
            let mut away: Vec<Away> = Vec::new();
            for b in 0..self.fixed.buckets.len() {
                let further = self.fixed.buckets[b].among.further.get(round);
                if let Some((comm, reduction)) =
                    further.map(|(comm, reduction)| (Arc::clone(comm), *reduction))
                {
                    away.extend(self.send_further(b, &*comm, Op::all_reduce(reduction))?);
                }
                if away.last().is_some_and(|away| away.started.is_err()) {
                    break; // the other ranks' call is not to meet this one's next
                }
            }
            // Wait even after a failure: all buffers must come back.
            let landed: Vec<Result<(), Error>> =
                away.into_iter().map(|away| self.land_further(away)).collect();
            landed.into_iter().collect::<Result<(), Error>>()?;
        }
        (0..self.fixed.buckets.len()).try_for_each(|b| self.count_late(b))
    }

    /// Adds this rank's counted ranges of bucket `b` to the norm, if they had to wait for further reductions.
    fn count_late(&mut self, b: usize) -> Result<(), Error> {
        let Kept { counted, among, .. } = &self.fixed.buckets[b];
        if among.further.is_empty() {
            return Ok(());
        }
        let (counted, counts, queue) = (counted.clone(), among.counts, self.fixed.queue.clone());
        // A shard holds the chunk of its rank only.
        let first =
            if self.fixed.stage.cuts_grads() { counted.first().map_or(0, |chunk| chunk.start) } else { 0 };
        let Some(grads) = self.grads(b).map(Buffer::take) else { return Ok(()) };
        let norm = self.norm.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut each = counted.iter().map(|range| range.start - first..range.end - first);
        let added = each.try_for_each(|range| {
            let values = grads.as_slice().slice(range)?;
            Ok(if counts { norm.add(values, &queue) } else { norm.watch(values, &queue) }?)
        });
        if let Some(place) = self.grads(b) {
            *place = grads;
        }
        added
    }

    fn send_further(&mut self, b: usize, comm: &dyn Communicator, op: Op) -> Result<Option<Away>, Error> {
        let chunk = match self.fixed.stage {
            Stage::Zero1 => self.fixed.buckets[b].owned.first().cloned(),
            _ => None,
        };
        let Some(buffer) = self.grads(b).filter(|buffer| !buffer.is_empty()) else { return Ok(None) };
        let mut part = buffer.take();
        let around = match chunk {
            Some(chunk) => {
                let mut rest = part.split_off(chunk.start)?;
                let after = rest.split_off(chunk.len())?;
                let before = std::mem::replace(&mut part, rest);
                Some((before, after))
            }
            None => None,
        };
        Ok(Some(Away { bucket: b, started: comm.start(op, part, &self.fixed.queue), around }))
    }

    fn land_further(&mut self, Away { bucket, started, around }: Away) -> Result<(), Error> {
        let (part, arrived) = host_words::land(started, &self.fixed.queue);
        let whole = match around {
            Some((before, after)) => {
                let joined = before.join(part).and_then(|both| both.join(after));
                joined.unwrap_or_else(|_| unreachable!("a chunk lands where it was cut"))
            }
            None => part,
        };
        if let Some(buffer) = self.grads(bucket) {
            *buffer = whole;
        }
        Ok(arrived?)
    }
}
