//! Further reductions: reduced gradients are reduced again along other ranks before they count.

use crate::config::options::Options;
use crate::config::stage::Stage;
use crate::error::Error;
use crate::ranks::host_words;
use crate::reduce::reducer::GradReducer;
use crate::reduce::reducer_config::BucketInfo;
use meshstep_comm::{Communicator, InFlight, Op};
use meshstep_tensor::Buffer;
use std::sync::{Arc, PoisonError};

/// This rank's part of a bucket in flight, and the memory before and after it.
struct Away {
    bucket: usize,
    started: Result<InFlight, (Buffer, meshstep_comm::Error)>,
    hooks: Option<(Buffer, Buffer)>,
}

impl GradReducer {
    /// Reduces this rank's part of each bucket over the further ranks that share it, once every bucket has arrived, and adds it
    /// to the norm. Collective, in the same order on every rank.
    pub(crate) fn second_reduce(&mut self) -> Result<(), Error> {
        let rounds =
            self.config.buckets.iter().map(|kept| kept.among.extra_reductions.len()).max().unwrap_or(0);
        for round in 0..rounds {
            let mut away: Vec<Away> = Vec::new();
            for b in 0..self.config.buckets.len() {
                let extra_reductions = self.config.buckets[b].among.extra_reductions.get(round);
                if let Some((comm, reduction)) =
                    extra_reductions.map(|(comm, reduction)| (Arc::clone(comm), *reduction))
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
        (0..self.config.buckets.len()).try_for_each(|b| self.count_late(b))?;
        let whole = self.config.options.stage == Stage::Replicated && self.config.adds_up();
        if whole { self.gather_sums() } else { Ok(()) }
    }

    /// Gathers the sums over slots, of which each rank has made its chunk, once every bucket has arrived. Collective.
    fn gather_sums(&mut self) -> Result<(), Error> {
        let mut away: Vec<Away> = Vec::new();
        for b in 0..self.config.buckets.len() {
            let comm = Arc::clone(&self.config.buckets[b].among.shards);
            if self.travels(b) {
                away.extend(self.send_further(b, &*comm, Op::all_gather())?);
            }
            if away.last().is_some_and(|away| away.started.is_err()) {
                break;
            }
        }
        let landed: Vec<Result<(), Error>> = away.into_iter().map(|away| self.land_further(away)).collect();
        landed.into_iter().collect()
    }

    /// Adds this rank's counted ranges of bucket `b` to the norm, if they had to wait for further reductions.
    fn count_late(&mut self, b: usize) -> Result<(), Error> {
        let BucketInfo { counted, among, .. } = &self.config.buckets[b];
        if among.extra_reductions.is_empty() {
            return Ok(());
        }
        let (counted, counts, queue) = (counted.clone(), among.counts_in_norm, self.config.queue.clone());
        // A shard holds the chunk of its rank only.
        let first =
            if self.config.options.cuts_grads() { counted.first().map_or(0, |chunk| chunk.start) } else { 0 };
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
        let Options { stage, .. } = &self.config.options;
        // A rank that keeps whole gradients has reduced its own chunk only.
        let reduced = stage.cuts_state() && !self.config.options.cuts_grads();
        let chunk = self.config.buckets[b].owned.first().filter(|_| reduced).cloned();
        let Some(buffer) = self.grads(b).filter(|buffer| !buffer.is_empty()) else { return Ok(None) };
        let mut part = buffer.take();
        let hooks = match chunk {
            Some(chunk) => {
                let mut rest = part.split_off(chunk.start)?;
                let after = rest.split_off(chunk.len())?;
                let before = std::mem::replace(&mut part, rest);
                Some((before, after))
            }
            None => None,
        };
        Ok(Some(Away { bucket: b, started: comm.start(op, part, &self.config.queue), hooks }))
    }

    fn land_further(&mut self, Away { bucket, started, hooks }: Away) -> Result<(), Error> {
        let (part, arrived) = host_words::land(started, &self.config.queue);
        let whole = match hooks {
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
