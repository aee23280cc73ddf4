//! Errors between ranks, as values that every rank can repeat.

use crate::Action;
use meshstep_tensor::DType;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Error of an operation.
///
/// Errors of the caller alone (from [`Uneven`](Error::Uneven) on) are returned before any other rank is involved and leave the
/// communicator usable. The failures before it poison the communicator: every rank gets the cause once, from the first operation
/// that meets it, and [`Poisoned`](Error::Poisoned) from every later one.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Ranks called different operations, or one operation with different types, lengths or roots, or wait for each
    /// other in a circle.
    #[error("operation {op_number} does not match: {}; every rank must call the same", Calls(.calls))]
    Mismatch {
        /// Number of the operation on the rank that completed the contradiction.
        op_number: u64,
        /// Call of each rank at that moment; `None` for a rank in no operation.
        calls: Vec<Option<Called>>,
    },
    /// Not every rank arrived before a deadline.
    #[error(
        "operation {op_number}, {called}: ranks {missing:?} had not arrived after {after:?} ({arrived:?} had); check the \
         missing ranks, or allow more time with `Op::within`"
    )]
    Timeout {
        /// Number of the operation on the rank that reached its deadline.
        op_number: u64,
        /// Call of the rank, boxed to keep the error small.
        called: Box<Called>,
        /// Ranks waiting in the same operation.
        arrived: Vec<usize>,
        /// Ranks that were waited for.
        missing: Vec<usize>,
        /// The deadline.
        after: Duration,
    },
    /// A rank returned or dropped its communicator while others needed it.
    #[error(
        "rank {rank} left before operation {op_number}; every rank must make the same calls before it leaves"
    )]
    Left {
        /// The rank.
        rank: usize,
        /// Number of the first operation without it.
        op_number: u64,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// Message of the panic.
        message: String,
    },
    /// A rank called [`abort`](crate::Communicator::abort), on this communicator or on one it was split from.
    #[error("rank {rank} aborted the communicator; make a new one")]
    Aborted {
        /// The rank, as a rank of the aborted communicator.
        rank: usize,
    },
    /// A rank's process ended, or it cannot be reached any more.
    #[error("rank {rank} was lost: {why}; see the output of its process, and start the ranks again")]
    Lost {
        /// The rank.
        rank: usize,
        /// Reason for the end of the connection to it.
        why: String,
    },
    /// A rank in another process has reported a failure.
    #[error("rank {rank} failed: {message}")]
    Remote {
        /// The rank.
        rank: usize,
        /// Message of the failure.
        message: String,
    },
    /// An operation did not end in time, on a backend that cannot tell which ranks are missing.
    #[error(
        "operation {op_number}, {called}, had not ended after {after:?}; compare the ranks' flight records, set \
         MESHSTEP_COMM_CHECK=1 to see calls that differ, or allow more time with `Op::within`"
    )]
    Stuck {
        /// Number of the operation on this rank.
        op_number: u64,
        /// Call of the rank, boxed to keep the error small.
        called: Box<Called>,
        /// The deadline.
        after: Duration,
    },
    /// Not all ranks of a new communicator joined.
    #[error(
        "rank {rank} of {world_size} waited {after:?} for the others to join; check that all ranks run, with this world size"
    )]
    NotJoined {
        /// This rank.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
        /// The deadline.
        after: Duration,
    },
    /// The rendezvous of the processes failed.
    #[error(transparent)]
    Rendezvous(Box<crate::rendezvous::Error>),
    /// The GPU of a launched rank is not visible.
    #[error(
        "local rank {local_rank} has no GPU {ordinal}: {visible} are visible; start as many ranks on the machine as GPUs are \
         visible (CUDA_VISIBLE_DEVICES), or choose the GPU with nccl::Options::device"
    )]
    NoDevice {
        /// Index of the rank on its machine.
        local_rank: usize,
        /// Ordinal of the GPU.
        ordinal: usize,
        /// Number of visible GPUs.
        visible: usize,
    },
    /// Ranks have registered buffers that do not match. No buffer is registered.
    #[error(
        "ranks registered {bytes:?} bytes, by rank (0: memory registered already, or not from the communicator's `zeroed_on`); \
         every rank must register a whole buffer of the same length and type, in the same order"
    )]
    UnlikeMemory {
        /// Bytes of each rank's memory.
        bytes: Vec<u64>,
    },
    /// Ranks called an operation in one pass on buffers at different places of their registered memory.
    #[error(
        "{called}: the ranks' buffers lie at different places of their registered memory; every rank must pass the same parts of \
         buffers that were registered together"
    )]
    UnlikePlaces {
        /// The call.
        called: Box<Called>,
    },
    /// The bytes are not the id of a communicator.
    #[error("an NCCL id has {needed} bytes, {given} were given; use the bytes of `UniqueId::as_bytes`")]
    BadId {
        /// Bytes given.
        given: usize,
        /// Bytes of an id.
        needed: usize,
    },
    /// NCCL refused a call, or failed later.
    #[error("{function} failed with {name} ({code}): {last_error}")]
    Nccl {
        /// NCCL function; `ncclCommGetAsyncError` for a failure after the call.
        function: &'static str,
        /// Error code.
        code: i32,
        /// Error name.
        name: String,
        /// Last error message of NCCL.
        last_error: String,
    },
    /// An earlier operation failed, so the ranks are no longer in step.
    #[error("an earlier operation failed ({cause}); make a new communicator")]
    Poisoned {
        /// The failure.
        cause: Arc<Error>,
    },
    /// The operation needs a function that writes this rank's chunk.
    #[error("reduce_and_gather needs a writer; call `Communicator::reduce_and_gather`")]
    NeedsWriter,
    /// The buffer does not divide evenly among the ranks.
    #[error("{len} elements do not divide among {world_size} ranks; pad to {padded}")]
    Uneven {
        /// Elements of the buffer.
        len: usize,
        /// Ranks in the group.
        world_size: usize,
        /// Next length that divides.
        padded: usize,
    },
    /// The group has no such rank.
    #[error("no rank {rank} in a group of {world_size}; ranks count from 0")]
    InvalidRank {
        /// Rank requested.
        rank: usize,
        /// Ranks in the group.
        world_size: usize,
    },
    /// A rank sends to or receives from itself.
    #[error("rank {rank} cannot send to or receive from itself; copy the buffer")]
    ToSelf {
        /// The rank.
        rank: usize,
    },
    /// A mean of integers was requested.
    #[error("the mean of {dtype} is not defined; take the sum and divide")]
    MeanOfIntegers {
        /// The buffer's type.
        dtype: DType,
    },
    /// A sum of integers with factors was requested.
    #[error("a sum of {dtype} takes no factors; multiply before, or use f64")]
    FactorsOfIntegers {
        /// The buffer's type.
        dtype: DType,
    },
    /// A reduction that depends on an element's place in the buffer was requested for another type than words.
    #[error(
        "a sum of the first elements and a maximum of the others is defined for u64, not for {dtype}; start one operation for each"
    )]
    WordsOnly {
        /// The buffer's type.
        dtype: DType,
    },
    /// A reduction that depends on an element's place in the buffer was requested for a reduce-scatter.
    #[error(
        "a sum of the first elements and a maximum of the others is an all_reduce; no reduce_scatter has it"
    )]
    WholeOnly,
    /// The backend has no pairwise sum.
    #[error(
        "this backend has no pairwise sum; exchange chunks by all_to_all and add them, or use Reduction::Sum"
    )]
    NoPairwise,
    /// Collectives do not support the type.
    #[error("collectives do not support {dtype}; use f32, f64, bf16, f16 or u64")]
    UnsupportedDType {
        /// The buffer's type.
        dtype: DType,
    },
    /// The world has no rank.
    #[error("a world needs at least one rank")]
    ZeroRanks,
    /// The system could not start a thread.
    #[error("cannot start a thread for rank {rank}: {message}; use fewer ranks or raise the limit")]
    NoThread {
        /// The rank.
        rank: usize,
        /// Message of the system.
        message: String,
    },
    /// NCCL cannot be used on this machine.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    NoNccl(#[from] crate::nccl::Unavailable),
    /// This process cannot be a rank of an MPI job.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(Box<crate::mpi::Error>),
    /// Error of the buffer.
    #[error(transparent)]
    Buffer(#[from] meshstep_tensor::Error),
}

meshstep_tensor::debug_is_display!(Error);

impl From<crate::rendezvous::Error> for Error {
    fn from(error: crate::rendezvous::Error) -> Self {
        Error::Rendezvous(Box::new(error))
    }
}

#[cfg(feature = "mpi")]
impl From<crate::mpi::Error> for Error {
    fn from(error: crate::mpi::Error) -> Self {
        Error::Mpi(Box::new(error))
    }
}

impl Error {
    /// Returns the root failure: the cause of [`Poisoned`](Error::Poisoned), or this one.
    pub fn cause(&self) -> &Error {
        match self {
            Error::Poisoned { cause } => cause.cause(),
            other => other,
        }
    }
}

/// One rank's call of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Called {
    /// Number of operations that the rank had started on this communicator before.
    pub op_number: u64,
    /// Action called.
    pub action: Action,
    /// Elements of the buffer.
    pub len: usize,
    /// Type of the buffer.
    pub dtype: DType,
    /// Name given to the calls by the rank ([`name_calls`](crate::name_calls)), on backends whose ranks are one process.
    pub by: Option<&'static str>,
}

impl Called {
    /// Returns true if both are the same collective on buffers that match.
    pub(crate) fn agrees_with(&self, other: &Called) -> bool {
        let alike = (self.len, self.dtype) == (other.len, other.dtype);
        self.action.agrees_with(other.action) && (alike || !self.action.moves_data())
    }

    /// Returns true if this is the send that matches `recv`.
    pub(crate) fn goes_to(&self, recv: &Called) -> bool {
        let pair = matches!((self.action, recv.action), (Action::Send { .. }, Action::Recv { .. }));
        pair && (self.len, self.dtype) == (recv.len, recv.dtype)
    }
}

impl fmt::Display for Called {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.action)?;
        if self.action.moves_data() {
            write!(f, " of {} {}", self.len, self.dtype)?;
        }
        self.by.map_or(Ok(()), |by| write!(f, " in {by}"))
    }
}

struct Calls<'a>(&'a [Option<Called>]);

impl fmt::Display for Calls<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (rank, call) in self.0.iter().enumerate() {
            let comma = if rank == 0 { "" } else { ", " };
            match call {
                Some(call) => {
                    write!(f, "{comma}rank {rank} called {call} (its operation {})", call.op_number)?
                }
                None => write!(f, "{comma}rank {rank} was in no operation")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatch_names_what_each_rank_called() {
        let call = |action, len| Some(Called { op_number: 3, action, len, dtype: DType::F32, by: None });
        let calls = vec![call(Action::AllGather, 8), None, call(Action::Barrier, 0)];
        let error = Error::Mismatch { op_number: 3, calls };
        assert_eq!(
            error.to_string(),
            "operation 3 does not match: rank 0 called all_gather of 8 f32 (its operation 3), rank 1 was in no operation, \
             rank 2 called barrier (its operation 3); every rank must call the same"
        );
    }

    #[test]
    fn the_cause_is_found_below_any_number_of_repetitions() {
        let once = Error::Poisoned { cause: Arc::new(Error::Aborted { rank: 1 }) };
        let twice = Error::Poisoned { cause: Arc::new(once) };
        assert_eq!(twice.cause(), &Error::Aborted { rank: 1 });
    }
}
