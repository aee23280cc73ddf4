//! The two passes of L-BFGS over a full history, measured separately: products of all rows with a vector, and the
//! direction.

use super::Result;
use super::check::{downloaded, parts};
use super::kernel::{Kernel, argument};
use super::lbfgs::HISTORY;
use super::measure::timed;
use super::race::{Copy, Measured};
use super::vectors::{PERIOD, made};
use meshstep_optim::ExactSum;
use meshstep_optim::cuda::{Combination, Products, THREADS, dot_tile, spans};
use meshstep_tensor::DType::{F32, U64};
use meshstep_tensor::{Buffer, Category, Meter, Queue};
use std::ops::Range;

const PTX: &str = include_str!("../../../../optim/src/lbfgs/lbfgs.ptx");

/// Number of rows: steps and gradient differences.
const ROWS: usize = 2 * HISTORY;
/// Rows that a block processes at a time, as in `lbfgs/launches.rs`.
const TOGETHER: usize = 2;
/// Elements per load of a thread.
const RUN: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    Products,
    Combination,
}

impl Pass {
    pub const ALL: [Pass; 2] = [Pass::Products, Pass::Combination];

    pub fn name(self) -> &'static str {
        match self {
            Pass::Products => "lbfgs products, 20 rows",
            Pass::Combination => "lbfgs combination, 20 rows",
        }
    }

    /// Returns the bytes that must be read and written for each element: the rows and the vector, and the direction.
    pub fn bytes(self) -> usize {
        4 * (ROWS + 1 + usize::from(self == Pass::Combination))
    }

    pub fn measure(self, copy: &mut Copy, (len, rounds): (usize, usize), queue: &Queue) -> Result<Measured> {
        let mut passes = Passes::new(len, queue)?;
        passes.go(self, queue)?;
        let compared = match self {
            Pass::Products => passes.compare_products(queue)?,
            Pass::Combination => passes.compare_direction(queue)?,
        };
        let go = &mut || passes.go(self, queue);
        // No instruction count: the budget's turns are of one row or of four rows.
        Ok(Measured { compared, ..timed(copy, (len, rounds), &Vec::new(), go, queue)? })
    }
}

struct Passes {
    len: usize,
    /// The vector, followed by the rows.
    vectors: Vec<Buffer>,
    d: Buffer,
    /// Addresses of the rows, followed by their coefficients.
    table: Buffer,
    span: Buffer,
    tiles: u64,
    sums: Buffer,
    products: Kernel,
    combine: Kernel,
}

/// Returns elements `range` of vector `i`.
fn vector(i: usize, range: &Range<usize>, queue: &Queue) -> Result<Buffer> {
    made(F32, (i as u64 + 1, 1e-2), range, queue)
}

fn coef(row: usize) -> f64 {
    if row.is_multiple_of(2) { 0.3 + row as f64 } else { -1.0 / row as f64 }
}

fn words(words: &[u64], queue: &Queue) -> Result<Buffer> {
    let mut there = Buffer::zeroed_on(queue, words.len(), U64, &Meter::new(), Category::Staging)?;
    queue.upload(words.into(), there.as_mut())?;
    Ok(there)
}

impl Passes {
    fn new(len: usize, queue: &Queue) -> Result<Self> {
        let vectors: Vec<Buffer> = (0..=ROWS).map(|i| vector(i, &(0..len), queue)).collect::<Result<_>>()?;
        let addresses = vectors[1..].iter().map(|row| row.as_slice().address() as u64);
        let table: Vec<u64> = addresses.chain((0..ROWS).map(|row| coef(row).to_bits())).collect();
        let (span, tiles) = spans(std::iter::once(0..len), dot_tile(F32));
        let span: Vec<u64> = span.iter().flat_map(|span| [span.start, span.end, span.tile]).collect();
        let kernel = |name| Kernel::load(PTX, name, THREADS, queue);
        Ok(Passes {
            len,
            d: Buffer::zeroed_on(queue, len, F32, &Meter::new(), Category::Staging)?,
            table: words(&table, queue)?,
            span: words(&span, queue)?,
            tiles,
            sums: words(&[0; ROWS * ExactSum::WORDS], queue)?,
            products: kernel("lbfgs_gram_f32")?,
            combine: kernel("lbfgs_combine_f32")?,
            vectors,
        })
    }

    fn go(&mut self, pass: Pass, queue: &Queue) -> Result<()> {
        let address = |buffer: &Buffer| buffer.as_slice().address() as u64;
        let (x, rows) = (address(&self.vectors[0]), address(&self.table));
        if pass == Pass::Products {
            queue.zero(self.sums.as_mut())?;
            let (spans, sums) = (address(&self.span), address(&self.sums));
            let count = ROWS as u64;
            let mut given = Products { x, rows, count, spans, span_count: 1, tiles: self.tiles, sums };
            let blocks = self.tiles * ROWS.div_ceil(TOGETHER) as u64;
            let blocks = blocks.min(self.products.resident.into());
            // SAFETY: the table has the addresses of `count` rows, the sums have room for as many, and each row is as long
            // as the span; all memory belongs to the queue's device and lives as long as `self`, and the owner of `self`
            // waits for the queue.
            return unsafe { self.products.launch(blocks, &mut [argument(&mut given)], queue) };
        }
        let (d, coefs, count) = (address(&self.d), rows + 8 * ROWS as u64, ROWS as u64);
        let mut given = Combination { d, g: x, rows, coefs, count, len: self.len as u64, coef: -1.0 };
        let blocks = self.len.div_ceil(THREADS as usize * RUN).min(self.combine.resident as usize);
        // SAFETY: as above; the coefficients follow the addresses, and `d` is as long as the rows.
        unsafe { self.combine.launch(blocks as u64, &mut [argument(&mut given)], queue) }
    }

    /// Compares every product with the CPU's, computed from one period times the number of periods, and from the rest.
    fn compare_products(&self, queue: &Queue) -> Result<usize> {
        let found = downloaded(&self.sums, &(0..self.sums.len()), queue)?;
        let dot = |row: usize, len: usize| -> Result<ExactSum> {
            let (x, y) = (vector(0, &(0..len), &Queue::cpu())?, vector(row + 1, &(0..len), &Queue::cpu())?);
            let mut sum = ExactSum::new();
            sum.add_dot(x.as_slice(), y.as_slice())?;
            Ok(sum)
        };
        for (row, found) in found.as_slice().typed::<u64>()?.chunks(ExactSum::WORDS).enumerate() {
            let (period, mut expected) = (dot(row, PERIOD)?, dot(row, self.len % PERIOD)?);
            (0..self.len / PERIOD).for_each(|_| expected.merge(&period));
            if ExactSum::from_words(found).words() != expected.words() {
                return Err(format!(
                    "{}: the product of row {row} differs from the CPU's",
                    Pass::Products.name()
                )
                .into());
            }
        }
        Ok(self.len)
    }

    /// Compares parts of the direction with its definition.
    fn compare_direction(&self, queue: &Queue) -> Result<usize> {
        let parts = parts(self.len);
        for range in &parts {
            let vectors: Vec<Buffer> =
                (0..=ROWS).map(|i| vector(i, range, &Queue::cpu())).collect::<Result<_>>()?;
            let of = |vector: &Buffer, i: usize| Ok::<_, meshstep_tensor::Error>(vector.typed::<f32>()?[i]);
            let found = downloaded(&self.d, range, queue)?;
            for i in 0..range.len() {
                let mut sum = -f64::from(of(&vectors[0], i)?);
                for (row, vector) in vectors[1..].iter().enumerate() {
                    sum = coef(row).mul_add(f64::from(of(vector, i)?), sum);
                }
                if of(&found, i)?.to_bits() != (sum as f32).to_bits() {
                    let at = range.start + i;
                    return Err(
                        format!("{}: element {at} differs from the CPU's", Pass::Combination.name()).into()
                    );
                }
            }
        }
        Ok(parts.iter().map(Range::len).sum())
    }
}
