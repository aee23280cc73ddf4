//! Reasons for which a trace cannot be replayed.

use std::path::PathBuf;

use meshstep_tensor::DType;
use safetensors::SafeTensorError;

use super::key::Key;

/// Error of a replay: in the file, in its spec, or in the options.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Reason {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("not a whole safetensors file: {0}")]
    NotSafetensors(#[from] SafeTensorError),
    #[error(
        "its __metadata__ has no `{key}` of {wanted:?}{}; this version cannot read the trace",
        found.as_ref().map_or(String::new(), |found| format!(" but {found:?}"))
    )]
    Metadata { key: &'static str, wanted: &'static str, found: Option<String> },
    #[error("its spec: {0}")]
    Spec(#[from] serde_json::Error),
    #[error("its spec has {field} = {given}; {wanted}")]
    SpecValue { field: &'static str, given: String, wanted: &'static str },
    #[error("its rule is {name:?}; the known rules are {known}")]
    UnknownRule { name: String, known: String },
    #[error("its rule {rule} has no field {field:?}; it takes {known}")]
    UnknownField { rule: String, field: String, known: String },
    #[error("field {field:?} of its rule {rule}: {source}")]
    Field { rule: String, field: &'static str, source: serde_json::Error },
    #[error(
        "a group of its rule {rule} has {field:?} = null; leave it out for the optimizer's value, or give a value"
    )]
    NullInGroup { rule: String, field: String },
    #[error("its rule {rule} needs the field {field:?}: {why}")]
    MissingField { rule: String, field: &'static str, why: &'static str },
    #[error("{what} and {other} contradict each other: {why}")]
    Contradiction { what: String, other: String, why: String },

    #[error("its rule lbfgs evaluates a loss several times per step; its spec needs a problem")]
    NoProblem,
    #[error("tensor {name:?} is missing: {why}")]
    MissingTensor { name: String, why: &'static str },
    #[error("tensor {name:?} does not belong to a trace: {why}")]
    StrayTensor { name: String, why: String },
    #[error("tensor {name:?} has the type {given}; use F32, F64, BF16 or F16")]
    NotFloat { name: String, given: String },
    #[error("tensor {key} has the type {given} instead of {wanted}")]
    DType { key: Key, given: DType, wanted: DType },
    #[error("tensor {key} has the shape {given:?} instead of {wanted:?}")]
    Shape { key: Key, given: Vec<usize>, wanted: Vec<usize> },
    #[error("tensor {key} has {value} at {index}; a trace may only contain finite numbers")]
    NotFinite { key: Key, index: usize, value: f64 },
    #[error("tensor {key} has {value} for rank {rank}; weights must be whole numbers from 0 to 2^24")]
    Weight { key: Key, rank: usize, value: f64 },
    #[error("it has no tensor expect..., so there is nothing to compare")]
    NothingExpected,

    #[error("--device cuda: this build does not support it; use --device cpu")]
    NoCuda,
    #[error("step {t} has {non_finite} combined gradient elements that are not finite")]
    Skipped { t: u64, non_finite: u64 },
    #[error("{key}: the rule keeps no such state; it keeps {known}")]
    NoSuchState { key: Key, known: String },
    #[error("{key}: {why}")]
    NotObserved { key: Key, why: &'static str },
    #[error("{key}: rank {rank} and an earlier rank have different bits at {index}")]
    RanksDiffer { key: Key, rank: usize, index: usize },
    #[error("the optimizer rejects it: {0}")]
    Optimizer(#[from] meshstep_shard::Error),
    #[error("the rule rejects it: {0}")]
    Rule(#[from] meshstep_optim::Error),
    #[error("a tensor is rejected: {0}")]
    Tensor(#[from] meshstep_tensor::Error),
    #[error("cannot start the ranks: {0}")]
    Ranks(#[from] meshstep_comm::Error),
    #[error("--{option} {}: {source}", path.display())]
    Output { option: &'static str, path: PathBuf, source: std::io::Error },
}
