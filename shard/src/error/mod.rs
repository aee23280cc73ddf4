//! Errors of a sharded optimizer, with their values.

mod data_rank;
mod read;
mod slots;
mod unit;
mod weight;

pub use data_rank::DataRankError;
pub use read::ReadError;
pub use slots::SlotError;
pub use unit::UnitError;
pub use weight::WeightError;

use crate::config::fault::Fault;
use crate::config::stage::Stage;
use meshstep_tensor::DType;

/// Error of a sharded optimizer.
///
/// After [`Comm`](Error::Comm) the optimizer is poisoned: ranks may be at different points, parameters may be of two steps, and
/// every later call repeats the error. A failure of one rank in the middle of a collective call ends the run in this way: that
/// rank gets its own error, the others [`Comm`](Error::Comm). Other errors change nothing; those that end a step drop its gradients.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] meshstep_comm::Error),
    /// Memory could not be allocated or viewed.
    #[error(transparent)]
    Tensor(#[from] meshstep_tensor::Error),
    /// A rule refused its hyperparameters or its memory.
    #[error(transparent)]
    Optim(#[from] meshstep_optim::Error),

    /// The plan has no ranks.
    #[error("a plan needs at least one rank")]
    NoRanks,
    /// There are more ranks than the step's exchange has room for.
    #[error("{world_size} ranks; at most {max} can step together")]
    TooManyRanks {
        /// Ranks asked for.
        world_size: usize,
        /// Maximum number of ranks.
        max: usize,
    },
    /// Buckets would have no elements.
    #[error("bucket_len is 0; use at least 1 element, or None for the default")]
    EmptyBuckets,
    /// Every parameter is frozen.
    #[error("every parameter is frozen; an optimizer needs one that trains")]
    NothingTrains,
    /// The stage does not keep a rank's own gradients, so they cannot be clipped.
    #[error("stages 2 and 3 send gradients off at once; Clip::BeforeReduce needs Accumulate::Local")]
    ClipNeedsGradients,
    /// The stage does not keep a rank's own gradients until the step.
    #[error("stages 2 and 3 send gradients off at once; Options::reduce_in_step needs Accumulate::Local")]
    StepNeedsGradients,
    /// The loss scale falls at skipped steps, and no step is skipped.
    #[error("a dynamic loss scale needs skips; with NonFinite::Propagate use a static loss scale, or none")]
    ScaleNeedsSkips,
    /// 16 bits cannot hold the sum of small steps.
    #[error("parameter {name:?} is {dtype}, in which small steps vanish; use {works} in Options::precision")]
    NeedsMaster {
        /// The parameter.
        name: String,
        /// Its type.
        dtype: DType,
        /// A type or setting that works.
        works: &'static str,
    },
    /// An f16 number is not the upper half of an f32 number.
    #[error("parameter {name:?} is f16, and only bf16 has f32 remainders; use bf16, or `Master::F32`")]
    RemainderOfF16 {
        /// The parameter.
        name: String,
    },
    /// All vectors are f64, except narrow state.
    #[error("parameter {name:?} is f64, and bf16 moments waste it; use `Moments::Full`, or f32 parameters")]
    NarrowF64 {
        /// The parameter.
        name: String,
    },
    /// No parameter uses the requested precision.
    #[error("Options::precision asks for {what}, and no parameter uses it; use {works}")]
    UnusedPrecision {
        /// The setting that no parameter uses.
        what: &'static str,
        /// A setting that works.
        works: &'static str,
    },
    /// The gradient type does not fit the parameter's.
    #[error(
        "parameter {name:?} is {dtype} and cannot take {grads} gradients; f64 takes f64, others f32, bf16 or f16"
    )]
    GradType {
        /// The parameter.
        name: String,
        /// Its type.
        dtype: DType,
        /// The gradient type asked for.
        grads: DType,
    },
    /// weight x gradient leaves the range of f16.
    #[error("weighted gradients overflow f16; use bf16 or f32 gradients")]
    WeightedF16,
    /// The rule has more state than an update can carry.
    #[error("rule {rule} names {states} state vectors; at most {max} fit an update")]
    TooManyStates {
        /// The rule.
        rule: &'static str,
        /// State vectors it names.
        states: usize,
        /// What fits.
        max: usize,
    },
    /// The rule sees whole matrices and has no `by_matrix`, and the stage or the planned part cuts them.
    #[error("{stage:?} cuts matrices of {rule}: use stages 0 to 2 (Part::uncut) or Stage::WholeParams")]
    NeedsWholeParams {
        /// The rule.
        rule: &'static str,
        /// The stage.
        stage: Stage,
    },
    /// The rule needs matrices, and the parameter is not one.
    #[error(
        "{rule} updates {blocks} and parameter {name:?} has the shape {shape:?}; name other blocks, or give it another rule"
    )]
    NotAMatrix {
        /// The rule.
        rule: &'static str,
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Matrices that the rule updates.
        blocks: meshstep_optim::Blocks,
    },
    /// Ranks on GPUs have stepped with different arguments; the first difference is reported.
    #[error(
        "ranks disagree on {field}: this rank has {mine}, the ranks have {smallest} to {largest}; give every rank the same value"
    )]
    Differ {
        /// The first field that differs.
        field: &'static str,
        /// Value of this rank.
        mine: String,
        /// Smallest value of all ranks.
        smallest: String,
        /// Largest value of all ranks.
        largest: String,
    },
    /// The device wrote a verdict that does not exist.
    #[error("GPU returned unknown verdict {verdict}; its memory was overwritten, restart the run")]
    NoVerdict {
        /// The verdict.
        verdict: u32,
    },
    /// Something works on the CPU only, and memory is on a GPU.
    #[error("{what} does not work on GPU memory; use {works}")]
    NotOnGpu {
        /// The request.
        what: String,
        /// An alternative that works.
        works: &'static str,
    },
    /// A unit of sharded parameters was used wrongly.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// A parameter cannot be read into the memory given.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Parameters hold the values to evaluate.
    #[error("the model is being evaluated; call end_evaluation first")]
    Evaluating,
    /// A part of a plan has groups of different rules.
    #[error("rules {first} and {other} for one part of a plan: plan one for each (`RulePart::split`)")]
    MixedRules {
        /// The first group's rule.
        first: &'static str,
        /// The rule that differs.
        other: &'static str,
    },
    /// A parameter is in two groups.
    #[error("parameter {name:?} is in two groups")]
    InTwoGroups {
        /// The parameter.
        name: String,
    },
    /// A factor on the learning rate is negative or not finite.
    #[error("a group's lr_scale is {value}; use a finite number, 0 or above")]
    LrScale {
        /// The factor given.
        value: f64,
    },
    /// The request needs parameters that all ranks share in the same way.
    #[error("{what}: invalid for parameters that groups of ranks share in different ways; use {works}")]
    Shared {
        /// The request.
        what: String,
        /// An alternative that works.
        works: &'static str,
    },
    /// The parts of a parameter do not add up to it.
    #[error("the parts of {name:?} are not its {len} elements, one after another, in runs of 1 or more")]
    Parts {
        /// The parameter.
        name: String,
        /// Elements of the parameter on this rank.
        len: usize,
    },
    /// A parameter of this name exists already.
    #[error("parameter {name:?} exists already; a new group's parameters need names of their own")]
    NameTaken {
        /// The parameter.
        name: String,
    },
    /// The caller's function for initial values failed.
    #[error("no initial value for parameter {name:?}: {source}")]
    Initial {
        /// The parameter.
        name: String,
        /// Why.
        source: meshstep_tensor::Error,
    },
    /// Ranks were given different arguments.
    #[error("ranks disagree on {what}: rank 0 has {rank0}, rank {rank} has {theirs}")]
    Disagree {
        /// The first difference.
        what: String,
        /// Value of rank 0.
        rank0: String,
        /// The first rank with another value.
        rank: usize,
        /// Value of that rank.
        theirs: String,
    },
    /// No parameter has this name.
    #[error("no parameter {name:?} among the {count} registered")]
    UnknownParam {
        /// The name asked for.
        name: String,
        /// Number of registered parameters.
        count: usize,
    },
    /// A gradient or a group was given for a frozen parameter.
    #[error("parameter {name:?} is frozen; it takes no gradient and joins no group")]
    FrozenParam {
        /// The parameter.
        name: String,
    },
    /// A gradient has the wrong length.
    #[error("gradient of {name:?} has {given} elements; its shape {shape:?} has {expected}")]
    GradLen {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Elements of the shape.
        expected: usize,
        /// Elements given.
        given: usize,
    },
    /// A gradient has the wrong type.
    #[error("gradient of {name:?} is {given}; this optimizer takes {expected} (see Options::grads)")]
    GradDType {
        /// The parameter.
        name: String,
        /// The type that the optimizer takes.
        expected: DType,
        /// The type given.
        given: DType,
    },
    /// A parameter got a second gradient in one micro-batch.
    #[error("a second gradient for {name:?} in one micro-batch; add them first, or open another micro-batch")]
    GradTwice {
        /// The parameter.
        name: String,
    },
    /// A slot already holds the gradient of an earlier micro-batch.
    #[error("the slot of {name:?} holds an earlier micro-batch's gradient; hand this one over with `grad`")]
    SlotTaken {
        /// The parameter.
        name: String,
    },
    /// A micro-batch was begun after the step's last.
    #[error("the step's last micro-batch is finished; call step, or the optimizer's discard_gradients")]
    StepDue,
    /// A slot was neither filled nor dropped, so its memory is lost; the run is aborted on every rank.
    #[error("the slot of {name:?} was leaked; fill it or drop it, and make a new optimizer")]
    SlotLeaked {
        /// The parameter.
        name: String,
    },
    /// The weights of micro-batches are invalid.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The slots of a step are invalid, or a micro-batch is not the next one.
    #[error(transparent)]
    Slots(#[from] SlotError),
    /// The data places of ranks are invalid.
    #[error(transparent)]
    Place(#[from] DataRankError),

    /// One rank could not take the step; no rank did.
    #[error("rank {rank} cannot take the step: {fault}; nothing changed on any rank")]
    Fault {
        /// The rank, the lowest if there are several.
        rank: usize,
        /// The fault of that rank.
        fault: Fault,
    },
    /// Ranks that should hold the same data do not, or a rank no longer holds the data it wrote.
    #[error(transparent)]
    Differs(#[from] Box<crate::verify::difference::Difference>),
    /// Verification or repair is not possible.
    #[error(transparent)]
    Verify(#[from] crate::verify::difference::VerifyError),
    /// The assignment of ranks to groups is invalid.
    #[error(transparent)]
    Assignment(#[from] crate::cross_shard::assignment::AssignmentError),
    /// A cross-shard optimizer replicates, and a stage was chosen that shards.
    #[error(
        "a cross-shard optimizer replicates, and stage is {stage:?}; leave out `stage`, or set `Stage::Replicated`"
    )]
    NotReplicated {
        /// The stage given.
        stage: Stage,
    },
    /// Cross-shard optimizers average replicas, and remainders cannot be averaged.
    #[error("replicas that drift are averaged, and bf16 remainders cannot be; use `Master::F32`")]
    RemaindersOfReplicas,
    /// A gradient has some of its elements only.
    #[error(
        "gradient of {name:?} is sparse ({indices} indices, {values} values); sparse gradients cannot be reduced \
         here: scatter them into {len} elements and hand those over"
    )]
    SparseGradient {
        /// The parameter.
        name: String,
        /// Indices given.
        indices: usize,
        /// Values given.
        values: usize,
        /// Elements the dense gradient has.
        len: usize,
    },
    /// Replicas cannot be averaged, because a value is not finite.
    #[error("{slot} of {name:?} differs at element {index} and is not finite on some rank; restore it first")]
    DriftNotFinite {
        /// `param`, `master`, or the state's name.
        slot: &'static str,
        /// The parameter.
        name: String,
        /// The element, in row-major order.
        index: usize,
    },
    /// L-BFGS does not work with these parameters or options.
    #[error(transparent)]
    NotForLbfgs(#[from] crate::closure::lbfgs::refusal::NotForLbfgs),
    /// A scheduled rate was requested, and there is no schedule.
    #[error("this optimizer has no schedule; set Options::schedule, or give each step its own StepArgs::lr")]
    NoSchedule,
    /// A loss scale was to be restored, and none is kept.
    #[error("this optimizer keeps no loss scale; set Options::loss_scale to restore one")]
    NoLossScale,
    /// The caller's closure failed on this rank; every rank is back at its start, or at the last accepted point.
    #[error("the closure failed: {source}")]
    Closure {
        /// The closure's error.
        source: std::sync::Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The closure failed on another rank.
    #[error("the closure failed on rank {rank}; its error says why")]
    ClosureElsewhere {
        /// The rank, the lowest if there are several.
        rank: usize,
    },
    /// A run begins with a loss or gradient that is not finite.
    #[error("loss {loss} and {non_finite} gradient elements are not finite; start where both are finite")]
    NotFinite {
        /// The loss at the start.
        loss: f64,
        /// Number of gradient elements that are infinite or NaN.
        non_finite: u64,
    },
    /// Ranks have made different progress.
    #[error("the ranks' progress differs; make the same calls on every rank")]
    Parted,
    /// Too many consecutive steps had gradients that are not finite.
    #[error("{skips} steps in a row had non-finite gradients; lower the learning rate or the loss scale")]
    TooManySkips {
        /// Number of skipped steps.
        skips: u32,
    },
}

meshstep_tensor::debug_is_display!(Error);
