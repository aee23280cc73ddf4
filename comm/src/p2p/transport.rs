//! Byte streams between the ranks of one group: the interface of backends of messages.

use crate::Called;
use std::any::Any;
use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// ThreadStreams of bytes between the ranks of one group. Each pair of ranks has one stream in each direction, which is reliable and in
/// order: a byte arrives as it was written, or the stream ends with [`Lost`].
///
/// One thread at a time uses a transport, through `&mut`; another thread interrupts its wait by the [`Waker`]. No call but
/// [`wait`](Transport::wait) blocks, and no call but [`split`](Transport::split) and a first use allocates.
///
/// A transport opens the stream to a rank when it is first written to or read from, unless that costs nothing.
///
/// The engine leaves frames of later operations unread. Short writes are frequent: a frame begins with 8 bytes, and up to 256 KiB of a
/// buffer follow in the next write. The end of a stream is reported once, by [`progress`](Transport::progress) or
/// [`wait`](Transport::wait); bytes that arrived before it stay readable, and the other streams are served.
pub(crate) trait Transport: Send + Debug {
    /// Index of this rank in the group.
    fn rank(&self) -> usize;

    /// Number of ranks of the group.
    fn world_size(&self) -> usize;

    /// Ranks that read the common stream of this rank: one copy of the bytes serves them all. Empty if the transport has none.
    /// Ranks that are not listed here are written to one by one. Two ranks are in each other's audience, or neither is.
    fn audience(&self) -> &[usize] {
        &[]
    }

    /// Writes as many of `bytes` as fit now, and returns their number, which may be 0. The caller's next write to `to` begins with the
    /// bytes that did not fit, unchanged, or there is none: a transport may have promised them to the other rank. A write to the audience goes on for
    /// the ranks that are left after the end of one was reported.
    fn write(&mut self, to: Target, bytes: &[u8]) -> Result<usize, Lost>;

    /// Moves what the system has for this rank: receives bytes, sends bytes that were kept. Returns true if anything moved.
    ///
    /// Once bytes of a rank's common stream show here, the next call shows what the rank wrote to this one alone before them.
    fn progress(&mut self) -> Result<bool, Lost>;

    /// Returns bytes that have arrived and have not been consumed, in place and contiguous; there may be more behind them.
    fn arrived(&self, from: Source) -> &[u8];

    /// Consumes the first `len` bytes that have arrived.
    ///
    /// # Panics
    /// If [`arrived`](Transport::arrived) has fewer.
    fn consume(&mut self, from: Source, len: usize);

    /// Reads as many bytes as have arrived into `into`, past the transport's own memory where it can, and returns their number.
    fn read(&mut self, from: Source, into: &mut [u8]) -> Result<usize, Lost> {
        let arrived = self.arrived(from);
        let len = arrived.len().min(into.len());
        into[..len].copy_from_slice(&arrived[..len]);
        self.consume(from, len);
        Ok(len)
    }

    /// Waits until new bytes may have arrived, until written bytes may fit, until the waker is called, or for `at_most`. It may return
    /// early for no reason.
    fn wait(&mut self, at_most: Duration) -> Result<(), Lost>;

    /// Returns a handle that ends a wait of another thread.
    fn waker(&self) -> Arc<dyn Waker>;

    /// Returns the transport of a group of `members`, ranks of this group in the order of the new one, of which this rank is one.
    /// Every member calls it with the same list and `channel`, a number that this group has not used before.
    fn split(&mut self, members: &[usize], channel: u64) -> Result<Box<dyn Transport>, Lost>;

    /// Longest wait of a handle's drop for the communication thread, so that the last handle's thread drops the transport before the
    /// process ends: none, if nothing is lost with the process.
    fn drop_wait(&self) -> Duration {
        Duration::ZERO
    }

    /// Returns the system's own reductions if they run `called`, which all ranks of the group answer alike.
    fn system_reduction(&mut self, _called: &Called) -> Option<&mut dyn SystemReduction> {
        None
    }

    /// Returns the allocator of memory that the ranks of the group read in place, if all of them share a host.
    fn window_allocator(&self) -> Option<Arc<dyn WindowAllocator>> {
        None
    }

    /// Returns the windows of the ranks, if there is an allocator.
    fn windows(&mut self) -> Option<&mut dyn Windows> {
        None
    }

    /// Tells the transport that its group has failed.
    fn note_failure(&mut self, _error: &crate::Error) {}

    /// Ends the streams in both directions; written bytes still arrive where that costs no wait.
    fn close(&mut self);
}

/// Reductions by the system of a transport, with its bits: one block at a time, in memory of the transport. [`Transport::progress`]
/// moves them.
pub(crate) trait SystemReduction {
    /// Returns memory for this rank's `len` bytes of the next block.
    fn input(&mut self, len: usize) -> &mut [u8];

    /// Begins to reduce the block in the input. All ranks of the group begin the same blocks in the same order.
    fn begin(&mut self, called: &Called);

    /// Returns the result of the block once it is there: of a reduce-scatter this rank's piece. An error is this rank's own.
    fn output(&self) -> Result<Option<&[u8]>, LostWhy>;
}

/// Allocator of memory that the other ranks can map. It waits for no operation.
pub(crate) trait WindowAllocator: Send + Sync + Debug {
    /// Allocates `bytes` zeroed bytes of which the address modulo 4096 differs from those of `apart`; `None` if the system refuses,
    /// or too much memory waits to be offered.
    fn allocate(&self, bytes: usize, apart: &[usize]) -> Option<WindowMemory>;
}

/// Memory that the ranks of one host read in place. A rank offers its own to the others, and maps theirs.
pub(crate) trait Windows {
    /// Returns the place of the memory that begins at `start`, if it was allocated here and was not offered before.
    fn place(&self, start: NonNull<u8>) -> Option<WindowPlace>;

    /// Sends the memory that begins at `start` to the other ranks as window `id`. Returns false if the system refuses; some ranks may
    /// have it then.
    fn offer(&mut self, start: NonNull<u8>, id: u64) -> bool;

    /// Takes window `id` of all other ranks, once all have offered it or have failed to, and maps it if `places` has its places, by
    /// rank. Returns false if one is not mapped.
    fn accept(&mut self, id: u64, places: Option<&[WindowPlace]>) -> bool;

    /// Ends window `id`: its memory stays this rank's own.
    fn forget(&mut self, id: u64);

    /// Returns the window in which `address` lies, and the offset of the address from the window's first byte.
    fn find(&self, address: NonNull<u8>) -> Option<(u64, usize)>;

    /// Returns the address of byte `offset` of rank `rank`'s window `id`.
    fn address(&self, rank: usize, id: u64, offset: usize) -> Option<NonNull<u8>>;
}

/// Allocated memory of a window.
#[derive(Debug)]
pub(crate) struct WindowMemory {
    pub(crate) start: NonNull<u8>,
    /// Owner of the memory, which frees it on drop.
    pub(crate) owner: Box<dyn Any + Send + Sync>,
}

/// Size of a rank's window, and its place in the memory that the rank sent. All zero: the rank offers none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WindowPlace {
    pub(crate) bytes: u64,
    pub(crate) first: u64,
}

/// Destination of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// One rank.
    Rank(usize),
    /// All ranks of the [`audience`](Transport::audience), by one copy.
    Audience,
}

/// Stream to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Bytes that the rank wrote to this one alone.
    Rank(usize),
    /// Bytes that the rank wrote to its audience; this rank is in the audience.
    Common(usize),
}

/// Handle that ends a transport's wait.
pub(crate) trait Waker: Send + Sync + Debug {
    /// Ends the wait that is running, or the next one.
    fn wake(&self);
}

/// A stream ended. The transport is of no further use for `peer`; its other streams go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection to rank {peer} ended: {why}")]
pub(crate) struct Lost {
    /// The rank at the other end.
    pub(crate) peer: usize,
    /// The reason.
    pub(crate) why: LostWhy,
}

/// Reason for the end of a stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LostWhy {
    /// The other process closed it or ended.
    #[error("its process closed it")]
    Closed,
    /// Bytes arrived that its rank did not send.
    #[error("bytes were altered on the way")]
    Altered,
    /// The system refused a call.
    #[allow(dead_code, reason = "the transport between threads makes no calls of the system")]
    #[error("{what}: {message}")]
    System {
        /// The call.
        what: &'static str,
        /// The system's text.
        message: String,
    },
}
