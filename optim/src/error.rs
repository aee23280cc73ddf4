//! What can go wrong with a rule, its memory or a norm. Nothing has been written when one of these comes back.

use crate::Isa;
use meshstep_tensor::DType;

/// What was wrong, and what would work.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A hyperparameter out of range.
    #[error("{rule}: {name} = {value} is out of range; use {works}")]
    Hyperparameter {
        /// The rule.
        rule: &'static str,
        /// The hyperparameter.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What would work.
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
    /// What a step, a norm or a hand-over was given besides memory is out of range.
    #[error("{name} = {value} is out of range; use {works}")]
    Scalar {
        /// Which one.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What would work.
        works: &'static str,
    },
    /// Memory of a type the operation does not take.
    #[error("{what} cannot be {given} here; use {works}")]
    DType {
        /// Which memory.
        what: &'static str,
        /// Its type.
        given: DType,
        /// What would work.
        works: &'static str,
    },
    /// Memory that goes together differs in length.
    #[error("{what} has {given} elements where {expected} are needed")]
    Len {
        /// Which memory.
        what: &'static str,
        /// Its length.
        given: usize,
        /// What would work.
        expected: usize,
    },
    /// Not as many state vectors as the rule names.
    #[error("{rule} keeps {expected:?}, so it needs {} state vectors; {given} given", expected.len())]
    StateCount {
        /// The rule.
        rule: &'static str,
        /// State vectors given.
        given: usize,
        /// The state the rule names.
        expected: &'static [&'static str],
    },
    /// A segment that ends before it begins or after the memory does.
    #[error("segment {index} is {start}..{end} of {len} elements; use 0 <= start <= end <= {len}")]
    SegmentBounds {
        /// Its place in the table.
        index: usize,
        /// Its first element.
        start: usize,
        /// One past its last element.
        end: usize,
        /// Elements there are.
        len: usize,
    },
    /// A segment that begins before the one before it ends.
    #[error(
        "segment {index} starts at {start}, before {end}, where the one before it ends; sort them, without overlap"
    )]
    SegmentOrder {
        /// Its place in the table.
        index: usize,
        /// Its first element.
        start: usize,
        /// One past the last element of the segment before.
        end: usize,
    },
    /// A step count of zero.
    #[error("segment {index} has t = 0; t counts this step too, so it is 1 at the first")]
    SegmentTime {
        /// Its place in the table.
        index: usize,
    },
    /// Elements that lie in runs of none.
    #[error("segment {index} has runs of 0 elements; use Strided::WHOLE for what is not cut")]
    SegmentRun {
        /// Its place in the table.
        index: usize,
    },
    /// A tensor's own factor that no learning rate has.
    #[error(
        "segment {index} has the ratio {ratio}, times lr = {lr}; use a number >= 0 whose product the parameters' type can hold"
    )]
    SegmentRatio {
        /// Its place in the table.
        index: usize,
        /// The ratio given.
        ratio: f64,
        /// The learning rate.
        lr: f64,
    },
    /// A segment that is not a whole matrix, for a rule that needs one.
    #[error(
        "{rule} sees whole matrices; segment {index} has {len} elements and the shape {shape:?}, rows and columns"
    )]
    NotAMatrix {
        /// The rule.
        rule: &'static str,
        /// The segment's place in the table.
        index: usize,
        /// Its elements.
        len: usize,
        /// The rows and columns it names.
        shape: Option<(usize, usize)>,
    },
    /// bf16 parameters rounded to nearest, without the remainder that would keep small steps.
    #[error(
        "bf16 params rounded to nearest lose steps below 1/512 of them; give a remainder, update an f32 master with a bf16 \
         copy, or round stochastically"
    )]
    NearestParams,
    /// bf16 state that decays by less than its last bit.
    #[error(
        "{rule} keeps {retention} of its state a step: bf16 rounded to nearest cannot decay by so little; round \
         stochastically, keep the state in f32, or keep at most {works}"
    )]
    NearestState {
        /// The rule.
        rule: &'static str,
        /// [`Rule::retention`](crate::Rule::retention).
        retention: f64,
        /// What would work.
        works: f64,
    },
    /// Instructions this machine does not have.
    #[error("this machine has no {isa}; Isa::available() lists what it has")]
    Isa {
        /// What was asked for.
        isa: Isa,
    },
    /// A step on a GPU with a rule that has no kernels for it.
    #[error("{rule} has no CUDA kernels; use a rule that sees single elements, or update on the CPU")]
    NoKernels {
        /// The rule.
        rule: &'static str,
    },
    /// Groups of one launch whose rules have different kernels.
    #[error("groups of {first} and {other} in one update; make one for each")]
    MixedKernels {
        /// The first group's kernels.
        first: &'static str,
        /// Those of a later one.
        other: &'static str,
    },
    /// Two groups of one update have elements in common.
    #[error("segments {one:?} and {other:?} of two groups overlap; an element is of one group")]
    Overlap {
        /// A segment.
        one: std::ops::Range<usize>,
        /// One of another group.
        other: std::ops::Range<usize>,
    },
    /// An update is given other memory than it was made for.
    #[error("memory of {given} for an update of {expected}")]
    OtherMemory {
        /// What was given.
        given: String,
        /// What the update was made for.
        expected: String,
    },
    /// The memory itself refused.
    #[error(transparent)]
    Tensor(#[from] meshstep_tensor::Error),
}

#[cfg(feature = "cuda")]
impl From<meshstep_tensor::cuda::Error> for Error {
    fn from(error: meshstep_tensor::cuda::Error) -> Self {
        Error::Tensor(error.into())
    }
}
