//! The fields of a rule, taken one by one; what is left over is refused.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::reason::Reason;

/// The hyperparameters of one rule as a trace spells them.
#[derive(Debug)]
pub(super) struct Fields {
    rule: String,
    left: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Fields {
    /// The fields of `optimizer` but its name, some of them replaced by a group's, which are values: of null nobody could
    /// say whether the optimizer's or the rule's default is meant.
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
            let why = "one layout has one rule";
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

    /// The field's value; `default` where it is absent or null.
    pub(super) fn get<T: DeserializeOwned>(&mut self, field: &'static str, default: T) -> Result<T, Reason> {
        Ok(self.find(field)?.unwrap_or(default))
    }

    /// The field's value, if it is there and not null.
    pub(super) fn find<T: DeserializeOwned>(&mut self, field: &'static str) -> Result<Option<T>, Reason> {
        self.known.push(field);
        let value = self.left.remove(field).unwrap_or(Value::Null);
        serde_json::from_value(value).map_err(|source| Reason::Field {
            rule: self.rule.clone(),
            field,
            source,
        })
    }

    /// Refuses what nobody asked for.
    pub(super) fn finish(self) -> Result<(), Reason> {
        match self.left.into_iter().next() {
            None => Ok(()),
            Some((field, _)) => {
                Err(Reason::UnknownField { rule: self.rule, field, known: self.known.join(", ") })
            }
        }
    }
}
