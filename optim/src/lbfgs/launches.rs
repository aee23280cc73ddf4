//! Kernels of L-BFGS and of norms on vectors of one length and type, and the arguments of each launch.

use crate::cuda::{
    Combination, Kernel, NormAt, Products, Span, THREADS, argument, dot_tile, norm_kernel, norm_tile, spans,
};
use crate::{Error, Norm};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut};
use std::ffi::c_void;
use std::ops::Range;

/// Kernels for vectors of `len` elements of `dtype` on a stream's device.
#[derive(Debug)]
pub(super) struct Launches {
    len: usize,
    dtype: DType,
    stream: Stream,
    leave: Kernel,
    walk: Kernel,
    difference: Kernel,
    combine: Kernel,
    gram: Kernel,
    dot: Kernel,
    l1: Kernel,
    l2: Kernel,
    inf: Kernel,
}

/// Rows that a block of `lbfgs_gram` processes at a time.
const ROWS: usize = 2;

/// Norm of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Which {
    L1,
    L2,
    Inf,
}

/// Ranges of the vectors, and their device tables once a kernel has needed them.
#[derive(Debug)]
pub(super) struct Ranges {
    ranges: Vec<Range<usize>>,
    tables: Option<(Buffer, [u64; 2])>,
}

/// Device tables of ranges, in tiles of norms and in tiles of products.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tables {
    norm: LaunchTable,
    dot: LaunchTable,
}

/// Device table of ranges: its address, length, and number of tiles.
#[derive(Clone, Copy, Debug)]
struct LaunchTable {
    spans: u64,
    count: u64,
    tiles: u64,
}

impl Launches {
    pub(super) fn new(len: usize, dtype: DType, stream: &Stream) -> Result<Self, Error> {
        let find = |name: &str| Kernel::find(stream.device(), name);
        let own = |name: &str| find(&format!("lbfgs_{name}_{dtype}"));
        let norm = |norm: Norm| {
            let (what, works) = ("a vector", "f32 or f64");
            find(&norm_kernel(norm, dtype).ok_or(Error::DType { what, given: dtype, works })?)
        };
        Ok(Launches {
            len,
            dtype,
            stream: stream.clone(),
            leave: own("leave")?,
            walk: own("walk")?,
            difference: own("difference")?,
            combine: own("combine")?,
            gram: own("gram")?,
            dot: own("dot")?,
            l1: norm(Norm::L1)?,
            l2: norm(Norm::L2)?,
            inf: norm(Norm::Inf)?,
        })
    }

    /// Checks that the vectors have this device, length and type.
    pub(super) fn check<'a>(&self, vectors: impl IntoIterator<Item = Slice<'a>>) -> Result<(), Error> {
        let place = Queue::cuda(self.stream.clone()).place();
        for vector in vectors {
            vector.place().check(place)?;
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

    /// Computes `start = x` and `x = fma(t, d, start)`.
    pub(super) fn leave(
        &self,
        x: SliceMut<'_>,
        start: SliceMut<'_>,
        t: f64,
        d: Slice<'_>,
    ) -> Result<(), Error> {
        // SAFETY: `x` and `start` are borrowed exclusively.
        unsafe { self.step(&self.leave, [x.as_slice(), start.as_slice(), d], t) }
    }

    /// Computes `x = fma(t, d, start)`.
    pub(super) fn walk(&self, x: SliceMut<'_>, start: Slice<'_>, t: f64, d: Slice<'_>) -> Result<(), Error> {
        // SAFETY: `x` is borrowed exclusively.
        unsafe { self.step(&self.walk, [x.as_slice(), start, d], t) }
    }

    /// # Safety
    /// The kernel writes only to memory that is borrowed exclusively.
    unsafe fn step(&self, kernel: &Kernel, vectors: [Slice<'_>; 3], mut t: f64) -> Result<(), Error> {
        self.check(vectors)?;
        let [mut x, mut start, mut d] = vectors.map(|vector| vector.address() as u64);
        let mut n = self.len as u64;
        let arguments = &mut [
            argument(&mut x),
            argument(&mut start),
            argument(&mut d),
            argument(&mut t),
            argument(&mut n),
        ];
        // SAFETY: all vectors have `n` elements of the kernel's type on the stream's device, checked above. Later work on this stream
        // runs after the kernel. Written memory is the caller's promise.
        unsafe { self.each(kernel, arguments) }
    }

    /// Computes `y = g - before`.
    pub(super) fn difference(&self, y: SliceMut<'_>, [g, before]: [Slice<'_>; 2]) -> Result<(), Error> {
        let vectors = [y.as_slice(), g, before];
        self.check(vectors)?;
        let [mut y, mut g, mut before] = vectors.map(|vector| vector.address() as u64);
        let mut n = self.len as u64;
        let arguments = &mut [argument(&mut y), argument(&mut g), argument(&mut before), argument(&mut n)];
        // SAFETY: as in `step`; `y` is borrowed exclusively.
        unsafe { self.each(&self.difference, arguments) }
    }

    /// Computes `d = coef g + sum over i of coef_i row_i`, for `rows` rows.
    ///
    /// # Safety
    /// On the stream, `table` holds the addresses of `rows` vectors that pass [`check`](Self::check), followed by their coefficients.
    pub(super) unsafe fn combine(
        &self,
        d: SliceMut<'_>,
        (coef, g): (f64, Slice<'_>),
        rows: usize,
        table: &Buffer,
    ) -> Result<(), Error> {
        self.check([d.as_slice(), g])?;
        let mut given = Combination {
            d: d.address() as u64,
            g: g.address() as u64,
            rows: address(table, 0),
            coefs: address(table, rows),
            count: rows as u64,
            len: self.len as u64,
            coef,
        };
        // SAFETY: as in `step`, with `d` borrowed exclusively; the rows are the caller's promise.
        unsafe { self.each(&self.combine, &mut [argument(&mut given)]) }
    }

    /// Adds the sums of `of` over the table's ranges to `words`: the count of non-finite elements and the largest magnitude at two
    /// indices, and the sum, if this norm has one, from index `sum` on.
    pub(super) fn norm(
        &self,
        which: Which,
        of: Slice<'_>,
        tables: Tables,
        words: &mut Buffer,
        ([non_finite, max_bits], sum): ([usize; 2], usize),
    ) -> Result<(), Error> {
        self.check([of])?;
        assert!(sum + crate::ExactSum::WORDS <= words.len(), "a sum lies within the words");
        let word = |word: usize| address(words, word);
        let mut at = NormAt { non_finite: word(non_finite), words: word(sum), max_bits: word(max_bits) };
        let LaunchTable { mut spans, mut count, mut tiles } = tables.norm;
        let mut values = of.address() as u64;
        let arguments = &mut [
            argument(&mut values),
            argument(&mut spans),
            argument(&mut count),
            argument(&mut tiles),
            argument(&mut at),
        ];
        let kernel = match which {
            Which::L1 => &self.l1,
            Which::L2 => &self.l2,
            Which::Inf => &self.inf,
        };
        // SAFETY: `of` is checked above, and the ranges lie within a vector of its length; the words are borrowed exclusively.
        unsafe { self.launch(kernel, tiles, arguments) }
    }

    /// Adds products of vectors with `x` over the table's ranges to the sums from word `sums` on.
    ///
    /// # Safety
    /// On the stream, `rows` holds from word `first` on the addresses of `count` vectors that pass [`check`](Self::check).
    pub(super) unsafe fn products(
        &self,
        x: Slice<'_>,
        (rows, first, count): (&Buffer, usize, usize),
        tables: Tables,
        words: &mut Buffer,
        sums: usize,
    ) -> Result<(), Error> {
        self.check([x])?;
        assert!(sums + count * crate::ExactSum::WORDS <= words.len(), "sums lie within the words");
        let table = tables.dot;
        let (kernel, together) = if count == 1 { (&self.dot, 1) } else { (&self.gram, ROWS) };
        let mut given = Products {
            x: x.address() as u64,
            rows: address(rows, first),
            count: count as u64,
            spans: table.spans,
            span_count: table.count,
            tiles: table.tiles,
            sums: address(words, sums),
        };
        let blocks = table.tiles.saturating_mul(count.div_ceil(together) as u64);
        // SAFETY: as in `norm`; the rows are the caller's promise.
        unsafe { self.launch(kernel, blocks, &mut [argument(&mut given)]) }
    }

    /// Runs an elementwise kernel.
    ///
    /// # Safety
    /// Same as [`Kernel::launch`].
    unsafe fn each(&self, kernel: &Kernel, arguments: &mut [*mut c_void]) -> Result<(), Error> {
        let tile = THREADS as usize * (16 / self.dtype.size());
        // SAFETY: the caller's promise.
        unsafe { self.launch(kernel, self.len.div_ceil(tile) as u64, arguments) }
    }

    /// Runs a kernel unless there are no tiles.
    ///
    /// # Safety
    /// Same as [`Kernel::launch`].
    unsafe fn launch(&self, kernel: &Kernel, tiles: u64, arguments: &mut [*mut c_void]) -> Result<(), Error> {
        if tiles == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(&self.stream, tiles, arguments) }
    }
}

impl Ranges {
    /// Creates ranges that lie within the vectors.
    pub(super) fn new(ranges: Vec<Range<usize>>) -> Self {
        Ranges { ranges, tables: None }
    }

    /// Returns the device tables, made on first use.
    pub(super) fn there(&mut self, dtype: DType, queue: &Queue, meter: &Meter) -> Result<Tables, Error> {
        let (words, tiles) = match &mut self.tables {
            Some(tables) => tables,
            none => none.insert(tables(&self.ranges, dtype, queue, meter)?),
        };
        let count = self.ranges.len();
        let table = |i: usize| LaunchTable {
            spans: address(words, i * count * SPAN),
            count: count as u64,
            tiles: tiles[i],
        };
        Ok(Tables { norm: table(0), dot: table(1) })
    }
}

/// Words of a [`Span`].
const SPAN: usize = 3;

/// Returns the spans of norms, then those of products, and the number of tiles of each.
fn tables(
    ranges: &[Range<usize>],
    dtype: DType,
    queue: &Queue,
    meter: &Meter,
) -> Result<(Buffer, [u64; 2]), Error> {
    let [norm, dot] = [norm_tile, dot_tile].map(|tile| spans(ranges.iter().cloned(), tile(dtype)));
    let words: Vec<u64> =
        norm.0.iter().chain(&dot.0).flat_map(|&Span { start, end, tile }| [start, end, tile]).collect();
    let mut there = Buffer::zeroed_on(queue, words.len(), DType::U64, meter, Category::Staging)?;
    queue.upload(words[..].into(), there.as_mut())?;
    Ok((there, [norm.1, dot.1]))
}

/// Returns the address of word `i`.
fn address(words: &Buffer, i: usize) -> u64 {
    (words.as_slice().address() + i * size_of::<u64>()) as u64
}
