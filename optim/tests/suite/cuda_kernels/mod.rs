//! The source of the CUDA kernels, run on the CPU, gives the bits of the rules' references. These tests neither need nor verify a GPU.

pub(crate) mod blocks;
mod equality;
pub(crate) mod interleaved;
mod memory;
mod numbers;
mod table;
mod vectors;

use crate::common::{DTYPES, Memory, RECIPES, Recipe};
use meshstep_optim::cuda::{self, Row, StepScalars, Streams, THREADS};
use meshstep_optim::{Flat, Rounding, Rule, Scalars, Segment};
use meshstep_simt::Device;
use meshstep_tensor::{DType, SliceMut};
use std::ops::Range;

const SCALARS: Scalars =
    Scalars { lr: 0.01, grad_scale: 0.75, zero_grads: false, rounding: Rounding::Nearest };
const KEY: u64 = 0x0123_4567_89ab_cdef;

/// Recipes without 16-bit types except for gradients and copies, and [`RECIPES`].
fn recipes() -> Vec<Recipe> {
    let plain = |(params, grads, copy): (DType, DType, Option<DType>)| {
        let (state, rounding) = (params, Rounding::Nearest);
        Recipe { params, remainder: false, grads, state, copy, rounding }
    };
    DTYPES.into_iter().map(plain).chain(RECIPES).collect()
}

/// Returns elements `range` of a tensor that begins `before` elements earlier.
fn segment(range: Range<usize>, before: usize, t: u64) -> Segment {
    Segment { key: KEY, first: (range.start + before) as u64, ..Segment::new(range, t) }
}

fn scalars(recipe: &Recipe, t: u64) -> Scalars {
    Scalars { rounding: recipe.rounding, zero_grads: t == 2, ..SCALARS }
}

/// Returns the step in device form.
fn step(scalars: &Scalars) -> StepScalars {
    StepScalars {
        lr: scalars.lr,
        grad_scale: scalars.grad_scale,
        skip: 0,
        zero_grads: scalars.zero_grads.into(),
    }
}

/// A step with update flags for some parameters.
#[repr(C)]
struct Told {
    step: StepScalars,
    updated: [u8; 8],
}

/// Parameter groups: rules of one family with their segments.
type Groups<'a> = [(&'a dyn Rule, Vec<Segment>)];

/// Table of rows, and its device.
struct Table<'a> {
    device: &'a Device,
    family: &'static str,
    params: DType,
    rows: Vec<Row>,
}

impl<'a> Table<'a> {
    fn new(device: &'a Device, params: DType, groups: &Groups<'_>) -> Self {
        let family = groups[0].0.on_device().unwrap().family;
        let mut rows = Vec::new();
        for (rule, segments) in groups {
            assert_eq!(rule.on_device().unwrap().family, family);
            cuda::append(&mut rows, params, *rule, 1.0, segments).unwrap();
        }
        Table { device, family, params, rows }
    }

    /// Takes one step of the elements from `offset` on; returns the kernel's name.
    fn step(
        &mut self,
        memory: &mut Memory,
        offset: usize,
        rounding: Rounding,
        step: StepScalars,
        blocks: u32,
    ) -> Result<String, String> {
        let (kernel, streams) = describe(self.family, memory, offset, rounding);
        self.prepare(step);
        // SAFETY: `memory` has vectors of the types that the kernel was chosen for, and the segments lie within them: the reference,
        // which checks, updates the same.
        unsafe { self.update(&kernel, streams, step, blocks)? };
        Ok(kernel)
    }

    fn prepare(&mut self, step: StepScalars) {
        self.prepare_some(step, [0; 8]);
    }

    /// Prepares the rows of each parameter with a nonzero byte, and the rows without a parameter.
    fn prepare_some(&mut self, step: StepScalars, updated: [u8; 8]) {
        let told = Told { step, updated };
        let (mut rows, mut count, mut step) =
            (self.rows.as_mut_ptr(), self.rows.len() as u64, &raw const told);
        let mut args = [(&raw mut rows).cast(), (&raw mut count).cast(), (&raw mut step).cast()];
        // SAFETY: `prepare` takes `count` writable rows, and a step with a byte for each parameter that they name.
        unsafe { self.device.launch(&cuda::prepare(self.family), 2, THREADS, &mut args) }.unwrap();
    }

    /// # Safety
    /// The addresses are those of vectors of the kernel's types that hold every element of the rows.
    unsafe fn update(
        &self,
        kernel: &str,
        mut streams: Streams,
        mut step: StepScalars,
        blocks: u32,
    ) -> Result<(), String> {
        let (mut rows, mut count, mut step) = (self.rows.as_ptr(), self.rows.len() as u64, &raw mut step);
        let mut tiles = cuda::tiles(&self.rows, self.params);
        let mut args = [
            (&raw mut streams).cast(),
            (&raw mut rows).cast(),
            (&raw mut count).cast(),
            (&raw mut tiles).cast(),
            (&raw mut step).cast(),
        ];
        // SAFETY: these are an update's arguments, and the caller promises the vectors.
        unsafe { self.device.launch(kernel, blocks, THREADS, &mut args) }
    }
}

/// Takes one step as the host would.
fn launch(
    device: &Device,
    groups: &Groups<'_>,
    memory: &mut Memory,
    scalars: &Scalars,
    blocks: u32,
) -> Result<String, String> {
    let mut table = Table::new(device, memory.params.slice().dtype(), groups);
    table.step(memory, 0, scalars.rounding, step(scalars), blocks)
}

/// Returns the kernel for these types, and the addresses of the elements from `offset` on.
fn describe(family: &str, memory: &mut Memory, offset: usize, rounding: Rounding) -> (String, Streams) {
    memory.flat(offset, |flat| describe_flat(family, flat, rounding))
}

fn describe_flat(family: &str, flat: Flat<'_, '_>, rounding: Rounding) -> (String, Streams) {
    let address = |mut slice: SliceMut<'_>| slice.bytes_mut().unwrap().as_mut_ptr() as u64;
    let kernel = cuda::kernel(family, &flat);
    let mut streams = Streams::of(&flat, rounding);
    for (to, slot) in streams.state.iter_mut().zip(flat.state) {
        *to = address(slot.reborrow());
    }
    (streams.params, streams.grads) = (address(flat.params), address(flat.grads));
    (streams.copy, streams.remainder) = (flat.copy.map_or(0, address), flat.remainder.map_or(0, address));
    (kernel, streams)
}
