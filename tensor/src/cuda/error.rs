//! What can go wrong with a GPU.

use super::Unavailable;
use crate::{Category, Place};

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
    /// The driver cannot compile the text of kernels.
    #[error("the driver refuses this PTX ({log}); a newer driver may take it")]
    Ptx {
        /// The driver's reason.
        log: String,
    },
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
