//! Settings of a checkpoint that belong to no parameter: named members, divided into sections.

use crate::error::CheckpointError;
use serde::de::DeserializeOwned;
use serde::de::value::MapDeserializer;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Maximum length of settings as text.
pub(crate) const MOST_SETTINGS: u64 = 16 << 20;

/// Maximum of the estimated bytes that settings take in memory.
pub(crate) const MOST_VALUES: u64 = 32 << 20;

/// The manifest's `settings`. A section is a struct with some of the members as fields; the type that a section belongs to writes and
/// reads it. Members of other programs are left alone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings(BTreeMap<String, Value>);

/// Section of all types: other names of parameters, and the parameters they denote.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct TiedNames {
    pub(crate) tied: BTreeMap<String, String>,
}

impl Settings {
    /// Returns settings of these members.
    pub fn new(members: BTreeMap<String, Value>) -> Self {
        Settings(members)
    }

    /// Returns all members.
    pub fn members(&self) -> &BTreeMap<String, Value> {
        &self.0
    }

    /// Returns the settings with the members of `section`, which replace those of the same names.
    pub fn with(mut self, section: &impl Serialize) -> Self {
        if let Ok(Value::Object(members)) = serde_json::to_value(section) {
            self.0.extend(members);
        }
        self
    }

    /// Reads a section; absent members have their defaults.
    pub fn section<S: DeserializeOwned>(&self) -> Result<S, CheckpointError> {
        let members = self.0.iter().map(|(name, value)| (&**name, value));
        S::deserialize(MapDeserializer::new(members))
            .map_err(|error: serde_json::Error| contradiction(error.to_string()))
    }
}

/// Returns the error of settings that are inconsistent.
pub(crate) fn contradiction(reason: String) -> CheckpointError {
    CheckpointError::Contradiction { what: "settings".to_owned(), reason }
}
