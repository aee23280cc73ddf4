//! Errors of flat memory, and the Debug form of all errors.

use crate::{Category, DType, Place};
use std::fmt;
use std::ops::Range;

/// Error of a buffer, a slice or a layout.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The allocator or the kernel refused the allocation.
    #[error("no memory for {bytes} bytes of {category}")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Category of the allocation.
        category: Category,
    },
    /// The byte count does not fit an address.
    #[error("{len} elements of {dtype} are more bytes than this machine can address")]
    TooLarge {
        /// Elements requested.
        len: usize,
        /// Element type.
        dtype: DType,
    },
    /// A view was requested in a type that the memory does not hold.
    #[error("asked for elements of {asked} but the memory holds {holds}")]
    WrongDType {
        /// Type requested.
        asked: DType,
        /// Type of the memory.
        holds: DType,
    },
    /// Two slices of one operation differ in length.
    #[error("{given} elements given but {expected} are needed")]
    WrongLen {
        /// Elements given.
        given: usize,
        /// Elements needed.
        expected: usize,
    },
    /// Memory is at another place than the operation needs.
    #[error("memory is on {given} but memory on {expected} is needed")]
    Place {
        /// Place of the memory.
        given: Place,
        /// Place needed.
        expected: Place,
    },
    /// Memory of the CPU begins at an address that its element type does not allow.
    #[error("address {address:#x} is no multiple of the size of {dtype}")]
    Misaligned {
        /// Address of the first element.
        address: usize,
        /// Element type.
        dtype: DType,
    },
    /// A CUDA call failed, or there is no GPU.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::cuda::Error),
    /// A range reaches past the end.
    #[error("elements {start}..{end} are out of bounds for a buffer of {len}")]
    OutOfBounds {
        /// First element asked for.
        start: usize,
        /// One past the last element asked for.
        end: usize,
        /// Elements of the buffer.
        len: usize,
    },
    /// There is no conversion between these types.
    #[error("no cast from {from} to {to}; casts are between f32, f64, bf16 and f16")]
    NoCast {
        /// Source type.
        from: DType,
        /// Destination type.
        to: DType,
    },
    /// The layout has no element.
    #[error("a layout needs at least one parameter with at least one element")]
    EmptyLayout,
    /// The unit has no name.
    #[error("the unit that begins at parameter {index} has no name")]
    EmptyUnit {
        /// Number of parameters added before it.
        index: usize,
    },
    /// The parameter has no name.
    #[error("parameter {index} has an empty name; gradients and checkpoints find parameters by name")]
    EmptyName {
        /// Its index in registration order.
        index: usize,
    },
    /// Two parameters have one name.
    #[error("parameter {name:?} is registered twice (as {first} and as {second}); names must differ")]
    DuplicateName {
        /// The name.
        name: String,
        /// Index of the first registration.
        first: usize,
        /// Index of the second.
        second: usize,
    },
    /// The parameter's type is not a float.
    #[error("parameter {name:?} cannot be {dtype}; use f32, f64, bf16 or f16")]
    NotAFloat {
        /// The parameter.
        name: String,
        /// Type requested.
        dtype: DType,
    },
    /// The product of a shape overflows, or the layout is longer than memory.
    #[error("parameter {name:?} of shape {shape:?} makes the layout larger than this machine can address")]
    ShapeTooLarge {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
}

crate::debug_is_display!(Error);

impl Error {
    pub(crate) fn bounds(range: Range<usize>, len: usize) -> Self {
        Error::OutOfBounds { start: range.start, end: range.end, len }
    }
}

/// Implements `Debug` of errors as their sentence with its causes: a `main` that returns an error prints its Debug form.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_is_display {
    ($($error:ty),+ $(,)?) => {$(
        impl ::core::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                $crate::write_with_causes(self, f)
            }
        }
    )+};
}

/// Writes the sentence of an error, and of each cause that the sentences before do not contain.
#[doc(hidden)]
pub fn write_with_causes(error: &dyn std::error::Error, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let sentence = next.to_string();
        if !text.contains(&sentence) {
            text = text + ": " + &sentence;
        }
        cause = next.source();
    }
    f.write_str(&text)
}
