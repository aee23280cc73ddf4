//! Differences between a checkpoint and the optimizer that loads it.

use super::manifest::Type;
use serde::{Deserialize, Serialize};

/// Reason why a checkpoint does not fit. Nothing was changed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// Vectors that the checkpoint lacks, up to a thousand of them.
    #[error("the checkpoint has nothing for {}; load what it has with `partial`", list(.vectors))]
    Missing {
        /// Parameters, or their states as `parameter:state`.
        vectors: Vec<String>,
    },
    /// Vectors of the checkpoint that do not exist here, up to a thousand of them.
    #[error("the checkpoint has {}, which are not here; leave them out with `partial`", list(.vectors))]
    Unexpected {
        /// Parameters, or their states as `parameter:state`.
        vectors: Vec<String>,
    },
    /// A parameter has another shape.
    #[error("parameter {tensor:?} was saved with shape {saved:?}, and has {here:?}")]
    Shape {
        /// Name of the parameter.
        tensor: String,
        /// Shape in the checkpoint.
        saved: Vec<u64>,
        /// Shape here.
        here: Vec<u64>,
    },
    /// A vector has another type.
    #[error("slot {slot:?} of {tensor:?} was saved as {saved:?}, and is {here:?}; `partial` converts")]
    Type {
        /// Name of the parameter.
        tensor: String,
        /// Name of the vector.
        slot: String,
        /// Type in the checkpoint.
        saved: Type,
        /// Type here.
        here: Type,
    },
    /// L-BFGS keeps its pairs in another type. A history is not converted, because its products belong to the rounded pairs.
    #[error(
        "the history of L-BFGS was saved as {saved}, and is {here}; build L-BFGS with `history: History::{saved}`"
    )]
    History {
        /// Type of the history in the checkpoint.
        saved: String,
        /// Type here.
        here: String,
    },
    /// A rule, group, schedule or recipe differs.
    #[error("{what} was saved as {saved}, and is {here}; go on with these by `other_settings`")]
    Setting {
        /// Name of the setting.
        what: String,
        /// Value in the checkpoint.
        saved: String,
        /// Value here.
        here: String,
    },
}

meshstep_tensor::debug_is_display!(Mismatch);

/// Maximum number of names in an error, which all ranks exchange.
pub(crate) const LISTED: usize = 1000;

/// Lists the first few names.
fn list(names: &[String]) -> String {
    const MOST: usize = 5;
    let shown: Vec<String> = names.iter().take(MOST).map(|name| format!("{name:?}")).collect();
    match names.len().saturating_sub(MOST) {
        0 => shown.join(", "),
        more if names.len() >= LISTED => format!("{} and {more} more at least", shown.join(", ")),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
