//! What cannot be said in PyTorch's names, or is not what a file says.

use crate::checkpoint::Type;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Why a file in PyTorch's names is not written, or not taken in. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum PyTorchError {
    /// A rule that PyTorch has not.
    #[error(
        "the state of {param:?} has no names in PyTorch, as its rule, {rule}, is none of adam, adamw, sgd, rmsprop, adagrad, \
         muon there; save a checkpoint instead"
    )]
    Rule {
        /// The parameter.
        param: String,
        /// Its rule.
        rule: String,
    },
    /// A buffer of SGD that holds something else than PyTorch's.
    #[error(
        "the momentum of {param:?} is not what PyTorch's SGD keeps; that is `Momentum::PyTorch`'s, or save a checkpoint"
    )]
    Form {
        /// The parameter.
        param: String,
    },
    /// A master in halves.
    #[error(
        "the master of {param:?} is a 16-bit remainder; an f32 master or none can be exported and imported"
    )]
    Remainder {
        /// The parameter.
        param: String,
    },
    /// Two vectors would be called alike.
    #[error("two vectors are called {key:?}, or the file format needs that name; rename the parameter")]
    Name {
        /// The name.
        key: String,
    },
    /// The file is no safetensors file, or damaged.
    #[error("{} is no safetensors file: {reason}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Ranks read other files, or one that is written meanwhile.
    #[error(
        "bytes {} to {} of {} are not those that rank 0 reads: give every rank the same file, which nobody writes", .bytes[0],
        .bytes[1], .path.display()
    )]
    Apart {
        /// The file here.
        path: PathBuf,
        /// The first ones in which they differ somewhere, and the one behind.
        bytes: [u64; 2],
    },
    /// What is here and not in the file.
    #[error(
        "the file has nothing called {key:?}; a parameter whose state is missing as a whole begins anew with `fresh`"
    )]
    Missing {
        /// The first of them.
        key: String,
    },
    /// What is in the file and not here.
    #[error("the file has {key:?}, which is not here; it is of another model or rule")]
    Unexpected {
        /// The first of them.
        key: String,
    },
    /// Another shape.
    #[error("{key:?} has shape {found:?} in the file, and {here:?} here")]
    Shape {
        /// Which vector.
        key: String,
        /// In the file.
        found: Vec<u64>,
        /// Here.
        here: Vec<u64>,
    },
    /// Another type, of which something would be lost, or that is none of numbers.
    #[error("{key:?} is {found} in the file, and {here:?} here; convert it there")]
    Type {
        /// Which vector.
        key: String,
        /// In the file.
        found: String,
        /// Here.
        here: Type,
    },
    /// A count of updates that is none.
    #[error("{key:?} is {value}, which is no count of updates")]
    Step {
        /// Which.
        key: String,
        /// What it is.
        value: String,
    },
}
