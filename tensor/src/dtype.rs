//! Element types of buffers, and the Rust type of each.

use half::{bf16, f16};
use std::fmt;

/// Element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// The upper half of a binary32: 8 bits of significand.
    BF16,
    /// IEEE 754 binary16.
    F16,
    /// Unsigned 16-bit integer: lower halves of f32 numbers stored apart from their upper halves, never parameters.
    U16,
    /// Unsigned 64-bit integer: counters and exact accumulators, never parameters.
    U64,
}

impl DType {
    /// Returns the bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F64 | DType::U64 => 8,
            DType::BF16 | DType::F16 | DType::U16 => 2,
        }
    }

    /// Returns true for the floating-point types.
    pub const fn is_float(self) -> bool {
        !matches!(self, DType::U16 | DType::U64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::U16 => "u16",
            DType::U64 => "u64",
        })
    }
}

/// Rust type of the elements of one [`DType`]: f32, f64, bf16, f16, u16 or u64. The trait is sealed.
///
/// ```
/// use meshstep_tensor::{DType, Element, Error, Slice, bf16};
///
/// /// Returns the largest element.
/// fn largest<T: Element + PartialOrd>(values: Slice<'_>) -> Result<Option<T>, Error> {
///     Ok(values.typed::<T>()?.iter().copied().reduce(|a, b| if a < b { b } else { a }))
/// }
/// assert_eq!(largest::<f32>((&[1f32, 3.0, 2.0]).into())?, Some(3.0));
/// assert!(largest::<bf16>((&[1f32]).into()).is_err());
/// assert_eq!(bf16::DTYPE, DType::BF16);
/// # Ok::<(), Error>(())
/// ```
pub trait Element: sealed::Sealed + bytemuck::Pod + PartialEq + fmt::Debug + Send + Sync {
    /// The matching [`DType`].
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
    impl Sealed for u16 {}
    impl Sealed for u64 {}
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for f64 {
    const DTYPE: DType = DType::F64;
}
impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for u16 {
    const DTYPE: DType = DType::U16;
}
impl Element for u64 {
    const DTYPE: DType = DType::U64;
}
