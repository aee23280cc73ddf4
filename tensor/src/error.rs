//! What can go wrong with flat memory.

use crate::{Category, DType, Place};
use std::ops::Range;

/// What went wrong with a buffer, a slice or a layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The allocator or the kernel refused.
    #[error("no memory for {bytes} bytes of {category}")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// What they were for.
        category: Category,
    },
    /// The byte count does not fit an address.
    #[error("{len} elements of {dtype} are more bytes than this machine can address")]
    TooLarge {
        /// Elements asked for.
        len: usize,
        /// Their type.
        dtype: DType,
    },
    /// A view of one type was asked of memory of another.
    #[error("asked for {asked} where the memory holds {holds}")]
    WrongDType {
        /// What the caller asked for.
        asked: DType,
        /// What the memory holds.
        holds: DType,
    },
    /// Two slices that go together differ in length.
    #[error("{given} elements given where {expected} are needed")]
    WrongLen {
        /// Elements given.
        given: usize,
        /// Elements needed.
        expected: usize,
    },
    /// Memory is elsewhere than where it is needed.
    #[error("memory of {given} where memory of {expected} is needed")]
    Place {
        /// Where it is.
        given: Place,
        /// Where it is needed.
        expected: Place,
    },
    /// A GPU refused, or there is none.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::cuda::Error),
    /// A range reaches past the end.
    #[error("elements {start}..{end} of a buffer of {len}")]
    OutOfBounds {
        /// First element asked for.
        start: usize,
        /// One past the last element asked for.
        end: usize,
        /// Elements there are.
        len: usize,
    },
    /// No conversion between these types.
    #[error("no cast from {from} to {to}; casts are between f32, f64, bf16 and f16")]
    NoCast {
        /// Source type.
        from: DType,
        /// Destination type.
        to: DType,
    },
    /// A layout without a single element.
    #[error("a layout needs at least one parameter with at least one element")]
    EmptyLayout,
    /// A unit without a name.
    #[error("the unit that begins at parameter {index} has no name")]
    EmptyUnit {
        /// How many parameters were added before it.
        index: usize,
    },
    /// A parameter without a name.
    #[error("parameter {index} has an empty name; names are how gradients and checkpoints find it")]
    EmptyName {
        /// Its place in registration order.
        index: usize,
    },
    /// Two parameters of one name.
    #[error("parameter {name:?} is registered twice (as {first} and as {second}); names must differ")]
    DuplicateName {
        /// The name.
        name: String,
        /// Index of the first registration.
        first: usize,
        /// Index of the second.
        second: usize,
    },
    /// A parameter type that is not a float.
    #[error("parameter {name:?} cannot be {dtype}; use f32, f64, bf16 or f16")]
    NotAFloat {
        /// The parameter.
        name: String,
        /// The type asked for.
        dtype: DType,
    },
    /// A shape whose product overflows, or a layout longer than memory.
    #[error("parameter {name:?} of shape {shape:?} makes the layout larger than this machine can address")]
    ShapeTooLarge {
        /// The parameter.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
}

impl Error {
    pub(crate) fn bounds(range: Range<usize>, len: usize) -> Self {
        Error::OutOfBounds { start: range.start, end: range.end, len }
    }
}
