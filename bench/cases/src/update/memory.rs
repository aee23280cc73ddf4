//! Memory of one update, and a loop that moves the same bytes.

use super::rows::Row;
use crate::copies::MovedBytes;
use meshstep_optim::{Flat, Isa, Scalars, Sees, Segment, TensorSums};
use meshstep_tensor::simd::Body;
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut, SplitParts, Threads};
use std::hint::black_box;

/// Vectors of one length; their addresses differ modulo a page, as in the optimizer.
pub struct Memory {
    params: Buffer,
    grads: Buffer,
    state: Vec<Buffer>,
    copy: Option<Buffer>,
    remainder: Option<Buffer>,
    /// True if the rule measures sums before the update, and if it also reads its state for them.
    measured: bool,
    state_too: bool,
    queue: Queue,
}

impl Memory {
    pub fn new(row: &Row, len: usize) -> Result<Self, meshstep_tensor::Error> {
        let (recipe, meter, mut apart) = (row.recipe, Meter::new(), Vec::new());
        let mut vector = |dtype, category, size: f32| -> Result<Buffer, meshstep_tensor::Error> {
            let mut buffer = Buffer::zeroed_apart(len, dtype, &meter, category, &apart)?;
            apart.push(buffer.as_ptr().addr().get());
            fill(buffer.as_mut(), apart.len() as u32, size);
            Ok(buffer)
        };
        // Moments of ordinary size; the last vector has the size of squares.
        let states = row.rule.state().len();
        let size = |slot: usize| if slot + 1 == states { 1e-4 } else { 1e-2 };
        Ok(Memory {
            params: vector(recipe.params, Category::Params, 1e-2)?,
            grads: vector(recipe.grads, Category::Grads, 1e-2)?,
            state: (0..states)
                .map(|slot| vector(recipe.state, Category::State, size(slot)))
                .collect::<Result<_, _>>()?,
            copy: recipe.copy.map(|dtype| vector(dtype, Category::Params, 0.0)).transpose()?,
            remainder: recipe.remainder.then(|| vector(DType::U16, Category::Master, 0.0)).transpose()?,
            measured: row.rule.sees() == Sees::TensorSums,
            state_too: row.measures_state,
            queue: Queue::cpu(),
        })
    }

    /// Sets the threads of updates and copies.
    pub fn on(self, threads: &Threads) -> Self {
        Memory { queue: Queue::cpu_on(threads), ..self }
    }

    /// Returns the bytes that an update must read and write for each element.
    pub fn bytes(&self) -> usize {
        self.moved().total()
    }

    /// Returns these bytes by their kind.
    pub fn moved(&self) -> MovedBytes {
        let size = |b: &Buffer| b.dtype().size();
        let state: usize = self.state.iter().chain(&self.remainder).map(size).sum();
        let measured = match (self.measured, self.state_too) {
            (false, _) => 0,
            (true, false) => size(&self.params) + size(&self.grads),
            (true, true) => size(&self.params) + size(&self.grads) + state,
        };
        MovedBytes {
            read: measured + size(&self.grads),
            written: self.copy.as_ref().map_or(0, size),
            in_place: 2 * (size(&self.params) + state),
        }
    }

    /// Returns the bytes of all vectors.
    pub fn held(&self) -> usize {
        let vectors = [&self.params, &self.grads].into_iter().chain(&self.state);
        vectors.chain(&self.copy).chain(&self.remainder).map(Buffer::bytes).sum()
    }

    pub fn threads(&self) -> &Threads {
        self.queue.threads()
    }

    pub fn update(&mut self, row: &Row) {
        let mut segment = [Segment::new(0..self.params.len(), 100)];
        let mut state: Vec<SliceMut<'_>> = self.state.iter_mut().map(Buffer::as_mut).collect();
        let flat = Flat {
            params: self.params.as_mut(),
            grads: self.grads.as_mut(),
            state: &mut state,
            copy: self.copy.as_mut().map(Buffer::as_mut),
            remainder: self.remainder.as_mut().map(Buffer::as_mut),
        };
        let rounding = row.recipe.rounding;
        let scalars = Scalars { lr: 1e-9, grad_scale: 0.5, rounding, ..Scalars::default() };
        if self.measured {
            let mut sums = [TensorSums::new()];
            row.rule.measure_on(Isa::detect(), &flat, &segment, &scalars, &mut sums, &self.queue).unwrap();
            segment[0].ratio = row.rule.ratio(&sums[0]);
        }
        row.rule.update(flat, &segment, &scalars, &self.queue).unwrap();
    }

    /// Reads the inputs of an update and writes its outputs in place, without a change: the mask is zero, but the compiler
    /// does not know that.
    pub fn copy(&mut self) {
        let (mask, threads) = (black_box(0), self.queue.threads());
        if self.measured {
            let state = self.state.iter().filter(|_| self.state_too);
            let read = [&self.params, &self.grads].into_iter().chain(state).map(Buffer::as_slice);
            black_box(read_all(read.collect(), threads));
        }
        let written = [&mut self.params]
            .into_iter()
            .chain(&mut self.state)
            .chain(&mut self.remainder)
            .map(Buffer::as_mut);
        move_all(
            self.grads.as_slice(),
            written.collect(),
            self.copy.as_mut().map(Buffer::as_mut),
            mask,
            threads,
        );
    }
}

fn fill(mut values: SliceMut<'_>, seed: u32, size: f32) {
    let mut seed = seed;
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 24) as f32 * size
    };
    if !values.dtype().is_float() {
        return; // remainders start as zeros
    }
    let (len, mut block) = (values.len(), [0f32; 1024]);
    for start in (0..len).step_by(block.len()) {
        let end = len.min(start + block.len());
        block.iter_mut().for_each(|x| *x = next());
        let part = Slice::from(&block[..end - start]);
        values.reborrow().slice(start..end).unwrap().cast_from(part).unwrap();
    }
}

/// Least number of elements of a part, as in an update.
const PART: usize = 32 << 10;

/// Elements processed stream by stream.
const BLOCK: usize = 1 << 10;

fn read_all(streams: Vec<Slice<'_>>, threads: &Threads) -> u64 {
    let len = streams[0].len();
    let part = threads.part_len(len, PART);
    let work = |all: &mut u64, start: usize| {
        let range = start..len.min(start + part);
        let streams: Vec<_> = streams.iter().map(|stream| stream.slice(range.clone()).unwrap()).collect();
        *all ^= Isa::detect().run(Read(&streams));
    };
    threads.fold((0..len.div_ceil(part)).map(|i| i * part), || 0, work, |all, other| *all ^= other)
}

fn move_all(
    read: Slice<'_>,
    written: Vec<SliceMut<'_>>,
    filled: Option<SliceMut<'_>>,
    mask: u64,
    threads: &Threads,
) {
    let part = threads.part_len(read.len(), PART).next_multiple_of(BLOCK);
    let parts = SplitParts::new(Move { read, written, filled, mask }, read.len(), part, Move::split_at);
    threads.for_each(parts, |(_, part)| Isa::detect().run(part));
}

struct Read<'a, 's>(&'s [Slice<'a>]);

impl Body for Read<'_, '_> {
    type Output = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        self.0.iter().fold(0, |all, stream| all ^ seen(stream.bytes().unwrap()))
    }
}

struct Move<'a> {
    read: Slice<'a>,
    written: Vec<SliceMut<'a>>,
    filled: Option<SliceMut<'a>>,
    mask: u64,
}

impl Move<'_> {
    fn split_at(self, at: usize) -> (Self, Self) {
        let Move { read, written, filled, mask } = self;
        let (written, right) = written.into_iter().map(|stream| stream.split_at(at).unwrap()).unzip();
        let (filled, other) = filled.map(|stream| stream.split_at(at).unwrap()).unzip();
        let (first, second) = (read.slice(0..at).unwrap(), read.slice(at..read.len()).unwrap());
        (
            Move { read: first, written, filled, mask },
            Move { read: second, written: right, filled: other, mask },
        )
    }
}

impl Body for Move<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let len = self.read.len();
        for start in (0..len).step_by(BLOCK) {
            let bytes = |dtype: DType| start * dtype.size()..len.min(start + BLOCK) * dtype.size();
            let mask = self.mask & seen(&self.read.bytes().unwrap()[bytes(self.read.dtype())]);
            for stream in &mut self.written {
                let range = bytes(stream.dtype());
                mix(&mut stream.bytes_mut().unwrap()[range], mask);
            }
            if let Some(stream) = &mut self.filled {
                let range = bytes(stream.dtype());
                stream.bytes_mut().unwrap()[range].fill(mask as u8);
            }
        }
    }
}

/// Combines all bits of `bytes`. The length is a multiple of 8, except at the very end.
#[inline(always)]
fn seen(bytes: &[u8]) -> u64 {
    bytes.as_chunks().0.iter().fold(0, |all, &word| all ^ u64::from_ne_bytes(word))
}

#[inline(always)]
fn mix(bytes: &mut [u8], mask: u64) {
    for word in bytes.as_chunks_mut().0 {
        *word = (u64::from_ne_bytes(*word) ^ mask).to_ne_bytes();
    }
}
