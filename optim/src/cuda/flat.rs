//! Whole vectors of a device, element by element: added with a weight, scaled, cast.

use super::kernels::{Kernel, Text, argument};
use super::tile;
use crate::Error;
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{DType, Place, Queue, Slice, SliceMut};

const FLAT: Text = Text { name: "flat", ptx: include_str!("flat.ptx") };

/// [`accumulate`](crate::accumulate) on a stream; lengths and types are checked.
pub(crate) fn accumulate(
    stream: &Stream,
    dst: SliceMut<'_>,
    src: Slice<'_>,
    weight: f64,
    first: bool,
) -> Result<(), Error> {
    on(stream, &[dst.place(), src.place()])?;
    match (first, weight == 1.0) {
        (true, true) => Ok(Queue::cuda(stream.clone()).copy(src, dst)?),
        (true, false) => run(stream, "scale", dst.as_slice(), src, weight),
        (false, _) => run(stream, "add", dst.as_slice(), src, weight),
    }
}

/// Every element times `factor`, as [`SliceMut::scale`] makes it.
pub(crate) fn scale(stream: &Stream, memory: SliceMut<'_>, factor: f64) -> Result<(), Error> {
    on(stream, &[memory.place()])?;
    run(stream, "scale", memory.as_slice(), memory.as_slice(), factor)
}

/// Copies `src` into `dst`, of the same length, as [`SliceMut::cast_from`] does, between f32, bf16 and f16.
pub(crate) fn cast(stream: &Stream, src: Slice<'_>, dst: SliceMut<'_>) -> Result<(), Error> {
    on(stream, &[dst.place(), src.place()])?;
    if src.dtype() == dst.dtype() {
        return Ok(Queue::cuda(stream.clone()).copy(src, dst)?);
    }
    if src.len() != dst.len() {
        return Err(Error::Len { what: "src", given: src.len(), expected: dst.len() });
    }
    let narrow = |dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    if let Some(given) = [src.dtype(), dst.dtype()].into_iter().find(|&dtype| !narrow(dtype)) {
        return Err(Error::DType { what: "a cast on a GPU", given, works: "f32, bf16 and f16" });
    }
    let name = format!("flat_cast_{}_to_{}", src.dtype(), dst.dtype());
    let kernel = Kernel::find(stream.device(), FLAT, &name)?;
    let (mut to, mut from, mut n) = (dst.address() as u64, src.address() as u64, src.len() as u64);
    let tiles = n.div_ceil(tile(DType::F32));
    // SAFETY: both vectors have `n` elements of the kernel's types on the stream's device; `dst` is borrowed exclusively, and
    // work that later calls put on this stream follows.
    unsafe { kernel.launch(stream, tiles, &mut [argument(&mut to), argument(&mut from), argument(&mut n)]) }
}

fn run(stream: &Stream, what: &str, dst: Slice<'_>, src: Slice<'_>, mut weight: f64) -> Result<(), Error> {
    let kernel = Kernel::find(stream.device(), FLAT, &format!("flat_{what}_{}", dst.dtype()))?;
    let (mut to, mut from, mut n) = (dst.address() as u64, src.address() as u64, src.len() as u64);
    let arguments = &mut [argument(&mut to), argument(&mut from), argument(&mut n), argument(&mut weight)];
    // SAFETY: both vectors have `n` elements of the kernel's type on the stream's device, checked by the callers, which
    // borrow `dst` exclusively; work that later calls put on this stream follows.
    unsafe { kernel.launch(stream, n.div_ceil(tile(dst.dtype())), arguments) }
}

/// Whether memory is that of the stream's device.
fn on(stream: &Stream, places: &[Place]) -> Result<(), Error> {
    let own = Place::Cuda(stream.device().ordinal());
    Ok(places.iter().try_for_each(|place| place.check(own))?)
}
