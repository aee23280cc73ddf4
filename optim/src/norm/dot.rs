//! Dot products without rounding, of one vector with another or of several with many rows: products are added block by block, as
//! squares are in block.rs, by what the two blocks' extents say of them.

use super::ExactSum;
use super::block::{Ahead, Exponents, LEN, Wide, product};
use super::extent::Extent;
use super::lanes::{Lanes, add_all};
use crate::check::check_isa;
use crate::{Error, Isa};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{DType, Slice};
use std::array::from_fn;

/// Blocks of the vectors measured against many rows that stay in the cache meanwhile.
const BLOCKS: usize = 16;
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

/// Halves the rows, the halves side by side, while there are `threads` for them: each part reads the new vectors once. Halves of the
/// elements would each need sums of their own.
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
    let (sums, _) = sums.as_chunks_mut::<N>();
    let count = sums.len();
    for start in (0..news[0].len()).step_by(CHUNK) {
        let chunk = start..news[0].len().min(start + CHUNK);
        let news = news.map(|new| &new[chunk.clone()]);
        let news = news.map(|new| (new, isa.run(Extents(new))));
        let at = |i: usize| Ok::<_, Error>(&row(first + i)?[chunk.clone()]);
        // Where this part of a row lies, or the next part of the first ones.
        let after = |i: usize| {
            let begin = if i < count { chunk.start } else { chunk.end };
            Ok::<_, Error>(row(first + i % count)?.as_ptr().wrapping_add(begin))
        };
        // Pairs fill the registers of AVX-512, single rows those of other instructions.
        let paired = if isa == Isa::Avx512 { count / 2 * 2 } else { 0 };
        let (pairs, singles) = sums.split_at_mut(paired);
        for (i, sums) in pairs.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (rows, after) = ([at(2 * i)?, at(2 * i + 1)?], [after(2 * i + 2)?, after(2 * i + 3)?]);
            isa.run(Blocks { news: &news, rows, after, sums });
        }
        for (i, sums) in singles.iter_mut().enumerate() {
            let (row, after) = (at(paired + i)?, after(paired + i + 1)?);
            match isa {
                Isa::Reference => plainly(news.map(|(new, _)| new), row, sums),
                _ => isa.run(Blocks {
                    news: &news,
                    rows: [row],
                    after: [after],
                    sums: std::array::from_mut(sums),
                }),
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

/// Some rows against the new vectors, block by block.
struct Blocks<'a, X: Wide, const R: usize, const N: usize> {
    news: &'a [New<'a, X>; N],
    rows: [&'a [X]; R],
    /// Where what is needed next lies.
    after: [*const X; R],
    sums: &'a mut [[ExactSum; N]; R],
}

impl<X: Wide, const R: usize, const N: usize> Body for Blocks<'_, X, R, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut lanes = [(); R].map(|()| [(); N].map(|()| Lanes::new()));
        let len = self.rows[0].len();
        for start in (0..len).step_by(LEN) {
            let block = start..len.min(start + LEN);
            let rows = self.rows.map(|row| (&row[block.clone()], Extent::of(&row[block.clone()])));
            let news = self.news.each_ref().map(|(new, extents)| (&new[block.clone()], extents[start / LEN]));
            let next = from_fn(|r| match block.end {
                end if end < len => self.rows[r][end..].as_ptr(),
                _ => self.after[r],
            });
            add_block(rows, news, next, &mut lanes, self.sums);
        }
        let sums = self.sums.iter_mut().flatten();
        lanes.iter_mut().flatten().zip(sums).for_each(|(lanes, sum)| lanes.deposit(sum));
    }
}

/// Numbers, and between which magnitudes they are.
type Block<'a, X> = (&'a [X], Extent<X>);

/// Adds the products of a block: all in one pass over it where that can be, else each for itself.
#[inline(always)]
fn add_block<X: Wide, const R: usize, const N: usize>(
    rows: [Block<'_, X>; R],
    news: [Block<'_, X>; N],
    next: [*const X; R],
    lanes: &mut [[Lanes; N]; R],
    sums: &mut [[ExactSum; N]; R],
) {
    let of_rows = rows.map(|(_, extent)| Exponents::of(extent));
    let of_news = news.map(|(_, extent)| Exponents::of(extent));
    let bits =
        of_rows.map(|row| of_news.map(|new| X::products(row?, new?).filter(|bits| Lanes::hold(*bits))));
    if bits.iter().flatten().all(Option::is_some) {
        let all = lanes.iter_mut().flatten().zip(sums.iter_mut().flatten());
        all.zip(bits.iter().flatten().flatten()).for_each(|((lanes, sum), bits)| {
            lanes.make_room(rows[0].0.len(), *bits, sum);
        });
        let (xs, ys) = (rows.map(|(row, _)| row), news.map(|(new, _)| new));
        return add_all(
            (xs, ys),
            product,
            next.map(Ahead::block),
            lanes.each_mut().map(<[Lanes; N]>::each_mut),
        );
    }
    for (r, (lanes, sums)) in lanes.iter_mut().zip(sums).enumerate() {
        for (n, (lanes, sum)) in lanes.iter_mut().zip(sums).enumerate() {
            let ((row, row_extent), (new, new_extent)) = (rows[r], news[n]);
            match (of_rows[r], of_news[n]) {
                (Some(x), Some(y)) => {
                    let ahead = if n == 0 { Ahead::block(next[r]) } else { Ahead::NOTHING };
                    X::add_products([(row, x), (new, y)], ahead, lanes, sum);
                }
                _ if row_extent.largest() == 0 || new_extent.largest() == 0 => {}
                _ => plainly([new], row, std::array::from_mut(sum)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

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
        let vectors = |seeds: Range<usize>| seeds.map(|seed| vector(seed, len, of)).collect::<Vec<_>>();
        let (news, rows) = (vectors(0..3), vectors(3..10));
        let given = [&news[0][..], &news[1], &news[2]];
        let mut plain = vec![[(); 3].map(|()| ExactSum::new()); rows.len()];
        rows.iter().zip(&mut plain).for_each(|(row, sums)| plainly(given, row, sums));
        for isa in Isa::available().filter(|&isa| isa != Isa::Reference) {
            for threads in [1, 2, 3, 5, 9] {
                let mut sums = vec![ExactSum::new(); 3 * rows.len()];
                spread(isa, given, (0, threads), &|i| Ok(&rows[i][..]), &mut sums)?;
                assert!(sums.as_chunks().0 == plain, "{isa}, {threads} threads");
            }
        }
        Ok(())
    }

    #[test]
    fn many_rows_with_several_vectors_are_each_ones_product() -> Result<(), Error> {
        all_are_the_definitions(|x| x as f32)?;
        all_are_the_definitions(|x| x)
    }

    /// Pairs of rows with two vectors, together: more terms than lanes take at once, of one row and vector the largest that there are
    /// between their bounds, which fall and rise; and blocks in between whose products lanes do not hold.
    #[test]
    fn pairs_of_rows_are_added_together_and_apart() {
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
        // The wide blocks of a row and of a vector are the same one once.
        let (news, rows) = ([made(1, 8), made(2, 99)], [made(12, 99), made(4, 8)]);
        let isa = Isa::detect();
        let chunk = |of: &[f32], isa: Isa| (isa.run(Extents(of)), of.len());
        assert!(LEN_OF_ALL <= CHUNK && chunk(&news[0], isa).1 == LEN_OF_ALL);
        let holds = |row: &[f32], new: &[f32]| {
            let [row, new] = [row, new].map(|of| Exponents::of(Extent::of(of)).unwrap());
            f32::products(row, new).is_some_and(Lanes::hold)
        };
        let block = |of: &Vec<f32>, b: usize| of[b * LEN..LEN_OF_ALL.min((b + 1) * LEN)].to_vec();
        let together = (0..13)
            .filter(|&b| rows.iter().all(|row| news.iter().all(|new| holds(&block(row, b), &block(new, b)))));
        assert_eq!(together.collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]);
        let mut plain = [(); 2].map(|()| [(); 2].map(|()| ExactSum::new()));
        rows.iter().zip(&mut plain).for_each(|(row, sums)| plainly([&news[0], &news[1]], row, sums));
        let mut sums = [(); 2].map(|()| [(); 2].map(|()| ExactSum::new()));
        let news = news.each_ref().map(|new| (&new[..], isa.run(Extents(new))));
        let rows = rows.each_ref().map(|row| &row[..]);
        Blocks { news: &news, rows, after: [std::ptr::null(); 2], sums: &mut sums }.run();
        assert!(sums == plain);
    }
}
