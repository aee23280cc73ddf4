//! What can go wrong with a GPU.

use super::Unavailable;
use crate::Category;

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
    /// Two things that work together are on different devices.
    #[error("{what} is on device {given} and the stream on device {expected}; use one device")]
    OtherDevice {
        /// What is elsewhere.
        what: &'static str,
        /// Its device.
        given: usize,
        /// The stream's device.
        expected: usize,
    },
    /// A range reaches past the end.
    #[error("bytes {start}..{end} of {what} of {len}")]
    OutOfBounds {
        /// Of what.
        what: &'static str,
        /// First byte asked for.
        start: usize,
        /// One past the last byte asked for; the largest number where that has no place in an address.
        end: usize,
        /// Bytes there are.
        len: usize,
    },
    /// A copy onto itself.
    #[error("{len} bytes cannot be copied to a place {apart} bytes away; ranges must not overlap")]
    Overlap {
        /// Bytes to copy.
        len: usize,
        /// Distance of the two places.
        apart: u64,
    },
    /// Host memory is used by a stream.
    #[error("pinned memory is in use by a stream; wait for the stream first")]
    InUse,
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
