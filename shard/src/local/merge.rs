//! How what workers have becomes one, element by element: in f64, rounded once.

use super::Outer;
use meshstep_optim::{Error, Flat, Scalars, Segment};
use meshstep_tensor::{Buffer, Queue, Slice, SliceMut, cast};
use std::ops::Range;

/// Elements at a time.
const BLOCK: usize = 1 << 12;

/// What a spot's values become one by.
pub(crate) struct Merging<'a> {
    /// The workers' mean; with `differences` of what they have moved from `anchor`.
    pub(crate) reduced: Slice<'a>,
    pub(crate) differences: bool,
    pub(crate) anchor: Option<&'a mut Buffer>,
    /// What was sent, where that was earlier, and how much of it is left.
    pub(crate) snapshot: Option<(&'a Buffer, f64)>,
    pub(crate) alpha: f64,
}

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

fn read(from: Slice<'_>, range: &Range<usize>, into: &mut [f64]) -> Result<(), meshstep_tensor::Error> {
    cast(from.slice(range.clone())?, SliceMut::from(&mut into[..range.len()]))
}

fn write(from: &[f64], range: &Range<usize>, into: &mut SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    cast(Slice::from(&from[..range.len()]), into.reborrow().slice(range.clone())?)
}

impl Merging<'_> {
    /// Takes the mean: `x = mean`; with a mixing factor `x + alpha (mean - x)`; of what was sent earlier `x + alpha beta^n (mean -
    /// s0)`.
    pub(crate) fn mean(mut self, mut values: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
        let mut room = Blocks::new(values.len());
        for range in blocks(values.len()) {
            self.read_mean(&range, &mut room)?;
            let Blocks { x, mean, other, .. } = &mut room;
            read(values.as_slice(), &range, x)?;
            if let Some((sent, left)) = &self.snapshot {
                read(sent.as_slice(), &range, other)?;
                let share = self.alpha * left;
                each(range.len(), |i| x[i] += share * (mean[i] - other[i]));
            } else {
                each(range.len(), |i| x[i] = mixed(self.alpha, x[i], mean[i]));
            }
            write(x, &range, &mut values)?;
            if let Some(anchor) = &mut self.anchor {
                write(mean, &range, &mut anchor.as_mut())?;
            }
        }
        Ok(())
    }

    /// Takes step `t` of an outer optimizer from the anchor `a`, whose gradient is `d = a - mean`. It ends at `mean + (p - (a - d))`
    /// where the rule ends at `p`: at the mean itself, to the bit, where the rule undoes `d`.
    pub(crate) fn outer(
        mut self,
        mut values: SliceMut<'_>,
        outer: &Outer,
        state: &mut [Buffer],
        t: u64,
    ) -> Result<(), Error> {
        let mut room = Blocks::new(values.len());
        let mut params = vec![0.0; values.len().min(BLOCK)];
        for range in blocks(values.len()) {
            self.read_mean(&range, &mut room)?;
            let Blocks { x, mean, anchor, other: grads } = &mut room;
            let n = range.len();
            each(n, |i| (params[i], grads[i]) = (anchor[i], anchor[i] - mean[i]));
            let slots = state.iter_mut().map(|slot| slot.as_mut().slice(range.clone()));
            let mut slots = slots.collect::<Result<Vec<_>, _>>()?;
            let flat = Flat {
                params: SliceMut::from(&mut params[..n]),
                grads: SliceMut::from(&mut grads[..n]),
                state: &mut slots,
                copy: None,
                remainder: None,
            };
            let scalars = Scalars { lr: outer.lr, ..Scalars::default() };
            outer.rule.update(flat, &[Segment::new(0..n, t)], &scalars, &Queue::cpu())?;
            each(n, |i| mean[i] += params[i] - (anchor[i] - grads[i]));
            read(values.as_slice(), &range, x)?;
            each(n, |i| x[i] = mixed(self.alpha, x[i], mean[i]));
            write(x, &range, &mut values)?;
            if let Some(anchor) = &mut self.anchor {
                write(mean, &range, &mut anchor.as_mut())?;
            }
        }
        Ok(())
    }

    /// The mean, and the anchor where there is one.
    fn read_mean(&self, range: &Range<usize>, room: &mut Blocks) -> Result<(), meshstep_tensor::Error> {
        let Blocks { mean, anchor, .. } = room;
        read(self.reduced, range, mean)?;
        if let Some(from) = &self.anchor {
            read(from.as_slice(), range, anchor)?;
        }
        if self.differences {
            each(range.len(), |i| mean[i] += anchor[i]);
        }
        Ok(())
    }
}

fn each(n: usize, then: impl FnMut(usize)) {
    (0..n).for_each(then);
}

/// Of the share `alpha` the result, to the bit where that is all.
fn mixed(alpha: f64, own: f64, result: f64) -> f64 {
    if alpha == 1.0 { result } else { own + alpha * (result - own) }
}

/// What is left of zeros that are mixed in by `alpha`.
pub(crate) fn reset(mut values: SliceMut<'_>, alpha: f64) -> Result<(), meshstep_tensor::Error> {
    let mut x = vec![0.0; values.len().min(BLOCK)];
    for range in blocks(values.len()) {
        read(values.as_slice(), &range, &mut x)?;
        x.iter_mut().for_each(|x| *x = mixed(alpha, *x, 0.0));
        write(&x, &range, &mut values)?;
    }
    Ok(())
}

/// What a worker brings: its values, or by how much they are away from `anchor`.
pub(crate) fn bring(
    values: Slice<'_>,
    anchor: Option<&Buffer>,
    mut into: SliceMut<'_>,
) -> Result<(), meshstep_tensor::Error> {
    let Some(anchor) = anchor else { return cast(values, into) };
    let mut room = Blocks::new(values.len());
    for range in blocks(values.len()) {
        read(values, &range, &mut room.x)?;
        read(anchor.as_slice(), &range, &mut room.anchor)?;
        each(range.len(), |i| room.x[i] -= room.anchor[i]);
        write(&room.x, &range, &mut into)?;
    }
    Ok(())
}

/// Whether all elements are finite.
pub(crate) fn finite(values: Slice<'_>) -> Result<bool, meshstep_tensor::Error> {
    let mut x = vec![0.0; values.len().min(BLOCK)];
    for range in blocks(values.len()) {
        read(values, &range, &mut x)?;
        if !x[..range.len()].iter().all(|x| x.is_finite()) {
            return Ok(false);
        }
    }
    Ok(true)
}
