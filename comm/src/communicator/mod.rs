//! Interface of all backends, and the blocking calls on top of it.

pub(crate) mod call_name;
pub(crate) mod checks;
#[cfg(feature = "conformance")]
pub mod conformance;
pub(crate) mod in_flight;
pub(crate) mod keeping;
pub(crate) mod observing;
pub(crate) mod stats;
pub(crate) mod writing;

use crate::{Error, InFlight, Op, Reduction, Stats};
use meshstep_tensor::{Buffer, Category, DType, Meter, Place, Queue, SliceMut};
use observing::ReduceObserver;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use writing::{WriteChunk, WriteReduced};

/// One rank's handle to a group of ranks that exchange buffers. Passed as `Arc<dyn Communicator>`.
///
/// Every rank calls the same collectives in the same order; `send` and `recv` involve two ranks only. Operations of one
/// communicator run one after the other, in the order of their starts, while the caller computes.
///
/// Dropping the last handle makes the rank leave the group: started operations still run, and ranks that need it for more get
/// [`Error::Left`].
pub trait Communicator: Send + Sync + Debug {
    /// Index of this rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Starts `op` on `buffer` after the work that is on `after` so far. The buffer comes back from [`InFlight::wait`], or at
    /// once with the error if the call is refused.
    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, Error)>;

    /// Starts `op`, an all-reduce or a reduce-scatter, like [`start`](Self::start), with an observer of chunk `rank` of the result on this
    /// rank. It sees each element at most once, before the wait returns. A backend may leave out any elements, also all, as the default
    /// and loopback do; processes show what they reduce in registered memory. The observer counts what it has seen. After an error its
    /// values are unspecified. It is released with a later operation.
    fn start_observed(
        &self,
        op: Op,
        buffer: Buffer,
        after: &Queue,
        _observer: Arc<dyn ReduceObserver>,
    ) -> Result<InFlight, (Buffer, Error)> {
        self.start(op, buffer, after)
    }

    /// Runs `op` on `buffer` and waits for it. The buffer always comes back, as from [`InFlight::wait`].
    fn complete(&self, op: Op, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        let queue = Queue::cpu();
        match self.start(op, buffer, &queue) {
            Ok(started) => started.wait(&queue),
            Err((buffer, error)) => (buffer, Err(error)),
        }
    }

    /// Reduces `values` where they lie over all ranks, keeps their former contents in `kept`, and waits: for a result that the
    /// caller may still refuse, as it can copy `kept` back.
    ///
    /// `values` are any number of slices, also empty ones. Laid end to end they are the vector `x_r` of rank `r`, as long as `kept`
    /// and of its type, in memory of the CPU. With the bits of [`Op::all_reduce`] on a buffer with these values,
    ///
    /// ```text
    /// kept_r = x_r,    x_r = x_0 ⊕ x_1 ⊕ ... ⊕ x_(n-1)
    /// ```
    ///
    /// The result is the number of elements of the new `x_r` that are infinite or NaN, the same on every rank; 0 for u64.
    ///
    /// It is an all-reduce in every respect: other ranks may call it with slices of other lengths, or call [`Op::all_reduce`] on
    /// a buffer; deadlines (`within`, or else the communicator's), failures and counts of [`Stats`] are those of the all-reduce.
    ///
    /// `kept` always comes back. After an error its contents are unspecified and the values are as before. One failure is
    /// excepted, the panic of a rank while it moved bytes, which is a bug of the backend: then the values are unspecified.
    /// [`Error::Buffer`] with the lengths, types or places if these do not agree, before any other rank is involved.
    ///
    /// The default copies the values into `kept`, reduces it, and swaps both.
    fn all_reduce_keeping(
        &self,
        reduction: Reduction,
        within: Option<Duration>,
        values: &mut [SliceMut<'_>],
        kept: Buffer,
    ) -> (Buffer, Result<u64, Error>) {
        let op = Op::all_reduce(reduction);
        keeping::through_a_copy(self, within.map_or(op, |within| op.within(within)), values, kept)
    }

    /// Gathers `buffer` on all ranks while this rank still writes its chunk, and waits: an [`Op::all_gather`] of chunks that are computed.
    ///
    /// `write` is called on this thread with consecutive parts of the chunk, with the values that they have, until it has written all of
    /// it, whatever becomes of the operation; not at all for a chunk without elements or of a type that does not travel. Parts that are
    /// written travel while they are in the cache. On return chunk `q` has what rank `q` wrote, for all `q`.
    /// Other ranks may call it at the same time or [`Op::all_gather`]. `on` is the queue of the buffer's place; its threads share the
    /// work of a copy.
    ///
    /// `buffer` always comes back; after an error its contents are unspecified. If `write` breaks, the group is aborted
    /// ([`Error::Aborted`] on every rank); if it panics, the others get an error too: [`Error::Panicked`] for a chunk that is written in
    /// parts, and otherwise [`Error::Aborted`]. Its time counts for the operation's deadline.
    ///
    /// `write` must not wait for an operation of this communicator that was not started before: it begins after this one, and the wait
    /// has no end. Operations of other communicators may run in it.
    ///
    /// The default calls `write` once, with the whole chunk, before the gather is checked, and then gathers. CPU ranks do so too with chunks
    /// of one part: 64 Ki elements for each thread that a rank has of its own.
    fn all_gather_written(
        &self,
        buffer: Buffer,
        on: &Queue,
        write: &mut WriteChunk<'_>,
    ) -> (Buffer, Result<(), Error>) {
        writing::before_gather(self, buffer, on, write)
    }

    /// Returns true if [`all_gather_written`](Self::all_gather_written) gathers `buffer` while it is written; otherwise a caller with other
    /// work had better start an [`Op::all_gather`] and do that meanwhile.
    fn gathers_while_written(&self, _buffer: &Buffer, _on: &Queue) -> bool {
        false
    }

    /// Reduces `from` over all ranks, writes with the result this rank's chunk of `into`, and gathers `into` on all ranks, in one pass
    /// over memory where the backend can: a reduce-scatter, a computation and an all-gather. With chunk `q` of rank `r`'s buffers
    /// `from_r[q]` and `into_r[q]`,
    ///
    /// ```text
    /// into_r[q] = write_q(from_0[q] ⊕ from_1[q] ⊕ ... ⊕ from_(n-1)[q], into_q[q])   for all q
    /// ```
    ///
    /// `write` is called on this thread with consecutive parts of the chunk: their reduced values, with the bits of
    /// [`Op::reduce_scatter`], and the elements of `into`; `write` may overwrite them. Parts are written once all ranks have called; a failure
    /// before that writes nothing, and after a later one `write` may not get the parts that follow. `from` has unspecified contents
    /// afterwards. A rank keeps memory for one reduced part.
    ///
    /// Both buffers have one length and one type ([`Error::Buffer`] otherwise), and the length is a multiple of the number of ranks
    /// ([`Error::Uneven`]). Every rank calls it
    /// with buffers of which [`reduces_in_one_pass`](Self::reduces_in_one_pass) says the same. [`Stats`] count a reduce-scatter and an
    /// all-gather. Deadline, panics, [`ControlFlow::Break`](std::ops::ControlFlow::Break) and operations within `write` are as for
    /// [`all_gather_written`](Self::all_gather_written).
    ///
    /// The default runs a reduce-scatter, and then a written all-gather.
    fn reduce_and_gather(
        &self,
        reduction: Reduction,
        (from, into): (&mut Buffer, Buffer),
        on: &Queue,
        write: &mut WriteReduced<'_>,
    ) -> (Buffer, Result<(), Error>) {
        writing::reduce_before_gather(self, reduction, (from, into), on, write)
    }

    /// Returns true if [`reduce_and_gather`](Self::reduce_and_gather) is one pass over these buffers, which is so on all ranks or none:
    /// long chunks on loopback, or in memory that processes of one host have [registered](Self::register). Otherwise a caller with other
    /// work had better start a reduce-scatter.
    fn reduces_in_one_pass(&self, _from: &Buffer, _into: &Buffer) -> bool {
        false
    }

    /// Returns true if reductions may be [`Reduction::Pairwise`]. The same on every rank, and for the groups that it is split into.
    fn reduces_pairwise(&self) -> bool {
        false
    }

    /// Allocates zeros at `queue`'s place, in memory suitable for [`register`](Self::register) if the backend has its own
    /// allocator. On the CPU the address differs modulo 4096 from those of `apart`, as by [`Buffer::zeroed_apart`].
    fn zeroed_on(
        &self,
        queue: &Queue,
        len: usize,
        dtype: DType,
        (meter, category): (&Meter, Category),
        apart: &[usize],
    ) -> Result<Buffer, meshstep_tensor::Error> {
        match queue.place() {
            Place::Cpu => Buffer::zeroed_apart(len, dtype, meter, category, apart),
            Place::Cuda(_) => Buffer::zeroed_on(queue, len, dtype, meter, category),
        }
    }

    /// Registers `buffer` with the backend for later operations on it or on parts of it, which begin at the same element on every
    /// rank. Returns true if the backend treats registered memory differently: NCCL has windows, and ranks that are processes of one
    /// host read it in place. A collective: every rank calls it for a buffer of the same length and type, the whole of a buffer from
    /// [`zeroed_on`](Self::zeroed_on).
    fn register(&self, _buffer: &Buffer) -> Result<bool, Error> {
        Ok(false)
    }

    /// Creates a communicator of the ranks with the same `color`, ranked by `key` and then by rank in this group; returns `None`
    /// for color `None`. A collective: every rank calls it.
    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error>;

    /// Ends every operation that has not begun to move bytes with [`Error::Aborted`], on every rank, and poisons the communicator
    /// and all groups [`split`](Self::split) from it, at any depth: no rank may wait in a subgroup of an aborted group. The
    /// parent of this communicator is unaffected.
    fn abort(&self);

    /// Returns the failure that has ended the group, if this rank knows of one. A GPU queue continues past an operation that was
    /// ended: call this before using its result.
    fn sound(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Counts of this rank's successful operations and sent bytes.
    fn stats(&self) -> Stats;
}

impl dyn Communicator + '_ {
    /// Starts `op` on the whole of `buffer` and waits for it. Copies and allocates nothing.
    pub fn run(&self, op: Op, buffer: &mut Buffer) -> Result<(), Error> {
        let whole = buffer.split_off(0)?;
        let (whole, result) = self.complete(op, whole);
        *buffer = whole;
        result
    }

    /// Reduces the elements over all ranks; any length. All ranks get the same bits.
    pub fn all_reduce(&self, buffer: &mut Buffer, reduction: Reduction) -> Result<(), Error> {
        self.run(Op::all_reduce(reduction), buffer)
    }

    /// Reduces chunk `rank` over all ranks; the other chunks are unspecified afterwards.
    pub fn reduce_scatter(&self, buffer: &mut Buffer, reduction: Reduction) -> Result<(), Error> {
        self.run(Op::reduce_scatter(reduction), buffer)
    }

    /// Sets chunk `q` to rank `q`'s chunk `q`, for all `q`.
    pub fn all_gather(&self, buffer: &mut Buffer) -> Result<(), Error> {
        self.run(Op::all_gather(), buffer)
    }

    /// Sets chunk `q` to rank `q`'s chunk `rank`, for all `q`.
    pub fn all_to_all(&self, buffer: &mut Buffer) -> Result<(), Error> {
        self.run(Op::all_to_all(), buffer)
    }

    /// Copies the buffer of rank `root` to all ranks.
    pub fn broadcast(&self, buffer: &mut Buffer, root: usize) -> Result<(), Error> {
        self.run(Op::broadcast(root), buffer)
    }

    /// Sends the buffer to rank `to`; returns once it has been received.
    pub fn send(&self, buffer: &mut Buffer, to: usize) -> Result<(), Error> {
        self.run(Op::send(to), buffer)
    }

    /// Receives a buffer of the same length and type from rank `from`.
    pub fn recv(&self, buffer: &mut Buffer, from: usize) -> Result<(), Error> {
        self.run(Op::recv(from), buffer)
    }

    /// Waits until every rank has called it.
    pub fn barrier(&self) -> Result<(), Error> {
        self.run(Op::barrier(), &mut nothing()?)
    }
}

/// Returns an empty buffer, for operations without data. All empty buffers share one allocation.
pub(crate) fn nothing() -> Result<Buffer, Error> {
    static NOTHING: Mutex<Option<Buffer>> = Mutex::new(None);
    let mut nothing = NOTHING.lock().unwrap_or_else(PoisonError::into_inner);
    if nothing.is_none() {
        *nothing = Some(Buffer::zeroed(0, DType::F32, &Meter::new(), Category::Staging)?);
    }
    // The branch above has filled it, so the second arm is never reached.
    match nothing.as_mut() {
        Some(buffer) => Ok(buffer.split_off(0)?),
        None => Ok(Buffer::zeroed(0, DType::F32, &Meter::new(), Category::Staging)?),
    }
}
