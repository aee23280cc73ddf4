//! Arguments of the CUDA kernels that update parameters: arithmetic and memory layouts, no CUDA.
//!
//! A step is two launches, one after the other, in blocks of [`THREADS`] threads; the grid may have any size:
//!
//! ```text
//! FAMILY_prepare(Row* rows, u64 count, const Step*)                      advances every row: its t, its constants
//! NAME(Streams, const Row* rows, u64 count, u64 tiles, const Step*)      updates every element of every row
//! ```
//!
//! `FAMILY_prepare` does not access vectors, so one launch prepares the rows of all of a step's tables that lie end to end. The results
//! have the bits of [`Isa::Reference`](crate::Isa::Reference). The table of rows, of one or several parameter groups, stays on the device
//! and counts its own steps. A [`StepScalars`] may also be written on the device, so the host need not know the decision: if
//! [`StepScalars::skip`] is set, rows and memory stay unchanged. After the step comes one byte for each parameter with counted gradients;
//! if it is 0, the rows of that parameter stay unchanged.
//!
//! Kernels are in the folders of their rules (`adam/adam.cu`). Each is compiled with the numbered files of this folder in front, in
//! order. Rules that need sums of tensors have no kernels. Rules of matrices have two sweeps and launches between them
//! ([`Orthogonalization`]). Two more kernels accumulate and convert gradients:
//!
//! ```text
//! accumulate_TYPE(void* dst, const void* src, u64 len, f64 weight, u32 first)    accumulate(dst, src, weight, first)
//! cast_FROM_TO(void* dst, const void* src, u64 len)                              tensor's cast, among f32, bf16 and f16
//! ```

mod decide;
#[cfg(feature = "cuda")]
mod decision;
#[cfg(feature = "cuda")]
pub(crate) mod flat;
#[cfg(feature = "cuda")]
mod kernels;
mod lbfgs;
#[cfg(feature = "cuda")]
mod matrices;
#[cfg(feature = "cuda")]
mod matrix_arguments;
#[cfg(feature = "cuda")]
mod matrix_memory;
mod moments;
#[cfg(feature = "cuda")]
mod norm;
mod orthogonalization;
#[cfg(feature = "cuda")]
mod orthogonalize;
mod sums;
#[cfg(feature = "cuda")]
mod tables;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(feature = "cuda")]
mod texts;
#[cfg(feature = "cuda")]
mod update;

#[cfg(feature = "cuda")]
pub use kernels::{LoadedKernel, loaded_kernels};

#[cfg(feature = "cuda")]
pub use decision::{Answer, Decision};
#[cfg(feature = "cuda")]
pub(crate) use kernels::{Kernel, argument};
#[cfg(feature = "cuda")]
pub use matrix_memory::MatrixMemory;
#[cfg(feature = "cuda")]
pub(crate) use norm::NormThere;
#[cfg(feature = "cuda")]
pub use orthogonalize::Orthogonalizer;
#[cfg(feature = "cuda")]
pub use tables::Tables;
#[cfg(feature = "cuda")]
pub use update::{Group, StepBlock, Update};

pub use decide::{Decided, FIELDS, Progress, Settings, Verdict, norm_code};
pub use lbfgs::{Combination, Products};
pub use orthogonalization::{MatrixSizes, Orthogonalization};
pub use sums::{CARRY_SUMS, NormAt, Span, WRITE_SUM, dot_tile, norm_kernel, norm_tile, spans};

use crate::engine::frame::Common;
use crate::engine::pass::check_segments;
use crate::{Decay, Error, Flat, Rounding, Rule, Sees, Segment, Strided};
use meshstep_tensor::DType;
use std::ops::Range;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Kernel family of a rule, and its arguments for a parameter group: all that depends neither on `t` nor on the learning rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hyper {
    /// Prefix of the kernels' names: `adam` of `adam_f32`. [`module`] derives the file from it.
    pub family: &'static str,
    /// Switches, in the kernels' encoding.
    pub flags: u32,
    /// `weight_decay` of the rule.
    pub weight_decay: f64,
    /// Largest learning rate of the schedule with [`Decay::FullyDecoupled`], else 0.
    pub lr_max: f64,
    /// Hyperparameters specific to the rule, in its kernels' order.
    pub given: [f64; Hyper::MOST],
}

impl Hyper {
    /// Maximum number of hyperparameters specific to a rule: four moments with their weights, and three more. The last is the adjustment of
    /// the learning rate to a matrix, for a rule that sees matrices.
    pub const MOST: usize = 11;

    const COUPLED: u32 = 1;
    const MAXIMIZE: u32 = 2;
    const DECOUPLED: u32 = 4;
    const FULLY_DECOUPLED: u32 = 8;
    const OWN: u32 = 16;

    /// Combines the hyperparameters that all rules share with those specific to the rule.
    pub(crate) fn new(family: &'static str, common: &Common, own: &[f64]) -> Self {
        let (decay, lr_max) = match common.decay {
            Decay::Coupled if common.weight_decay == 0.0 => (0, 0.0),
            Decay::Coupled => (Self::COUPLED, 0.0),
            Decay::Decoupled => (Self::DECOUPLED, 0.0),
            Decay::FullyDecoupled { lr_max } => (Self::FULLY_DECOUPLED, lr_max),
        };
        let flags = decay | if common.maximize { Self::MAXIMIZE } else { 0 };
        let mut given = [0.0; Self::MOST];
        given[..own.len()].copy_from_slice(own);
        Hyper { family, flags, weight_decay: common.weight_decay, lr_max, given }
    }

    /// Adds switches specific to the rule, in its kernels' order.
    pub(crate) fn with(mut self, own: &[bool]) -> Self {
        self.flags |= own.iter().enumerate().map(|(i, &on)| u32::from(on) * (Self::OWN << i)).sum::<u32>();
        self
    }
}

/// One segment with the hyperparameters of its parameter group, in device layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Row {
    /// First element in the flat memory; beyond all memory while a step leaves the row unchanged.
    pub start: u64,
    /// One past the last element.
    pub end: u64,
    /// Number of tiles of all rows before this one.
    pub tile: u64,
    /// Key of the tensor's random numbers.
    pub key: u64,
    /// Position of the first element in [`strided`](Self::strided).
    pub first: u64,
    /// Elements of the whole tensor: first, run and stride of a [`Strided`].
    pub strided: [u64; 3],
    /// Number of steps done. The device counts.
    pub t: u64,
    /// [`Hyper::flags`].
    pub flags: u32,
    /// Index of the parameter's byte after the [`StepScalars`], or [`EVERY_STEP`](Self::EVERY_STEP).
    pub param: u32,
    /// The group's factor on the learning rate.
    pub lr_scale: f64,
    /// [`Hyper::weight_decay`].
    pub weight_decay: f64,
    /// [`Hyper::lr_max`].
    pub lr_max: f64,
    /// [`Hyper::given`].
    pub given: [f64; Hyper::MOST],
    /// Fraction of a parameter that the weight decay of a step removes. Written on the device.
    pub lw: f64,
    /// Constants of a step specific to the rule. Written on the device.
    pub constants: [f64; Row::CONSTANTS],
}

impl Row {
    /// Maximum number of constants specific to a rule.
    pub const CONSTANTS: usize = 14;
    /// [`param`](Self::param) of a row that every step updates.
    pub const EVERY_STEP: u32 = u32::MAX;

    /// Returns the number of its tiles, with parameters of this type.
    fn tiles(&self, params: DType) -> u64 {
        tiles_of(&(self.start as usize..self.end as usize), params)
    }
}

/// Returns the number of tiles of a row with these elements.
fn tiles_of(range: &Range<usize>, params: DType) -> u64 {
    let (start, end) = (range.start as u64, range.end as u64);
    let anchor = start / ANCHOR * ANCHOR;
    if start < end { (end - anchor).div_ceil(tile(params)) } else { 0 }
}

/// Values that change from step to step, possibly decided on the device.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct StepScalars {
    /// [`Scalars::lr`](crate::Scalars::lr), in range for every group: kernels do not check it.
    pub lr: f64,
    /// Factor on every gradient: [`Scalars::grad_scale`](crate::Scalars::grad_scale).
    pub grad_scale: f64,
    /// Nonzero: nothing is written, and the step does not count.
    pub skip: u32,
    /// Nonzero: gradients are set to zero afterwards.
    pub zero_grads: u32,
}

/// Addresses of the vectors, and their types unless given by the kernel's name.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Streams {
    /// Address of the parameters. As for all vectors here, it is that of element 0 of the flat memory, aligned to the element.
    pub params: u64,
    /// Address of the remainders, if parameters have them.
    pub remainder: u64,
    /// Address of the gradients.
    pub grads: u64,
    /// Address of the copy in low precision; 0 for none.
    pub copy: u64,
    /// Addresses of the rule's state vectors.
    pub state: [u64; Streams::STATES],
    /// [`format()`] of the gradients.
    pub grads_format: u32,
    /// [`format()`] of the copy.
    pub copy_format: u32,
    /// Nonzero: bf16 state, and bf16 parameters without remainder, are rounded stochastically.
    pub stochastic: u32,
    /// Padding.
    pub unused: u32,
}

impl Streams {
    /// Maximum number of state vectors of a rule.
    pub const STATES: usize = 5;

    /// Returns the formats of `flat`, without addresses.
    pub fn of(flat: &Flat<'_, '_>, rounding: Rounding) -> Self {
        Streams {
            grads_format: format(flat.grads.dtype()),
            copy_format: flat.copy.as_ref().map_or(0, |copy| format(copy.dtype())),
            stochastic: (rounding == Rounding::Stochastic).into(),
            ..Streams::default()
        }
    }
}

/// Returns the kernels' code of a vector's type: 0 for the type of the computation, 1 for bf16, 2 for f16.
pub fn format(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

/// Returns the name of the kernel of `family` that updates memory of these types, which [`Rule::update`] would accept.
pub fn kernel(family: &str, flat: &Flat<'_, '_>) -> String {
    let narrow = flat.state.first().is_some_and(|state| state.dtype() == DType::BF16);
    format!("{family}_{}", suffix(flat.params.dtype(), flat.remainder.is_some(), narrow))
}

/// Returns the part of a kernel's name that tells the types of its memory; `narrow` for state in bf16.
fn suffix(params: DType, remainder: bool, narrow: bool) -> String {
    let params = match params {
        DType::F64 => "f64",
        DType::BF16 if remainder => "bf16_remainder",
        DType::BF16 => "bf16",
        _ => "f32",
    };
    format!("{params}{}", if narrow { "_state_bf16" } else { "" })
}

/// Returns the number of elements of a tile for parameters of this type.
pub fn tile(params: DType) -> u64 {
    u64::from(THREADS) * if params == DType::F64 { 4 } else { 8 }
}

/// Tiles begin at multiples of this many elements, wherever their row begins, so that the whole tiles of a row are aligned.
const ANCHOR: u64 = 64;

/// Returns the file, without its ending, of a family or a kernel: the first part of the name.
pub fn module(name: &str) -> &str {
    name.split('_').next().unwrap_or(name)
}

/// Returns the name of the kernel that computes [`accumulate`](crate::accumulate) for this type. The caller checks that the weight is
/// finite in it.
pub fn accumulate(dtype: DType) -> Option<String> {
    let has = matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16);
    has.then(|| format!("accumulate_{dtype}"))
}

/// Returns the name of the kernel that computes [`meshstep_tensor::cast`] between two types.
pub fn cast(from: DType, to: DType) -> Option<String> {
    let has = |dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    (has(from) && has(to) && from != to).then(|| format!("cast_{from}_{to}"))
}

/// Returns the name of the kernel that prepares the rows of a `family`.
pub fn prepare(family: &str) -> String {
    format!("{family}_prepare")
}

/// Appends the segments of one parameter group to a table for parameters of this type. `lr_scale` is the group's factor on
/// the learning rate; a segment's `t` is that of the next step.
///
/// Rows may be in any order, because a row's tiles are counted from the row before it. The caller ensures that all groups of a table are
/// of one family, and that no two rows overlap. After an error the table is unchanged.
pub fn append(
    table: &mut Vec<Row>,
    params: DType,
    rule: &dyn Rule,
    lr_scale: f64,
    segments: &[Segment],
) -> Result<(), Error> {
    rule.check()?;
    let hyper = rule.on_device().ok_or(Error::NoKernels { rule: rule.name() })?;
    if !matches!(params, DType::F32 | DType::BF16 | DType::F64) {
        return Err(Error::DType { what: "params", given: params, works: "f32, bf16 or f64" });
    }
    if lr_scale < 0.0 || !lr_scale.is_finite() {
        return Err(Error::Scalar { name: "lr_scale", value: lr_scale, works: "a finite number >= 0" });
    }
    check_segments(segments, usize::MAX, 0.0, f64::is_finite)?;
    let adjusted = |(index, segment)| Ok(Hyper { given: given(&hyper, rule, index, segment)?, ..hyper });
    let hypers = segments.iter().enumerate().map(adjusted).collect::<Result<Vec<_>, Error>>()?;
    for (hyper, segment) in hypers.iter().zip(segments) {
        let row = row(hyper, lr_scale, segment, tiles(table, params));
        table.push(row);
    }
    Ok(())
}

/// Returns the hyperparameters specific to the rule and to the matrices of a segment, or an error if the rule updates no such matrices.
fn given(
    hyper: &Hyper,
    rule: &dyn Rule,
    index: usize,
    segment: &Segment,
) -> Result<[f64; Hyper::MOST], Error> {
    let mut given = hyper.given;
    if rule.sees() == Sees::Matrix {
        let phases = rule.by_matrix().ok_or(Error::NoKernels { rule: rule.name() })?;
        let matrix = segment.matrix.and_then(|matrix| phases.orthogonalization(matrix));
        let (len, shape, blocks) = (segment.range.len(), segment.matrix, rule.blocks());
        let matrix = matrix.ok_or(Error::NotAMatrix { rule: rule.name(), index, len, shape, blocks })?;
        given[Hyper::MOST - 1] = matrix.adjustment;
    }
    Ok(given)
}

fn row(hyper: &Hyper, lr_scale: f64, segment: &Segment, tile: u64) -> Row {
    // Kernels are fast for elements that are contiguous in their tensor, at any position.
    let together = segment.strided.together(segment.first, segment.range.len() as u64);
    let (first, strided) = together.map_or((segment.first, segment.strided), |index| (index, Strided::WHOLE));
    Row {
        start: segment.range.start as u64,
        end: segment.range.end as u64,
        tile,
        key: segment.key,
        first,
        strided: [strided.first, strided.run, strided.stride],
        t: segment.t - 1,
        flags: hyper.flags,
        param: Row::EVERY_STEP,
        lr_scale,
        weight_decay: hyper.weight_decay,
        lr_max: hyper.lr_max,
        given: hyper.given,
        lw: 0.0,
        constants: [0.0; Row::CONSTANTS],
    }
}

/// Returns the number of tiles of a table, an argument of the launch.
pub fn tiles(table: &[Row], params: DType) -> u64 {
    table.last().map_or(0, |row| row.tile + row.tiles(params))
}
