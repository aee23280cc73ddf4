//! Dot products without rounding: products of f32 are f64 numbers, products of f64 are sums of two.
//!
//! A block's products are computed once; its sum is taken as [`block`](super::block) takes sums of squares.

use super::ExactSum;
use super::block::{INFINITE, LEN, add_values};
use crate::check::check_isa;
use crate::{Error, Isa};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{DType, Element, Slice};

/// Elements of the vectors measured against many rows that stay in the cache meanwhile.
const CHUNK: usize = 8 * LEN;

/// A product's rounding error is an f64 number from here up: it is a multiple of `2^-1066`.
const SMALLEST: f64 = f64::from_bits((1023 - 960) << 52);
/// Products below this leave room for a block's sum.
const LARGEST: f64 = f64::from_bits((1023 + 1000) << 52);

impl ExactSum {
    /// Adds the dot product of `x` and `y`, of one length and type, f32 or f64; the same words in any order and split.
    /// Products of what is not finite are left out.
    pub fn add_dot(&mut self, x: Slice<'_>, y: Slice<'_>) -> Result<(), Error> {
        self.add_dot_on(Isa::detect(), x, y)
    }

    /// [`add_dot`](Self::add_dot) with given instructions, for tests and benches: the words are the same with any.
    pub fn add_dot_on(&mut self, isa: Isa, x: Slice<'_>, y: Slice<'_>) -> Result<(), Error> {
        check_isa(isa)?;
        if x.len() != y.len() {
            return Err(Error::Len { what: "y", given: y.len(), expected: x.len() });
        }
        if x.dtype() != y.dtype() {
            return Err(Error::DType { what: "y", given: y.dtype(), works: "the type of x" });
        }
        match x.dtype() {
            DType::F32 => add_dots(isa, [x.typed::<f32>()?], 1, &|_| y.typed(), self.as_one()),
            DType::F64 => add_dots(isa, [x.typed::<f64>()?], 1, &|_| y.typed(), self.as_one()),
            given => Err(Error::DType { what: "what a dot product is of", given, works: "f32 or f64" }),
        }
    }

    fn as_one(&mut self) -> &mut [ExactSum] {
        std::slice::from_mut(self)
    }
}

/// Adds the dot products of each of `count` rows with each of `news` to `sums`, row by row: one pass over the rows, which
/// are spread over the cores.
pub(crate) fn add_dots<'r, X: Factor, const N: usize>(
    isa: Isa,
    news: [&[X]; N],
    count: usize,
    row: &(impl Fn(usize) -> Result<&'r [X], meshstep_tensor::Error> + Sync),
    sums: &mut [ExactSum],
) -> Result<(), Error> {
    assert_eq!(sums.len(), N * count, "as many sums as products");
    spread(isa, news, 0, row, sums)
}

/// Elements times rows above which rows are spread.
const SPREAD_FROM: usize = 256 << 10;

fn spread<'r, X: Factor, const N: usize>(
    isa: Isa,
    news: [&[X]; N],
    first: usize,
    row: &(impl Fn(usize) -> Result<&'r [X], meshstep_tensor::Error> + Sync),
    sums: &mut [ExactSum],
) -> Result<(), Error> {
    let count = sums.len() / N;
    if count < 2 || count * news[0].len() < SPREAD_FROM || rayon::current_num_threads() == 1 {
        return inline(isa, news, first, row, sums);
    }
    let half = count / 2;
    let (left, right) = sums.split_at_mut(N * half);
    let (a, b) =
        rayon::join(|| spread(isa, news, first, row, left), || spread(isa, news, first + half, row, right));
    a.and(b)
}

fn inline<'r, X: Factor, const N: usize>(
    isa: Isa,
    news: [&[X]; N],
    first: usize,
    row: &impl Fn(usize) -> Result<&'r [X], meshstep_tensor::Error>,
    sums: &mut [ExactSum],
) -> Result<(), Error> {
    for start in (0..news[0].len()).step_by(CHUNK) {
        let chunk = start..news[0].len().min(start + CHUNK);
        let news = news.map(|new| &new[chunk.clone()]);
        for (i, sums) in sums.as_chunks_mut::<N>().0.iter_mut().enumerate() {
            let row = &row(first + i)?[chunk.clone()];
            match isa {
                Isa::Reference => plainly(news, row, sums),
                _ => isa.run(Blocks { news, row, sums }),
            }
        }
    }
    Ok(())
}

/// The definition.
fn plainly<X: Factor, const N: usize>(news: [&[X]; N], row: &[X], sums: &mut [ExactSum; N]) {
    for (new, sum) in news.iter().zip(sums) {
        new.iter().zip(row).for_each(|(x, y)| sum.add_product(x.widened(), y.widened()));
    }
}

/// One row against the new ones, block by block.
struct Blocks<'a, X, const N: usize> {
    news: [&'a [X]; N],
    row: &'a [X],
    sums: &'a mut [ExactSum; N],
}

impl<X: Factor, const N: usize> Body for Blocks<'_, X, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (mut products, mut errors) = ([0.0; LEN], [0.0; LEN]);
        for (b, row) in self.row.chunks(LEN).enumerate() {
            for (new, sum) in self.news.iter().zip(&mut *self.sums) {
                let new = &new[b * LEN..][..row.len()];
                let products = &mut products[..row.len()];
                products.iter_mut().zip(new.iter().zip(row)).for_each(|(p, (x, y))| *p = x.times(*y));
                X::add_block(new, row, products, &mut errors[..row.len()], sum);
            }
        }
    }
}

/// What dot products are taken of.
pub(crate) trait Factor: Element {
    /// The product, rounded to f64: not at all for f32.
    fn times(self, other: Self) -> f64;
    /// The same number.
    fn widened(self) -> f64;
    /// Adds a block's products, of which `products` are the roundings.
    fn add_block(x: &[Self], y: &[Self], products: &[f64], errors: &mut [f64], sum: &mut ExactSum);
}

impl Factor for f32 {
    #[inline(always)]
    fn times(self, other: f32) -> f64 {
        f64::from(self) * f64::from(other)
    }
    #[inline(always)]
    fn widened(self) -> f64 {
        self.into()
    }
    #[inline(always)]
    fn add_block(x: &[f32], y: &[f32], products: &[f64], _: &mut [f64], sum: &mut ExactSum) {
        if peak(products) >= INFINITE {
            plainly([x], y, std::array::from_mut(sum));
        } else {
            add_values(products, sum);
        }
    }
}

impl Factor for f64 {
    #[inline(always)]
    fn times(self, other: f64) -> f64 {
        self * other
    }
    #[inline(always)]
    fn widened(self) -> f64 {
        self
    }
    /// A product is its rounding and what a fused multiply-subtract says was lost, where that is an f64 number too.
    #[inline(always)]
    fn add_block(x: &[f64], y: &[f64], products: &[f64], errors: &mut [f64], sum: &mut ExactSum) {
        // Zero becomes the largest and does not count; a product that vanished does.
        let smallest =
            products.iter().fold(u64::MAX, |least, p| least.min(p.abs().to_bits().wrapping_sub(1)));
        let both = |(p, (x, y)): (&f64, (&f64, &f64))| *p == 0.0 && *x != 0.0 && *y != 0.0;
        let vanished = products.iter().zip(x.iter().zip(y)).fold(false, |any, one| any | both(one));
        if vanished || smallest < SMALLEST.to_bits() || peak(products) >= LARGEST.to_bits() {
            return plainly([x], y, std::array::from_mut(sum));
        }
        let all = errors.iter_mut().zip(products).zip(x.iter().zip(y));
        all.for_each(|((e, p), (x, y))| *e = x.mul_add(*y, -p));
        add_values(products, sum);
        add_values(errors, sum);
    }
}

#[inline(always)]
fn peak(products: &[f64]) -> u64 {
    products.iter().fold(0, |largest, p| largest.max(p.abs().to_bits()))
}
