//! The passes on memory of a GPU, in the order of a stream. The host waits where it measures, and nowhere else.

use super::fold::{Fold, Scalar};
use super::passes::{Measure, Passes, Rows};
use crate::cuda::{Combination, Kernel, NormAt, Products, Span, THREADS, argument, norm_kernel, spans};
use crate::{Error, ExactSum, Norm};
use meshstep_tensor::cuda::{Mail, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut};
use std::ffi::c_void;
use std::ops::Range;

/// Words of what is measured. A direction keeps its own until the next.
mod at {
    use crate::ExactSum;

    /// Of the direction: elements that are not finite, bits of the largest magnitude.
    pub(super) const DIRECTION: [usize; 2] = [0, 1];
    /// Words before those of a measurement.
    pub(super) const MEASURED: usize = 2;
    /// Of the gradient.
    pub(super) const GRADIENT: [usize; 2] = [2, 3];
    /// Of the newest pair.
    pub(super) const PAIR: [usize; 2] = [4, 5];
    /// What nobody asks for.
    pub(super) const REST: [usize; 2] = [6, 7];
    pub(super) const SQUARES: usize = 8;
    pub(super) const MAGNITUDES: usize = SQUARES + ExactSum::WORDS;
    pub(super) const SLOPE: usize = MAGNITUDES + ExactSum::WORDS;
    /// Of each row with the gradient, the newest `s` and the newest `y`.
    pub(super) const PRODUCTS: usize = SLOPE + ExactSum::WORDS;
}

/// Passes over vectors of one length and type on a stream's device.
#[derive(Debug)]
pub(super) struct There {
    len: usize,
    dtype: DType,
    queue: Queue,
    stream: Stream,
    meter: Meter,
    kernels: Kernels,
    /// All elements, and those that count.
    whole: Ranges,
    counted: Ranges,
    /// Addresses and coefficients of rows: here, on their way, and there.
    told: Vec<u64>,
    mail: Mail,
    table: Buffer,
    /// What is measured: there, and here.
    measured: Buffer,
    words: Vec<u64>,
}

#[derive(Debug)]
struct Kernels {
    walk: Kernel,
    pair: Kernel,
    combine: Kernel,
    gram: Kernel,
    dot: Kernel,
    /// Of L1, L2 and the infinity norm.
    norms: [Kernel; 3],
}

/// Ranges of the vectors, and their table once a kernel has needed it.
#[derive(Debug)]
struct Ranges {
    ranges: Vec<Range<usize>>,
    table: Option<(Buffer, u64)>,
}

/// Where a table of ranges is, how many they are, and their tiles.
#[derive(Clone, Copy)]
struct Table {
    spans: u64,
    count: u64,
    tiles: u64,
}

impl There {
    /// For vectors of `len` elements of f32 or f64 and `history_len` pairs of them.
    pub(super) fn new(
        history_len: usize,
        (len, dtype): (usize, DType),
        stream: &Stream,
        meter: &Meter,
    ) -> Result<Self, Error> {
        let queue = Queue::cuda(stream.clone());
        let room = |words| Buffer::zeroed_on(&queue, words, DType::U64, meter, Category::Staging);
        let rows = 2 * (history_len + 1);
        // One more than the rows' addresses and coefficients.
        let told = 1 + 2 * rows;
        let words = at::PRODUCTS + 3 * rows * ExactSum::WORDS;
        Ok(There {
            len,
            dtype,
            meter: meter.clone(),
            kernels: Kernels::new(stream, dtype)?,
            whole: Ranges::new(std::iter::once(0..len).collect()),
            counted: Ranges::new(std::iter::once(0..len).collect()),
            told: Vec::with_capacity(told),
            mail: Mail::new(stream.device(), told * size_of::<u64>(), meter),
            table: room(told)?,
            measured: room(words)?,
            words: vec![0; words],
            stream: stream.clone(),
            queue,
        })
    }

    /// Whether vectors are of this place, length and type.
    fn check<'a>(&self, vectors: impl IntoIterator<Item = Slice<'a>>) -> Result<(), Error> {
        for vector in vectors {
            vector.place().check(self.queue.place())?;
            if vector.len() != self.len {
                return Err(Error::Len { what: "a vector", given: vector.len(), expected: self.len });
            }
            if vector.dtype() != self.dtype {
                let (given, works) = (vector.dtype(), "the type of the state");
                return Err(Error::DType { what: "a vector", given, works });
            }
        }
        Ok(())
    }

    /// Runs one of the kernels of single elements.
    ///
    /// # Safety
    /// As [`Kernel::launch`]'s.
    unsafe fn each(&self, kernel: &Kernel, arguments: &mut [*mut c_void]) -> Result<(), Error> {
        let tile = THREADS as usize * (16 / self.dtype.size());
        // SAFETY: the caller's promise.
        unsafe { launch(kernel, &self.stream, self.len.div_ceil(tile) as u64, arguments) }
    }

    /// Puts addresses of `vectors` into the device's table, then `coefs`.
    fn tell<'a>(
        &mut self,
        vectors: impl IntoIterator<Item = Slice<'a>>,
        coefs: impl IntoIterator<Item = f64>,
    ) -> Result<(), Error> {
        self.told.clear();
        self.told.extend(vectors.into_iter().map(|vector| vector.address() as u64));
        self.told.extend(coefs.into_iter().map(f64::to_bits));
        let into = self.table.as_mut().slice(0..self.told.len())?;
        let sent = self.mail.send(&self.stream, bytemuck::cast_slice(&self.told), into);
        Ok(sent.map_err(meshstep_tensor::Error::from)?)
    }

    /// Adds a norm's parts to where they are measured: the counts, and the sum if it has one.
    fn norm(
        &self,
        kernel: usize,
        of: Slice<'_>,
        table: Table,
        ([non_finite, max_bits], words): ([usize; 2], usize),
    ) -> Result<(), Error> {
        let word = |word: usize| address(&self.measured, word);
        let mut at = NormAt { non_finite: word(non_finite), words: word(words), max_bits: word(max_bits) };
        let (mut values, Table { mut spans, mut count, mut tiles }) = (of.address() as u64, table);
        let arguments = &mut [
            argument(&mut values),
            argument(&mut spans),
            argument(&mut count),
            argument(&mut tiles),
            argument(&mut at),
        ];
        // SAFETY: the ranges of the table are those of a vector of this length, as `of` is one, of the kernel's type; what it adds
        // to are words of ours. All are of the stream's device.
        unsafe { launch(&self.kernels.norms[kernel], &self.stream, table.tiles, arguments) }
    }

    /// Adds products of `rows` rows, whose addresses are in the table from `first` on, with `news` to the sums at `sums`.
    fn products(
        &self,
        kernel: &Kernel,
        news: [Slice<'_>; 3],
        (first, rows): (usize, usize),
        table: Table,
        sums: usize,
    ) -> Result<(), Error> {
        let mut given = Products {
            news: news.map(|new| new.address() as u64),
            rows: address(&self.table, first),
            count: rows as u64,
            spans: table.spans,
            span_count: table.count,
            tiles: table.tiles,
            sums: address(&self.measured, sums),
        };
        let blocks = table.tiles.saturating_mul(rows as u64);
        // SAFETY: the table holds addresses of so many vectors of this length, as the new ones are, all of the kernel's type; the
        // sums are words of ours, three for each row or one. All are of the stream's device, and live as long as the state, whose
        // memory is freed after the stream's work with it.
        unsafe { launch(kernel, &self.stream, blocks, &mut [argument(&mut given)]) }
    }

    /// Launches what is asked for.
    fn launch_all(&mut self, of: &Measure<'_>) -> Result<(), Error> {
        let Measure { g, d, rows, .. } = of;
        let all = || (0..rows.len()).map(|i| rows.row(i).as_slice());
        self.check([*g, *d].into_iter().chain(all()))?;
        let there = self.counted.there(self.dtype, &self.queue, &self.meter)?;
        if of.gradient {
            self.norm(L2, *g, there, (at::GRADIENT, at::SQUARES))?;
        }
        if of.magnitudes {
            self.norm(L1, *g, there, (at::REST, at::MAGNITUDES))?;
        }
        if of.slope || rows.len() > 0 {
            self.tell([*d].into_iter().chain(all()), [])?;
        }
        if of.slope {
            self.products(&self.kernels.dot, [*g; 3], (0, 1), there, at::SLOPE)?;
        }
        if rows.len() > 0 {
            let [s, y] = rows.newest().map(Buffer::as_slice);
            for new in [s, y] {
                self.norm(INF, new, there, (at::PAIR, at::REST[0]))?;
            }
            self.products(&self.kernels.gram, [*g, s, y], (1, rows.len()), there, at::PRODUCTS)?;
        }
        Ok(())
    }
}

impl Passes for There {
    fn count(&mut self, ranges: Vec<Range<usize>>) {
        self.counted = Ranges::new(ranges);
    }

    fn walk(&mut self, x: SliceMut<'_>, start: Slice<'_>, t: f64, d: Slice<'_>) -> Result<(), Error> {
        self.check([x.as_slice(), start, d])?;
        let (mut t, mut n) = (t, self.len as u64);
        let [mut x, mut start, mut d] = [x.as_slice(), start, d].map(|vector| vector.address() as u64);
        let arguments = &mut [
            argument(&mut x),
            argument(&mut start),
            argument(&mut d),
            argument(&mut t),
            argument(&mut n),
        ];
        // SAFETY: all vectors have `n` elements of the kernel's type on the stream's device, checked above; `x` is borrowed
        // exclusively, and work that later calls put on this stream follows.
        unsafe { self.each(&self.kernels.walk, arguments) }
    }

    fn pair(
        &mut self,
        [s, y]: [SliceMut<'_>; 2],
        t: f64,
        d: Slice<'_>,
        [g, before]: [Slice<'_>; 2],
    ) -> Result<(), Error> {
        let vectors = [s.as_slice(), y.as_slice(), d, g, before];
        self.check(vectors)?;
        let (mut t, mut n) = (t, self.len as u64);
        let [mut s, mut y, mut d, mut g, mut before] = vectors.map(|vector| vector.address() as u64);
        let arguments = &mut [
            argument(&mut s),
            argument(&mut y),
            argument(&mut d),
            argument(&mut g),
            argument(&mut before),
            argument(&mut t),
            argument(&mut n),
        ];
        // SAFETY: as in `walk`; `s` and `y` are borrowed exclusively.
        unsafe { self.each(&self.kernels.pair, arguments) }
    }

    fn combine(
        &mut self,
        d: SliceMut<'_>,
        (coef, g): (f64, Slice<'_>),
        rows: &Rows<'_>,
    ) -> Result<(), Error> {
        let all = || (0..rows.len()).map(|i| rows.row(i).as_slice());
        self.check([d.as_slice(), g].into_iter().chain(all()))?;
        self.tell(all(), (0..rows.len()).map(|i| rows.coef(i)))?;
        let mut given = Combination {
            d: d.address() as u64,
            g: g.address() as u64,
            rows: address(&self.table, 0),
            coefs: address(&self.table, rows.len()),
            count: rows.len() as u64,
            len: self.len as u64,
            coef,
        };
        // SAFETY: the table holds the addresses of so many vectors and then their coefficients; all vectors are as in `walk`, `d`
        // borrowed exclusively.
        unsafe { self.each(&self.kernels.combine, &mut [argument(&mut given)])? };
        let direction = at::DIRECTION[0]..at::MEASURED;
        self.queue.zero(self.measured.as_mut().slice(direction)?)?;
        let whole = self.whole.there(self.dtype, &self.queue, &self.meter)?;
        self.norm(INF, d.as_slice(), whole, (at::DIRECTION, at::REST[0]))
    }

    fn measure(&mut self, of: &Measure<'_>, fold: &mut Fold) -> Result<(), Error> {
        let end = at::PRODUCTS + 3 * of.rows.len() * ExactSum::WORDS;
        self.queue.zero(self.measured.as_mut().slice(at::MEASURED..end)?)?;
        self.launch_all(of)?;
        let words = &mut self.words[..end];
        self.queue.download(self.measured.as_slice().slice(0..end)?, (&mut *words).into())?;
        let [bad, largest] = at::DIRECTION.map(|word| words[word]);
        fold.mine.d_max = if bad > 0 { f64::INFINITY.to_bits() } else { largest };
        [fold.mine.bad_grads, fold.mine.grad_max] = at::GRADIENT.map(|word| words[word]);
        fold.mine.bad_pairs = words[at::PAIR[0]];
        let sum = |first: usize| ExactSum::from_words(&words[first..first + ExactSum::WORDS]);
        fold.add(Scalar::Squares, &sum(at::SQUARES));
        fold.add(Scalar::Magnitudes, &sum(at::MAGNITUDES));
        fold.add(Scalar::Slope, &sum(at::SLOPE));
        for (i, product) in fold.products_mut(of.rows.len()).iter_mut().enumerate() {
            *product = sum(at::PRODUCTS + i * ExactSum::WORDS);
        }
        Ok(())
    }
}

/// Places in [`Kernels::norms`].
const L1: usize = 0;
const L2: usize = 1;
const INF: usize = 2;

impl Kernels {
    fn new(stream: &Stream, dtype: DType) -> Result<Self, Error> {
        let find = |name: &str| Kernel::find(stream.device(), name);
        let own = |name: &str| find(&format!("lbfgs_{name}_{dtype}"));
        let norm = |norm: Norm| {
            let (what, works) = ("what a norm is of", "f32 or f64");
            find(&norm_kernel(norm, dtype).ok_or(Error::DType { what, given: dtype, works })?)
        };
        Ok(Kernels {
            walk: own("walk")?,
            pair: own("pair")?,
            combine: own("combine")?,
            gram: own("gram")?,
            dot: own("dot")?,
            norms: [norm(Norm::L1)?, norm(Norm::L2)?, norm(Norm::Inf)?],
        })
    }
}

impl Ranges {
    fn new(ranges: Vec<Range<usize>>) -> Self {
        Ranges { ranges, table: None }
    }

    /// The table on the device, which is made at most once.
    fn there(&mut self, dtype: DType, queue: &Queue, meter: &Meter) -> Result<Table, Error> {
        let (table, tiles) = match &mut self.table {
            Some(table) => table,
            none => {
                let (table, tiles) = spans(self.ranges.iter().cloned(), dtype);
                let words: Vec<u64> =
                    table.iter().flat_map(|&Span { start, end, tile }| [start, end, tile]).collect();
                let mut there = Buffer::zeroed_on(queue, words.len(), DType::U64, meter, Category::Staging)?;
                queue.upload(words[..].into(), there.as_mut())?;
                none.insert((there, tiles))
            }
        };
        Ok(Table { spans: address(table, 0), count: self.ranges.len() as u64, tiles: *tiles })
    }
}

/// Where word `i` is.
fn address(words: &Buffer, i: usize) -> u64 {
    (words.as_slice().address() + i * size_of::<u64>()) as u64
}

/// Runs a kernel, unless there is nothing for it to do.
///
/// # Safety
/// As [`Kernel::launch`]'s.
unsafe fn launch(
    kernel: &Kernel,
    stream: &Stream,
    tiles: u64,
    arguments: &mut [*mut c_void],
) -> Result<(), Error> {
    if tiles == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { kernel.launch(stream, tiles, arguments) }
}
