//! Vectors of a case, whole on the device or a part of them on the CPU; both contain the same periodic pattern.

use super::Result;
use super::cases::Case;
use meshstep_optim::Flat;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, SliceMut};
use std::ops::Range;

/// Period of the pattern in elements: a prime, so that tiles begin at different phases.
pub(crate) const PERIOD: usize = 65_521;

pub(crate) struct Vectors {
    /// `None` if the case is only a norm.
    params: Option<Buffer>,
    pub(crate) grads: Buffer,
    state: Vec<Buffer>,
    copy: Option<Buffer>,
    remainder: Option<Buffer>,
}

impl Vectors {
    /// Creates elements `range` of the case's vectors in the memory of the queue.
    pub(crate) fn new(case: &Case, range: &Range<usize>, queue: &Queue) -> Result<Self> {
        let mut seed = 0;
        let mut vector = |dtype, size: f32| {
            seed += 1;
            made(dtype, (seed, size), range, queue)
        };
        let (recipe, updates, states) = (case.recipe, case.rule.is_some(), case.states());
        // The last state vector is the mean of squares, if there is one.
        let size = |slot: usize| if slot + 1 == states { 1e-4 } else { 1e-2 };
        Ok(Vectors {
            grads: vector(recipe.grads, 1e-2)?,
            params: updates.then(|| vector(recipe.params, 1e-1)).transpose()?,
            state: (0..states).map(|slot| vector(recipe.state, size(slot))).collect::<Result<_>>()?,
            copy: recipe.copy.filter(|_| updates).map(|dtype| vector(dtype, 1.0)).transpose()?,
            remainder: (recipe.remainder && updates).then(|| vector(DType::U16, 0.0)).transpose()?,
        })
    }

    /// Calls `with` on the arguments of an update; returns `None` if the case is only a norm.
    pub(crate) fn flat<R>(&mut self, with: impl FnOnce(Flat<'_, '_>) -> R) -> Option<R> {
        let mut state: Vec<SliceMut<'_>> = self.state.iter_mut().map(Buffer::as_mut).collect();
        Some(with(Flat {
            params: self.params.as_mut()?.as_mut(),
            grads: self.grads.as_mut(),
            state: &mut state,
            copy: self.copy.as_mut().map(Buffer::as_mut),
            remainder: self.remainder.as_mut().map(Buffer::as_mut),
        }))
    }

    /// Returns each vector with its name.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&'static str, &Buffer)> {
        let params = self.params.iter().map(|buffer| ("params", buffer));
        let state = self.state.iter().map(|buffer| ("state", buffer));
        let copy = self.copy.iter().map(|buffer| ("copy", buffer));
        let remainder = self.remainder.iter().map(|buffer| ("remainder", buffer));
        params.chain([("grads", &self.grads)]).chain(state).chain(copy).chain(remainder)
    }
}

/// Creates elements `range` of an endless periodic vector.
pub(crate) fn made(
    dtype: DType,
    (seed, size): (u64, f32),
    range: &Range<usize>,
    queue: &Queue,
) -> Result<Buffer> {
    let pattern = pattern(dtype, seed, size, range.start)?;
    let len = range.len();
    let mut buffer = Buffer::zeroed_on(queue, len, dtype, &Meter::new(), Category::State)?;
    let mut done = len.min(PERIOD);
    queue.upload(pattern.as_slice().slice(0..done)?, buffer.as_mut().slice(0..done)?)?;
    while done < len {
        // The finished part is a number of whole periods, so a copy of it continues the pattern.
        let more = done.min(len - done);
        let (from, into) = buffer.as_mut().split_at(done)?;
        queue.copy(from.as_slice().slice(0..more)?, into.slice(0..more)?)?;
        done += more;
    }
    Ok(buffer)
}

/// Returns one period from element `start` on: state is positive, other values lie between -size and size.
fn pattern(dtype: DType, seed: u64, size: f32, start: usize) -> Result<Buffer> {
    let mut buffer = Buffer::zeroed(PERIOD, dtype, &Meter::new(), Category::Staging)?;
    let words = (0..PERIOD).map(|i| word(seed, (start + i) % PERIOD));
    if dtype == DType::U16 {
        // A remainder is at most half of the lost part of its bf16 number.
        for (x, word) in buffer.typed_mut::<u16>()?.iter_mut().zip(words) {
            *x = ((word >> 48) as u16 >> 1).wrapping_sub(1 << 14);
        }
        return Ok(buffer);
    }
    let state = seed > 2;
    let unit = |word: u64| (word >> 40) as f32 / (1 << 24) as f32;
    let value = |word| size * if state { unit(word) + 1e-3 } else { 2.0 * unit(word) - 1.0 };
    let values: Vec<f32> = words.map(value).collect();
    buffer.as_mut().cast_from(values[..].into())?;
    Ok(buffer)
}

/// Returns pseudo-random bits (splitmix64).
fn word(seed: u64, i: usize) -> u64 {
    let mut x = (seed << 32 | i as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
