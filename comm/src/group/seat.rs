//! Place of a rank in a group: the interface between a rank's queue and its backend.

use super::chunk_writer::{ChunkWriter, ReduceSource};
use super::segments::LentValues;
use crate::communicator::observing::Observed;
use crate::{Action, Called, Clock, Communicator, Error, ReduceObserver};
use meshstep_tensor::{Buffer, Category, DType, Meter};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// A rank's place in its group. Its operations run one at a time, on any thread of the rank.
pub(crate) trait RankSeat: Send + Sync + Debug + Sized + 'static {
    /// Description of an operation's memory, which the rank's queue keeps alive until the operation has ended.
    type Memory: Copy + Send + Debug;

    /// True if an all-reduce works on lent values where they lie.
    const LENDS: bool;

    /// Index of this rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Clock of deadlines.
    fn clock(&self) -> &Clock;

    /// Default deadline of an operation.
    fn timeout(&self) -> Duration;

    /// Describes `buffer`, on which its rank calls `action`.
    fn memory(buffer: &Buffer, action: Action, besides: Besides<'_>) -> Self::Memory;

    /// Adds an observer of the reduced chunk to an operation's memory. The default leaves it out.
    fn observed(memory: Self::Memory, _observer: Observed) -> Self::Memory {
        memory
    }

    /// Returns true if the ranks gather `buffer` while they write their chunks of it, and reduce it where it lies.
    fn gathers_while_written(&self, buffer: &Buffer) -> bool;

    /// Begins an operation without waiting for another rank and without moving many bytes. The rank's earlier operations have begun. The
    /// default leaves everything to [`run`](RankSeat::run).
    ///
    /// # Safety
    /// The memory is alive and this rank's own until the operation has been run.
    unsafe fn begin(&self, _called: Called, _memory: Self::Memory) -> Begun {
        Begun::Not
    }

    /// Returns true if [`run`](RankSeat::run) would not wait for other ranks in the next operation, which has begun, with this deadline.
    fn is_ready(&self, _after: Duration) -> bool {
        false
    }

    /// Runs the next operation to its end: from its start, or from where [`begin`](RankSeat::begin) left it if it was `posted`. The
    /// backend has finished with `memory` on return. With a `writer`, an all-gather in which it writes this rank's chunk, perhaps from
    /// reduced values of its source; a failure of the writer fails the group.
    ///
    /// # Safety
    /// The memory is alive and this rank's own until this returns.
    unsafe fn run(
        &self,
        called: Called,
        memory: Self::Memory,
        after: Duration,
        posted: bool,
        writer: Option<&mut ChunkWriter<'_>>,
    ) -> Result<Ended<Self>, Arc<Error>>;

    /// Waits until `until` outside of any operation, or until the group has failed.
    fn pause(&self, until: Duration) -> Result<(), Arc<Error>>;

    /// Fails the group because this rank never arrived at the operation that it `called`.
    fn miss(&self, called: Called, after: Duration) -> Arc<Error>;

    /// Flips a bit in the middle of the operation's input, or of its result, as a faulty link would.
    ///
    /// # Safety
    /// The memory is alive, and no other thread accesses it now.
    unsafe fn flip_a_bit(memory: Self::Memory, of_input: bool);

    /// Allocates zeros of the CPU in memory that can be registered; `None` if the backend has none.
    fn zeroed(
        &self,
        _len: usize,
        _dtype: DType,
        _counted: (&Meter, Category),
        _apart: &[usize],
    ) -> Option<Result<Buffer, meshstep_tensor::Error>> {
        None
    }

    /// Registers `buffer`, by operations of `comm`, which is this seat's communicator.
    fn register(&self, _comm: &dyn Communicator, _buffer: &Buffer) -> Result<bool, Error> {
        Ok(false)
    }

    /// Fails every operation that has not begun to move bytes, now and later.
    fn fail(&self, error: Error);

    /// Fails this group and all groups split from it by [`Error::Aborted`].
    fn abort(&self);

    /// Returns the failure that has ended the group, if this rank knows of one.
    fn sound(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Records that this rank has left, before its operation `op_number`.
    fn depart(&self, op_number: u64);

    /// Longest wait of a handle's drop for the rank's communication thread, which has the seat too: none, if the backend needs nothing
    /// of the process after the last handle.
    fn drop_wait(&self) -> Duration {
        Duration::ZERO
    }

    /// Waits a bounded time for [`depart`](RankSeat::depart), where the end of the process would cut it off.
    fn await_departure(&self) {}
}

/// Part of an operation besides its buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Besides<'a> {
    Nothing,
    /// Values to reduce in place of the buffer, which keeps their former contents.
    Lent(LentValues),
    /// An observer of the reduced chunk.
    Observer(&'a Arc<dyn ReduceObserver>),
    /// The caller writes the rank's chunk while the operation runs, and runs the operation itself; from reduced values of the source if
    /// there is one.
    Writer(Option<ReduceSource>),
}

impl Besides<'_> {
    /// Returns the source of a writer, if it has one.
    pub(crate) fn source(self) -> Option<ReduceSource> {
        if let Besides::Writer(source) = self { source } else { None }
    }

    /// Returns the observer, if there is one.
    pub(crate) fn observer(self) -> Option<Arc<dyn ReduceObserver>> {
        if let Besides::Observer(observer) = self { Some(Arc::clone(observer)) } else { None }
    }
}

/// State of an operation after [`RankSeat::begin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// Nothing has happened.
    Not,
    /// The other ranks know of it. `carried`: no thread of this rank is needed for its bytes.
    Posted { carried: bool },
}

/// Result of an operation of one rank, beside its buffer.
#[derive(Debug)]
pub(crate) struct Ended<S> {
    /// The rank's seat in the group that a split has formed.
    pub(crate) formed: Option<S>,
    /// Non-finite elements of the result, if it was a reduction that keeps former values.
    pub(crate) non_finite: u64,
}

impl<S> Default for Ended<S> {
    fn default() -> Self {
        Ended { formed: None, non_finite: 0 }
    }
}
