//! Errors of bytes from `serialize`.

use serde::{Deserialize, Serialize};

/// Reason why bytes are refused. Nothing was changed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum BytesError {
    /// The bytes are not those that `serialize` made.
    #[error("the bytes are not what `serialize` made: {reason}")]
    Damaged {
        /// Reason.
        reason: String,
    },
    /// The bytes are of another rank, layout or rule.
    #[error("{what} was {there} when the bytes were made, and is {here}; another layout needs a checkpoint")]
    Other {
        /// Name of the property that differs.
        what: String,
        /// Its value when the bytes were made.
        there: String,
        /// Its value here.
        here: String,
    },
}

meshstep_tensor::debug_is_display!(BytesError);
