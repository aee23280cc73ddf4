//! Merges on the CPU: the definition.

use super::{Merge, OuterStep};
use crate::{Flat, Scalars, Segment};
use meshstep_tensor::{Error, Queue, Slice, SliceMut, SplitParts, Threads, cast};
use std::ops::Range;

/// Elements of a block: four blocks of f64 stay in the L1 cache.
const BLOCK: usize = 1 << 10;
/// Least number of elements of a part for one thread.
const PART: usize = 1 << 15;
/// Bytes above which a vector is copied by non-temporal stores, which do not read the lines they overwrite. Measured with a last-level
/// cache of 32 MiB: an exchange of three vectors of 32 MiB between 2 workers takes 0.8 of the time; with vectors of 1 MiB there is no
/// difference.
const NON_TEMPORAL_FROM: usize = 1 << 20;

/// Buffers for one block.
struct Blocks {
    x: [f64; BLOCK],
    mean: [f64; BLOCK],
    anchor: [f64; BLOCK],
    other: [f64; BLOCK],
}

impl Blocks {
    const fn new() -> Self {
        Blocks { x: [0.0; BLOCK], mean: [0.0; BLOCK], anchor: [0.0; BLOCK], other: [0.0; BLOCK] }
    }
}

fn blocks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(BLOCK).map(move |start| start..len.min(start + BLOCK))
}

/// Calls `work` with parts of vectors of `len` elements, on several threads if they are long. Returns the first error found.
fn in_parts<V: Send>(
    threads: &Threads,
    (len, vectors): (usize, V),
    split: impl Fn(V, usize) -> Result<(V, V), Error> + Sync,
    work: impl Fn(V) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let split = |vectors: Result<V, Error>, at| match vectors.and_then(|vectors| split(vectors, at)) {
        Ok((left, right)) => (Ok(left), Ok(right)),
        Err(error) => (Err(error.clone()), Err(error)),
    };
    let part = threads.part_len(len, PART).next_multiple_of(BLOCK);
    let parts = SplitParts::new(Ok(vectors), len, part, split);
    let work = |done: &mut Result<(), Error>, (_, part): (usize, Result<V, Error>)| {
        if done.is_ok() {
            *done = part.and_then(&work);
        }
    };
    let merge = |done: &mut Result<(), Error>, other| {
        if done.is_ok() {
            *done = other;
        }
    };
    threads.fold(parts, || Ok(()), work, merge)
}

fn read(from: Slice<'_>, range: &Range<usize>, into: &mut [f64]) -> Result<(), Error> {
    cast(from.slice(range.clone())?, SliceMut::from(&mut into[..range.len()]))
}

fn write(from: &[f64], range: &Range<usize>, into: &mut SliceMut<'_>) -> Result<(), Error> {
    cast(Slice::from(&from[..range.len()]), into.reborrow().slice(range.clone())?)
}

fn halves(whole: Slice<'_>, at: usize) -> Result<(Slice<'_>, Slice<'_>), Error> {
    Ok((whole.slice(0..at)?, whole.slice(at..whole.len())?))
}

impl<'a> Merge<'a> {
    /// Splits the merge into elements before `at` and the others.
    fn split_at(self, at: usize) -> Result<[Merge<'a>; 2], Error> {
        let Merge { mean, differences, anchor, sent, taken, squares } = self;
        let (first, second) = halves(mean, at)?;
        let (anchor, other) = anchor.map(|anchor| anchor.split_at(at)).transpose()?.unzip();
        let left = sent.map_or(1.0, |(_, left)| left);
        let (own, others) = sent.map(|(sent, _)| halves(sent, at)).transpose()?.unzip();
        let [own, others] = [own, others].map(|sent| sent.map(|sent| (sent, left)));
        Ok([
            Merge { mean: first, anchor, sent: own, differences, taken, squares },
            Merge { mean: second, anchor: other, sent: others, differences, taken, squares },
        ])
    }
}

/// A function that writes one vector into another of the same length.
type Copy = fn(Slice<'_>, SliceMut<'_>) -> Result<(), Error>;

/// Returns the copy for these vectors: by non-temporal stores if they are long and of one type, else with a conversion.
fn copy_to(into: Slice<'_>, from: Slice<'_>) -> Copy {
    let long = into.len() * into.dtype().size() >= NON_TEMPORAL_FROM;
    if long && from.dtype() == into.dtype() {
        |from, mut into| into.copy_non_temporal_from(from)
    } else {
        cast
    }
}

/// Implements [`Merge::mean`].
pub(super) fn mean(merge: Merge<'_>, values: SliceMut<'_>, threads: &Threads) -> Result<(), Error> {
    let copy = copy_to(values.as_slice(), merge.mean);
    let work = |(merge, values): Merged<'_>| mean_of_part(merge, values, copy);
    in_parts(threads, (values.len(), (merge, values)), split_merged, work)
}

/// Arguments of [`mean`].
type Merged<'a> = (Merge<'a>, SliceMut<'a>);

fn split_merged<'a>((merge, values): Merged<'a>, at: usize) -> Result<(Merged<'a>, Merged<'a>), Error> {
    let ([left, right], (first, second)) = (merge.split_at(at)?, values.split_at(at)?);
    Ok(((left, first), (right, second)))
}

fn mean_of_part(mut merge: Merge<'_>, mut values: SliceMut<'_>, copy: Copy) -> Result<(), Error> {
    if merge.sent.is_none() && merge.taken == 1.0 && !merge.differences {
        // The result is the mean, rounded once to the type of the values.
        merge.anchor.map_or(Ok(()), |anchor| copy(merge.mean, anchor))?;
        return copy(merge.mean, values);
    }
    let mut room = Blocks::new();
    for range in blocks(values.len()) {
        read_mean(&merge, &range, &mut room)?;
        let Blocks { x, mean, other, .. } = &mut room;
        read(values.as_slice(), &range, x)?;
        if let Some((sent, left)) = merge.sent {
            read(sent, &range, other)?;
            let share = merge.taken * left;
            let floor = if merge.squares { 0.0 } else { f64::NEG_INFINITY };
            each(range.len(), |i| x[i] = at_least(floor, x[i] + share * (mean[i] - other[i])));
        } else {
            each(range.len(), |i| x[i] = mixed(merge.taken, x[i], mean[i]));
        }
        write(x, &range, &mut values)?;
        if let Some(anchor) = &mut merge.anchor {
            write(mean, &range, anchor)?;
        }
    }
    Ok(())
}

/// Implements [`Merge::outer`].
pub(super) fn outer(
    mut merge: Merge<'_>,
    mut values: SliceMut<'_>,
    outer: OuterStep<'_>,
) -> Result<(), crate::Error> {
    let (mut room, mut params) = (Blocks::new(), [0.0; BLOCK]);
    for range in blocks(values.len()) {
        read_mean(&merge, &range, &mut room)?;
        let Blocks { x, mean, anchor, other: grads } = &mut room;
        let n = range.len();
        each(n, |i| (params[i], grads[i]) = (anchor[i], anchor[i] - mean[i]));
        let slots = outer.state.iter_mut().map(|slot| slot.as_mut().slice(range.clone()));
        let mut slots = slots.collect::<Result<Vec<_>, _>>()?;
        let flat = Flat {
            params: SliceMut::from(&mut params[..n]),
            grads: SliceMut::from(&mut grads[..n]),
            state: &mut slots,
            copy: None,
            remainder: None,
        };
        let scalars = Scalars { lr: outer.lr, ..Scalars::default() };
        outer.rule.update(flat, &[Segment::new(0..n, outer.t)], &scalars, &Queue::cpu())?;
        each(n, |i| mean[i] += params[i] - (anchor[i] - grads[i]));
        read(values.as_slice(), &range, x)?;
        each(n, |i| x[i] = mixed(merge.taken, x[i], mean[i]));
        write(x, &range, &mut values)?;
        if let Some(anchor) = &mut merge.anchor {
            write(mean, &range, anchor)?;
        }
    }
    Ok(())
}

/// Reads the mean, and the anchor if there is one.
fn read_mean(merge: &Merge<'_>, range: &Range<usize>, room: &mut Blocks) -> Result<(), Error> {
    let Blocks { mean, anchor, .. } = room;
    read(merge.mean, range, mean)?;
    if let Some(from) = &merge.anchor {
        read(from.as_slice(), range, anchor)?;
    }
    if merge.differences {
        each(range.len(), |i| mean[i] += anchor[i]);
    }
    Ok(())
}

fn each(n: usize, then: impl FnMut(usize)) {
    (0..n).for_each(then);
}

/// Mixes the share `taken` of the result into `own`; returns the result itself, bit for bit, if `taken` is 1.
fn mixed(taken: f64, own: f64, result: f64) -> f64 {
    if taken == 1.0 { result } else { own + taken * (result - own) }
}

/// Returns the larger of both; NaN stays NaN.
fn at_least(floor: f64, x: f64) -> f64 {
    if x < floor { floor } else { x }
}

/// Implements [`super::mix_zeros`].
pub(super) fn mix_zeros(mut values: SliceMut<'_>, taken: f64) -> Result<(), Error> {
    let mut x = [0.0; BLOCK];
    for range in blocks(values.len()) {
        read(values.as_slice(), &range, &mut x)?;
        each(range.len(), |i| x[i] = mixed(taken, x[i], 0.0));
        write(&x, &range, &mut values)?;
    }
    Ok(())
}

/// Implements [`super::pack`].
pub(super) fn pack(
    values: Slice<'_>,
    anchor: Option<Slice<'_>>,
    into: SliceMut<'_>,
    threads: &Threads,
) -> Result<(), Error> {
    let copy = copy_to(into.as_slice(), values);
    let work = |(values, anchor, into): Packed<'_>| pack_part(values, anchor, into, copy);
    in_parts(threads, (values.len(), (values, anchor, into)), split_packed, work)
}

/// Arguments of [`pack`].
type Packed<'a> = (Slice<'a>, Option<Slice<'a>>, SliceMut<'a>);

fn split_packed<'a>(
    (values, anchor, into): Packed<'a>,
    at: usize,
) -> Result<(Packed<'a>, Packed<'a>), Error> {
    let ((left, right), (first, second)) = (halves(values, at)?, into.split_at(at)?);
    let (anchor, other) = anchor.map(|anchor| halves(anchor, at)).transpose()?.unzip();
    Ok(((left, anchor, first), (right, other, second)))
}

fn pack_part(
    values: Slice<'_>,
    anchor: Option<Slice<'_>>,
    mut into: SliceMut<'_>,
    copy: Copy,
) -> Result<(), Error> {
    let Some(anchor) = anchor else { return copy(values, into) };
    let mut room = Blocks::new();
    for range in blocks(values.len()) {
        read(values, &range, &mut room.x)?;
        read(anchor, &range, &mut room.anchor)?;
        each(range.len(), |i| room.x[i] -= room.anchor[i]);
        write(&room.x, &range, &mut into)?;
    }
    Ok(())
}
