//! What a launch of a rule's CUDA kernel is told: arithmetic and memory layouts, no CUDA.
//!
//! A kernel is `extern "C" NAME(Streams, const Row* rows, u64 count, u64 tiles, const Step*)`, in blocks of [`THREADS`]
//! threads; the grid may have any size. One launch updates every element of a table of rows, whatever parameter groups they
//! belong to, and gives the bits of [`Isa::Reference`](crate::Isa::Reference). All is as it was if [`Step::skip`] is set.
//!
//! The kernels stand beside their rules (`adam/adam.cu`) and share the files of this folder, put in front in the order of
//! their names.

#[cfg(feature = "cuda")]
pub(crate) mod flat;
#[cfg(feature = "cuda")]
mod kernels;

use crate::{Flat, Rounding, Rule, Scalars, Segment};
use meshstep_tensor::DType;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// A rule's kernels, and a segment's constants for them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// What the names of its kernels begin with: `adam` of `adam_f32`.
    pub family: &'static str,
    /// Switches of the rule.
    pub flags: u32,
    /// Scalars of the rule, before they are cast to the type it computes in.
    pub values: [f64; Constants::MOST],
}

impl Constants {
    /// Scalars that a row has room for.
    pub const MOST: usize = 9;

    /// The gradient gets its penalty: `wd` counts.
    pub(crate) const COUPLED: u32 = 1;
    /// The gradient's sign changes.
    pub(crate) const MAXIMIZE: u32 = 2;
    /// The first flag that is a rule's own.
    pub(crate) const OWN: u32 = 4;

    /// The two that every rule has, then the rule's `own`.
    pub(crate) fn new(
        family: &'static str,
        maximize: bool,
        frame: &crate::frame::Frame<f64>,
        own: &[f64],
    ) -> Self {
        let mut values = [0.0; Self::MOST];
        (values[0], values[1]) = (frame.lw, frame.wd);
        values[2..][..own.len()].copy_from_slice(own);
        let flags = u32::from(frame.coupled) * Self::COUPLED + u32::from(maximize) * Self::MAXIMIZE;
        Constants { family, flags, values }
    }

    /// With these flags of the rule's own, in order.
    pub(crate) fn with(mut self, own: &[bool]) -> Self {
        self.flags |=
            own.iter().enumerate().map(|(i, &flag)| u32::from(flag) * (Self::OWN << i)).sum::<u32>();
        self
    }
}

/// One segment, with the constants of its parameter group and step.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// Its first element in the flat memory.
    pub start: u64,
    /// The element behind its last.
    pub end: u64,
    /// Tiles of all rows before it.
    pub tile: u64,
    /// Key of its tensor's random numbers.
    pub key: u64,
    /// Index in its tensor of its first element.
    pub first: u64,
    /// Number of the step, from 1.
    pub t: u64,
    /// [`Constants::flags`].
    pub flags: u32,
    /// Only fills.
    pub unused: u32,
    /// [`Constants::values`].
    pub constants: [f64; Constants::MOST],
}

/// What may be decided on the device, between two launches of a captured graph.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Multiplied into every gradient: [`Scalars::grad_scale`].
    pub grad_scale: f64,
    /// Not 0: nothing is written.
    pub skip: u32,
    /// Not 0: gradients are zero afterwards.
    pub zero_grads: u32,
}

/// The addresses of the vectors, and what the name of the kernel does not say about them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Streams {
    /// Address of the parameters; like all others, that of element 0 of the flat memory, aligned to the element.
    pub params: u64,
    /// Of the remainders, where parameters have some.
    pub remainder: u64,
    /// Of the gradients.
    pub grads: u64,
    /// Of the copy in low precision; 0: none.
    pub copy: u64,
    /// Of the rule's state vectors.
    pub state: [u64; 4],
    /// [`format`] of the gradients.
    pub grads_format: u32,
    /// [`format`] of the copy.
    pub copy_format: u32,
    /// Not 0: bf16 state, and bf16 parameters without remainder, are rounded by random bits.
    pub stochastic: u32,
    /// Only fills.
    pub unused: u32,
}

impl Streams {
    /// The formats of `flat`, without addresses.
    pub fn of(flat: &Flat<'_, '_>, rounding: Rounding) -> Self {
        Streams {
            grads_format: format(flat.grads.dtype()),
            copy_format: flat.copy.as_ref().map_or(0, |copy| format(copy.dtype())),
            stochastic: (rounding == Rounding::Stochastic).into(),
            ..Streams::default()
        }
    }
}

/// How kernels call the type of a vector: 0 for the type they compute in, 1 for bf16, 2 for f16.
pub fn format(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

/// The kernel of a `family` that updates memory of these types, which [`Rule::update`] would accept.
pub fn kernel(family: &str, flat: &Flat<'_, '_>) -> String {
    let params = match (flat.params.dtype(), &flat.remainder) {
        (DType::F64, _) => "f64",
        (DType::BF16, Some(_)) => "bf16_remainder",
        (DType::BF16, None) => "bf16",
        _ => "f32",
    };
    let narrow = flat.state.first().is_some_and(|state| state.dtype() == DType::BF16);
    format!("{family}_{params}{}", if narrow { "_state_bf16" } else { "" })
}

/// Elements of a tile, where parameters have this type.
pub fn tile(params: DType) -> u64 {
    u64::from(THREADS) * if params == DType::F64 { 4 } else { 8 }
}

/// Appends the segments of one parameter group to a table whose parameters have this type. False, and the table as it was, if
/// the rule has no kernels.
///
/// Rows may come in any order, since a row's tiles are counted from the one before. All groups of a launch are of one rule.
pub fn append(
    table: &mut Vec<Row>,
    params: DType,
    rule: &dyn Rule,
    segments: &[Segment],
    scalars: &Scalars,
) -> bool {
    let before = table.len();
    for segment in segments {
        let Some(constants) = rule.constants_on_device(scalars, segment) else {
            table.truncate(before);
            return false;
        };
        table.push(Row {
            start: segment.range.start as u64,
            end: segment.range.end as u64,
            tile: tiles(table, params),
            key: segment.key,
            first: segment.first,
            t: segment.t,
            flags: constants.flags,
            unused: 0,
            constants: constants.values,
        });
    }
    true
}

/// The tiles of a table, which a launch is told.
pub fn tiles(table: &[Row], params: DType) -> u64 {
    table.last().map_or(0, |row| row.tile + (row.end - row.start).div_ceil(tile(params)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AdamW, Lamb};

    #[test]
    fn rows_count_the_tiles_before_them() {
        let segments = [0..1, 1..1, 5..2053, 2053..6150, 10_000..10_000].map(|range| Segment::new(range, 3));
        let mut table = Vec::new();
        assert!(append(&mut table, DType::F32, &AdamW::default(), &segments, &Scalars::default()));
        assert_eq!(table.iter().map(|row| row.tile).collect::<Vec<_>>(), [0, 1, 1, 2, 5]);
        assert_eq!((tiles(&table, DType::F32), tiles(&[], DType::F32)), (5, 0));
        assert!(!append(&mut table, DType::F32, &Lamb::default(), &segments, &Scalars::default()));
        assert_eq!(table.len(), 5);
    }

    #[test]
    fn layouts_are_those_of_the_kernels() {
        assert_eq!((size_of::<Row>(), size_of::<Step>(), size_of::<Streams>()), (128, 16, 80));
        assert_eq!(std::mem::offset_of!(Row, constants), 56);
    }
}
