//! Flat memory on a device: typed buffers, layouts of named parameters, casts, exact byte accounting.
//!
//! ```
//! use meshstep_tensor::{Buffer, Category, DType, Layout, Meter};
//!
//! let layout = Layout::builder().param("w", &[3, 4], DType::F32).param("b", &[4], DType::F32).build()?;
//! let meter = Meter::new();
//! let mut params = Buffer::zeroed(layout.len(DType::F32), DType::F32, &meter, Category::Params)?;
//! let b = layout.get("b").ok_or("no such parameter")?;
//! params.typed_mut::<f32>()?[b.range()].fill(1.0);
//! assert_eq!(meter.live(Category::Params), params.bytes() as u64);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | type | meaning |
//! |---|---|
//! | [`Buffer`] | exclusive owner of a range of one allocation; splits and joins without copying |
//! | [`Slice`], [`SliceMut`] | borrowed flat memory that knows its [`DType`] |
//! | [`Layout`] | map from parameter name to its range in a flat vector |
//! | [`Meter`] | live and peak bytes by [`Category`], exactly |
//! | [`Place`], [`Queue`] | location of memory, and the order of work on it: empty on the CPU, a stream on a GPU |
//! | [`Threads`], [`SplitParts`] | threads that share the work of one call, and the parts of it |
//! | `cuda` (a feature) | devices, streams, events and memory of NVIDIA GPUs |
//! | [`simd`], [`narrow`] | loops compiled for every instruction set; conversions that vectorise in them |
//! | [`fetch`], [`copy_non_temporal`], [`copy_bytes_non_temporal`] | software prefetch; copies larger than the caches |
//! | [`prelude`] | types for a glob import |
//!
//! # Limits
//! Arithmetic on buffers in this crate runs on the CPU only. Huge pages are requested on Linux; the kernel decides whether to
//! grant them.

mod buffer;
mod cast;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dtype;
mod error;
pub mod fetch;
mod layout;
mod memory;
mod meter;
mod non_temporal;
mod place;
pub mod prelude;
mod queue;
pub mod simd;
mod slice;

pub use buffer::Buffer;
pub use cast::cast;
pub use cast::narrow;
pub use dtype::{DType, Element};
pub use error::Error;
#[doc(hidden)]
pub use error::write_with_causes;
pub use half::{bf16, f16};
pub use layout::{ALIGN, Layout, LayoutBuilder, Param};
pub use meter::{Category, Claim, Meter};
pub use non_temporal::{copy_bytes_non_temporal, copy_non_temporal};
pub use place::Place;
pub use queue::{Helper, Queue, SplitParts, Threads};
pub use slice::{Slice, SliceMut};
