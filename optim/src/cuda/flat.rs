//! Elementwise operations on whole vectors of a device: weighted add, scale, cast.

use super::kernels::{Kernel, argument};
use super::tile;
use crate::Error;
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{DType, Place, Queue, Slice, SliceMut};

/// [`accumulate`](crate::accumulate) on a stream; the caller has checked lengths and types.
pub(crate) fn accumulate(
    stream: &Stream,
    dst: SliceMut<'_>,
    src: Slice<'_>,
    weight: f64,
    first: bool,
) -> Result<(), Error> {
    on(stream, &[dst.place(), src.place()])?;
    run(stream, dst.as_slice(), src, weight, first)
}

/// Multiplies every element by `factor`, with the result of [`SliceMut::scale`].
pub(crate) fn scale(stream: &Stream, memory: SliceMut<'_>, factor: f64) -> Result<(), Error> {
    on(stream, &[memory.place()])?;
    run(stream, memory.as_slice(), memory.as_slice(), factor, true)
}

/// Copies `src` into `dst` of the same length between f32, bf16 and f16, with the result of [`SliceMut::cast_from`].
pub(crate) fn cast(stream: &Stream, src: Slice<'_>, dst: SliceMut<'_>) -> Result<(), Error> {
    on(stream, &[dst.place(), src.place()])?;
    if src.dtype() == dst.dtype() {
        return Ok(Queue::cuda(stream.clone()).copy(src, dst)?);
    }
    if src.len() != dst.len() {
        return Err(Error::Len { what: "src", given: src.len(), expected: dst.len() });
    }
    let wide = src.dtype() == DType::F64 || dst.dtype() == DType::F64;
    let given = if wide { DType::F64 } else { src.dtype() };
    let works = "f32, bf16 and f16";
    let name = super::cast(src.dtype(), dst.dtype()).ok_or(Error::DType {
        what: "a cast on a GPU",
        given,
        works,
    })?;
    let kernel = Kernel::find(stream.device(), &name)?;
    let (mut to, mut from, mut n) = (dst.address() as u64, src.address() as u64, src.len() as u64);
    let tiles = n.div_ceil(tile(DType::F32));
    // SAFETY: both vectors have `n` elements of the kernel's types on the stream's device. `dst` is borrowed exclusively, and later work
    // on this stream runs after the kernel.
    unsafe { kernel.launch(stream, tiles, &mut [argument(&mut to), argument(&mut from), argument(&mut n)]) }
}

/// Computes `dst = weight * src` if `first`, else `dst += weight * src`.
fn run(stream: &Stream, dst: Slice<'_>, src: Slice<'_>, mut weight: f64, first: bool) -> Result<(), Error> {
    let (given, works) = (dst.dtype(), "f32, f64, bf16 or f16");
    let name = super::accumulate(given).ok_or(Error::DType { what: "dst", given, works })?;
    let kernel = Kernel::find(stream.device(), &name)?;
    let (mut to, mut from, mut n) = (dst.address() as u64, src.address() as u64, src.len() as u64);
    let mut first = u32::from(first);
    let arguments = &mut [
        argument(&mut to),
        argument(&mut from),
        argument(&mut n),
        argument(&mut weight),
        argument(&mut first),
    ];
    // SAFETY: both vectors have `n` elements of the kernel's type on the stream's device, checked by the callers, which borrow `dst`
    // exclusively; `src` and `dst` may be the same vector. Later work on this stream runs after the kernel.
    unsafe { kernel.launch(stream, n.div_ceil(tile(dst.dtype())), arguments) }
}

/// Checks that memory is on the stream's device.
fn on(stream: &Stream, places: &[Place]) -> Result<(), Error> {
    let own = Place::Cuda(stream.device().ordinal());
    Ok(places.iter().try_for_each(|place| place.check(own))?)
}
