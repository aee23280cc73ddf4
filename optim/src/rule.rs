//! Update rules: hyperparameters, names of state vectors, and one pass over flat memory.

use crate::state_slot::{Carry, StateSlot};
use crate::{Blocks, Error, Isa, MatrixRule, Strided, TensorSums, cuda};
use meshstep_tensor::{Queue, SliceMut};
use std::fmt::Debug;
use std::ops::Range;

/// Part of a tensor that an update must see at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sees {
    /// One element: segments may be any ranges of a tensor.
    Elements,
    /// One element and two sums over the whole tensor ([`Rule::measure_on`], [`Rule::ratio`]): segments may be any ranges, with the sums
    /// of all ranges added.
    TensorSums,
    /// A whole matrix, or all [blocks](Rule::blocks) of a tensor, in one segment; the phases of [`Rule::by_matrix`] see pieces of it.
    Matrix,
}

/// Update rule: a value that holds hyperparameters and no state.
///
/// A parameter group with different hyperparameters is another value, applied to that group's segments.
///
/// ```
/// use meshstep_optim::{Adopt, Decay, Flat, Isa, Lamb, Lars, Lion, QhAdopt, Rule, Scalars, Sees, Segment, TensorSums, UncorrectedAdam};
/// use meshstep_tensor::{Queue, SliceMut};
///
/// let lion = Lion { weight_decay: 0.1, decay: Decay::Decoupled, ..Lion::default() };
/// let rules: [&dyn Rule; 6] =
///     [&lion, &Adopt::default(), &QhAdopt::default(), &UncorrectedAdam::default(), &Lamb::default(), &Lars::default()];
/// let (scalars, queue) = (Scalars { lr: 0.01, ..Scalars::default() }, Queue::cpu());
/// for rule in rules {
///     let (mut p, mut g) = ([1f32, -1.0], [0.5f32, -0.5]);
///     let mut state = vec![[0f32; 2]; rule.state().len()];
///     for t in 1..=2 {
///         let mut slots: Vec<SliceMut> = state.iter_mut().map(SliceMut::from).collect();
///         let flat = Flat { params: (&mut p).into(), grads: (&mut g).into(), state: &mut slots, copy: None, remainder: None };
///         let mut segment = Segment::new(0..2, t);
///         if rule.sees() == Sees::TensorSums {
///             // Norms of the whole tensor; a sharded tensor adds the sums of its parts.
///             let mut sums = [TensorSums::new()];
///             rule.measure_on(Isa::detect(), &flat, &[segment.clone()], &scalars, &mut sums, &queue)?;
///             segment.ratio = rule.ratio(&sums[0]);
///         }
///         rule.update(flat, &[segment], &scalars, &queue)?;
///     }
///     assert!(p[0] < 1.0 && p[1] > -1.0, "{} does not descend: {p:?}", rule.name());
/// }
/// # Ok::<(), meshstep_optim::Error>(())
/// ```
pub trait Rule: Send + Sync + Debug {
    /// Returns the name of the rule in reports and errors.
    fn name(&self) -> &'static str;

    /// Returns the names of the state vectors, in the order of `update`. Each vector starts as zeros.
    fn state(&self) -> &'static [&'static str];

    /// Checks that the hyperparameters are in range.
    fn check(&self) -> Result<(), Error>;

    /// Calls `each` with every hyperparameter by name, always in the same order, for comparison between ranks and for reports; a switch
    /// is 0 or 1. Ranks compare hyperparameters in every step, so this method should not allocate.
    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64));

    /// Returns the hyperparameters as a list.
    fn hyperparameters(&self) -> Vec<(&'static str, f64)> {
        let mut list = Vec::new();
        self.each_hyperparameter(&mut |name, value| list.push((name, value)));
        list
    }

    /// Returns the part of a tensor that an update must see at once.
    fn sees(&self) -> Sees {
        Sees::Elements
    }

    /// Returns the matrices of a tensor, for a rule that [sees](Rule::sees) matrices.
    fn blocks(&self) -> Blocks {
        Blocks::Whole
    }

    /// Returns the phases of the update, for a rule that [sees](Rule::sees) matrices and whose caller may hold a matrix in pieces. Without
    /// them a matrix is updated where all of it is.
    fn by_matrix(&self) -> Option<&dyn MatrixRule> {
        None
    }

    /// Returns the effect of an update on the state vector at index `slot` of [`state`](Rule::state).
    fn slot(&self, slot: usize) -> StateSlot;

    /// Returns the largest factor by which a step without gradient multiplies an element of a decaying or accumulating state vector: the
    /// largest beta; 1 for a sum that only grows; 0 without such state. 16-bit state rounded to nearest requires it to be at most
    /// [`NEAREST_RETENTION`].
    fn retention(&self) -> f64 {
        let keeps = |slot| match self.slot(slot).carry {
            Carry::Linear { keeps, .. } => keeps,
            Carry::Maximum => 0.0,
        };
        (0..self.state().len()).map(keeps).fold(0.0, f64::max)
    }

    /// Adds the part of each segment to its pair of `sums`, for a rule that [sees](Rule::sees) sums of tensors; takes the same arguments
    /// as the update and writes nothing else. The [`ratio`](Rule::ratio) of a whole tensor's sums then goes into its segments. The default
    /// does nothing.
    fn measure_on(
        &self,
        isa: Isa,
        flat: &Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        sums: &mut [TensorSums],
        queue: &Queue,
    ) -> Result<(), Error> {
        let _ = (isa, flat, segments, scalars, sums, queue);
        Ok(())
    }

    /// Returns the largest number that a step at learning rate `lr` derives from the hyperparameters: the rate, adjusted to a matrix of
    /// `matrix` rows and columns, and its product with the weight decay. An update refuses numbers out of range; with this method all
    /// ranks can check beforehand, independent of their own segments.
    fn reach(&self, lr: f64, matrix: Option<(usize, usize)>) -> f64 {
        let _ = matrix;
        lr
    }

    /// Returns the tensor's factor on the learning rate, from its sums.
    fn ratio(&self, sums: &TensorSums) -> f64 {
        let _ = sums;
        1.0
    }

    /// Returns the rule whose update takes parameters from where they are trained to where a model is evaluated, or `None` if both are
    /// the same. A segment's `t` is that of the parameter's next update; gradients are not used, and state stays. The way back is a copy
    /// of the trained parameters.
    fn evaluation(&self) -> Option<Box<dyn Rule>> {
        None
    }

    /// Returns the CUDA kernels of the rule with their arguments, or `None` if it has none, as for rules that see sums of tensors: a step on
    /// a GPU refuses these. A rule that sees matrices has [`MatrixRule::orthogonalization`] too.
    fn on_device(&self) -> Option<cuda::Hyper> {
        None
    }

    /// Advances the elements of `segments` by one step; the rest of `flat` stays unchanged.
    ///
    /// All checks come first: after an error all memory is unchanged. Large updates are shared by the queue's threads. Allocates nothing
    /// except, for Muon, a few times the memory of a tensor.
    fn update(
        &self,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error> {
        self.update_on(Isa::detect(), flat, segments, scalars, queue)
    }

    /// Same as [`update`](Rule::update) with given instructions, for tests and benches: the bits are the same with any.
    fn update_on(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error>;
}

/// Maximum [`retention`](Rule::retention) of bf16 state rounded to nearest. A bf16 number has 8 bits of significand: a decay by less than
/// half of its last bit, at worst 2^-8 of the number, is lost in rounding.
pub const NEAREST_RETENTION: f64 = 1.0 - 1.0 / 256.0;

/// Flat memory to update, all of one length.
///
/// | params | grads | state | copy | remainder |
/// |---|---|---|---|---|
/// | f32 | f32, bf16 or f16 | f32 or bf16 | none, bf16 or f16 | none |
/// | bf16 | f32, bf16 or f16 | f32 or bf16 | none | u16; none with [`Rounding::Stochastic`] only |
/// | f64 | f64 | f64 | none | none |
///
/// Everything except f64 is computed in f32. bf16 state rounded to nearest requires a rule with a retention of at most
/// [`NEAREST_RETENTION`].
#[derive(Debug)]
pub struct Flat<'a, 's> {
    /// Parameters.
    pub params: SliceMut<'a>,
    /// Gradients; written only for resetting.
    pub grads: SliceMut<'a>,
    /// State vectors of the rule, in its order.
    pub state: &'s mut [SliceMut<'a>],
    /// Copy of the updated parameters, rounded to nearest even, for a model in low precision.
    pub copy: Option<SliceMut<'a>>,
    /// Lower halves of an f32 master; the bf16 parameters are its upper halves, rounded to nearest even. Zeros for a master that starts
    /// equal to its parameter.
    pub remainder: Option<SliceMut<'a>>,
}

/// Range of the flat memory with elements of one tensor that share a step count. Segments in a table ascend without overlap; the caller
/// keeps the table and reuses it.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Elements in the flat memory.
    pub range: Range<usize>,
    /// Number of this step for these elements, from 1.
    pub t: u64,
    /// Key of the tensor's random numbers, from the seed and the tensor's name.
    pub key: u64,
    /// Position of the range's first element in `strided`; for a whole tensor its row-major index.
    pub first: u64,
    /// Elements of the whole tensor in this part, so that random numbers do not depend on cuts.
    pub strided: Strided,
    /// Factor of the tensor on the learning rate: the result of [`Rule::ratio`] for its norms, else 1.
    pub ratio: f64,
    /// Rows and columns, if the range is a whole matrix, or of each of the matrices of [`Blocks::Batch`].
    pub matrix: Option<(usize, usize)>,
}

impl Segment {
    /// Creates a segment of elements `range` at step `t`, at the beginning of a tensor with key 0.
    pub fn new(range: Range<usize>, t: u64) -> Self {
        Segment { range, t, key: 0, first: 0, strided: Strided::WHOLE, ratio: 1.0, matrix: None }
    }
}

/// Rounding into memory narrower than the computation: 16-bit state, or 16-bit parameters without a master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Rounding {
    /// To the nearest, ties to even: small changes vanish.
    #[default]
    Nearest,
    /// Up or down, with probabilities that make the expected value exact. The random bits depend only on the tensor's key, `t` and the
    /// element's index in the whole tensor.
    Stochastic,
}

/// Values that change from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scalars {
    /// Learning rate: finite, at least 0.
    pub lr: f64,
    /// Factor on every gradient, applied first: unscaling and clipping combined. Finite.
    pub grad_scale: f64,
    /// True to set the gradients of the segments to zero afterwards.
    pub zero_grads: bool,
    /// Rounding into narrower memory.
    pub rounding: Rounding,
}

impl Default for Scalars {
    /// lr 0.001, unscaled gradients that are not reset, rounding to nearest.
    fn default() -> Self {
        Scalars { lr: 1e-3, grad_scale: 1.0, zero_grads: false, rounding: Rounding::Nearest }
    }
}
