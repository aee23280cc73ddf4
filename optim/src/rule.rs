//! What an update rule is: hyperparameters, the names of its state, and one pass over flat memory.

use crate::{Error, Isa};
use meshstep_tensor::{Queue, SliceMut};
use std::fmt::Debug;
use std::ops::Range;

/// An update rule: a value that holds hyperparameters and no state.
///
/// A parameter group with hyperparameters of its own is another value, given that group's segments.
pub trait Rule: Send + Sync + Debug {
    /// Its name in reports and errors.
    fn name(&self) -> &'static str;

    /// The names of its state vectors, in the order `update` takes them. Each starts as zeros.
    fn state(&self) -> &'static [&'static str];

    /// Whether the hyperparameters are in range.
    fn check(&self) -> Result<(), Error>;

    /// Hyperparameters by name, for ranks to compare and reports to print; a switch is 0 or 1.
    fn hyperparameters(&self) -> Vec<(&'static str, f64)>;

    /// Brings the elements of `segments` one step forward; the rest of `flat` is not touched.
    ///
    /// Everything is checked first: after an error all memory is as it was. Uses rayon's threads where there is work for
    /// several, and allocates nothing.
    fn update(
        &self,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error> {
        self.update_on(Isa::detect(), flat, segments, scalars, queue)
    }

    /// [`update`](Rule::update) with given instructions, for tests and benches: the bits are the same with any.
    fn update_on(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error>;
}

/// Flat memory to update, all of one length.
///
/// | params | grads | state | copy |
/// |---|---|---|---|
/// | f32 | f32, bf16 or f16 | f32 | none, bf16 or f16 |
/// | f64 | f64 | f64 | none |
#[derive(Debug)]
pub struct Flat<'a, 's> {
    /// Parameters.
    pub params: SliceMut<'a>,
    /// Gradients; written only to reset them.
    pub grads: SliceMut<'a>,
    /// The rule's state vectors, in its order.
    pub state: &'s mut [SliceMut<'a>],
    /// Written with the updated parameters, rounded to nearest even: what a model in low precision computes with.
    pub copy: Option<SliceMut<'a>>,
}

/// One range of the flat memory whose elements share a step count. A table of them ascends without overlap; the caller
/// keeps the table and reuses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Elements, in the flat memory.
    pub range: Range<usize>,
    /// The number of this step for these elements, from 1.
    pub t: u64,
}

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scalars {
    /// Learning rate: finite, at least 0.
    pub lr: f64,
    /// Multiplied into every gradient first: unscaling and clipping in one factor. Finite.
    pub grad_scale: f64,
    /// Whether the gradients of the segments are zero afterwards.
    pub zero_grads: bool,
}
