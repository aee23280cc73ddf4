//! Vectors that an update sweeps together, each in its own type.

use crate::Strided;
use crate::engine::view::{View, map};
use crate::precision::number::Real;
use crate::precision::philox::{self, Bits};
use crate::precision::{remainder, stochastic};
use meshstep_tensor::simd::{Body, Isa};
use meshstep_tensor::{bf16, f16, narrow};
use std::ops::Range;

/// Vector that is read and written as `T`, for any type in memory.
#[derive(Debug)]
pub(crate) enum Stream<'a, T> {
    /// Memory of type `T`, used without conversion.
    Same(&'a mut [T]),
    BF16(&'a mut [bf16]),
    F16(&'a mut [f16]),
    /// Upper halves of f32 numbers, and the remainders.
    Halves(&'a mut [bf16], &'a mut [u16]),
}

/// Vectors of one length that an update sweeps together.
#[derive(Debug)]
pub(crate) struct Streams<'a, T, const S: usize> {
    pub(crate) params: Stream<'a, T>,
    pub(crate) grads: Stream<'a, T>,
    pub(crate) state: [Stream<'a, T>; S],
    /// Low-precision copy of the updated parameters.
    pub(crate) copy: Option<Stream<'a, T>>,
}

/// Random bits for rounding to bf16: those of these elements of a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw {
    pub(crate) bits: Bits,
    pub(crate) strided: Strided,
    /// Position of the first element in `strided`.
    pub(crate) first: u64,
}

impl Draw {
    /// Returns the index in the tensor of element `i`.
    pub(crate) fn index(&self, i: usize) -> u64 {
        self.strided.index(self.first.wrapping_add(i as u64))
    }
}

impl<T: Real> Stream<'_, T> {
    /// Returns a view for reading.
    pub(crate) fn view(&self) -> View<'_, T> {
        match self {
            Stream::Same(x) => View::Same(x),
            Stream::BF16(x) => View::BF16(x),
            Stream::F16(x) => View::F16(x),
            Stream::Halves(high, low) => View::Halves(high, low),
        }
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        self.view().len()
    }

    /// Reborrows elements `range`.
    pub(crate) fn part(&mut self, range: Range<usize>) -> Stream<'_, T> {
        match self {
            Stream::Same(x) => Stream::Same(&mut x[range]),
            Stream::BF16(x) => Stream::BF16(&mut x[range]),
            Stream::F16(x) => Stream::F16(&mut x[range]),
            Stream::Halves(high, low) => Stream::Halves(&mut high[range.clone()], &mut low[range]),
        }
    }

    /// Splits into elements `..at` and `at..`.
    fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Stream::Same(x) => both(x.split_at_mut(at), Stream::Same),
            Stream::BF16(x) => both(x.split_at_mut(at), Stream::BF16),
            Stream::F16(x) => both(x.split_at_mut(at), Stream::F16),
            Stream::Halves(high, low) => {
                let ((high, high_right), (low, low_right)) = (high.split_at_mut(at), low.split_at_mut(at));
                (Stream::Halves(high, low), Stream::Halves(high_right, low_right))
            }
        }
    }

    /// Sets element `i`, by the obvious way.
    pub(crate) fn set_plainly(&mut self, i: usize, value: T, draw: Option<Draw>) {
        match (self, draw) {
            (Stream::Same(x), _) => x[i] = value,
            (Stream::BF16(x), None) => x[i] = bf16::from_f32(value.to_f32()),
            (Stream::BF16(x), Some(draw)) => {
                x[i] = stochastic::round_plainly(value.to_f32(), draw.bits.plainly(draw.index(i)));
            }
            (Stream::F16(x), _) => x[i] = f16::from_f32(value.to_f32()),
            (Stream::Halves(high, low), _) => {
                (high[i], low[i]) = remainder::split_plainly(value.to_f32());
            }
        }
    }

    /// Returns the numbers for updating: in place, or converted into `room` for [`store`](Self::store) to write back.
    pub(crate) fn load<'r>(&'r mut self, isa: Isa, room: &'r mut [T]) -> &'r mut [T] {
        if let Stream::Same(x) = self {
            return x;
        }
        let room = &mut room[..self.len()];
        self.view().convert(isa, room);
        room
    }

    /// Writes the numbers back from `room` if they were converted. `random` has space for the random bits, a group more than numbers.
    pub(crate) fn store(&mut self, isa: Isa, room: &[T], draw: Option<Draw>, random: &mut [u16]) {
        match (self, draw) {
            (Stream::Same(_), _) => {}
            (Stream::BF16(x), Some(Draw { bits, strided, first })) => {
                for (run, first) in strided.runs(first, x.len()) {
                    let skip = (first % philox::GROUP as u64) as usize;
                    let random = &mut random[..skip + run.len()];
                    bits.fill(isa, first - skip as u64, random);
                    isa.run(Round { from: &room[run.clone()], random: &random[skip..], into: &mut x[run] });
                }
            }
            (other, _) => other.write(isa, &room[..other.len()]),
        }
    }

    /// Writes `values`, one for each element, rounded to nearest.
    pub(crate) fn write(&mut self, isa: Isa, values: &[T]) {
        match self {
            Stream::Same(x) => x.copy_from_slice(values),
            Stream::BF16(x) => map(isa, values, x, |x: T| narrow::to_bf16(x.to_f32())),
            Stream::F16(x) => map(isa, values, x, |x: T| narrow::to_f16(x.to_f32())),
            Stream::Halves(high, low) => isa.run(Split { from: values, high, low }),
        }
    }

    /// Sets every element to zero.
    pub(crate) fn zero(&mut self) {
        match self {
            Stream::Same(x) => x.fill(T::from_f32(0.0)),
            Stream::BF16(x) => x.fill(bf16::ZERO),
            Stream::F16(x) => x.fill(f16::ZERO),
            Stream::Halves(high, low) => {
                high.fill(bf16::ZERO);
                low.fill(0);
            }
        }
    }
}

fn both<X, Y>((left, right): (X, X), make: impl Fn(X) -> Y) -> (Y, Y) {
    (make(left), make(right))
}

impl<T: Real, const S: usize> Streams<'_, T, S> {
    /// Returns true if all vectors of the computation are used without conversion.
    pub(crate) fn are_same(&self) -> bool {
        let mut all = [&self.params, &self.grads].into_iter().chain(&self.state);
        all.all(|stream| stream.view().is_same())
    }

    /// Reborrows elements `range`.
    pub(crate) fn part(&mut self, range: Range<usize>) -> Streams<'_, T, S> {
        Streams {
            params: self.params.part(range.clone()),
            grads: self.grads.part(range.clone()),
            state: self.state.each_mut().map(|s| s.part(range.clone())),
            copy: self.copy.as_mut().map(|copy| copy.part(range)),
        }
    }

    /// Splits into elements `..at` and `at..`.
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        let (params, params_right) = self.params.split_at(at);
        let (grads, grads_right) = self.grads.split_at(at);
        let mut halves = self.state.map(|s| s.split_at(at));
        let state = halves.each_mut().map(|(left, _)| std::mem::replace(left, Stream::Same(&mut [])));
        let state_right = halves.map(|(_, right)| right);
        let (copy, copy_right) = self.copy.map(|copy| copy.split_at(at)).unzip();
        let left = Streams { params, grads, state, copy };
        (left, Streams { params: params_right, grads: grads_right, state: state_right, copy: copy_right })
    }
}

struct Split<'a, T> {
    from: &'a [T],
    high: &'a mut [bf16],
    low: &'a mut [u16],
}

impl<T: Real> Body for Split<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // The halves of f32 numbers in memory separate in one shuffle.
        let halves: &[[u16; 2]] = bytemuck::cast_slice(self.from);
        assert_eq!(halves.len(), self.high.len(), "parameters with a remainder are computed in f32");
        for ((halves, high), low) in halves.iter().zip(self.high).zip(self.low) {
            let [lower, upper] =
                if cfg!(target_endian = "little") { *halves } else { [halves[1], halves[0]] };
            (*high, *low) = remainder::split_bits(upper, lower);
        }
    }
}

struct Round<'a, T> {
    from: &'a [T],
    random: &'a [u16],
    into: &'a mut [bf16],
}

impl<T: Real> Body for Round<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for ((x, &random), y) in self.from.iter().zip(self.random).zip(self.into) {
            *y = stochastic::round(x.to_f32(), random);
        }
    }
}
