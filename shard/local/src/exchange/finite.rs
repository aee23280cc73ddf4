//! Check for infinite and NaN values, on the device that holds them.

use meshstep_optim::{Norm, NormSum};
use meshstep_shard::{Error, Options};
use meshstep_tensor::Slice;

/// Returns true if all elements of all vectors are finite. On a GPU the call waits for the queue, once.
pub(crate) fn all_finite<'a>(
    vectors: impl IntoIterator<Item = Slice<'a>>,
    options: &Options,
) -> Result<bool, Error> {
    let (queue, mut vectors) = (&options.queue, vectors.into_iter().peekable());
    if vectors.peek().is_none() {
        return Ok(true);
    }
    let mut seen = NormSum::new(Norm::Inf, queue, &options.meter)?;
    vectors.try_for_each(|vector| seen.watch(vector, queue))?;
    Ok(seen.read(queue)?.non_finite() == 0)
}
