//! Errors of files with PyTorch's names.

use crate::Type;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Reason why a file with PyTorch's names is not written or not imported. Nothing was changed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum PyTorchError {
    /// PyTorch has no such rule.
    #[error(
        "the state of {param:?} has no names in PyTorch, as its rule, {rule}, is none of adam, adamw, sgd, rmsprop, adagrad, \
         muon there; save a checkpoint instead"
    )]
    Rule {
        /// Name of the parameter.
        param: String,
        /// Name of its rule.
        rule: String,
    },
    /// SGD's buffer holds another value than PyTorch's.
    #[error(
        "the momentum of {param:?} is not what PyTorch's SGD keeps; that is `Momentum::PyTorch`'s, or save a checkpoint"
    )]
    Form {
        /// Name of the parameter.
        param: String,
    },
    /// The master is stored as a 16-bit remainder.
    #[error(
        "the master of {param:?} is a 16-bit remainder; an f32 master or none can be exported and imported"
    )]
    Remainder {
        /// Name of the parameter.
        param: String,
    },
    /// Two vectors would have the same name.
    #[error("two vectors have the name {key:?}, or the file format reserves it; rename the parameter")]
    Name {
        /// The name.
        key: String,
    },
    /// The file is not a safetensors file, or damaged.
    #[error("{} is no safetensors file: {reason}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
    /// Ranks read different files, or a file that is being written.
    #[error(
        "bytes {} to {} of {} are not those that rank 0 reads: give every rank the same file, and do not write to it", .bytes[0],
        .bytes[1], .path.display()
    )]
    Apart {
        /// The file here.
        path: PathBuf,
        /// First byte of a range that differs, and the byte behind its last.
        bytes: [u64; 2],
    },
    /// The file lacks an entry.
    #[error("the file has no entry {key:?}; a parameter without any state begins anew with `fresh`")]
    Missing {
        /// Key of the first missing entry.
        key: String,
    },
    /// The file has an entry that does not exist here.
    #[error("the file has {key:?}, which is not here; it is of another model or rule")]
    Unexpected {
        /// Key of the first such entry.
        key: String,
    },
    /// A vector has another shape.
    #[error("{key:?} has shape {found:?} in the file, and {here:?} here")]
    Shape {
        /// Name of the vector.
        key: String,
        /// Shape in the file.
        found: Vec<u64>,
        /// Shape here.
        here: Vec<u64>,
    },
    /// A vector has a type that loses information, or is not numeric.
    #[error("{key:?} is {found} in the file, and {here:?} here; convert it in the file")]
    Type {
        /// Name of the vector.
        key: String,
        /// Type in the file.
        found: String,
        /// Type here.
        here: Type,
    },
    /// A count of updates is not a valid count.
    #[error("{key:?} is {value}, which is no count of updates")]
    Step {
        /// Name of the scalar.
        key: String,
        /// Value of the scalar.
        value: String,
    },
}

meshstep_tensor::debug_is_display!(PyTorchError);
