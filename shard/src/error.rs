//! What can go wrong with a sharded optimizer, in values.

use crate::{Fault, Stage};
use meshstep_tensor::DType;

/// What went wrong.
///
/// After [`Comm`](Error::Comm) the optimizer is poisoned: ranks may have parted, parameters may be of two steps, and every
/// later call repeats the error. What fails on one rank in the middle of a collective call, and there alone, is such an end: that
/// rank gets its own error, the others [`Comm`](Error::Comm) with the rank that aborted. All others leave parameters and state as
/// they were; those that a step ends with drop its gradients.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] meshstep_comm::Error),
    /// Memory could not be had or viewed.
    #[error(transparent)]
    Tensor(#[from] meshstep_tensor::Error),
    /// A rule refused its hyperparameters or its memory.
    #[error(transparent)]
    Optim(#[from] meshstep_optim::Error),

    /// A plan for nobody.
    #[error("a plan needs at least one rank")]
    NoRanks,
    /// More ranks than the step's exchange has room for.
    #[error("{world_size} ranks; at most {max} can step together")]
    TooManyRanks {
        /// Ranks asked for.
        world_size: usize,
        /// The most there may be.
        max: usize,
    },
    /// Buckets of nothing.
    #[error("bucket_len is 0; use at least 1 element, or None for the default")]
    EmptyBuckets,
    /// Every parameter is frozen.
    #[error("every parameter is frozen; an optimizer needs one that trains")]
    NothingTrains,
    /// A rank's own gradients are to be clipped at a stage that does not keep them.
    #[error(
        "stages 2 and 3 send gradients off as they come; Clip::BeforeReduce needs Replicated, Zero1 or WholeParams"
    )]
    ClipNeedsGradients,
    /// A loss scale that falls at skipped steps, where no step is skipped.
    #[error("a dynamic loss scale needs skips; with NonFinite::Propagate use a static loss scale, or none")]
    ScaleNeedsSkips,
    /// 16 bits cannot hold what small steps add up to.
    #[error("parameter {name:?} is {dtype}, in which small steps vanish; use {works} in Options::precision")]
    NeedsMaster {
        /// The parameter.
        name: String,
        /// Its type.
        dtype: DType,
        /// What would work.
        works: &'static str,
    },
    /// An f16 number is not the upper half of an f32 number.
    #[error("parameter {name:?} is f16, which leaves no remainder of an f32; use bf16, or `Master::F32`")]
    RemainderOfF16 {
        /// The parameter.
        name: String,
    },
    /// f64 throughout, but for its state.
    #[error("parameter {name:?} is f64, and bf16 moments waste it; use `Moments::Full`, or f32 parameters")]
    NarrowF64 {
        /// The parameter.
        name: String,
    },
    /// A precision that is asked for and used by nothing.
    #[error("Options::precision asks for {what}, and there is none here; use {works}")]
    UnusedPrecision {
        /// What was asked for.
        what: &'static str,
        /// What would work.
        works: &'static str,
    },
    /// A gradient type that does not go with the parameter's.
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
    /// A rule with more state than an update can carry.
    #[error("rule {rule} names {states} state vectors; at most {max} fit an update")]
    TooManyStates {
        /// The rule.
        rule: &'static str,
        /// State vectors it names.
        states: usize,
        /// What fits.
        max: usize,
    },
    /// A rule that must see whole matrices, on chunks.
    #[error(
        "{rule} sees whole matrices and {stage:?} cuts them; use Stage::WholeParams or Stage::Replicated"
    )]
    NeedsWholeParams {
        /// The rule.
        rule: &'static str,
        /// The stage.
        stage: Stage,
    },
    /// A parameter without rows and columns, for a rule that needs them.
    #[error(
        "{rule} updates matrices and parameter {name:?} has the shape {shape:?}; add it with another rule by add_param_group"
    )]
    NotAMatrix {
        /// The rule.
        rule: &'static str,
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Ranks on GPUs have stepped with different things, of which one is told.
    #[error(
        "ranks disagree on {field}: this one has {mine}, all have from {smallest} to {largest}; give every rank the same"
    )]
    Differ {
        /// The first that differs.
        field: &'static str,
        /// What this rank has.
        mine: String,
        /// The smallest of all ranks.
        smallest: String,
        /// The largest of all ranks.
        largest: String,
    },
    /// What a GPU has decided is nothing that it decides.
    #[error("a GPU has told of a step what is no verdict ({verdict}); its memory has been written over")]
    NoVerdict {
        /// What it told.
        verdict: u32,
    },
    /// What is decided on the CPU alone, where memory is a GPU's.
    #[error("{what} is not for memory of a GPU; use {works}")]
    NotOnGpu {
        /// What was asked for.
        what: String,
        /// What would work.
        works: &'static str,
    },
    /// Something about a unit of sharded parameters.
    #[error(transparent)]
    Unit(#[from] crate::UnitError),
    /// Groups of one layout with different rules.
    #[error("rules {first} and {other} for one layout; groups may differ in hyperparameters only")]
    MixedRules {
        /// The first group's rule.
        first: &'static str,
        /// The one that differs.
        other: &'static str,
    },
    /// A parameter in two groups.
    #[error("parameter {name:?} is in two groups")]
    InTwoGroups {
        /// The parameter.
        name: String,
    },
    /// A factor on the learning rate that is not a finite number, 0 or above.
    #[error("a group's lr_scale is {value}; use a finite number, 0 or above")]
    LrScale {
        /// What was given.
        value: f64,
    },
    /// What takes all ranks to share all parameters alike, where they do not.
    #[error("{what}, where groups of ranks share parameters in several ways; use {works}")]
    Shared {
        /// What was asked for.
        what: String,
        /// What would work.
        works: &'static str,
    },
    /// Parts of a parameter that do not make it up.
    #[error(
        "the parts of parameter {name:?} are not its {len} elements, one after another, in runs of 1 or more"
    )]
    Parts {
        /// The parameter.
        name: String,
        /// Its elements here.
        len: usize,
    },
    /// A parameter that exists already.
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
    /// Ranks were given different things.
    #[error("ranks disagree on {what}: rank 0 has {rank0}, rank {rank} has {theirs}")]
    Disagree {
        /// What differs first.
        what: String,
        /// Rank 0's.
        rank0: String,
        /// The first rank with another one.
        rank: usize,
        /// What it has.
        theirs: String,
    },
    /// No parameter of this name.
    #[error("no parameter {name:?} among the {count} registered")]
    UnknownParam {
        /// The name asked for.
        name: String,
        /// Parameters there are.
        count: usize,
    },
    /// A gradient or a group for a parameter that does not train.
    #[error("parameter {name:?} is frozen; it takes no gradient and joins no group")]
    FrozenParam {
        /// The parameter.
        name: String,
    },
    /// A gradient of another length.
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
    /// A gradient of another type.
    #[error("gradient of {name:?} is {given}; this optimizer takes {expected} (see Options::grads)")]
    GradDType {
        /// The parameter.
        name: String,
        /// What is taken.
        expected: DType,
        /// What was given.
        given: DType,
    },
    /// A second gradient for a parameter in one micro-batch.
    #[error("a second gradient for {name:?} in one micro-batch; add them first, or open another micro-batch")]
    GradTwice {
        /// The parameter.
        name: String,
    },
    /// A slot that already holds an earlier micro-batch's gradient.
    #[error("the slot of {name:?} holds an earlier micro-batch's gradient; hand this one over with `grad`")]
    SlotTaken {
        /// The parameter.
        name: String,
    },
    /// A micro-batch after the step's last.
    #[error("the step's last micro-batch is finished; call step or discard_gradients on every rank")]
    StepDue,
    /// A slot that was neither filled nor dropped, so that its memory is lost: every rank is given up.
    #[error("the slot of {name:?} was leaked; fill it or drop it, and make a new optimizer")]
    SlotLeaked {
        /// The parameter.
        name: String,
    },
    /// What is wrong with the weights of micro-batches.
    #[error(transparent)]
    Weights(#[from] crate::WeightError),
    /// What is wrong with the data places of ranks.
    #[error(transparent)]
    Place(#[from] crate::PlaceError),

    /// One rank could not take the step; no rank did.
    #[error("rank {rank} cannot take the step: {fault}; nothing changed on any rank")]
    Fault {
        /// The rank, the lowest if there are several.
        rank: usize,
        /// What is wrong there.
        fault: Fault,
    },
    /// Ranks that should hold the same do not, or a rank no longer holds what it wrote.
    #[error(transparent)]
    Differs(#[from] Box<crate::Difference>),
    /// What cannot be verified or repaired.
    #[error(transparent)]
    Verify(#[from] crate::VerifyError),
    /// Saving or loading a checkpoint failed, on all ranks; it has changed nothing.
    #[cfg(feature = "checkpoint")]
    #[error(transparent)]
    Checkpoint(#[from] Box<crate::checkpoint::Failed>),
    /// Ranks are not in groups as they must be.
    #[error(transparent)]
    Assignment(#[from] crate::AssignmentError),
    /// Replicas at a stage that divides them.
    #[error("a cross-shard optimizer replicates and stage is {stage:?}; set `stage: Stage::Replicated`")]
    NotReplicated {
        /// The stage given.
        stage: crate::Stage,
    },
    /// Replicas that could not be averaged.
    #[error("replicas are averaged where they drift, which remainders cannot be; use `Master::F32`")]
    RemaindersOfReplicas,
    /// A gradient of some elements only.
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
    /// Replicas that cannot be averaged.
    #[error("{slot} of {name:?} differs at element {index}, on some rank not finite: restore it first")]
    DriftNotFinite {
        /// `param`, `master`, or the state's name.
        slot: &'static str,
        /// The parameter.
        name: String,
        /// The element, in row-major order.
        index: usize,
    },
    /// What L-BFGS cannot be made of.
    #[error(transparent)]
    NotForLbfgs(#[from] crate::NotForLbfgs),
    /// A rate by a schedule where there is none.
    #[error("this optimizer has no schedule; set Options::schedule, or give each step its own At::lr")]
    NoSchedule,
    /// A loss scale to restore where none is kept.
    #[error("this optimizer keeps no loss scale; set Options::loss_scale to restore one")]
    NoLossScale,
    /// The caller's closure failed here; every rank is where it was before, or at the last point it accepted.
    #[error("the closure failed: {source}")]
    Closure {
        /// What it returned.
        source: std::sync::Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The closure of another rank failed.
    #[error("the closure failed on rank {rank}; its error says why")]
    ClosureElsewhere {
        /// Which rank, the lowest if there are several.
        rank: usize,
    },
    /// A run that begins where loss or gradient is not finite.
    #[error(
        "a step begins with loss {loss} and {non_finite} gradient elements that are not finite; start where both are finite"
    )]
    NotFinite {
        /// The loss.
        loss: f64,
        /// How many gradient elements are infinite or NaN.
        non_finite: u64,
    },
    /// Ranks were given different things to run to.
    #[error("the ranks' progress differs; call the same on every rank")]
    Parted,
    /// Too many steps in a row had gradients that are not finite.
    #[error("{skips} steps in a row had non-finite gradients; lower the learning rate or the loss scale")]
    TooManySkips {
        /// How many.
        skips: u32,
    },
}
