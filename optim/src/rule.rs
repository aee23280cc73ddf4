//! What an update rule is: hyperparameters, the names of its state, and one pass over flat memory.

use crate::state_slot::{Carry, StateSlot};
use crate::{Error, Isa, Strided, TensorSums, cuda};
use meshstep_tensor::{Queue, SliceMut};
use std::fmt::Debug;
use std::ops::Range;

/// What of a tensor an update must see at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sees {
    /// One element: any range of a tensor will do.
    Elements,
    /// One element, and two sums over the whole tensor ([`Rule::measure_on`], [`Rule::ratio`]): any range will do, with
    /// the sums of all ranges added.
    TensorSums,
    /// A whole matrix, in one segment.
    Matrix,
}

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

    /// Tells every hyperparameter by name, always in one order, for ranks to compare and reports to print; a switch is 0 or 1.
    /// Ranks compare them in every step, so it is not to allocate.
    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64));

    /// The same as a list.
    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        let mut list = Vec::new();
        self.each_hyperparameter(&mut |name, value| list.push((name, value)));
        list
    }

    /// What of a tensor an update must see at once.
    fn sees(&self) -> Sees {
        Sees::Elements
    }

    /// What an update does to the state vector at place `slot` of [`state`](Rule::state).
    fn slot(&self, slot: usize) -> StateSlot;

    /// The largest factor by which a step without gradient multiplies an element of a state vector that is to decay or to
    /// accumulate: the largest beta; 1 for a sum that only grows; 0 without such state. 16-bit state rounded to nearest
    /// needs it to be at most [`NEAREST_RETENTION`].
    fn retention(&self) -> f64 {
        let keeps = |slot| match self.slot(slot).carry {
            Carry::Linear { keeps, .. } => keeps,
            Carry::Maximum => 0.0,
        };
        (0..self.state().len()).map(keeps).fold(0.0, f64::max)
    }

    /// For a rule that [sees](Rule::sees) sums of tensors: adds the part of each segment to its pair of `sums`, as the update
    /// with the same arguments will need it; writes nothing else. The [`ratio`](Rule::ratio) of a whole tensor's sums then
    /// goes into its segments. Other rules have nothing to measure.
    fn measure_on(
        &self,
        isa: Isa,
        flat: &Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        sums: &mut [TensorSums],
    ) -> Result<(), Error> {
        let _ = (isa, flat, segments, scalars, sums);
        Ok(())
    }

    /// The largest number that a step at the learning rate `lr` makes of its hyperparameters: the rate, as it is adjusted to a
    /// matrix of so many rows and columns, and what it and the weight decay make. An update refuses what is out of range;
    /// here all ranks can tell beforehand, whatever they update.
    fn reach(&self, lr: f64, matrix: Option<(usize, usize)>) -> f64 {
        let _ = matrix;
        lr
    }

    /// A tensor's own factor on the learning rate, from its sums.
    fn ratio(&self, sums: &TensorSums) -> f64 {
        let _ = sums;
        1.0
    }

    /// The CUDA kernels that update as this rule does, and what they are told of its hyperparameters. None where there are
    /// none, as for rules that see more than an element: a step on a GPU refuses them.
    fn on_device(&self) -> Option<cuda::Hyper> {
        None
    }

    /// Brings the elements of `segments` one step forward; the rest of `flat` is not touched.
    ///
    /// Everything is checked first: after an error all memory is as it was. Uses rayon's threads where there is work for
    /// several, and allocates nothing but, for Muon, room for one matrix.
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

/// A bf16 number has 8 bits of significand: a decay by less than half of its last bit, 2^-8 of the number at worst, is
/// lost in rounding to nearest.
pub const NEAREST_RETENTION: f64 = 1.0 - 1.0 / 256.0;

/// Flat memory to update, all of one length.
///
/// | params | grads | state | copy | remainder |
/// |---|---|---|---|---|
/// | f32 | f32, bf16 or f16 | f32 or bf16 | none, bf16 or f16 | none |
/// | bf16 | f32, bf16 or f16 | f32 or bf16 | none | u16; none with [`Rounding::Stochastic`] only |
/// | f64 | f64 | f64 | none | none |
///
/// All but f64 is computed in f32. bf16 state rounded to nearest is for rules that retain at most [`NEAREST_RETENTION`].
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
    /// The lower halves of an f32 master whose upper halves, rounded to nearest even, are the bf16 parameters: zeros where a
    /// master begins as its parameter.
    pub remainder: Option<SliceMut<'a>>,
}

/// One range of the flat memory whose elements belong to one tensor and share a step count. A table of them ascends without
/// overlap; the caller keeps the table and reuses it.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Elements, in the flat memory.
    pub range: Range<usize>,
    /// The number of this step for these elements, from 1.
    pub t: u64,
    /// The tensor's key for random numbers: of the seed and the tensor's name.
    pub key: u64,
    /// The place of the range's first element among those that `strided` has: for a whole tensor its row-major index.
    pub first: u64,
    /// Which of the whole tensor's elements these are, so that random numbers do not depend on how the tensor is cut.
    pub strided: Strided,
    /// The tensor's own factor on the learning rate: what [`Rule::ratio`] made of its norms; else 1.
    pub ratio: f64,
    /// Rows and columns, where the range is a whole matrix.
    pub matrix: Option<(usize, usize)>,
}

impl Segment {
    /// Elements `range` of step `t`, from the beginning of a tensor whose key is 0.
    pub fn new(range: Range<usize>, t: u64) -> Self {
        Segment { range, t, key: 0, first: 0, strided: Strided::WHOLE, ratio: 1.0, matrix: None }
    }
}

/// How a result is fitted into memory narrower than it was computed in: 16-bit state, 16-bit parameters without a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Rounding {
    /// To the nearest, ties to even: small changes vanish.
    #[default]
    Nearest,
    /// Up or down with probabilities that make the expected value exact. The random bits depend on the tensor's key, `t`
    /// and the element's index in the whole tensor alone.
    Stochastic,
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
    /// How narrower memory is written.
    pub rounding: Rounding,
}

impl Default for Scalars {
    /// lr 0.001, gradients as they are and left as they are, to nearest.
    fn default() -> Self {
        Scalars { lr: 1e-3, grad_scale: 1.0, zero_grads: false, rounding: Rounding::Nearest }
    }
}
