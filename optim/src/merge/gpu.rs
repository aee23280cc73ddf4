//! Merges on a GPU, after all work of a stream so far.

use super::{Merge, OuterStep};
use crate::cuda::{Group, Kernel, StepBlock, StepScalars, THREADS, Update, argument};
use crate::{Error, Flat, Rounding, Rule, Segment};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, Slice, SliceMut};
use std::ops::Range;

/// Elements of an outer optimizer's step at a time: two f64 vectors of this length take 64 MiB.
const CHUNK: usize = 1 << 22;

/// Argument of a launch: the struct of this name in merge.cu, field by field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Launch {
    values: u64,
    mean: u64,
    anchor: u64,
    sent: u64,
    params: u64,
    grads: u64,
    taken: f64,
    share: f64,
    len: u64,
    own: u32,
    wire: u32,
    differences: u32,
    squares: u32,
}

/// Returns merge.cu's code of a type; the caller has checked that it has one.
fn format(dtype: DType) -> u32 {
    match dtype {
        DType::F64 => 1,
        DType::BF16 => 2,
        DType::F16 => 3,
        _ => 0,
    }
}

fn address(vector: Slice<'_>) -> u64 {
    vector.address() as u64
}

/// Implements [`Merge::mean`].
pub(super) fn mean(merge: Merge<'_>, values: SliceMut<'_>, stream: &Stream) -> Result<(), Error> {
    let len = values.len();
    let launch = Launch::of(&merge, &values, &(0..len), stream)?;
    // SAFETY: `values` and the anchor are borrowed exclusively. The callers checked lengths and types, and `of` checked places.
    unsafe { launch.run("merge_mean", stream) }
}

/// Implements [`super::mix_zeros`].
pub(super) fn mix_zeros(values: SliceMut<'_>, taken: f64, stream: &Stream) -> Result<(), Error> {
    on(stream, values.as_slice())?;
    let (own, len) = (format(values.dtype()), values.len() as u64);
    let launch = Launch { values: address(values.as_slice()), taken, len, own, ..Launch::default() };
    // SAFETY: `values` is borrowed exclusively, has `len` elements of the format, and is on the stream's device.
    unsafe { launch.run("merge_zeros", stream) }
}

/// Implements [`super::pack`].
pub(super) fn pack(
    values: Slice<'_>,
    anchor: Option<Slice<'_>>,
    into: SliceMut<'_>,
    stream: &Stream,
) -> Result<(), Error> {
    for vector in [values, into.as_slice()].into_iter().chain(anchor) {
        on(stream, vector)?;
    }
    if anchor.is_none() && values.dtype() == into.dtype() {
        return Ok(Queue::cuda(stream.clone()).copy(values, into)?);
    }
    let launch = Launch {
        values: address(values),
        mean: address(into.as_slice()),
        anchor: anchor.map_or(0, address),
        len: values.len() as u64,
        own: format(values.dtype()),
        wire: format(into.dtype()),
        ..Launch::default()
    };
    // SAFETY: the kernel writes only `into`, which is borrowed exclusively. Lengths and types were checked by the callers, places above.
    unsafe { launch.run("merge_pack", stream) }
}

/// Implements [`Merge::outer`]. All allocations come first: if one fails, nothing has been written.
pub(super) fn outer(
    merge: Merge<'_>,
    values: SliceMut<'_>,
    outer: OuterStep<'_>,
    queue: &Queue,
    meter: &Meter,
) -> Result<(), Error> {
    let (OuterStep { rule, lr, state, t }, len) = (outer, values.len());
    if len == 0 {
        return Ok(());
    }
    let elsewhere = || meshstep_tensor::Error::Place { given: queue.place(), expected: Place::Cuda(0) };
    let stream = queue.stream().ok_or_else(elsewhere)?;
    let mut room = MergeScratch::new(len.min(CHUNK), lr, queue, meter)?;
    let chunks = || (0..len).step_by(CHUNK).map(|start| start..len.min(start + CHUNK));
    let update = |range| room.flat(state, &range, |flat, _| update(rule, t, &flat, queue, meter));
    let updates: Vec<Update> = chunks().map(update).collect::<Result<_, _>>()?;
    for (range, mut update) in chunks().zip(updates) {
        let mut launch = Launch::of(&merge, &values, &range, stream)?;
        (launch.params, launch.grads) = room.addresses(range.len())?;
        // SAFETY: as in `mean`. The optimizer's vectors belong to `room`, are as long as the range, and are not used otherwise.
        unsafe { launch.run("merge_begin", stream)? };
        room.flat(state, &range, |flat, step| update.run(flat, step, queue))?;
        // SAFETY: as above.
        unsafe { launch.run("merge_outer", stream)? };
    }
    Ok(())
}

/// Creates the table of a step of the outer optimizer.
fn update(
    rule: &dyn Rule,
    t: u64,
    flat: &Flat<'_, '_>,
    queue: &Queue,
    meter: &Meter,
) -> Result<Update, Error> {
    let segments = &[Segment::new(0..flat.params.len(), t)];
    let group = Group { rule, lr_scale: 1.0, segments, params: &[] };
    Update::new(flat, &[group], Rounding::Nearest, queue, meter)
}

/// Device memory of an outer optimizer's step: parameters and gradients of a chunk, and its scalars.
struct MergeScratch {
    vectors: Buffer,
    step: StepBlock,
}

impl MergeScratch {
    fn new(len: usize, lr: f64, queue: &Queue, meter: &Meter) -> Result<Self, Error> {
        let vectors = Buffer::zeroed_on(queue, 2 * len, DType::F64, meter, Category::Staging)?;
        let mut step = StepBlock::new(queue, meter)?;
        step.set(&StepScalars { lr, grad_scale: 1.0, skip: 0, zero_grads: 0 }, queue)?;
        Ok(MergeScratch { vectors, step })
    }

    /// Returns the addresses of parameters and gradients for `len` elements.
    fn addresses(&self, len: usize) -> Result<(u64, u64), Error> {
        let vectors = self.vectors.as_slice();
        Ok((address(vectors), address(vectors.slice(len..2 * len)?)))
    }

    /// Calls `then` with the vectors of a step of `range` with this state.
    fn flat<T>(
        &mut self,
        state: &mut [Buffer],
        range: &Range<usize>,
        then: impl FnOnce(Flat<'_, '_>, &StepBlock) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let n = range.len();
        let (params, grads) = self.vectors.as_mut().slice(0..2 * n)?.split_at(n)?;
        let slots = state.iter_mut().map(|slot| slot.as_mut().slice(range.clone()));
        let mut slots = slots.collect::<Result<Vec<_>, _>>()?;
        then(Flat { params, grads, state: &mut slots, copy: None, remainder: None }, &self.step)
    }
}

impl Launch {
    /// Creates the launch of a merge of the elements `range`.
    fn of(
        merge: &Merge<'_>,
        values: &SliceMut<'_>,
        range: &Range<usize>,
        stream: &Stream,
    ) -> Result<Self, Error> {
        let place = |vector: Slice<'_>| -> Result<u64, Error> {
            on(stream, vector)?;
            Ok(address(vector.slice(range.clone())?))
        };
        let anchor = merge.anchor.as_ref().map(SliceMut::as_slice);
        let (sent, left) = merge.sent.map_or((None, 1.0), |(sent, left)| (Some(sent), left));
        Ok(Launch {
            values: place(values.as_slice())?,
            mean: place(merge.mean)?,
            anchor: anchor.map_or(Ok(0), place)?,
            sent: sent.map_or(Ok(0), place)?,
            taken: merge.taken,
            share: merge.taken * left,
            len: range.len() as u64,
            own: format(values.dtype()),
            wire: format(merge.mean.dtype()),
            differences: merge.differences.into(),
            squares: merge.squares.into(),
            ..Launch::default()
        })
    }

    /// # Safety
    /// Vectors that are not null have `len` elements of the formats that the kernel expects, on the stream's device. Memory that the
    /// kernel writes is borrowed exclusively, and later work on the stream runs after the kernel.
    unsafe fn run(mut self, kernel: &str, stream: &Stream) -> Result<(), Error> {
        if self.len == 0 {
            return Ok(());
        }
        let kernel = Kernel::find(stream.device(), kernel)?;
        // SAFETY: the caller's promise; the kernel takes one such struct by value.
        unsafe { kernel.launch(stream, self.len.div_ceil(THREADS.into()), &mut [argument(&mut self)]) }
    }
}

/// Checks that memory is on the stream's device.
fn on(stream: &Stream, vector: Slice<'_>) -> Result<(), Error> {
    Ok(vector.place().check(Place::Cuda(stream.device().ordinal()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_kernels() {
        assert_eq!(size_of::<Launch>(), 88);
        assert_eq!(std::mem::offset_of!(Launch, own), 72);
    }
}
