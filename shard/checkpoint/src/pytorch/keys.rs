//! Names of vectors in PyTorch. Arithmetic only.

use super::error::PyTorchError;
use crate::Type;
use crate::tensors::{MASTER, Named, PARAM, REMAINDER, SavedTensor};
use meshstep_optim::Rule;

/// Vectors of a parameter by their keys in the file.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    /// Type of all these vectors in the file.
    pub(super) dtype: Type,
    /// ReadSource of the parameter's values: its master, if it has one.
    pub(super) value: Named,
    /// Key of the count of updates.
    pub(super) step: Option<String>,
    /// Vectors of the state.
    pub(super) state: Vec<(String, Named)>,
}

impl Keys {
    /// Returns the keys of a parameter; `rule` is `None` for a frozen one.
    pub(super) fn new(content: &SavedTensor, rule: Option<&dyn Rule>) -> Result<Self, PyTorchError> {
        let SavedTensor { name: param, vectors, .. } = content;
        let named = |name: &str| vectors.iter().find(|vector| vector.name == name);
        if named(REMAINDER).is_some() {
            return Err(PyTorchError::Remainder { param: param.clone() });
        }
        let state = vectors.iter().filter(|vector| ![PARAM, MASTER].contains(&&*vector.name));
        let keyed = |vector: &Named| {
            let slot = rule.and_then(|rule| slot(rule.name(), &vector.name));
            let unknown = || PyTorchError::Rule {
                param: param.clone(),
                rule: rule.map_or("none", |rule| rule.name()).to_owned(),
            };
            Ok((key(param, slot.ok_or_else(unknown)?), vector.clone()))
        };
        let state: Vec<_> = state.map(keyed).collect::<Result<_, _>>()?;
        if rule.is_some_and(|rule| !state.is_empty() && other_form(rule)) {
            return Err(PyTorchError::Form { param: param.clone() });
        }
        let counted = rule.is_some_and(|rule| ["adam", "adamw", "rmsprop", "adagrad"].contains(&rule.name()));
        let value =
            named(MASTER).or(named(PARAM)).unwrap_or_else(|| unreachable!("every parameter has values"));
        let dtype = vectors.iter().map(|vector| vector.dtype).max_by_key(|dtype| dtype.size());
        let step = counted.then(|| key(param, "step"));
        Ok(Keys { dtype: dtype.unwrap_or(value.dtype), value: value.clone(), step, state })
    }
}

fn key(param: &str, slot: &str) -> String {
    format!("state.{param}.{slot}")
}

/// Returns PyTorch's name for a rule's vector.
fn slot(rule: &str, name: &str) -> Option<&'static str> {
    Some(match (rule, name) {
        ("adam" | "adamw", "m") => "exp_avg",
        ("adam" | "adamw", "v") => "exp_avg_sq",
        ("adam" | "adamw", "vmax") => "max_exp_avg_sq",
        ("sgd" | "rmsprop" | "muon", "momentum") => "momentum_buffer",
        ("rmsprop", "square_avg") => "square_avg",
        ("rmsprop", "grad_avg") => "grad_avg",
        ("adagrad", "sum") => "sum",
        _ => return None,
    })
}

/// Returns true if SGD keeps an average of gradients or of steps, which is another number than PyTorch's sum.
fn other_form(rule: &dyn Rule) -> bool {
    rule.name() == "sgd" && rule.hyperparameters().iter().any(|&(name, value)| name == "form" && value != 0.0)
}
