//! Errors of memory that a parameter is read into.

use meshstep_tensor::{DType, Place};

/// Error in the memory that a parameter was to be read into.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The memory has the wrong length.
    #[error("{name:?} was to be read into {given} elements; its shape {shape:?} has {expected}")]
    Len {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Elements of the shape.
        expected: usize,
        /// Elements given.
        given: usize,
    },
    /// The memory has the wrong type.
    #[error("{name:?} was to be read into {given}; it is {expected}, so read it into that and cast it")]
    DType {
        /// The parameter.
        name: String,
        /// Its type.
        expected: DType,
        /// The type given.
        given: DType,
    },
    /// The memory is on another GPU.
    #[error("{name:?} was to be read into memory of {given:?}; use memory of the CPU or of {own:?}")]
    Place {
        /// The parameter.
        name: String,
        /// Place of the memory given.
        given: Place,
        /// Place of the optimizer.
        own: Place,
    },
}

meshstep_tensor::debug_is_display!(ReadError);
