//! Errors of a plan, or of an exchange by it.

use meshstep_tensor::DType;
use std::ops::Range;

/// Error of a plan or of a step. An error of a plan is returned before anything is exchanged; the implementation of
/// [`Step`](meshstep_shard::Step) for [`LocalOptimizer`](crate::LocalOptimizer) documents the errors of a step.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// Error of the optimizer of this worker.
    #[error(transparent)]
    Shard(#[from] meshstep_shard::Error),

    /// Workers can no longer exchange; the worker's own step has been taken.
    #[error("workers can no longer exchange: {source}")]
    Workers {
        /// Error of the communicator.
        source: Box<meshstep_shard::Error>,
    },
    /// The sizes of the communicators do not fit each other.
    #[error("{ranks} ranks are not {workers} workers of {inside} ranks each")]
    Sizes {
        /// Number of ranks of all workers together.
        ranks: usize,
        /// Number of ranks in the group that exchanges.
        workers: usize,
        /// Number of ranks of this worker.
        inside: usize,
    },
    /// A worker begins with other values than the first.
    #[error(
        "rank {rank} of all workers' ranks begins with other values than the first worker; give all workers the same"
    )]
    Values {
        /// The lowest such rank.
        rank: usize,
    },

    /// Error of the membership in an elastic run, one that workers join and leave.
    #[error(transparent)]
    Membership(#[from] meshstep_membership::Error),
    /// In an elastic run rank 0 of each worker has the membership, and no other rank.
    #[error(
        "rank {rank} of the worker joined as {} would; rank 0 calls LocalOptimizer::join, the others join_through_rank0",
        if *.rank == 0 { "one of the others" } else { "rank 0" }
    )]
    Speaks {
        /// The lowest rank that called the wrong function.
        rank: usize,
    },
    /// Two exchanges are possible around one update.
    #[error(
        "fragments {before} and {after} may be exchanged before and after the same update, but elastic workers exchange once a step; \
         use periods with a common divisor that offsets and delays keep apart, no Retry with a delay, or one placement"
    )]
    BothSides {
        /// The fragment exchanged before updates.
        before: usize,
        /// The fragment exchanged after updates.
        after: usize,
    },
    /// Other workers have applied an exchange that this worker has not.
    #[error(
        "the exchange of step {step} was committed, but this worker got no decision in time and has left; join again"
    )]
    Missed {
        /// The step, as the membership counts.
        step: u64,
    },

    /// All workers are new.
    #[error("every worker is new; at least one must have the values that new workers take over")]
    NobodyHasASay,
    /// Workers would continue from different steps.
    #[error(
        "rank {rank} of all workers' ranks is at step {step}, the first at {first}; regroup at the same step"
    )]
    Apart {
        /// The lowest such rank.
        rank: usize,
        /// Its step.
        step: u64,
        /// The step of the first worker.
        first: u64,
    },

    /// The plan has no fragments.
    #[error("the plan has no fragments; give it one, such as LocalPlan::local_sgd's")]
    NoFragments,
    /// A fragment has no elements.
    #[error("fragment {fragment} has no elements; choose parameters that have some, or fewer parts")]
    Empty {
        /// Index of the fragment.
        fragment: usize,
    },
    /// A fragment has the period 0.
    #[error("fragment {fragment} has the period 0; use 1 or more, or None for never")]
    Period {
        /// Index of the fragment.
        fragment: usize,
    },
    /// An offset is not below the period.
    #[error("fragment {fragment} has the offset {offset} in a period of {period}; use one below the period")]
    Offset {
        /// Index of the fragment.
        fragment: usize,
        /// Its offset.
        offset: u64,
        /// Its period.
        period: u64,
    },
    /// A result would arrive after the next one is sent.
    #[error(
        "fragment {fragment} has the delay {delay} and is sent every {period} steps; use a delay below that"
    )]
    Delay {
        /// Index of the fragment.
        fragment: usize,
        /// Its delay.
        delay: u64,
        /// Its period.
        period: u64,
    },
    /// A share is out of range.
    #[error("fragment {fragment} takes the share {taken} of a result; use a number above 0, at most 1")]
    Taken {
        /// Index of the fragment.
        fragment: usize,
        /// The given share.
        taken: f64,
    },
    /// A rule does not say how its state decays.
    #[error(
        "fragment {fragment} is delayed, and rule {rule} says it keeps {keeps} of its state {slot:?} in an update; correct \
         its Rule::slot to a finite number, 0 or above, or use a delay of 0"
    )]
    Keeps {
        /// Index of the fragment.
        fragment: usize,
        /// The rule.
        rule: &'static str,
        /// Its state vector.
        slot: &'static str,
        /// The share that the rule says it keeps.
        keeps: f64,
    },
    /// A maximum would be merged late, but the values added since it was sent are not known.
    #[error(
        "fragment {fragment} has a delay of {delay}, and rule {rule}'s state {slot:?} is a maximum, which cannot be merged \
         late; name the other state vectors in fragments of their own (Slots::Named), and give {slot:?} a delay of 0"
    )]
    DelayedMaximum {
        /// Index of the fragment.
        fragment: usize,
        /// The rule.
        rule: &'static str,
        /// Its state vector.
        slot: &'static str,
        /// The fragment's delay.
        delay: u64,
    },
    /// A wire type would lose the values.
    #[error("fragment {fragment} travels as {wire}; use bf16, f32 or f64, or None for its own type")]
    Wire {
        /// Index of the fragment.
        fragment: usize,
        /// The given type.
        wire: DType,
    },
    /// A merge does not suit the kind of state.
    #[error("fragment {fragment}: {merge} cannot be used with {what}; use {works}")]
    Merge {
        /// Index of the fragment.
        fragment: usize,
        /// The merge.
        merge: &'static str,
        /// Kind of state of the fragment.
        what: &'static str,
        /// Merge or kind that would work.
        works: &'static str,
    },
    /// The outer optimizer has hyperparameters out of range, or a rule that sees more than single elements.
    #[error("fragment {fragment} cannot be stepped by the outer rule {rule} at lr {lr}: {why}")]
    Outer {
        /// Index of the fragment.
        fragment: usize,
        /// The rule.
        rule: &'static str,
        /// Its learning rate.
        lr: f64,
        /// Reason of the rule.
        why: String,
    },
    /// No rule of the fragment's parameters has the state.
    #[error(
        "fragment {fragment} selects the state {slots}, but rule {rule} has only {has:?}; choose a preset for this rule, or select its state \
         by these names"
    )]
    NoState {
        /// Index of the fragment.
        fragment: usize,
        /// The chosen state.
        slots: String,
        /// A rule of the fragment's parameters.
        rule: &'static str,
        /// State vectors of that rule.
        has: &'static [&'static str],
    },
    /// A fragment has no outer momentum to choose.
    #[error("fragment {fragment} selects the outer momentum of fragment {of}, which has none")]
    NoOuter {
        /// Index of the fragment.
        fragment: usize,
        /// Index of the fragment without outer momentum.
        of: usize,
    },
    /// Two fragments of one kind have an element in common.
    #[error(
        "fragments {first} and {second} both have elements of {name:?}; give each element to one of them"
    )]
    Overlap {
        /// Index of the first fragment.
        first: usize,
        /// Index of the second fragment.
        second: usize,
        /// The parameter.
        name: String,
    },
    /// The bucket length is 0.
    #[error("bucket_len is 0; use at least 1 element")]
    EmptyBuckets,
    /// A fragment names an unknown parameter.
    #[error("no parameter {name:?} among the {count} that train; choose one of these")]
    UnknownParam {
        /// The given name.
        name: String,
        /// Number of parameters that train.
        count: usize,
    },
    /// A fragment names a parameter twice.
    #[error("parameter {name:?} is named twice in one fragment")]
    NamedTwice {
        /// The parameter.
        name: String,
    },
    /// A range exceeds its parameter.
    #[error("elements {range:?} exceed parameter {name:?}, which has {len}")]
    Elements {
        /// The parameter.
        name: String,
        /// The given range.
        range: Range<usize>,
        /// Number of elements of the parameter.
        len: usize,
    },
    /// Elements are chosen of a parameter that is cut among ranks.
    #[error(
        "a rank has {len} of the {whole} elements of parameter {name:?}; choose the whole parameter, or one that is not cut"
    )]
    CutElements {
        /// The parameter.
        name: String,
        /// Number of elements on this rank.
        len: usize,
        /// Number of elements of the whole parameter.
        whole: usize,
    },
    /// The index of a part is too large.
    #[error("there is no part {index} of {of}; parts are counted from 0")]
    NoSuchPart {
        /// The given index.
        index: usize,
        /// Number of parts.
        of: usize,
    },
}

meshstep_tensor::debug_is_display!(LocalError);

/// Warning about a plan that is allowed, but that its method advises against.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LocalWarning {
    /// Second moments are never averaged, but first moments are.
    #[error(
        "fragment {fragment}: second moments of {rule} (beta2 {beta2}) are never averaged while first moments are, so workers \
         divide the same average by different roots; give them a period"
    )]
    SecondMomentsApart {
        /// Index of the fragment.
        fragment: usize,
        /// The rule.
        rule: &'static str,
        /// Its beta2.
        beta2: f64,
    },
    /// A fragment is never due.
    #[error("fragment {fragment} is never due between the steps {from} and {until} that it is for")]
    NeverDue {
        /// Index of the fragment.
        fragment: usize,
        /// First count of steps at which it may be due.
        from: u64,
        /// Count after the last one.
        until: u64,
    },
}

meshstep_tensor::debug_is_display!(LocalWarning);
