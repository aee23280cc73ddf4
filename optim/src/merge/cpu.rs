//! Merges on the CPU: the definition.

use super::{Merge, OuterStep};
use crate::{Flat, Scalars, Segment};
use meshstep_tensor::{Error, Queue, Slice, SliceMut, cast};
use std::ops::Range;

/// Elements at a time.
const BLOCK: usize = 1 << 12;

/// Room for a block.
struct Blocks {
    x: Vec<f64>,
    mean: Vec<f64>,
    anchor: Vec<f64>,
    other: Vec<f64>,
}

impl Blocks {
    fn new(len: usize) -> Self {
        let room = || vec![0.0; len.min(BLOCK)];
        Blocks { x: room(), mean: room(), anchor: room(), other: room() }
    }
}

fn blocks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(BLOCK).map(move |start| start..len.min(start + BLOCK))
}

fn read(from: Slice<'_>, range: &Range<usize>, into: &mut [f64]) -> Result<(), Error> {
    cast(from.slice(range.clone())?, SliceMut::from(&mut into[..range.len()]))
}

fn write(from: &[f64], range: &Range<usize>, into: &mut SliceMut<'_>) -> Result<(), Error> {
    cast(Slice::from(&from[..range.len()]), into.reborrow().slice(range.clone())?)
}

/// [`Merge::mean`].
pub(super) fn mean(mut merge: Merge<'_>, mut values: SliceMut<'_>) -> Result<(), Error> {
    let mut room = Blocks::new(values.len());
    for range in blocks(values.len()) {
        read_mean(&merge, &range, &mut room)?;
        let Blocks { x, mean, other, .. } = &mut room;
        read(values.as_slice(), &range, x)?;
        if let Some((sent, left)) = merge.sent {
            read(sent, &range, other)?;
            let share = merge.alpha * left;
            let floor = if merge.squares { 0.0 } else { f64::NEG_INFINITY };
            each(range.len(), |i| x[i] = at_least(floor, x[i] + share * (mean[i] - other[i])));
        } else {
            each(range.len(), |i| x[i] = mixed(merge.alpha, x[i], mean[i]));
        }
        write(x, &range, &mut values)?;
        if let Some(anchor) = &mut merge.anchor {
            write(mean, &range, anchor)?;
        }
    }
    Ok(())
}

/// [`Merge::outer`].
pub(super) fn outer(
    mut merge: Merge<'_>,
    mut values: SliceMut<'_>,
    outer: OuterStep<'_>,
) -> Result<(), crate::Error> {
    let mut room = Blocks::new(values.len());
    let mut params = vec![0.0; values.len().min(BLOCK)];
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
        each(n, |i| x[i] = mixed(merge.alpha, x[i], mean[i]));
        write(x, &range, &mut values)?;
        if let Some(anchor) = &mut merge.anchor {
            write(mean, &range, anchor)?;
        }
    }
    Ok(())
}

/// The mean, and the anchor where there is one.
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

/// Of the share `alpha` the result, to the bit where that is all.
fn mixed(alpha: f64, own: f64, result: f64) -> f64 {
    if alpha == 1.0 { result } else { own + alpha * (result - own) }
}

/// What is NaN stays so.
fn at_least(floor: f64, x: f64) -> f64 {
    if x < floor { floor } else { x }
}

/// [`super::mix_zeros`].
pub(super) fn mix_zeros(mut values: SliceMut<'_>, alpha: f64) -> Result<(), Error> {
    let mut x = vec![0.0; values.len().min(BLOCK)];
    for range in blocks(values.len()) {
        read(values.as_slice(), &range, &mut x)?;
        x.iter_mut().for_each(|x| *x = mixed(alpha, *x, 0.0));
        write(&x, &range, &mut values)?;
    }
    Ok(())
}

/// [`super::pack`].
pub(super) fn pack(
    values: Slice<'_>,
    anchor: Option<Slice<'_>>,
    mut into: SliceMut<'_>,
) -> Result<(), Error> {
    let Some(anchor) = anchor else { return cast(values, into) };
    let mut room = Blocks::new(values.len());
    for range in blocks(values.len()) {
        read(values, &range, &mut room.x)?;
        read(anchor, &range, &mut room.anchor)?;
        each(range.len(), |i| room.x[i] -= room.anchor[i]);
        write(&room.x, &range, &mut into)?;
    }
    Ok(())
}
