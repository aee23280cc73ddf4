//! What each vector is called in PyTorch. Arithmetic only.

use super::error::PyTorchError;
use crate::checkpoint::Type;
use crate::checkpoint::contents::{Content, MASTER, Named, PARAM, REMAINDER};
use meshstep_optim::Rule;

/// A parameter's vectors, by their keys in the file.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    /// What all of them are in the file.
    pub(super) dtype: Type,
    /// What the parameter is written from: its master, where it has one.
    pub(super) value: Named,
    /// Where updates are counted.
    pub(super) step: Option<String>,
    /// Its state.
    pub(super) state: Vec<(String, Named)>,
}

impl Keys {
    /// Those of a parameter; of one that is frozen there is no rule.
    pub(super) fn new(content: &Content, rule: Option<&dyn Rule>) -> Result<Self, PyTorchError> {
        let Content { name: param, vectors, .. } = content;
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

/// What PyTorch calls a rule's vector.
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

/// An average of gradients, or of steps, is another number than PyTorch's sum.
fn other_form(rule: &dyn Rule) -> bool {
    rule.name() == "sgd" && rule.hyperparameters().iter().any(|&(name, value)| name == "form" && value != 0.0)
}
