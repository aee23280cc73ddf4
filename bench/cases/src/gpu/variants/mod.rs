//! Variants of the update and the norm in turns with the library's own kernels, to decide about the latter: other grids,
//! other cache hints, loads by bulk copies. Delete them after the decision.

use super::Result;
use super::cases::{Case, cases};
use super::check::{downloaded, parts};
use super::job::{Job, KEY, LR};
use super::kernel::{Kernel, argument};
use super::measure::timed;
use super::race::{Copy, Measured};
use super::vectors::Vectors;
use meshstep_optim::cuda::{NormAt, Row, StepScalars, Streams, THREADS, append};
use meshstep_optim::{ExactSum, Norm, NormAccumulator, Segment};
use meshstep_tensor::DType::U64;
use meshstep_tensor::{Buffer, Category, Meter, Queue};
use std::ops::Range;

const VARIANTS: &str = include_str!("variants.ptx");
const BULK: &str = include_str!("bulk.sm_90.ptx");

/// Cases with variants, each with its kernel's name and the elements of a thread's turn.
const BASES: [(&str, &str, u64); 3] = [
    ("adamw f32", "adam_f32", 8),
    ("adamw bf16 + remainder, bf16 gradients", "adam_bf16_remainder", 8),
    ("exact norm bf16", "norm_l2_bf16", 32),
];

/// Maximum length for which whole vectors are compared.
const WHOLE: usize = 1 << 20;

/// A kernel that replaces a case's own kernel.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Name of the case that this is a variant of.
    pub base: &'static str,
    /// Difference from the base.
    pub change: String,
    kernel: String,
    ptx: &'static str,
    threads: u32,
    /// Elements of a thread's turn.
    elements: u64,
    /// True if the grid has a block for each tile. The library's grid has as many blocks as the device holds at once.
    a_block_a_tile: bool,
}

/// Returns all variants, grouped by case.
pub fn variants() -> Vec<Variant> {
    BASES.iter().flat_map(|&(base, kernel, elements)| of_base(base, kernel, elements)).collect()
}

fn of_base(base: &'static str, kernel: &str, elements: u64) -> Vec<Variant> {
    let variant = |hint: &str, change: &str, a_block_a_tile| Variant {
        base,
        change: change.to_owned(),
        kernel: format!("variants_{hint}_{kernel}"),
        ptx: VARIANTS,
        threads: THREADS,
        elements,
        a_block_a_tile,
    };
    let bulk = |stages: u32, threads| Variant {
        kernel: format!("bulk_{stages}_stages_{kernel}"),
        ptx: BULK,
        threads,
        elements: 4,
        ..variant("", &format!("bulk copies, {stages} stages"), false)
    };
    let mut all = vec![
        variant("plain", "unchanged", false),
        variant("plain", "a block a tile", true),
        variant("streaming", "ld.cs, st.cs", false),
        variant("streaming", "ld.cs, st.cs, a block a tile", true),
        variant("no_allocate", "ld.L1::no_allocate", false),
    ];
    if kernel == "adam_f32" {
        all.extend([bulk(2, 256), bulk(4, 128)]);
    }
    all
}

impl Variant {
    pub fn name(&self) -> String {
        format!("{} | {}", self.base, self.change)
    }

    pub fn bytes(&self) -> usize {
        self.case().map_or(0, |case| case.bytes())
    }

    /// Returns the reason if a device of this compute capability cannot run the variant.
    pub fn unfit(&self, capability: (u32, u32)) -> Option<String> {
        let (major, minor) = capability;
        let old = self.ptx == BULK && capability < (9, 0);
        old.then(|| format!("bulk copies need sm_90; this device is of sm_{major}{minor}"))
    }

    fn case(&self) -> Result<Case> {
        let case = cases().into_iter().find(|case| case.name == self.base);
        case.ok_or_else(|| format!("no case is named {}", self.base).into())
    }

    /// Measures the variant in turns with its base and a copy, after checking that one step of both gives the same bits.
    pub fn measure(&self, copy: &mut Copy, (len, rounds): (usize, usize), queue: &Queue) -> Result<Measured> {
        // Compare at a length that ends within a tile, and at the measured length.
        let odd = len.min(WHOLE).saturating_sub(777).max(1);
        let compared = self.compare(odd, queue)? + self.compare(len, queue)?;
        let mut base = Job::new(&self.case()?, len, queue)?;
        let mut ready = Ready::new(self, &mut base, queue)?;
        let mut go = |work| match work {
            0 => base.go(queue).map(drop),
            _ => ready.go(&mut base.vectors, queue),
        };
        let kernels = vec![(self.kernel.clone(), self.elements)];
        Ok(Measured { compared, ..timed(copy, (len, rounds), &kernels, (2, &mut go), queue)? })
    }

    /// Runs a step of the variant and one of its base from the same vectors, and compares them bit for bit. Returns the
    /// number of elements compared in each vector.
    pub fn compare(&self, len: usize, queue: &Queue) -> Result<usize> {
        let case = self.case()?;
        let ranges = if len > WHOLE { parts(len) } else { std::iter::once(0..len).collect() };
        let mut base = Job::new(&case, len, queue)?;
        base.go(queue)?;
        let norm = base.norm.as_ref().map(|norm| norm.read(queue)).transpose()?;
        let expected = Found { norm, vectors: found(&base.vectors, &ranges, queue)? };
        drop(base);
        let mut base = Job::new(&case, len, queue)?;
        let mut ready = Ready::new(self, &mut base, queue)?;
        ready.go(&mut base.vectors, queue)?;
        let found = Found { norm: ready.norm(queue)?, vectors: found(&base.vectors, &ranges, queue)? };
        if found != expected {
            return Err(format!("{}: a step of {len} elements differs from its base's", self.name()).into());
        }
        Ok(ranges.iter().map(Range::len).sum())
    }
}

/// Results of a step.
#[derive(PartialEq)]
struct Found {
    norm: Option<NormAccumulator>,
    vectors: Vec<u8>,
}

/// Returns the bytes of these elements of all vectors.
fn found(vectors: &Vectors, ranges: &[Range<usize>], queue: &Queue) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for range in ranges {
        for (_, vector) in vectors.all() {
            bytes.extend_from_slice(downloaded(vector, range, queue)?.as_slice().bytes()?);
        }
    }
    Ok(bytes)
}

/// A variant that is ready to launch.
struct Ready {
    kernel: Kernel,
    blocks: u64,
    tiles: u64,
    memory: Memory,
}

enum Memory {
    /// A table of one segment, and the step.
    Update { prepare: Kernel, streams: Streams, rows: Buffer, step: Buffer },
    /// A table of one span; and words for a count, the sum, and the largest magnitude.
    Norm { span: Buffer, words: Buffer },
}

impl Ready {
    /// Prepares the variant for vectors like those of `base`.
    fn new(variant: &Variant, base: &mut Job, queue: &Queue) -> Result<Self> {
        let kernel = Kernel::load(variant.ptx, &variant.kernel, variant.threads, queue)?;
        let tiles = (base.len as u64).div_ceil(variant.elements * u64::from(variant.threads));
        let blocks = if variant.a_block_a_tile { tiles } else { tiles.min(kernel.resident.into()) };
        let words = |words: &[u64]| -> Result<Buffer> {
            let mut there = Buffer::zeroed_on(queue, words.len(), U64, &Meter::new(), Category::State)?;
            queue.upload(words.into(), there.as_mut())?;
            Ok(there)
        };
        let Case { rule, recipe, .. } = variant.case()?;
        let memory = match rule {
            None => Memory::Norm {
                span: words(&[0, base.len as u64, 0])?,
                words: words(&[0; ExactSum::WORDS + 2])?,
            },
            Some(rule) => {
                let mut table = Vec::new();
                let segment = Segment { key: KEY, ..Segment::new(0..base.len, 1) };
                append(&mut table, recipe.params, &*rule, 1.0, &[segment])?;
                // Skip and zero_grads are 0.
                let step = [LR.to_bits(), 1f64.to_bits(), 0];
                const { assert!(size_of::<StepScalars>() == 24) };
                let streams = base.vectors.flat(|flat| Streams::of(&flat, recipe.rounding));
                Memory::Update {
                    prepare: Kernel::load(VARIANTS, "variants_prepare", THREADS, queue)?,
                    streams: streams.unwrap_or_default(),
                    rows: words(&row_words(&table[0]))?,
                    step: words(&step)?,
                }
            }
        };
        Ok(Ready { kernel, blocks, tiles, memory })
    }

    fn go(&mut self, vectors: &mut Vectors, queue: &Queue) -> Result<()> {
        let address = |buffer: &Buffer| buffer.as_slice().address() as u64;
        let (mut tiles, mut count) = (self.tiles, 1u64);
        match &mut self.memory {
            Memory::Norm { span, words } => {
                queue.zero(words.as_mut())?;
                let (mut values, mut spans) = (address(&vectors.grads), address(span));
                let at = address(words);
                let max_bits = at + 8 * (1 + ExactSum::WORDS as u64);
                let mut at = NormAt { non_finite: at, words: at + 8, max_bits };
                let arguments = &mut [
                    argument(&mut values),
                    argument(&mut spans),
                    argument(&mut count),
                    argument(&mut tiles),
                    argument(&mut at),
                ];
                // SAFETY: the span covers all gradients, and the words have room for a sum; both live as long as the job,
                // and the owner of the job waits for the queue.
                unsafe { self.kernel.launch(self.blocks, arguments, queue) }
            }
            Memory::Update { prepare, streams, rows, step } => {
                let (mut rows, mut step) = (address(rows), address(step));
                let mut streams = vectors.flat(|flat| {
                    streams.params = flat.params.address() as u64;
                    streams.grads = flat.grads.address() as u64;
                    streams.remainder = flat.remainder.as_ref().map_or(0, |vector| vector.address() as u64);
                    let state = streams.state.iter_mut().zip(flat.state.iter());
                    state.for_each(|(to, vector)| *to = vector.address() as u64);
                    *streams
                });
                let streams = streams.as_mut().ok_or("a case without parameters")?;
                // SAFETY: the table has one row, and the step has the layout that the kernels expect.
                unsafe { prepare.launch(1, &mut [argument(&mut rows), argument(&mut step)], queue)? };
                let arguments = &mut [
                    argument(streams),
                    argument(&mut rows),
                    argument(&mut count),
                    argument(&mut tiles),
                    argument(&mut step),
                ];
                // SAFETY: as above; the row covers all elements, and their vectors have the kernel's types and live as long
                // as the job.
                unsafe { self.kernel.launch(self.blocks, arguments, queue) }
            }
        }
    }

    /// Returns the norm, if the variant computes one.
    fn norm(&self, queue: &Queue) -> Result<Option<NormAccumulator>> {
        let Memory::Norm { words, .. } = &self.memory else { return Ok(None) };
        let found = downloaded(words, &(0..words.len()), queue)?;
        let found = found.as_slice().typed::<u64>()?;
        let (sum, max_bits) = (ExactSum::from_words(&found[1..=ExactSum::WORDS]), found[ExactSum::WORDS + 1]);
        Ok(Some(NormAccumulator::from_parts(Norm::L2, sum, max_bits, found[0])))
    }
}

/// Returns a row as 64-bit words.
fn row_words(row: &Row) -> Vec<u64> {
    bytemuck::cast_slice(std::slice::from_ref(row)).to_vec()
}
