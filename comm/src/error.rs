//! What goes wrong between ranks, as values that every rank can repeat.

use crate::Action;
use meshstep_tensor::DType;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What went wrong in an operation.
///
/// What the caller alone can be blamed for (from [`Uneven`](Error::Uneven) on) is refused before anybody else hears of
/// it and leaves the communicator as it was. The failures before it poison the communicator: every rank gets the cause
/// once, from the first operation that meets it, and [`Poisoned`](Error::Poisoned) from every later one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Ranks called different operations, or one operation with different types, lengths or roots, or wait for each
    /// other in a circle.
    #[error("operation {op_number} does not match: {}; every rank must call the same", Calls(.calls))]
    Mismatch {
        /// The operation's number on the rank that completed the contradiction.
        op_number: u64,
        /// What each rank was calling at that moment; `None` for one that was in no operation.
        calls: Vec<Option<Called>>,
    },
    /// Not every rank came before a deadline.
    #[error(
        "operation {op_number}, {called}: after {after:?} ranks {missing:?} had not come ({arrived:?} had); see what \
         they are doing, or allow more time with `Op::within`"
    )]
    Timeout {
        /// The operation's number on the rank whose deadline it was.
        op_number: u64,
        /// What that rank called; boxed, so that every error stays small.
        called: Box<Called>,
        /// Who was waiting in the same operation.
        arrived: Vec<usize>,
        /// Who was waited for.
        missing: Vec<usize>,
        /// The deadline.
        after: Duration,
    },
    /// A rank returned or dropped its communicator while others needed it.
    #[error(
        "rank {rank} left before operation {op_number}; every rank must make the same calls before it ends"
    )]
    Left {
        /// Who left.
        rank: usize,
        /// The number of the first operation it did not take part in.
        op_number: u64,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// Who panicked.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A rank called [`abort`](crate::Communicator::abort), on this communicator or on one that it was split from.
    #[error("rank {rank} aborted the communicator; make a new one")]
    Aborted {
        /// Who did, as a rank of the one that was aborted.
        rank: usize,
    },
    /// A rank elsewhere has said that it failed.
    #[error("rank {rank} failed: {message}")]
    Remote {
        /// Who.
        rank: usize,
        /// What it said.
        message: String,
    },
    /// An operation of a backend that cannot tell who is missing did not end.
    #[error(
        "operation {op_number}, {called}, had not ended after {after:?}; compare the ranks' flight records, set \
         MESHSTEP_COMM_CHECK=1 to see calls that differ, or allow more time with `Op::within`"
    )]
    Stuck {
        /// The operation's number on this rank.
        op_number: u64,
        /// What this rank called; boxed, so that every error stays small.
        called: Box<Called>,
        /// The deadline.
        after: Duration,
    },
    /// Ranks of a new communicator did not all come.
    #[error(
        "rank {rank} of {world_size} waited {after:?} for the others to join; see whether each runs, with this world size"
    )]
    NotJoined {
        /// This rank.
        rank: usize,
        /// How many were to come.
        world_size: usize,
        /// The deadline.
        after: Duration,
    },
    /// Ranks that are processes did not meet.
    #[error(transparent)]
    Rendezvous(Box<crate::rendezvous::Error>),
    /// The GPU of a launcher's rank is not visible.
    #[error(
        "local rank {local_rank} has no GPU {ordinal}: {visible} are visible; start as many ranks on the machine as GPUs are \
         visible (CUDA_VISIBLE_DEVICES), or choose the GPU with nccl::Options::device"
    )]
    NoDevice {
        /// The rank's number on its machine.
        local_rank: usize,
        /// The GPU that was looked for.
        ordinal: usize,
        /// How many GPUs the driver shows.
        visible: usize,
    },
    /// Ranks have registered memory that does not go together. Nothing is registered.
    #[error(
        "ranks register {bytes:?} bytes, by rank (0: memory that is registered already, or that the communicator's `zeroed_on` \
         did not give); every rank registers a whole buffer of the same length and type, in the same order"
    )]
    UnlikeMemory {
        /// The bytes of each rank's memory.
        bytes: Vec<u64>,
    },
    /// What was to be the id of a communicator is something else.
    #[error("{given} bytes where an id of NCCL has {needed}; use what `UniqueId::as_bytes` gave")]
    BadId {
        /// Bytes given.
        given: usize,
        /// Bytes of an id.
        needed: usize,
    },
    /// NCCL refused a call, or failed later.
    #[error("{function} failed with {name} ({code}): {last_error}")]
    Nccl {
        /// Its function; `ncclCommGetAsyncError` tells of what failed later.
        function: &'static str,
        /// Its number for it.
        code: i32,
        /// Its name for it.
        name: String,
        /// The last thing it had to say.
        last_error: String,
    },
    /// An earlier operation failed, so the ranks no longer agree where they are.
    #[error("an earlier operation failed ({cause}); make a new communicator")]
    Poisoned {
        /// That failure.
        cause: Arc<Error>,
    },
    /// The buffer does not divide evenly among the ranks.
    #[error("{len} elements do not divide among {world_size} ranks; pad to {padded}")]
    Uneven {
        /// Elements of the buffer.
        len: usize,
        /// Ranks in the group.
        world_size: usize,
        /// The next length that divides.
        padded: usize,
    },
    /// A rank that the group does not have.
    #[error("no rank {rank} in a group of {world_size}; ranks count from 0")]
    InvalidRank {
        /// The rank asked for.
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
    /// Integers have no mean of their type.
    #[error("no mean of {dtype}; take the sum and divide")]
    MeanOfIntegers {
        /// The buffer's type.
        dtype: DType,
    },
    /// Integers have no products with factors of their type.
    #[error("no factors in a sum of {dtype}; multiply before, or use f64")]
    FactorsOfIntegers {
        /// The buffer's type.
        dtype: DType,
    },
    /// A type that collectives do not know.
    #[error("no collectives of {dtype}; use f32, f64, bf16, f16 or u64")]
    UnsupportedDType {
        /// The buffer's type.
        dtype: DType,
    },
    /// A world without ranks.
    #[error("a world needs at least one rank")]
    ZeroRanks,
    /// The system gave no thread.
    #[error("no thread for rank {rank}: {message}; use fewer ranks or raise the limit")]
    NoThread {
        /// For whom.
        rank: usize,
        /// What the system said.
        message: String,
    },
    /// NCCL cannot be used on this machine.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    NoNccl(#[from] crate::nccl::Unavailable),
    /// What the buffer itself refused.
    #[error(transparent)]
    Buffer(#[from] meshstep_tensor::Error),
}

impl From<crate::rendezvous::Error> for Error {
    fn from(error: crate::rendezvous::Error) -> Self {
        Error::Rendezvous(Box::new(error))
    }
}

impl Error {
    /// The failure at the bottom: that of [`Poisoned`](Error::Poisoned), or this one.
    pub fn cause(&self) -> &Error {
        match self {
            Error::Poisoned { cause } => cause.cause(),
            other => other,
        }
    }
}

/// One rank's side of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Called {
    /// How many operations the rank had started on this communicator before.
    pub op_number: u64,
    /// What it called.
    pub action: Action,
    /// With how many elements.
    pub len: usize,
    /// Of which type.
    pub dtype: DType,
}

impl Called {
    /// Whether two ranks that call this and `other` call the same collective, on buffers that go together.
    pub(crate) fn agrees_with(&self, other: &Called) -> bool {
        let alike = (self.len, self.dtype) == (other.len, other.dtype);
        self.action.agrees_with(other.action) && (alike || !self.action.moves_data())
    }

    /// Whether this sends what `recv` receives.
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
        Ok(())
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
                None => write!(f, "{comma}rank {rank} was in none")?,
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
        let call = |action, len| Some(Called { op_number: 3, action, len, dtype: DType::F32 });
        let calls = vec![call(Action::AllGather, 8), None, call(Action::Barrier, 0)];
        let error = Error::Mismatch { op_number: 3, calls };
        assert_eq!(
            error.to_string(),
            "operation 3 does not match: rank 0 called all_gather of 8 f32 (its operation 3), rank 1 was in none, \
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
