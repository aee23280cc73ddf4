//! Scaling and casting of vectors at their place: on the CPU, or on a GPU in a stream's order.

use crate::Error;
use meshstep_tensor::{Queue, Slice, SliceMut};

/// Multiplies every element by `factor`, in f32 with the factor rounded to f32, or in f64; each product is rounded once. The memory must
/// be at the queue's place.
pub fn scale(mut memory: SliceMut<'_>, factor: f64, queue: &Queue) -> Result<(), Error> {
    #[cfg(feature = "cuda")]
    if let Some(stream) = queue.stream() {
        return crate::cuda::flat::scale(stream, memory, factor);
    }
    let _ = queue;
    Ok(memory.scale(factor)?)
}

/// Copies `src` into `dst`, of the same length, rounding each element to nearest, ties to even. Both must be at the queue's place. A GPU
/// converts between f32, bf16 and f16, and copies any type.
pub fn cast(src: Slice<'_>, mut dst: SliceMut<'_>, queue: &Queue) -> Result<(), Error> {
    #[cfg(feature = "cuda")]
    if let Some(stream) = queue.stream() {
        return crate::cuda::flat::cast(stream, src, dst);
    }
    let _ = queue;
    Ok(dst.cast_from(src)?)
}
