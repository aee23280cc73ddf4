//! Dot products without rounding, of one vector with another or of several with many rows: products are added block by block, as
//! squares are in block.rs, by what the two blocks' extents say of them.

use super::ExactSum;
use super::block::{Ahead, Exponents, LEN, Wide};
use super::extent::Extent;
use super::lanes::Lanes;
use crate::check::check_isa;
use crate::{Error, Isa};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{DType, Slice};

/// Blocks of the vectors measured against many rows that stay in the cache meanwhile.
const BLOCKS: usize = 8;
const CHUNK: usize = BLOCKS * LEN;

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
pub(crate) fn add_dots<'r, X: Wide, const N: usize>(
    isa: Isa,
    news: [&[X]; N],
    count: usize,
    row: &(impl Fn(usize) -> Result<&'r [X], meshstep_tensor::Error> + Sync),
    sums: &mut [ExactSum],
) -> Result<(), Error> {
    assert_eq!(sums.len(), N * count, "as many sums as products");
    let many = count * news[0].len() >= SPREAD_FROM;
    spread(isa, news, (0, if many { rayon::current_num_threads() } else { 1 }), row, sums)
}

/// Elements times rows above which rows are spread.
const SPREAD_FROM: usize = 256 << 10;

/// Halves the rows, the halves side by side, while there are `threads` for them: each part reads the new vectors once.
fn spread<'r, X: Wide, const N: usize>(
    isa: Isa,
    news: [&[X]; N],
    (first, threads): (usize, usize),
    row: &(impl Fn(usize) -> Result<&'r [X], meshstep_tensor::Error> + Sync),
    sums: &mut [ExactSum],
) -> Result<(), Error> {
    let count = sums.len() / N;
    if count < 2 || threads < 2 {
        return inline(isa, news, first, row, sums);
    }
    let fewer = threads / 2;
    let half = (count * fewer / threads).max(1);
    let (left, right) = sums.split_at_mut(N * half);
    let (a, b) = rayon::join(
        || spread(isa, news, (first, fewer), row, left),
        || spread(isa, news, (first + half, threads - fewer), row, right),
    );
    a.and(b)
}

fn inline<'r, X: Wide, const N: usize>(
    isa: Isa,
    news: [&[X]; N],
    first: usize,
    row: &impl Fn(usize) -> Result<&'r [X], meshstep_tensor::Error>,
    sums: &mut [ExactSum],
) -> Result<(), Error> {
    let count = sums.len() / N;
    for start in (0..news[0].len()).step_by(CHUNK) {
        let chunk = start..news[0].len().min(start + CHUNK);
        let news = news.map(|new| &new[chunk.clone()]);
        let news = news.map(|new| (new, isa.run(Extents(new))));
        for (i, sums) in sums.as_chunks_mut::<N>().0.iter_mut().enumerate() {
            // This part of the next row, or the next part of the first.
            let after = if i + 1 < count {
                row(first + i + 1)?[chunk.start..].as_ptr()
            } else {
                row(first)?[chunk.end..].as_ptr()
            };
            let row = &row(first + i)?[chunk.clone()];
            match isa {
                Isa::Reference => plainly(news.map(|(new, _)| new), row, sums),
                _ => isa.run(Blocks { news: &news, row, after, sums }),
            }
        }
    }
    Ok(())
}

/// The definition.
fn plainly<X: Wide, const N: usize>(news: [&[X]; N], row: &[X], sums: &mut [ExactSum; N]) {
    for (new, sum) in news.iter().zip(sums) {
        new.iter().zip(row).for_each(|(x, y)| sum.add_product((*x).into(), (*y).into()));
    }
}

/// The extents of a vector's blocks.
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

/// A vector, and the extents of its blocks.
type New<'a, X> = (&'a [X], [Extent<X>; BLOCKS]);

/// One row against the new ones, block by block.
struct Blocks<'a, X: Wide, const N: usize> {
    news: &'a [New<'a, X>; N],
    row: &'a [X],
    /// Where what is needed next lies.
    after: *const X,
    sums: &'a mut [ExactSum; N],
}

impl<X: Wide, const N: usize> Body for Blocks<'_, X, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut lanes = [(); N].map(|()| Lanes::new());
        for (b, row) in self.row.chunks(LEN).enumerate() {
            let next = self.row.get((b + 1) * LEN..).filter(|rest| !rest.is_empty());
            let next = next.map_or(self.after, <[X]>::as_ptr);
            let extent = Extent::of(row);
            for (n, (lanes, sum)) in lanes.iter_mut().zip(&mut *self.sums).enumerate() {
                let (new, extents) = &self.news[n];
                let block = b * LEN..b * LEN + row.len();
                match [extents[b], extent].map(Exponents::of) {
                    [Some(x), Some(y)] => {
                        X::add_products([(&new[block], x), (row, y)], Ahead::part(next, n, N), lanes, sum);
                    }
                    _ if extents[b].largest() == 0 || extent.largest() == 0 => {}
                    _ => plainly([&new[block]], row, std::array::from_mut(sum)),
                }
            }
        }
        lanes.iter_mut().zip(self.sums).for_each(|(lanes, sum)| lanes.deposit(sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of one sign, of zeros, and with what is not finite.
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

    fn all_are_the_definitions<X: Wide>(of: fn(f64) -> X) -> Result<(), Error> {
        let len = 3 * CHUNK + LEN + 77;
        let vectors =
            |seeds: std::ops::Range<usize>| seeds.map(|seed| vector(seed, len, of)).collect::<Vec<_>>();
        let (news, rows) = (vectors(0..3), vectors(3..10));
        let mut sums = vec![ExactSum::new(); 3 * rows.len()];
        for threads in [1, 2, 3, 5, 9] {
            sums.fill(ExactSum::new());
            let given = [&news[0][..], &news[1], &news[2]];
            spread(Isa::detect(), given, (0, threads), &|i| Ok(&rows[i][..]), &mut sums)?;
            for (row, sums) in rows.iter().zip(sums.chunks(3)) {
                for (new, sum) in news.iter().zip(sums) {
                    let mut plain = ExactSum::new();
                    plainly([new], row, std::array::from_mut(&mut plain));
                    assert!(*sum == plain);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn many_rows_with_several_vectors_are_each_ones_product() -> Result<(), Error> {
        all_are_the_definitions(|x| x as f32)?;
        all_are_the_definitions(|x| x)
    }
}
