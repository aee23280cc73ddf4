//! Errors of rules, their memory and norms. An operation that returns an error has written nothing.

use crate::{Blocks, History, Isa};
use meshstep_tensor::DType;

/// Error of an operation, with the value given and the values that would work.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Hyperparameter out of range.
    #[error("{rule}: {name} = {value} is out of range; use {works}")]
    Hyperparameter {
        /// The rule.
        rule: &'static str,
        /// The hyperparameter.
        name: &'static str,
        /// Value given.
        value: f64,
        /// Valid values.
        works: &'static str,
    },
    /// Nesterov momentum without momentum, or with dampening.
    #[error(
        "sgd: nesterov with momentum = {momentum}, dampening = {dampening}; use momentum > 0 and dampening = 0"
    )]
    Nesterov {
        /// The momentum given.
        momentum: f64,
        /// The dampening given.
        dampening: f64,
    },
    /// Argument other than memory that is out of range, in a step, a norm or an accumulation.
    #[error("{name} = {value} is out of range; use {works}")]
    Scalar {
        /// Name of the argument.
        name: &'static str,
        /// Value given.
        value: f64,
        /// Valid values.
        works: &'static str,
    },
    /// Memory of a type that the operation does not support.
    #[error("{what} cannot be {given} here; use {works}")]
    DType {
        /// The memory.
        what: &'static str,
        /// Type given.
        given: DType,
        /// Supported types.
        works: &'static str,
    },
    /// Memory of the wrong length.
    #[error("{what} has {given} elements where {expected} are needed")]
    Len {
        /// The memory.
        what: &'static str,
        /// Length given.
        given: usize,
        /// Length needed.
        expected: usize,
    },
    /// L-BFGS whose history has another type.
    #[error(
        "the history of L-BFGS is {expected:?}, and {given:?} was given; use one `Lbfgs::history` throughout"
    )]
    History {
        /// Type given.
        given: History,
        /// Type of the state.
        expected: History,
    },
    /// Wrong number of state vectors.
    #[error("{rule} keeps {expected:?}, so it needs {} state vectors; {given} given", expected.len())]
    StateCount {
        /// The rule.
        rule: &'static str,
        /// Number of state vectors given.
        given: usize,
        /// State vectors that the rule needs.
        expected: &'static [&'static str],
    },
    /// Segment that ends before it begins, or after the end of the memory.
    #[error("segment {index} is {start}..{end} of {len} elements; use 0 <= start <= end <= {len}")]
    SegmentBounds {
        /// Index of the segment in the table.
        index: usize,
        /// First element.
        start: usize,
        /// One past the last element.
        end: usize,
        /// Number of elements in the memory.
        len: usize,
    },
    /// Segment that begins before the previous one ends.
    #[error(
        "segment {index} starts at {start}, before {end}, where the one before it ends; sort them, without overlap"
    )]
    SegmentOrder {
        /// Index of the segment in the table.
        index: usize,
        /// First element.
        start: usize,
        /// One past the last element of the previous segment.
        end: usize,
    },
    /// Step count of zero.
    #[error("segment {index} has t = 0; t counts this step too, so it is 1 at the first")]
    SegmentTime {
        /// Index of the segment in the table.
        index: usize,
    },
    /// Runs of zero elements.
    #[error("segment {index} has runs of 0 elements; use Strided::WHOLE for a tensor that is not cut")]
    SegmentRun {
        /// Index of the segment in the table.
        index: usize,
    },
    /// Factor of a tensor that no learning rate can have.
    #[error(
        "segment {index} has the ratio {ratio}, times lr = {lr}; use a number >= 0 whose product the parameters' type can hold"
    )]
    SegmentRatio {
        /// Index of the segment in the table.
        index: usize,
        /// Ratio given.
        ratio: f64,
        /// Learning rate.
        lr: f64,
    },
    /// Segment that is not a whole matrix, for a rule that needs one.
    #[error(
        "{rule} updates {blocks}; segment {index} has {len} elements and the shape {shape:?}, rows and columns"
    )]
    NotAMatrix {
        /// The rule.
        rule: &'static str,
        /// Index of the segment in the table.
        index: usize,
        /// Number of its elements.
        len: usize,
        /// Rows and columns given.
        shape: Option<(usize, usize)>,
        /// Matrices that the rule updates.
        blocks: Blocks,
    },
    /// bf16 parameters rounded to nearest without the remainder that preserves small steps.
    #[error(
        "bf16 params rounded to nearest lose steps below 1/512 of them; give a remainder, update an f32 master with a bf16 \
         copy, or round stochastically"
    )]
    NearestParams,
    /// bf16 state with a decay below its last bit.
    #[error(
        "{rule} keeps {retention} of its state a step: bf16 rounded to nearest cannot decay by so little; round \
         stochastically, keep the state in f32, or keep at most {works}"
    )]
    NearestState {
        /// The rule.
        rule: &'static str,
        /// [`Rule::retention`](crate::Rule::retention).
        retention: f64,
        /// Largest value that works.
        works: f64,
    },
    /// Instructions that this machine does not have.
    #[error("this machine has no {isa}; Isa::available() lists what it has")]
    Isa {
        /// Instructions requested.
        isa: Isa,
    },
    /// Step on a GPU with a rule that has no kernels.
    #[error("{rule} has no CUDA kernels; use a rule that sees single elements, or update on the CPU")]
    NoKernels {
        /// The rule.
        rule: &'static str,
    },
    /// Groups with rules of different kernels in one launch.
    #[error("groups of {first} and {other} in one update; make one for each")]
    MixedKernels {
        /// Kernels of the first group.
        first: &'static str,
        /// Kernels of another group.
        other: &'static str,
    },
    /// Groups of one update with common elements.
    #[error("segments {one:?} and {other:?} of two groups overlap; an element is of one group")]
    Overlap {
        /// Segment of one group.
        one: std::ops::Range<usize>,
        /// Segment of another group.
        other: std::ops::Range<usize>,
    },
    /// Memory of a different layout from the one that the update was made for.
    #[error("the memory is {given}, but the update was made for {expected}")]
    OtherMemory {
        /// Layout given.
        given: String,
        /// Layout that the update was made for.
        expected: String,
    },
    /// Error from allocating or viewing memory.
    #[error(transparent)]
    Tensor(#[from] meshstep_tensor::Error),
}

meshstep_tensor::debug_is_display!(Error);

#[cfg(feature = "cuda")]
impl From<meshstep_tensor::cuda::Error> for Error {
    fn from(error: meshstep_tensor::cuda::Error) -> Self {
        Error::Tensor(error.into())
    }
}
