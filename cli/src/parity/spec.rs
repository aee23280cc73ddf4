//! The `spec` of a trace: the recorded run, and the tolerance of the replay.

use meshstep_optim::Norm;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::reason::Reason;

/// Limits on the ranks and steps of a trace: large enough for any trace, and small enough to start.
const MAX_RANKS: usize = 64;
const MAX_STEPS: u64 = 1_000_000;

/// Description of the recorded run. Unknown fields are rejected, because a replay would ignore them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spec {
    /// Name and hyperparameters of the rule; `rule.rs` reads them.
    pub(super) optimizer: Map<String, Value>,
    pub(super) steps: u64,
    #[serde(default = "one")]
    pub(super) ranks: usize,
    #[serde(default)]
    pub(super) reduce: Reduction,
    #[serde(default)]
    pub(super) clip: Option<Clip>,
    /// Learning rate of every step.
    #[serde(default)]
    pub(super) lrs: Option<Vec<f64>>,
    #[serde(default)]
    pub(super) groups: Option<Vec<Group>>,
    #[serde(default)]
    pub(super) problem: Option<Problem>,
    pub(super) tolerance: Tolerance,
    /// Program that recorded the trace.
    #[serde(default)]
    pub(super) source: String,
}

/// Combination of the ranks' gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Reduction {
    #[default]
    Mean,
    Sum,
    Weighted,
}

/// Clipping by the global norm.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Clip {
    pub(super) max_norm: f64,
    #[serde(default)]
    norm_type: NormType,
}

/// A number, or "inf" for the largest magnitude.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "Value")]
struct NormType(Norm);

impl TryFrom<Value> for NormType {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        match (value.as_f64(), value.as_str()) {
            (Some(1.0), _) => Ok(NormType(Norm::L1)),
            (Some(2.0), _) => Ok(NormType(Norm::L2)),
            (Some(p), _) => Ok(NormType(Norm::P(p))),
            (_, Some("inf")) => Ok(NormType(Norm::Inf)),
            _ => Err(format!("norm_type is {value}; use a number or \"inf\"")),
        }
    }
}

impl Default for NormType {
    fn default() -> Self {
        NormType(Norm::L2)
    }
}

/// Different hyperparameters for some parameters.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Group {
    pub(super) params: Vec<String>,
    /// Fields of `optimizer` that differ; checked in the same way.
    #[serde(flatten)]
    pub(super) overrides: Map<String, Value>,
}

/// A loss that the replay evaluates.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Problem {
    Rosenbrock {},
    LeastSquares {},
    Logistic {
        #[serde(default)]
        l2: f64,
    },
}

/// A value agrees if `|got - want| <= atol + rtol |want|`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tolerance {
    pub(crate) rtol: f64,
    pub(crate) atol: f64,
}

fn one() -> usize {
    1
}

impl Spec {
    /// Parses a spec, and checks its values.
    pub(super) fn parse(text: &str) -> Result<Spec, Reason> {
        let spec: Spec = serde_json::from_str(text)?;
        let Tolerance { rtol, atol } = spec.tolerance;
        let refuse = |field, given: &dyn ToString, wanted| {
            Err(Reason::SpecValue { field, given: given.to_string(), wanted })
        };
        if !(1..=MAX_RANKS).contains(&spec.ranks) {
            return refuse("ranks", &spec.ranks, "use 1 to 64");
        }
        if !(1..=MAX_STEPS).contains(&spec.steps) {
            return refuse("steps", &spec.steps, "use 1 to 1000000");
        }
        if !(rtol >= 0.0 && atol >= 0.0) {
            return refuse("tolerance", &format!("{rtol}, {atol}"), "use numbers of at least 0");
        }
        if spec.lrs.as_ref().is_some_and(|lrs| lrs.len() as u64 != spec.steps) {
            let len = spec.lrs.map_or(0, |lrs| lrs.len());
            return refuse("the length of lrs", &len, "use one learning rate for each of `steps`");
        }
        Ok(spec)
    }
}

impl Clip {
    pub(super) fn norm(&self) -> Norm {
        self.norm_type.0
    }
}
