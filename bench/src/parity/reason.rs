//! Why a trace cannot be replayed.

use std::path::PathBuf;

use meshstep_tensor::DType;
use safetensors::SafeTensorError;

use super::key::Key;

/// What stands in the way of a replay: of the file, of what it asks for, or of how it was asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Reason {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("not a whole safetensors file: {0}")]
    NotSafetensors(#[from] SafeTensorError),
    #[error(
        "its __metadata__ has no `{key}` of {wanted:?}{}; this is no trace that this version reads",
        found.as_ref().map_or(String::new(), |found| format!(" but {found:?}"))
    )]
    Metadata { key: &'static str, wanted: &'static str, found: Option<String> },
    #[error("its spec: {0}")]
    Spec(#[from] serde_json::Error),
    #[error("its spec has {field} = {given}; {wanted}")]
    SpecValue { field: &'static str, given: String, wanted: &'static str },
    #[error("its rule is {name:?}, which is none of {known}")]
    UnknownRule { name: String, known: String },
    #[error("its rule {rule} has no field {field:?}; it takes {known}")]
    UnknownField { rule: String, field: String, known: String },
    #[error("field {field:?} of its rule {rule}: {source}")]
    Field { rule: String, field: &'static str, source: serde_json::Error },
    #[error(
        "a group of its rule {rule} has {field:?} = null; leave it out for the optimizer's value, or say the group's own"
    )]
    NullInGroup { rule: String, field: String },
    #[error("its rule {rule} needs the field {field:?}: {why}")]
    MissingField { rule: String, field: &'static str, why: &'static str },
    #[error("{what} and {other} contradict each other: {why}")]
    Contradiction { what: String, other: String, why: String },

    #[error("its rule lbfgs evaluates a loss several times a step; its spec needs a problem")]
    NoProblem,
    #[error("tensor {name:?} is missing: {why}")]
    MissingTensor { name: String, why: &'static str },
    #[error("tensor {name:?} is not one that a trace has: {why}")]
    StrayTensor { name: String, why: String },
    #[error("tensor {name:?} has the type {given}; use F32, F64, BF16 or F16")]
    NotFloat { name: String, given: String },
    #[error("tensor {key} is {given} and not {wanted}")]
    DType { key: Key, given: DType, wanted: DType },
    #[error("tensor {key} has the shape {given:?} and not {wanted:?}")]
    Shape { key: Key, given: Vec<usize>, wanted: Vec<usize> },
    #[error("tensor {key} has {value} at {index}; a trace holds finite numbers only")]
    NotFinite { key: Key, index: usize, value: f64 },
    #[error("tensor {key} has {value} for rank {rank}; weights are whole numbers from 0 to 2^24")]
    Weight { key: Key, rank: usize, value: f64 },
    #[error("nothing is expected: it has no tensor expect..., so there is nothing to compare")]
    NothingExpected,

    #[error("--device cuda: not in this build; use --device cpu")]
    NoCuda,
    #[error("step {t} has {non_finite} combined gradient elements that are not finite")]
    Skipped { t: u64, non_finite: u64 },
    #[error("{key}: the rule keeps no such state; it keeps {known}")]
    NoSuchState { key: Key, known: String },
    #[error("{key}: {why}")]
    NotObserved { key: Key, why: &'static str },
    #[error("{key}: rank {rank} has other bits at {index} than a rank before it")]
    RanksDiffer { key: Key, rank: usize, index: usize },
    #[error("the optimizer refuses it: {0}")]
    Optimizer(#[from] meshstep_shard::Error),
    #[error("the rule refuses it: {0}")]
    Rule(#[from] meshstep_optim::Error),
    #[error("a tensor is refused: {0}")]
    Tensor(#[from] meshstep_tensor::Error),
    #[error("the ranks could not be brought together: {0}")]
    Ranks(#[from] meshstep_comm::Error),
    #[error("--{option} {}: {source}", path.display())]
    Output { option: &'static str, path: PathBuf, source: std::io::Error },
}
