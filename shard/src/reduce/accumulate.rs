//! Accumulation of a reduced bucket on this rank: into its shard, and into the norm.

use crate::error::Error;
use crate::reduce::reducer::GradReducer;
use crate::reduce::reducer_config::{BucketInfo, ReducerConfig};
use meshstep_optim::{Isa, NormAccumulator, NormSum, accumulate};
use meshstep_tensor::{Buffer, Place, Queue, Slice};
use std::sync::{MutexGuard, PoisonError};

/// Elements added to a shard on the CPU before their norm is taken: they are then still in the first-level cache.
const BLOCK: usize = 4096;

impl GradReducer {
    /// Adds an arrived bucket to the shard, if there is one, and in the last micro-batch this rank's counted ranges to the norm,
    /// in one pass.
    pub(crate) fn take_in(
        &self,
        b: usize,
        whole: &Buffer,
        shard: Option<&mut Buffer>,
        fresh: bool,
        last: bool,
    ) -> Result<(), Error> {
        let _span = tracing::debug_span!("norm", bucket = b).entered();
        let ReducerConfig { queue, buckets, options, .. } = &self.config;
        let (BucketInfo { counted, chunk_norm, owned, among, .. }, here) =
            (&buckets[b], queue.place() == Place::Cpu);
        // Gradients with further reductions count after those.
        let last = last && among.extra_reductions.is_empty();
        let observed = chunk_norm.as_ref().filter(|_| last && shard.is_none()).and_then(|norm| norm.sum());
        // Threads accumulate buckets in parallel, so each counts into an accumulator of its own.
        let mut part = NormAccumulator::new(options.norm);
        let mut count = |values: Slice<'_>| -> Result<(), Error> {
            Ok(match (here, among.counts_in_norm) {
                (true, true) => part.add_on(Isa::detect(), queue.threads(), values),
                (true, false) => part.watch_on(queue.threads(), values),
                (false, true) => self.sum().add(values, queue),
                (false, false) => self.sum().watch(values, queue),
            }?)
        };
        match shard {
            Some(shard) => {
                let chunk = whole.as_slice().slice(owned[0].clone())?;
                let block = if here { BLOCK } else { chunk.len().max(1) };
                add_to_shard(
                    shard,
                    chunk,
                    fresh,
                    block,
                    queue,
                    |part| if last { count(part) } else { Ok(()) },
                )?;
            }
            None if observed.is_some() => {}
            None if last => {
                counted.iter().try_for_each(|range| count(whole.as_slice().slice(range.clone())?))?;
            }
            None => {}
        }
        if here && last { Ok(self.sum().merge(&observed.unwrap_or(part))?) } else { Ok(()) }
    }

    /// Returns the sum, also after a panic (decision 119): it is held for one merge, which does not panic.
    fn sum(&self) -> MutexGuard<'_, NormSum> {
        self.norm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds a chunk to a shard block by block, and calls `then` with each block's sums.
fn add_to_shard(
    shard: &mut Buffer,
    chunk: Slice<'_>,
    fresh: bool,
    block: usize,
    queue: &Queue,
    mut then: impl FnMut(Slice<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    for start in (0..chunk.len()).step_by(block) {
        let block = start..chunk.len().min(start + block);
        accumulate(shard.as_mut().slice(block.clone())?, chunk.slice(block.clone())?, 1.0, fresh, queue)?;
        then(shard.as_slice().slice(block)?)?;
    }
    Ok(())
}
