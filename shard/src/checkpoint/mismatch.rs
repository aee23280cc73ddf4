//! How what is saved can differ from what it is to be loaded into.

use super::manifest::Type;
use serde::{Deserialize, Serialize};

/// What is saved is for something else. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// Vectors that are here and were not saved.
    #[error("the checkpoint has nothing for {}; load what it has with `partial`", list(.vectors))]
    Missing {
        /// Parameters, or their states as `parameter:state`.
        vectors: Vec<String>,
    },
    /// Vectors that were saved and are not here.
    #[error("the checkpoint has {}, which are not here; leave them out with `partial`", list(.vectors))]
    Unexpected {
        /// Parameters, or their states as `parameter:state`.
        vectors: Vec<String>,
    },
    /// A parameter of another shape.
    #[error("parameter {tensor:?} was saved with shape {saved:?}, and has {here:?}")]
    Shape {
        /// The parameter.
        tensor: String,
        /// What was saved.
        saved: Vec<u64>,
        /// What it is to be loaded into.
        here: Vec<u64>,
    },
    /// A vector of another type.
    #[error("slot {slot:?} of {tensor:?} was saved as {saved:?}, and is {here:?}; `partial` converts")]
    Type {
        /// The parameter.
        tensor: String,
        /// Which of its vectors.
        slot: String,
        /// What was saved.
        saved: Type,
        /// What it is to be loaded into.
        here: Type,
    },
    /// Other rules, groups, schedules or recipes.
    #[error("{what} was saved as {saved}, and is {here}; go on with these by `other_settings`")]
    Setting {
        /// Which setting.
        what: String,
        /// What was saved.
        saved: String,
        /// What is here.
        here: String,
    },
}

/// The first few names.
fn list(names: &[String]) -> String {
    const MOST: usize = 5;
    let shown: Vec<String> = names.iter().take(MOST).map(|name| format!("{name:?}")).collect();
    match names.len().saturating_sub(MOST) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
