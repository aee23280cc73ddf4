//! Reader for the fields of a rule: takes them one by one, and rejects those that remain.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::reason::Reason;

/// Hyperparameters of one rule as written in a trace.
#[derive(Debug)]
pub(super) struct Fields {
    rule: String,
    left: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Fields {
    /// Collects the fields of `optimizer` except its name, with a group's overrides. Overrides must not be null, because
    /// null could mean the optimizer's value or the rule's default.
    pub(super) fn new(
        optimizer: &Map<String, Value>,
        overrides: &Map<String, Value>,
    ) -> Result<Self, Reason> {
        let mut left = optimizer.clone();
        left.extend(overrides.clone());
        let rule = match left.remove("name") {
            Some(Value::String(rule)) => rule,
            _ => String::new(),
        };
        if overrides.contains_key("name") {
            let why = "a trace has one rule for all groups";
            return Err(Reason::Contradiction {
                what: format!("the rule {rule:?} of a group"),
                other: format!("the trace's rule {}", optimizer.get("name").unwrap_or(&Value::Null)),
                why: why.to_owned(),
            });
        }
        if let Some((field, _)) = overrides.iter().find(|(_, value)| value.is_null()) {
            return Err(Reason::NullInGroup { rule, field: field.clone() });
        }
        Ok(Fields { rule, left, known: Vec::new() })
    }

    pub(super) fn rule(&self) -> &str {
        &self.rule
    }

    /// Returns the field's value, or `default` if it is absent or null.
    pub(super) fn get<T: DeserializeOwned>(&mut self, field: &'static str, default: T) -> Result<T, Reason> {
        Ok(self.find(field)?.unwrap_or(default))
    }

    /// Returns the field's value, or `None` if it is absent or null.
    pub(super) fn find<T: DeserializeOwned>(&mut self, field: &'static str) -> Result<Option<T>, Reason> {
        self.known.push(field);
        let value = self.left.remove(field).unwrap_or(Value::Null);
        serde_json::from_value(value).map_err(|source| Reason::Field {
            rule: self.rule.clone(),
            field,
            source,
        })
    }

    /// Rejects fields that were not read.
    pub(super) fn finish(self) -> Result<(), Reason> {
        match self.left.into_iter().next() {
            None => Ok(()),
            Some((field, _)) => {
                Err(Reason::UnknownField { rule: self.rule, field, known: self.known.join(", ") })
            }
        }
    }
}
