//! Sum of a norm in device memory.

use super::kernels::{Kernel, argument};
use super::{CARRY_SUMS, NormAt, Span, WRITE_SUM, norm_kernel, norm_tile, spans};
use crate::{Error, ExactSum, Norm, NormAccumulator};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, Slice, SliceMut};

/// Index of the sum's first word, after the count of non-finite elements.
const WORDS: usize = 1;
/// Index of the bits of the largest magnitude.
const MAX: usize = WORDS + ExactSum::WORDS;
/// Index of the largest magnitude of watched vectors, which is never read.
const UNREAD: usize = MAX + 1;

/// [`NormAccumulator`] on a device.
#[derive(Debug)]
pub(crate) struct NormThere {
    norm: Norm,
    meter: Meter,
    words: Buffer,
    /// Loaded before a graph may be captured.
    carry: Kernel,
    write: Kernel,
    /// Tables of the vectors added so far, one for each length and type.
    tables: Vec<NormTable>,
}

/// Launch table of one whole vector.
#[derive(Debug)]
struct NormTable {
    len: usize,
    dtype: DType,
    norm: Norm,
    span: Buffer,
    tiles: u64,
    kernel: Kernel,
}

impl NormThere {
    pub(crate) fn new(norm: Norm, queue: &Queue, meter: &Meter) -> Result<Self, Error> {
        if let Norm::P(p) = norm {
            let works = "Norm::L1, L2 or Inf on a GPU";
            return Err(Error::Scalar { name: "p of a p-norm", value: p, works });
        }
        let words = Buffer::zeroed_on(queue, UNREAD + 1, DType::U64, meter, Category::Staging)?;
        let wrong = meshstep_tensor::Error::Place { given: queue.place(), expected: Place::Cuda(0) };
        let device = queue.stream().ok_or(wrong)?.device();
        let (carry, write) = (Kernel::find(device, CARRY_SUMS)?, Kernel::find(device, WRITE_SUM)?);
        Ok(NormThere { norm, meter: meter.clone(), words, carry, write, tables: Vec::new() })
    }

    pub(crate) fn add(&mut self, values: Slice<'_>, queue: &Queue) -> Result<(), Error> {
        self.add_to(values, self.norm, MAX, queue)
    }

    pub(crate) fn watch(&mut self, values: Slice<'_>, queue: &Queue) -> Result<(), Error> {
        // The kernel of this norm writes no sum.
        self.add_to(values, Norm::Inf, UNREAD, queue)
    }

    fn add_to(&mut self, values: Slice<'_>, norm: Norm, max: usize, queue: &Queue) -> Result<(), Error> {
        let stream = self.stream(queue)?;
        values.place().check(queue.place())?;
        if values.is_empty() {
            return Ok(());
        }
        let at =
            NormAt { non_finite: self.address(0), words: self.address(WORDS), max_bits: self.address(max) };
        let table = self.table(values, norm, stream, queue)?;
        let mut start = values.address() as u64;
        let (mut span, mut count, mut tiles) = (table.span.as_slice().address() as u64, 1u64, table.tiles);
        let mut at = at;
        let arguments = &mut [
            argument(&mut start),
            argument(&mut span),
            argument(&mut count),
            argument(&mut tiles),
            argument(&mut at),
        ];
        // SAFETY: the span covers `values`, and the kernel was chosen for their type. It adds to the words, which belong to this sum. All
        // memory is on the stream's device.
        unsafe { table.kernel.launch(stream, table.tiles, arguments) }
    }

    pub(crate) fn reset(&mut self, queue: &Queue) -> Result<(), Error> {
        Ok(queue.zero(self.words.as_mut())?)
    }

    /// Carries the words, so that equal sums have equal words.
    fn carry(&self, queue: &Queue) -> Result<(), Error> {
        let stream = self.stream(queue)?;
        let (mut sums, mut count) = (self.address(WORDS), 1u64);
        // SAFETY: the kernel carries one sum, at the address given.
        unsafe { self.carry.launch(stream, 1, &mut [argument(&mut sums), argument(&mut count)]) }
    }

    /// Writes the sum into an exchange's vectors.
    pub(crate) fn write(&self, sum: SliceMut<'_>, max: SliceMut<'_>, queue: &Queue) -> Result<(), Error> {
        let stream = self.stream(queue)?;
        let sum = sum.slice(0..2 + ExactSum::WORDS)?;
        let max = max.slice(0..1)?;
        for vector in [&sum, &max] {
            vector.place().check(queue.place())?;
            if vector.dtype() != DType::U64 {
                let what = "an exchange's vector";
                return Err(Error::DType { what, given: vector.dtype(), works: "u64" });
            }
        }
        let (mut from, mut sum, mut max) = (self.address(0), sum.address() as u64, max.address() as u64);
        // SAFETY: this sum's words have the layout that the kernel reads. Both vectors have room for its output, checked above, and all
        // memory is on the stream's device.
        unsafe {
            self.write.launch(stream, 1, &mut [argument(&mut from), argument(&mut sum), argument(&mut max)])
        }
    }

    pub(crate) fn read(&self, queue: &Queue) -> Result<NormAccumulator, Error> {
        self.carry(queue)?;
        let mut words = [0; MAX + 1];
        queue.download(self.words.as_slice().slice(0..MAX + 1)?, (&mut words[..]).into())?;
        let sum = ExactSum::from_words(&words[WORDS..MAX]);
        Ok(NormAccumulator::from_parts(self.norm, sum, words[MAX], words[0]))
    }

    /// Returns the error for CPU memory.
    pub(crate) fn not_here(&self) -> Error {
        meshstep_tensor::Error::Place { given: Place::Cpu, expected: self.words.place() }.into()
    }

    fn stream<'q>(&self, queue: &'q Queue) -> Result<&'q Stream, Error> {
        self.words.place().check(queue.place())?;
        queue.stream().ok_or_else(|| self.not_here())
    }

    fn address(&self, word: usize) -> u64 {
        (self.words.as_slice().address() + word * size_of::<u64>()) as u64
    }

    /// Returns the table for vectors like `values`.
    fn table(
        &mut self,
        values: Slice<'_>,
        norm: Norm,
        stream: &Stream,
        queue: &Queue,
    ) -> Result<&NormTable, Error> {
        let (len, dtype) = (values.len(), values.dtype());
        let alike = |table: &NormTable| (table.len, table.dtype, table.norm) == (len, dtype, norm);
        let index = match self.tables.iter().position(alike) {
            Some(index) => index,
            None => {
                self.tables.push(NormTable::new(norm, len, dtype, (stream, queue), &self.meter)?);
                self.tables.len() - 1
            }
        };
        Ok(&self.tables[index])
    }
}

impl NormTable {
    fn new(
        norm: Norm,
        len: usize,
        dtype: DType,
        (stream, queue): (&Stream, &Queue),
        meter: &Meter,
    ) -> Result<Self, Error> {
        let (what, works) = ("the input of a norm", "f32, f64, bf16 or f16");
        let name = norm_kernel(norm, dtype).ok_or(Error::DType { what, given: dtype, works })?;
        let (table, tiles) = spans(std::iter::once(0..len), norm_tile(dtype));
        let words: Vec<u64> =
            table.iter().flat_map(|&Span { start, end, tile }| [start, end, tile]).collect();
        let mut span = Buffer::zeroed_on(queue, words.len(), DType::U64, meter, Category::Staging)?;
        queue.upload(words[..].into(), span.as_mut())?;
        Ok(NormTable { len, dtype, norm, span, tiles, kernel: Kernel::find(stream.device(), &name)? })
    }
}
