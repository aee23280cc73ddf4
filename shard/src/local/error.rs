//! What can be wrong with a plan, or with an exchange by it.

use meshstep_tensor::DType;
use std::ops::Range;

/// What went wrong. Of a plan nothing has begun; what a step meets is said where the step is.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// The optimizer of this rank's replica.
    #[error(transparent)]
    Shard(#[from] crate::Error),

    /// Workers can no longer exchange; the worker's own step has been taken.
    #[error("workers can no longer exchange: {source}")]
    Workers {
        /// Why.
        source: Box<crate::Error>,
    },
    /// Communicators that do not go together.
    #[error("{ranks} ranks are not {workers} workers of {inside} ranks each")]
    Sizes {
        /// All ranks of all workers.
        ranks: usize,
        /// Ranks that exchange with each other.
        workers: usize,
        /// Ranks of this worker.
        inside: usize,
    },
    /// A worker that begins elsewhere.
    #[error("rank {rank} of all workers' begins with other values than the first worker; give all the same")]
    Values {
        /// The lowest such rank.
        rank: usize,
    },

    /// The membership of a run whose workers come and go.
    #[error(transparent)]
    Membership(#[from] meshstep_membership::Error),
    /// Of a worker that comes and goes rank 0 has the membership, and no other rank.
    #[error(
        "rank {rank} of the worker joined as {} would; rank 0 calls LocalOptimizer::join, the others join_through_rank0",
        if *.rank == 0 { "one of the others" } else { "rank 0" }
    )]
    Speaks {
        /// The lowest rank that called the other one.
        rank: usize,
    },
    /// Two exchanges in one step.
    #[error(
        "fragment {before} is exchanged before an update that fragment {after} may be exchanged after, and workers that come and go meet          once a step; give their periods a common divisor that offsets and delays keep them apart by, no Retry where there is a delay, or use          one placement"
    )]
    BothSides {
        /// The one before updates.
        before: usize,
        /// The one after them.
        after: usize,
    },
    /// Others have applied what this worker has not.
    #[error(
        "the exchange of step {step} was committed, and this worker did not hear of it in time; it has left: join anew"
    )]
    Missed {
        /// The step, as the membership counts.
        step: u64,
    },

    /// Only workers that are new.
    #[error("every worker has only just entered; one must have the values that the others are to get")]
    NobodyHasASay,
    /// Workers that do not go on from the same step.
    #[error(
        "rank {rank} of all workers' is at step {step}, the first at {first}; workers meet again at one step"
    )]
    Apart {
        /// The lowest such rank.
        rank: usize,
        /// Its step.
        step: u64,
        /// That of the first worker.
        first: u64,
    },

    /// A plan of nothing.
    #[error("the plan has no fragments; give it one, such as LocalPlan::local_sgd's")]
    NoFragments,
    /// A fragment without elements.
    #[error("fragment {fragment} has no elements; choose parameters that have some, or fewer parts")]
    Empty {
        /// Which one.
        fragment: usize,
    },
    /// Exchanged every 0 steps.
    #[error("fragment {fragment} has the period 0; use 1 or more, or None for never")]
    Period {
        /// Which one.
        fragment: usize,
    },
    /// An offset that is never reached.
    #[error("fragment {fragment} has the offset {offset} in a period of {period}; use one below the period")]
    Offset {
        /// Which one.
        fragment: usize,
        /// Its offset.
        offset: u64,
        /// Its period.
        period: u64,
    },
    /// A result that arrives once the next is on its way.
    #[error(
        "fragment {fragment} has the delay {delay} and is sent every {period} steps; use a delay below that"
    )]
    Delay {
        /// Which one.
        fragment: usize,
        /// Its delay.
        delay: u64,
        /// Its period.
        period: u64,
    },
    /// A share out of range.
    #[error("fragment {fragment} takes the share {taken} of a result; use a number above 0, at most 1")]
    Taken {
        /// Which one.
        fragment: usize,
        /// What was given.
        taken: f64,
    },
    /// A rule that does not say how its state decays.
    #[error(
        "fragment {fragment} is delayed, and rule {rule} says it keeps {keeps} of its state {slot:?} in an update; correct \
         its Rule::slot to a finite number, 0 or above, or use a delay of 0"
    )]
    Keeps {
        /// Which one.
        fragment: usize,
        /// The rule.
        rule: &'static str,
        /// Its state vector.
        slot: &'static str,
        /// What it says.
        keeps: f64,
    },
    /// A maximum, of which nobody knows what was added since it was sent.
    #[error(
        "fragment {fragment} has a delay of {delay}, and rule {rule}'s state {slot:?} is a maximum, which cannot be merged \
         late; name the other state vectors in fragments of their own (Slots::Named), and give {slot:?} a delay of 0"
    )]
    DelayedMaximum {
        /// Which one.
        fragment: usize,
        /// The rule.
        rule: &'static str,
        /// Its state vector.
        slot: &'static str,
        /// The fragment's delay.
        delay: u64,
    },
    /// A type that loses what it carries.
    #[error("fragment {fragment} travels as {wire}; use bf16, f32 or f64, or None for its own type")]
    Wire {
        /// Which one.
        fragment: usize,
        /// What was given.
        wire: DType,
    },
    /// A rule that does not go with what it is for.
    #[error("fragment {fragment}: {merge} is not for {what}; use {works}")]
    Merge {
        /// Which one.
        fragment: usize,
        /// How it is merged.
        merge: &'static str,
        /// What it has.
        what: &'static str,
        /// What would work.
        works: &'static str,
    },
    /// An outer optimizer with hyperparameters out of range, or one that sees more than an element.
    #[error("fragment {fragment} cannot be stepped by the outer rule {rule} at lr {lr}: {why}")]
    Outer {
        /// Which one.
        fragment: usize,
        /// The rule.
        rule: &'static str,
        /// Its learning rate.
        lr: f64,
        /// What is wrong.
        why: String,
    },
    /// State that no rule of the fragment's parameters has.
    #[error("fragment {fragment} is of the state {slots}, which rule {rule} has not; it has {has:?}")]
    NoState {
        /// Which one.
        fragment: usize,
        /// What was asked for.
        slots: String,
        /// A rule of its parameters.
        rule: &'static str,
        /// What that has.
        has: &'static [&'static str],
    },
    /// Outer momentum of a fragment that has none.
    #[error("fragment {fragment} is of the outer momentum of fragment {of}, which has none")]
    NoOuter {
        /// Which one.
        fragment: usize,
        /// The one that was to have it.
        of: usize,
    },
    /// Two fragments of one kind with an element in common.
    #[error(
        "fragments {first} and {second} both have elements of {name:?}; give each element to one of them"
    )]
    Overlap {
        /// The one.
        first: usize,
        /// The other.
        second: usize,
        /// The parameter.
        name: String,
    },
    /// Buckets of nothing.
    #[error("bucket_len is 0; use at least 1 element")]
    EmptyBuckets,
    /// A fragment of a parameter that there is not.
    #[error("no parameter {name:?} among the {count} that train; a fragment is of those")]
    UnknownParam {
        /// The name given.
        name: String,
        /// Parameters there are.
        count: usize,
    },
    /// A parameter that a fragment names twice.
    #[error("parameter {name:?} is twice in one fragment")]
    NamedTwice {
        /// The parameter.
        name: String,
    },
    /// Elements that a parameter has not.
    #[error("elements {range:?} of parameter {name:?}, which has {len}")]
    Elements {
        /// The parameter.
        name: String,
        /// What was asked for.
        range: Range<usize>,
        /// Its elements.
        len: usize,
    },
    /// Elements of a parameter of which each rank has a part.
    #[error(
        "elements of parameter {name:?}, of whose {whole} a rank has {len}; choose all of it, or parameters that are not cut"
    )]
    CutElements {
        /// The parameter.
        name: String,
        /// Its elements on this rank.
        len: usize,
        /// All of them.
        whole: usize,
    },
    /// A part beyond the last.
    #[error("part {index} of {of}; parts are counted from 0")]
    NoSuchPart {
        /// What was asked for.
        index: usize,
        /// Parts there are.
        of: usize,
    },
}

/// What a plan allows and its method advises against.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LocalWarning {
    /// Second moments that never meet, where first moments do.
    #[error(
        "fragment {fragment}: second moments of {rule} (beta2 {beta2}) are never averaged while first moments are, so workers \
         divide the same average by different roots; give them a period"
    )]
    SecondMomentsApart {
        /// Which one.
        fragment: usize,
        /// The rule.
        rule: &'static str,
        /// Its beta2.
        beta2: f64,
    },
    /// A fragment that is never due.
    #[error("fragment {fragment} is never due between the steps {from} and {until} that it is for")]
    NeverDue {
        /// Which one.
        fragment: usize,
        /// Its first count of steps.
        from: u64,
        /// The one after its last.
        until: u64,
    },
}
