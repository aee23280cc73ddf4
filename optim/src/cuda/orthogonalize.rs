//! Launches that orthogonalise the matrices of a tensor, with the CPU's bits.

use super::kernels::{Kernel, argument};
use super::matrix_arguments::{Due, MatrixAt, Product, Scaling};
use super::matrix_memory::Scratch;
use super::update::stream;
use super::{MatrixMemory, MatrixSizes, NormAt, Orthogonalization, StepBlock, norm_tile};
use crate::{Error, Rule};
use meshstep_tensor::cuda::Stream;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, SliceMut};

/// [`MatrixRule::transform`](crate::MatrixRule::transform) of tensors of one shape on a device.
///
/// ```
/// use meshstep_optim::Muon;
/// use meshstep_optim::cuda::{MatrixMemory, Orthogonalizer, StepBlock, StepScalars};
/// use meshstep_tensor::cuda::{Device, Stream, probe};
/// use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
///
/// if probe().is_err() {
///     return Ok(()); // no GPU
/// }
/// let (queue, meter) = (Queue::cuda(Stream::new(&Device::open(0)?)?), Meter::new());
/// let rows = Orthogonalizer::new(&Muon::default(), (DType::F32, 6), (2, 3), &queue, &meter)?;
/// let memory = MatrixMemory::new(DType::F32, rows.sizes(), &queue, &meter)?;
/// let mut decided = StepBlock::new(&queue, &meter)?;
/// decided.set(&StepScalars { lr: 0.1, grad_scale: 1.0, skip: 0, zero_grads: 0 }, &queue)?;
/// let mut step = Buffer::zeroed_on(&queue, 6, DType::F32, &meter, Category::Staging)?;
/// queue.upload((&[3f32, 0.0, 0.0, 0.0, 0.0, -3.0][..]).into(), step.as_mut())?;
/// rows.run(step.as_mut(), &memory, &decided, &queue)?;
/// let mut found = [0f32; 6];
/// queue.download(step.as_slice(), (&mut found[..]).into())?;
/// assert!((0.7..1.3).contains(&found[0]) && found[1] == 0.0 && found[5] == -found[0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Orthogonalizer {
    work: Orthogonalization,
    dtype: DType,
    len: usize,
    /// Number of matrices.
    count: usize,
    /// Range of a matrix, for the kernel of its norm.
    span: Buffer,
}

impl Orthogonalizer {
    /// Uploads what the launches need for tensors of `len` elements that the rule computes in `dtype`, with matrices of these rows and
    /// columns.
    pub fn new(
        rule: &dyn Rule,
        (dtype, len): (DType, usize),
        matrix: (usize, usize),
        queue: &Queue,
        meter: &Meter,
    ) -> Result<Self, Error> {
        rule.check()?;
        let phases = rule.by_matrix().ok_or(Error::NoKernels { rule: rule.name() })?;
        let whole = phases.orthogonalization(matrix).and_then(|work| Some((work, work.matrices(len)?)));
        let (name, shape, blocks) = (rule.name(), Some(matrix), rule.blocks());
        let (work, count) = whole.ok_or(Error::NotAMatrix { rule: name, index: 0, len, shape, blocks })?;
        let each = len.checked_div(count).unwrap_or(0) as u64;
        let mut span = Buffer::zeroed_on(queue, 3, DType::U64, meter, Category::Staging)?;
        queue.upload((&[0, each, 0][..]).into(), span.as_mut())?;
        Ok(Orthogonalizer { work, dtype, len, count, span })
    }

    /// Returns the scratch memory that it needs beside the step.
    pub fn sizes(&self) -> MatrixSizes {
        self.work.sizes(self.len).in_place()
    }

    /// Orthogonalises the matrices of `step` in place, unless the device skips the step.
    pub fn run(
        &self,
        step: SliceMut<'_>,
        memory: &MatrixMemory,
        decided: &StepBlock,
        queue: &Queue,
    ) -> Result<(), Error> {
        step.place().check(queue.place())?;
        memory.check(self.dtype, &self.sizes(), queue)?;
        decided.check(0, queue)?;
        if step.dtype() != self.dtype {
            return Err(Error::DType {
                what: "a step",
                given: step.dtype(),
                works: "the type that it was made for",
            });
        }
        if step.len() != self.len {
            return Err(Error::Len { what: "a step", given: step.len(), expected: self.len });
        }
        let due = Due { step: decided.address(), row: 0 };
        // SAFETY: the step and the scratch memory are as long as the matrices, have their type and are on the stream's device, checked
        // above. The step is borrowed exclusively, and later work on this stream runs after the kernels.
        unsafe { self.launch(step.address() as u64, memory, due, queue) }
    }

    /// Orthogonalises the matrices at address `x` in place.
    ///
    /// # Safety
    /// - `x` is the address of the tensor's elements, of this type, on the stream's device, which other work does not touch meanwhile.
    /// - `memory` has this type, and room for [`sizes`](Self::sizes).
    /// - `due` has the address of a [`StepScalars`](super::StepScalars), and of a row or 0.
    pub(super) unsafe fn launch(
        &self,
        x: u64,
        memory: &MatrixMemory,
        due: Due,
        queue: &Queue,
    ) -> Result<(), Error> {
        let stream = stream(queue)?;
        if self.count == 0 {
            return Ok(());
        }
        let scratch = memory.begin(self.count, queue)?;
        // SAFETY: the caller's promise.
        unsafe { self.add_norms(x, &memory.kernels.norm, scratch, stream)? };
        // Each iteration moves the matrices to the other memory, and the last one to `x`.
        let mut at = [x, scratch.product];
        if self.work.steps % 2 == 1 {
            at.swap(0, 1);
        }
        let mut scaling = Scaling {
            from: x,
            to: at[0],
            norms: scratch.norms,
            len: self.each(),
            count: self.count as u64,
            eps: self.work.eps,
            add_eps: self.work.add_eps.into(),
            due,
        };
        // SAFETY: both are as long as the matrices, and each has a norm.
        unsafe { memory.kernels.scale.launch(stream, scaling.blocks(), &mut [argument(&mut scaling)])? };
        for _ in 0..self.work.steps {
            for mut product in self.iteration(at, scratch, due) {
                // SAFETY: matrices and results have these sizes, and no result is a factor of its own product.
                unsafe {
                    memory.kernels.product.launch(stream, product.blocks(), &mut [argument(&mut product)])?;
                }
            }
            at.swap(0, 1);
        }
        Ok(())
    }

    /// Adds the squares of each matrix at `x` to its norm.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch); `scratch` has as many norms as there are matrices.
    unsafe fn add_norms(
        &self,
        x: u64,
        kernel: &Kernel,
        scratch: Scratch,
        stream: &Stream,
    ) -> Result<(), Error> {
        for matrix in 0..self.count as u64 {
            let mut values = x + matrix * self.each() * self.dtype.size() as u64;
            let word = |word: usize| {
                scratch.norms + (matrix * MatrixSizes::NORM as u64 + word as u64) * size_of::<u64>() as u64
            };
            let mut at =
                NormAt { non_finite: word(0), words: word(1), max_bits: word(MatrixSizes::NORM - 1) };
            let (mut span, mut count) = (self.span.as_slice().address() as u64, 1u64);
            let mut tiles = self.each().div_ceil(norm_tile(self.dtype));
            let arguments = &mut [
                argument(&mut values),
                argument(&mut span),
                argument(&mut count),
                argument(&mut tiles),
                argument(&mut at),
            ];
            // SAFETY: the span covers a matrix, and the kernel is that of its type. It adds to the words of the matrix's norm.
            unsafe { kernel.launch(stream, tiles, arguments)? };
        }
        Ok(())
    }

    /// Elements of a matrix.
    fn each(&self) -> u64 {
        let (rows, cols) = self.work.block;
        (rows * cols) as u64
    }

    /// Returns the products of an iteration that reads matrices at `from` and writes them at `to`.
    fn iteration(&self, [from, to]: [u64; 2], scratch: Scratch, due: Due) -> [Product; 3] {
        let [rows, cols] = [self.work.block.0 as u64, self.work.block.1 as u64];
        let (short, long, each) = (rows.min(cols), rows.max(cols), self.each());
        let [c0, c1, c2] = self.work.coefficients;
        let x = MatrixAt::new(from, cols);
        let wide = if rows <= cols { x } else { x.t() };
        let [gram, square] = [scratch.gram, scratch.square].map(|address| MatrixAt::new(address, short));
        let product = |[a, b]: [MatrixAt; 2], c, shape, lens| Product {
            a,
            b,
            base: 0,
            c,
            shape,
            lens,
            count: self.count as u64,
            factors: [0.0, 1.0],
            symmetric: 0,
            due,
        };
        let side = short * short;
        let factors = if rows <= cols { [square, x] } else { [x, square] };
        let lens = if rows <= cols { [side, each, each] } else { [each, side, each] };
        [
            Product {
                symmetric: 1,
                ..product([wide, wide.t()], scratch.gram, [short, short, long], [each, each, side])
            },
            Product {
                symmetric: 1,
                base: scratch.gram,
                factors: [c1, c2],
                ..product([gram; 2], scratch.square, [short; 3], [side; 3])
            },
            Product { base: from, factors: [c0, 1.0], ..product(factors, to, [rows, cols, short], lens) },
        ]
    }
}
