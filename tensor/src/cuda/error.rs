//! What can go wrong with a GPU.

use super::Unavailable;
use crate::{Category, DType, Place};
use std::fmt;

/// What went wrong with a device, a stream or memory there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// CUDA cannot be used on this machine.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// A device that does not exist.
    #[error("there is no device {ordinal}; use one below {devices}")]
    Ordinal {
        /// Asked for.
        ordinal: usize,
        /// How many there are.
        devices: usize,
    },
    /// The device has not so much left.
    #[error("device {ordinal} has no memory for {bytes} bytes of {category}")]
    OutOfMemory {
        /// The device.
        ordinal: usize,
        /// Bytes asked for.
        bytes: usize,
        /// What they were for.
        category: Category,
    },
    /// A buffer is not of the stream's device.
    #[error("a buffer of {given} for a stream of GPU {ordinal}; make it there, with Buffer::zeroed_on")]
    Elsewhere {
        /// Where the buffer is.
        given: Place,
        /// The stream's device.
        ordinal: usize,
    },
    /// Two buffers, or a buffer and host memory, differ in bytes.
    #[error("{given} bytes given where {expected} are needed")]
    WrongLen {
        /// Bytes given.
        given: usize,
        /// Bytes needed.
        expected: usize,
    },
    /// A range reaches past the end of page-locked memory.
    #[error("bytes {start}..{end} of pinned memory of {len}")]
    OutOfBounds {
        /// First byte asked for.
        start: usize,
        /// One past the last byte asked for; the largest number where that has no place in an address.
        end: usize,
        /// Bytes there are.
        len: usize,
    },
    /// Host memory is used by a stream.
    #[error("pinned memory is in use by a stream; wait for the stream first")]
    InUse,
    /// What cannot be part of a graph, while a stream is captured into one.
    #[error("{what} cannot be part of a graph; do it before the capture, or after")]
    Capturing {
        /// What was asked for, or the driver's function.
        what: &'static str,
    },
    /// A capture ended before work on another stream that belongs to it.
    #[error("work on a second stream belongs to the graph; wait for its end on the stream that is captured")]
    Unjoined,
    /// A stream that is another one on each thread.
    #[error(
        "a stream of each thread has no order across threads; use one of its own (candle: Device::new_cuda_with_stream)"
    )]
    PerThread,
    /// A stream of a context that is not the device's primary one.
    #[error(
        "a stream of another context of device {ordinal}; only those of its primary one share memory with it"
    )]
    OtherContext {
        /// The device.
        ordinal: usize,
    },
    /// An address of nothing.
    #[error("no memory is at address 0")]
    Null,
    /// An address where an element cannot begin.
    #[error("{dtype} at address {address:#x}, which is not a multiple of {align}")]
    Misaligned {
        /// The address.
        address: u64,
        /// The elements' type.
        dtype: DType,
        /// Bytes of an element.
        align: usize,
    },
    /// Memory that is not the device's.
    #[error("{found} at address {address:#x}, where memory of device {ordinal} is needed")]
    NotThere {
        /// The address, of the first byte or of the last.
        address: u64,
        /// Where memory is needed.
        ordinal: usize,
        /// What is there.
        found: Found,
    },
    /// cudarc has kept an error of an earlier call, or has met one.
    #[error("cudarc: {name} ({code})")]
    Cudarc {
        /// The driver's number for it.
        code: u32,
        /// The driver's name for it.
        name: String,
    },
    /// The driver cannot compile the text of kernels.
    #[error("the driver refuses this PTX ({log}); a newer driver may take it")]
    Ptx {
        /// The driver's reason.
        log: String,
    },
    /// The driver is older than the text of kernels.
    #[error(
        "the driver's compiler is too old for this PTX ({log}); update the driver, or build with the feature `cubins`"
    )]
    PtxTooNew {
        /// The driver's reason.
        log: String,
    },
    /// The driver lacks its compiler of PTX.
    #[error(
        "the driver has no PTX compiler (libnvidia-ptxjitcompiler); install it, start the container with the driver \
         capability `compute` (NVIDIA_DRIVER_CAPABILITIES), or build with the feature `cubins`"
    )]
    NoPtxCompiler,
    /// The environment forbids the driver to compile PTX.
    #[error(
        "CUDA_DISABLE_PTX_JIT forbids the driver to compile PTX; unset it, or build with the feature `cubins`"
    )]
    PtxDisabled,
    /// A module does not have a kernel.
    #[error("the module has no kernel {name}")]
    NoKernel {
        /// Asked for.
        name: String,
    },
    /// The driver refused, or an earlier call has failed on the device.
    #[error("{call} failed with {name} ({code})")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// The driver's number for it.
        code: u32,
        /// The driver's name for it.
        name: String,
    },
}

/// What the driver says is at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing that it knows: ordinary memory of the host, or none.
    Unknown,
    /// Memory of the host that the driver knows.
    Host,
    /// Memory of this device.
    Device(usize),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Unknown => f.write_str("nothing that the driver knows"),
            Found::Host => f.write_str("memory of the host"),
            Found::Device(ordinal) => write!(f, "memory of device {ordinal}"),
        }
    }
}
