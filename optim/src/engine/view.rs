//! Read access to a vector as the numbers of an update.

use crate::precision::number::Real;
use crate::precision::remainder;
use meshstep_tensor::simd::{Body, Isa};
use meshstep_tensor::{bf16, f16, narrow};
use std::ops::Range;

/// Vector that is read as `T`, for any type in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum View<'a, T> {
    /// Memory of type `T`, used without conversion.
    Same(&'a [T]),
    BF16(&'a [bf16]),
    F16(&'a [f16]),
    /// Upper halves of f32 numbers, and the remainders.
    Halves(&'a [bf16], &'a [u16]),
}

/// Memory to prefetch: its address, and the bytes of an element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ViewPlace {
    pub(crate) first: *const u8,
    pub(crate) size: usize,
}

impl<'a, T: Real> View<'a, T> {
    /// Returns the number of elements.
    pub(crate) fn len(self) -> usize {
        match self {
            View::Same(x) => x.len(),
            View::BF16(x) | View::Halves(x, _) => x.len(),
            View::F16(x) => x.len(),
        }
    }

    /// Returns true if the memory is used without conversion.
    pub(crate) fn is_same(self) -> bool {
        matches!(self, View::Same(_))
    }

    /// Returns elements `range`.
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        match self {
            View::Same(x) => View::Same(&x[range]),
            View::BF16(x) => View::BF16(&x[range]),
            View::F16(x) => View::F16(&x[range]),
            View::Halves(high, low) => View::Halves(&high[range.clone()], &low[range]),
        }
    }

    /// Returns the address of element `i`, which may be past the end, in each vector of this view.
    pub(crate) fn places(self, i: usize) -> [Option<ViewPlace>; 2] {
        match self {
            View::Same(x) => [ViewPlace::new(x, i), None],
            View::BF16(x) => [ViewPlace::new(x, i), None],
            View::F16(x) => [ViewPlace::new(x, i), None],
            View::Halves(high, low) => [ViewPlace::new(high, i), ViewPlace::new(low, i)],
        }
    }

    /// Returns element `i`, by the obvious way.
    pub(crate) fn get_plainly(self, i: usize) -> T {
        match self {
            View::Same(x) => x[i],
            View::BF16(x) => T::from_f32(x[i].to_f32()),
            View::F16(x) => T::from_f32(x[i].to_f32()),
            View::Halves(high, low) => T::from_f32(remainder::join_plainly(high[i], low[i])),
        }
    }

    /// Converts all elements into `room`.
    pub(crate) fn convert(self, isa: Isa, room: &mut [T]) {
        match self {
            View::Same(x) => room.copy_from_slice(x),
            View::BF16(x) => map(isa, x, room, |x| T::from_f32(narrow::from_bf16(x))),
            View::F16(x) => map(isa, x, room, |x| T::from_f32(narrow::from_f16(x))),
            View::Halves(high, low) => isa.run(Join { high, low, into: room }),
        }
    }

    /// Returns the numbers: in place, or converted into `room`, which must then be long enough.
    pub(crate) fn load<'r>(self, isa: Isa, room: &'r mut [T]) -> &'r [T]
    where
        'a: 'r,
    {
        if let View::Same(x) = self {
            return x;
        }
        let room = &mut room[..self.len()];
        self.convert(isa, room);
        room
    }
}

impl ViewPlace {
    fn new<X>(x: &[X], i: usize) -> Option<Self> {
        Some(ViewPlace { first: x.as_ptr().wrapping_add(i).cast(), size: size_of::<X>() })
    }
}

/// Converts `from` into `into`, of the same length.
pub(crate) fn map<X: Copy, Y>(isa: Isa, from: &[X], into: &mut [Y], convert: impl Fn(X) -> Y) {
    isa.run(Map { from, into, convert });
}

struct Map<'a, X, Y, F> {
    from: &'a [X],
    into: &'a mut [Y],
    convert: F,
}

impl<X: Copy, Y, F: Fn(X) -> Y> Body for Map<'_, X, Y, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (y, &x) in self.into.iter_mut().zip(self.from) {
            *y = (self.convert)(x);
        }
    }
}

struct Join<'a, T> {
    high: &'a [bf16],
    low: &'a [u16],
    into: &'a mut [T],
}

impl<T: Real> Body for Join<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for ((x, &high), &low) in self.into.iter_mut().zip(self.high).zip(self.low) {
            *x = T::from_f32(remainder::join(high, low));
        }
    }
}
