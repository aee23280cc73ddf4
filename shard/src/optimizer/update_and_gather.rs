//! Update and gather of a long bucket in one pass, perhaps with its reduction: parameters travel while they are in the cache.

use crate::config::stage::Stage;
use crate::error::Error;
use crate::reduce::reducer::GradReducer;
use crate::update::params::Params;
use crate::update::updater::Updater;
use meshstep_optim::{NormAccumulator, Scalars};
use meshstep_tensor::{Buffer, SliceMut};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Least elements of a rank's chunk: a shorter one travels while the next bucket is updated, which takes less time (256 Ki: a fifth, on two
/// cores). Builds with debug assertions take the pass earlier, so that tests of short vectors run it; no bit depends on it.
const LONG: usize = if cfg!(debug_assertions) { 256 << 10 } else { 1 << 20 };

/// Returns true if bucket `b` is worth one pass: this rank updates a long chunk of it, element by element, and the ranks gather it
/// while it is updated.
pub(super) fn is_long(b: usize, params: &Params, reducer: &GradReducer) -> bool {
    let (owned, bucket) = (&params.buckets[b], &reducer.config.buckets[b]);
    let (rank, ranks) = (bucket.among.shards.rank(), bucket.among.shards.world_size());
    let gathers = matches!(params.options.stage, Stage::Zero1 | Stage::Zero2) && ranks > 1;
    let long = gathers && owned.len() / ranks >= LONG && owned.is_chunk(rank, ranks, &params.groups);
    long && bucket.among.shards.gathers_while_written(&owned.params, &params.options.queue)
}

/// Updates this rank's chunk of bucket `b` part by part, and gathers the bucket on all ranks meanwhile.
pub(super) fn update_and_gather(
    b: usize,
    (params, reducer): (&mut Params, &mut GradReducer),
    updater: &Updater,
    scalars: &Scalars,
) -> Result<(), Error> {
    reducer.settle_one(b)?;
    let _span = tracing::debug_span!("update", bucket = b).entered();
    let (shards, queue) = (Arc::clone(&reducer.config.buckets[b].among.shards), params.options.queue.clone());
    let (whole, mut refused) = (params.buckets[b].params.take(), None);
    let (whole, gathered) = shards.all_gather_written(whole, &queue, &mut |first, part| match updater
        .update_part((b, first), part, params, reducer, scalars)
    {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => {
            refused = Some(error);
            ControlFlow::Break(())
        }
    });
    params.buckets[b].put_back(whole);
    match refused {
        Some(error) => Err(error),
        None => Ok(gathered?),
    }
}

/// Reduces this rank's chunk of the gradients `grads` of bucket `b`, updates it, and gathers the bucket on all ranks, part by part.
pub(super) fn reduce_update_and_gather(
    b: usize,
    mut grads: Buffer,
    (params, reducer): (&mut Params, &mut GradReducer),
    updater: &Updater,
    scalars: &Scalars,
) -> Result<(), Error> {
    let _span = tracing::debug_span!("reduce_and_update", bucket = b).entered();
    let shards = Arc::clone(&reducer.config.buckets[b].among.shards);
    let (queue, reduction) = (params.options.queue.clone(), reducer.config.reduction());
    let (whole, mut refused) = (params.buckets[b].params.take(), None);
    let (start, mut norm) = (params.buckets[b].first(), NormAccumulator::new(params.options.norm));
    let mut write = |first: usize, reduced: SliceMut<'_>, part: SliceMut<'_>| {
        let counted = reducer.count_part((b, start + first), reduced.as_slice(), &mut norm);
        match counted.and_then(|()| updater.update_with((b, first), (part, reduced), params, scalars)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                refused = Some(error);
                ControlFlow::Break(())
            }
        }
    };
    let (whole, done) = shards.reduce_and_gather(reduction, (&mut grads, whole), &queue, &mut write);
    params.buckets[b].put_back(whole);
    reducer.take_back(b, grads, &norm)?;
    match refused {
        Some(error) => Err(error),
        None => Ok(done?),
    }
}
