//! Errors of GPUs.

use super::Unavailable;
use crate::{Category, DType, Place};
use std::fmt;

/// Error of a device, a stream or device memory.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// CUDA cannot be used on this machine.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The ordinal is not that of a device.
    #[error("there is no device {ordinal}; use one below {devices}")]
    Ordinal {
        /// Ordinal requested.
        ordinal: usize,
        /// Number of devices.
        devices: usize,
    },
    /// The device is out of memory.
    #[error("device {ordinal} has no memory for {bytes} bytes of {category}")]
    OutOfMemory {
        /// The device.
        ordinal: usize,
        /// Bytes requested.
        bytes: usize,
        /// Category of the allocation.
        category: Category,
    },
    /// A buffer is not on the stream's device.
    #[error("the buffer is on {given} but the stream on GPU {ordinal}; make it with Buffer::zeroed_on")]
    Elsewhere {
        /// Place of the buffer.
        given: Place,
        /// The stream's device.
        ordinal: usize,
    },
    /// Two buffers, or a buffer and host memory, differ in bytes.
    #[error("{given} bytes given but {expected} are needed")]
    WrongLen {
        /// Bytes given.
        given: usize,
        /// Bytes needed.
        expected: usize,
    },
    /// A range reaches past the end of page-locked memory.
    #[error("bytes {start}..{end} are out of bounds for pinned memory of {len}")]
    OutOfBounds {
        /// First byte requested.
        start: usize,
        /// One past the last byte requested; `usize::MAX` if that overflows.
        end: usize,
        /// Bytes of the memory.
        len: usize,
    },
    /// Pinned memory is in use by a stream.
    #[error("pinned memory is in use by a stream; wait for the stream first")]
    InUse,
    /// The operation cannot be part of a graph, and the stream is being captured.
    #[error("{what} cannot be part of a graph; do it before the capture, or after")]
    Capturing {
        /// Operation, or the driver's function.
        what: &'static str,
    },
    /// A capture ended before the end of another stream's captured work.
    #[error("work on a second stream belongs to the graph; make the captured stream wait for its end")]
    Unjoined,
    /// The stream is the per-thread default stream.
    #[error(
        "the per-thread default stream has no order across threads; use an explicit stream (candle: Device::new_cuda_with_stream)"
    )]
    PerThread,
    /// The stream belongs to a context other than the device's primary one.
    #[error("the stream belongs to another context of device {ordinal}; use a stream of its primary context")]
    OtherContext {
        /// The device.
        ordinal: usize,
    },
    /// The address is null.
    #[error("the memory address is null")]
    Null,
    /// The address is not aligned for the element type.
    #[error("address {address:#x} of {dtype} elements is not a multiple of {align}")]
    Misaligned {
        /// The address.
        address: u64,
        /// The elements' type.
        dtype: DType,
        /// Bytes of an element.
        align: usize,
    },
    /// The memory is not on the device.
    #[error("address {address:#x} is {found}; memory of device {ordinal} is needed")]
    NotThere {
        /// Address of the first or of the last byte.
        address: u64,
        /// Ordinal of the device.
        ordinal: usize,
        /// Memory found at the address.
        found: Found,
    },
    /// cudarc returned an error, of this call or of an earlier one.
    #[error("cudarc: {name} ({code})")]
    Cudarc {
        /// Driver's error code.
        code: u32,
        /// Driver's name of the error.
        name: String,
    },
    /// The driver cannot compile the PTX.
    #[error("the driver refuses this PTX ({log}); a newer driver may take it")]
    Ptx {
        /// Driver's log.
        log: String,
    },
    /// The driver is older than the PTX version.
    #[error(
        "the driver's compiler is too old for this PTX ({log}); update the driver, or build with the feature `cubins`"
    )]
    PtxTooNew {
        /// Driver's log.
        log: String,
    },
    /// The driver lacks its PTX compiler.
    #[error(
        "the driver has no PTX compiler (libnvidia-ptxjitcompiler); install it, start the container with the driver \
         capability `compute` (NVIDIA_DRIVER_CAPABILITIES), or build with the feature `cubins`"
    )]
    NoPtxCompiler,
    /// The environment forbids PTX compilation.
    #[error(
        "CUDA_DISABLE_PTX_JIT forbids the driver to compile PTX; unset it, or build with the feature `cubins`"
    )]
    PtxDisabled,
    /// A module lacks a kernel.
    #[error("the module has no kernel {name}")]
    NoKernel {
        /// Name requested.
        name: String,
    },
    /// A driver call failed, or an earlier one has failed on the device.
    #[error("{call} failed with {name} ({code})")]
    Call {
        /// Driver function.
        call: &'static str,
        /// Driver's error code.
        code: u32,
        /// Driver's name of the error.
        name: String,
    },
}

crate::debug_is_display!(Error);

/// Kind of memory at an address, as the driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Unknown to the driver: ordinary host memory, or none.
    Unknown,
    /// Host memory known to the driver.
    Host,
    /// Memory of the device with this ordinal.
    Device(usize),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Unknown => f.write_str("unknown to the driver"),
            Found::Host => f.write_str("host memory"),
            Found::Device(ordinal) => write!(f, "memory of device {ordinal}"),
        }
    }
}
