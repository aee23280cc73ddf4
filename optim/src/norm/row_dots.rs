//! Dot products of rows of 16 bits with two vectors at once: f32 numbers, and rounded ones. A row is read and widened once.
//!
//! Rounded factors have few significand bits, so their products are mostly multiples of the lanes' grid: then a product takes one fused
//! multiply-add, where the general way takes four operations. Blocks are shorter than those of dot.rs, so that their magnitudes span fewer
//! bits.

use super::block::{Ahead, Exponents, product_bits, rounded_product_bits};
use super::dot::add_block;
use super::extent::Extent;
use super::lanes::{Lanes, WholeLanes};
use super::{ExactSum, Source};
use crate::Isa;
use crate::precision::number::Stored;
use meshstep_tensor::simd::Body;
use meshstep_tensor::{bf16, f16};

/// Elements of a block.
const SHORT: usize = 1024;
/// Blocks of a piece.
const BLOCKS: usize = 16;
/// Elements of two vectors that stay in the cache while they are multiplied with rows.
pub(crate) const PIECE: usize = SHORT * BLOCKS;

/// Element type of rows: 16 bits, read as f32.
pub(crate) trait RowElement: Source<Wide = f32> + Stored<f32> {
    /// Significand bits after the first.
    const FRACTION: i32;
    /// Exponent of the smallest number.
    const SMALLEST: i32;
}

impl RowElement for bf16 {
    const FRACTION: i32 = 7;
    const SMALLEST: i32 = -133;
}

impl RowElement for f16 {
    const FRACTION: i32 = 10;
    const SMALLEST: i32 = -24;
}

/// Pieces of two vectors that rows are multiplied with: `x` of f32 numbers, and `y` of numbers of `R`, widened.
pub(crate) struct Both<'a> {
    isa: Isa,
    x: &'a [f32],
    y: &'a [f32],
    extents: [[Extent<f32>; 2]; BLOCKS],
}

impl<'a> Both<'a> {
    /// Prepares up to [`PIECE`] elements of each.
    pub(crate) fn of(isa: Isa, x: &'a [f32], y: &'a [f32]) -> Self {
        Both { isa, x, y, extents: isa.run(BothExtents { x, y }) }
    }

    /// Adds the dot products of `row` with both, prefetching from `after`, the data needed next. The words are those of
    /// [`ExactSum::add_dot`] on the widened row.
    pub(crate) fn add<R: RowElement>(&self, row: &[R], after: *const R, sums: [&mut ExactSum; 2]) {
        match self.isa {
            Isa::Reference => [self.x, self.y].into_iter().zip(sums).for_each(|(of, sum)| {
                of.iter().zip(row).for_each(|(x, r)| sum.add_product((*x).into(), r.exactly()));
            }),
            isa => isa.run(BothBlocks { both: self, row, after, sums }),
        }
    }
}

/// Computes the extents of both vectors' blocks.
struct BothExtents<'a> {
    x: &'a [f32],
    y: &'a [f32],
}

impl Body for BothExtents<'_> {
    type Output = [[Extent<f32>; 2]; BLOCKS];

    #[inline(always)]
    fn run(self) -> Self::Output {
        let mut extents = [[Extent::new(); 2]; BLOCKS];
        let blocks = self.x.chunks(SHORT).zip(self.y.chunks(SHORT));
        extents.iter_mut().zip(blocks).for_each(|(extents, (x, y))| *extents = [x, y].map(Extent::of));
        extents
    }
}

/// Multiplies a row with both vectors, block by block.
struct BothBlocks<'a, R> {
    both: &'a Both<'a>,
    row: &'a [R],
    /// Address of the data needed next.
    after: *const R,
    sums: [&'a mut ExactSum; 2],
}

impl<R: RowElement> Body for BothBlocks<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let BothBlocks { both, row, after, sums: [of_x, of_y] } = self;
        let (mut x_lanes, mut y_lanes, mut whole) = (Lanes::new(), Lanes::new(), WholeLanes::new());
        let mut room = [0.0; SHORT];
        let blocks = both.x.chunks(SHORT).zip(both.y.chunks(SHORT)).zip(&both.extents);
        for (b, (part, ((x, y), [x_extent, y_extent]))) in row.chunks(SHORT).zip(blocks).enumerate() {
            let r = &mut room[..part.len()];
            r.iter_mut().zip(part).for_each(|(wide, r)| *wide = r.widen());
            let (r, extent) = (&*r, Extent::of(r));
            // Four blocks ahead, as many elements as dot.rs.
            let at = (b + 4) * SHORT;
            let next = match row.get(at..) {
                Some(next @ [_, ..]) => next.as_ptr(),
                _ => after.wrapping_add(at - row.len()),
            };
            let ahead = Ahead::block(next);
            let bits = (Exponents::of(*x_extent), Exponents::of(*y_extent), Exponents::of(extent));
            if let (Some(i), Some(j), Some(k)) = bits {
                let bits = [product_bits(i, k), rounded_product_bits(j, k, R::FRACTION, R::SMALLEST)];
                if Lanes::hold(bits[0]) && WholeLanes::hold(bits[1]) {
                    x_lanes.make_room(r.len(), bits[0], of_x);
                    whole.make_room(r.len(), bits[1], of_y);
                    whole.add_with(&mut x_lanes, [x, y, r], ahead);
                    continue;
                }
            }
            add_block((x, *x_extent), (r, extent), ahead, (&mut x_lanes, &mut *of_x));
            add_block((y, *y_extent), (r, extent), Ahead::NOTHING, (&mut y_lanes, &mut *of_y));
        }
        x_lanes.deposit(of_x);
        y_lanes.deposit(of_y);
        whole.deposit(of_y);
    }
}

#[cfg(test)]
mod tests {
    use super::super::dot::add_dot;
    use super::*;

    /// Blocks of narrow and of wide ranges, of zeros, and with values that are not finite.
    fn rows_are_widened_rows<R: RowElement>() {
        let len = PIECE - 301;
        let value = |seed: usize, i: usize| {
            let at = ((i * 7919 + seed * 104_729) % 2003) as f32 / 7.0 - 140.0;
            match (i / SHORT + seed) % 8 {
                2 => 0.0,
                4 if i % SHORT == seed => f32::INFINITY,
                5 => at * 2f32.powi((i % 30) as i32 - 36),
                6 => at * 256.0,
                _ => at,
            }
        };
        let vector = |seed| (0..len).map(|i| value(seed, i)).collect::<Vec<f32>>();
        let rounded = |seed| vector(seed).into_iter().map(R::narrow_plainly).collect::<Vec<R>>();
        let widened = |row: &[R]| row.iter().map(|r| r.widen_plainly()).collect::<Vec<f32>>();
        let (x, y, row) = (vector(0), widened(&rounded(1)), rounded(0));
        let wide = widened(&row);
        let expected = [&x, &y].map(|of| {
            let mut sum = ExactSum::new();
            add_dot(Isa::Reference, of, &wide, &mut sum);
            sum
        });
        for isa in Isa::available() {
            let [mut a, mut b] = [ExactSum::new(), ExactSum::new()];
            Both::of(isa, &x, &y).add(&row, std::ptr::null(), [&mut a, &mut b]);
            assert!([a, b] == expected, "{isa}");
        }
    }

    #[test]
    fn products_with_both_are_the_definitions() {
        rows_are_widened_rows::<bf16>();
        rows_are_widened_rows::<f16>();
    }
}
