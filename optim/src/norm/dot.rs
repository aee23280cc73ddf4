//! Dot products without rounding, of a vector with another or with many. Products are added block by block, as squares are in block.rs,
//! with bounds from the extents of both blocks.

use super::ExactSum;
use super::block::{Ahead, Exponents, LEN, Wide};
use super::extent::Extent;
use super::lanes::Lanes;
use crate::engine::check::check_isa;
use crate::{Error, Isa};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{DType, Slice};

/// Blocks of a chunk.
const BLOCKS: usize = 16;
/// Elements of a vector that stay in the cache while they are multiplied with other vectors.
pub(crate) const CHUNK: usize = BLOCKS * LEN;

impl ExactSum {
    /// Adds the dot product of `x` and `y`, of one length and type, f32 or f64. The words do not depend on order or splits. Products with
    /// infinite or NaN factors are left out.
    pub fn add_dot(&mut self, x: Slice<'_>, y: Slice<'_>) -> Result<(), Error> {
        self.add_dot_on(Isa::detect(), x, y)
    }

    /// Same as [`add_dot`](Self::add_dot) with given instructions, for tests and benches: the words are the same with any.
    pub fn add_dot_on(&mut self, isa: Isa, x: Slice<'_>, y: Slice<'_>) -> Result<(), Error> {
        check_isa(isa)?;
        if x.len() != y.len() {
            return Err(Error::Len { what: "y", given: y.len(), expected: x.len() });
        }
        if x.dtype() != y.dtype() {
            return Err(Error::DType { what: "y", given: y.dtype(), works: "the type of x" });
        }
        match x.dtype() {
            DType::F32 => add_dot(isa, x.typed::<f32>()?, y.typed()?, self),
            DType::F64 => add_dot(isa, x.typed::<f64>()?, y.typed()?, self),
            given => {
                return Err(Error::DType { what: "the input of a dot product", given, works: "f32 or f64" });
            }
        }
        Ok(())
    }
}

/// Adds the dot product of `xs` and `ys`, of one length, on this thread.
pub(crate) fn add_dot<X: Wide>(isa: Isa, xs: &[X], ys: &[X], sum: &mut ExactSum) {
    for (xs, ys) in xs.chunks(CHUNK).zip(ys.chunks(CHUNK)) {
        Chunk::of(isa, xs).add(ys, ys.as_ptr().wrapping_add(CHUNK), sum);
    }
}

/// Part of a vector that stays in the cache while it is multiplied with other vectors.
pub(crate) struct Chunk<'a, X: Wide> {
    isa: Isa,
    xs: &'a [X],
    extents: [Extent<X>; BLOCKS],
}

impl<'a, X: Wide> Chunk<'a, X> {
    /// Prepares up to [`CHUNK`] elements.
    pub(crate) fn of(isa: Isa, xs: &'a [X]) -> Self {
        Chunk { isa, xs, extents: isa.run(Extents(xs)) }
    }

    /// Adds the dot product with `ys`, of the same length; prefetches from `after`, the data needed next.
    pub(crate) fn add(&self, ys: &[X], after: *const X, sum: &mut ExactSum) {
        match self.isa {
            Isa::Reference => plainly(self.xs, ys, sum),
            isa => isa.run(Blocks { chunk: self, ys, after, sum }),
        }
    }
}

/// Adds the products one by one: the definition.
fn plainly<X: Wide>(xs: &[X], ys: &[X], sum: &mut ExactSum) {
    xs.iter().zip(ys).for_each(|(x, y)| sum.add_product((*x).into(), (*y).into()));
}

/// Computes the extents of a vector's blocks.
struct Extents<'a, X>(&'a [X]);

impl<X: Wide> Body for Extents<'_, X> {
    type Output = [Extent<X>; BLOCKS];

    #[inline(always)]
    fn run(self) -> Self::Output {
        let mut extents = [Extent::new(); BLOCKS];
        extents.iter_mut().zip(self.0.chunks(LEN)).for_each(|(extent, block)| *extent = Extent::of(block));
        extents
    }
}

/// Multiplies a vector with a chunk, block by block.
struct Blocks<'a, X: Wide> {
    chunk: &'a Chunk<'a, X>,
    ys: &'a [X],
    /// Address of the data needed next.
    after: *const X,
    sum: &'a mut ExactSum,
}

impl<X: Wide> Body for Blocks<'_, X> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut lanes = Lanes::new();
        let Chunk { xs, extents, .. } = self.chunk;
        for (b, (x, y)) in xs.chunks(LEN).zip(self.ys.chunks(LEN)).enumerate() {
            let (of_x, of_y) = (extents[b], Extent::of(y));
            // Two blocks ahead: with one, the data would still be in flight when the extent is computed.
            let at = (b + 2) * LEN;
            let next = match self.ys.get(at..) {
                Some(next @ [_, ..]) => next.as_ptr(),
                _ => self.after.wrapping_add(at - self.ys.len()),
            };
            add_block((x, of_x), (y, of_y), Ahead::block(next), (&mut lanes, &mut *self.sum));
        }
        lanes.deposit(self.sum);
    }
}

/// Adds the products of two blocks, each with its extent.
#[inline(always)]
pub(super) fn add_block<X: Wide>(
    (x, of_x): (&[X], Extent<X>),
    (y, of_y): (&[X], Extent<X>),
    ahead: Ahead,
    (lanes, sum): (&mut Lanes, &mut ExactSum),
) {
    match (Exponents::of(of_x), Exponents::of(of_y)) {
        (Some(i), Some(j)) => X::add_products([(x, i), (y, j)], ahead, lanes, sum),
        _ if of_x.largest() == 0 || of_y.largest() == 0 => {}
        _ => plainly(x, y, sum),
    }
}

#[cfg(test)]
mod tests {
    use super::super::block::product_bits;
    use super::*;

    /// Blocks of mixed sign, of zeros, and with values that are not finite.
    fn vector<X: Wide>(seed: usize, len: usize, of: fn(f64) -> X) -> Vec<X> {
        let at = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f64 / 7.0 - 140.0;
        let strange = |i: usize| match (i / LEN + seed) % 7 {
            2 => 0.0,
            4 if i % LEN == seed => f64::INFINITY,
            5 => at(i).abs() * 1e-38,
            _ => at(i),
        };
        (0..len).map(|i| of(strange(i))).collect()
    }

    fn all_are_the_definitions<X: Wide>(of: fn(f64) -> X) {
        let len = 3 * CHUNK + LEN + 77;
        let (x, rows) = (vector(0, len, of), (3..10).map(|seed| vector(seed, len, of)).collect::<Vec<_>>());
        for isa in Isa::available().filter(|&isa| isa != Isa::Reference) {
            for row in &rows {
                let (mut plain, mut sum) = (ExactSum::new(), ExactSum::new());
                plainly(&x, row, &mut plain);
                add_dot(isa, &x, row, &mut sum);
                assert!(sum == plain, "{isa}");
            }
        }
    }

    #[test]
    fn products_are_the_definitions() {
        all_are_the_definitions(|x| x as f32);
        all_are_the_definitions(|x| x);
    }

    /// More terms than lanes take at once, many of them the largest within their bounds, with bounds that fall and rise, and one block
    /// with products that exceed the lanes' bit range.
    #[test]
    fn lanes_are_filled_to_their_bounds() {
        const LEN_OF_ALL: usize = 12 * LEN + 37;
        let made = |seed: usize, wide: usize| -> Vec<f32> {
            let size = |i: usize| match i / LEN {
                block if block == wide => 2f32.powi((i % 40) as i32 - 20),
                block if block % 4 == 3 => 0.25,
                _ => 1.0 / (1 + i / (5 * LEN)) as f32,
            };
            let value = |i: usize| match ((i * 7919 + seed * 104_729) % 2003) as f32 {
                large if seed % 10 == 2 => 1.999 - large / 2e5,
                any => any - 1000.5,
            };
            (0..LEN_OF_ALL).map(|i| value(i) * size(i)).collect()
        };
        let (xs, ys) = ([made(12, 8), made(1, 99)], [made(2, 99), made(4, 99)]);
        let exponents = |of: &[f32]| Exponents::of(Extent::of(of)).unwrap();
        let held = |(x, y): (&[f32], &[f32])| Lanes::hold(product_bits(exponents(x), exponents(y)));
        let isa = Isa::detect();
        for ((i, x), y) in xs.iter().enumerate().flat_map(|x| ys.iter().map(move |y| (x, y))) {
            let apart = x.chunks(LEN).zip(y.chunks(LEN)).map(held).filter(|held| !held).count();
            assert_eq!(apart, usize::from(i == 0));
            let (mut plain, mut sum) = (ExactSum::new(), ExactSum::new());
            plainly(x, y, &mut plain);
            Chunk::of(isa, x).add(y, std::ptr::null(), &mut sum);
            assert!(sum == plain);
        }
    }
}
