//! The interface every backend has, and the blocking calls written once on top of it.

use crate::{Error, InFlight, Op, Reduction, Stats};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

/// One rank's place in a group of ranks that exchange buffers. Handed round as `Arc<dyn Communicator>`.
///
/// Every rank calls the same collectives in the same order; `send` and `recv` concern two ranks only. Operations of
/// one communicator run one after the other, in the order they were started, while the caller computes.
///
/// When the last handle to it is dropped the rank leaves: what it started still runs, and who needs it for more gets
/// [`Error::Left`].
pub trait Communicator: Send + Sync + Debug {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// Starts `op` on `buffer` once what is on `after` so far is done. The buffer comes back from
    /// [`InFlight::wait`], or at once with the error where the call is refused.
    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, Error)>;

    /// Carries out `op` on `buffer`, whose caller waits for it. The buffer always comes back, as from [`InFlight::wait`].
    fn complete(&self, op: Op, buffer: Buffer) -> (Buffer, Result<(), Error>) {
        let queue = Queue::cpu();
        match self.start(op, buffer, &queue) {
            Ok(started) => started.wait(&queue),
            Err((buffer, error)) => (buffer, Err(error)),
        }
    }

    /// Starts two operations, one after the other, both or none: small ones that a backend may launch as one group. Every rank
    /// starts them so. Where a call is refused both buffers come back at once.
    #[expect(clippy::result_large_err, reason = "the buffers go back to the caller")]
    fn start_both(
        &self,
        [first, second]: [(Op, Buffer); 2],
        after: &Queue,
    ) -> Result<[InFlight; 2], ([Buffer; 2], Error)> {
        let check = |(op, b): &(Op, Buffer)| op.check(self.rank(), self.world_size(), b.len(), b.dtype());
        if let Err(error) = check(&first).and_then(|()| check(&second)) {
            return Err(([first.1, second.1], error));
        }
        let first = match self.start(first.0, first.1, after) {
            Ok(started) => started,
            // The other ranks' first call is not to meet this one's second.
            Err((buffer, error)) => return Err(([buffer, second.1], error)),
        };
        match self.start(second.0, second.1, after) {
            Ok(second) => Ok([first, second]),
            Err((buffer, error)) => {
                let (first, _) = first.wait(after);
                Err(([first, buffer], error))
            }
        }
    }

    /// Zeros where `queue` works, in memory that [`register`](Self::register) takes where a backend has some of its own.
    fn zeroed_on(
        &self,
        queue: &Queue,
        len: usize,
        dtype: DType,
        meter: &Meter,
        category: Category,
    ) -> Result<Buffer, meshstep_tensor::Error> {
        Buffer::zeroed_on(queue, len, dtype, meter, category)
    }

    /// Tells the backend that operations will be started on `buffer` and on parts of it, which begin at the same element on every
    /// rank; whether that changes how they are carried out. A collective: every rank calls it for a buffer of the same length
    /// and type, the whole of what [`zeroed_on`](Self::zeroed_on) has given.
    fn register(&self, _buffer: &Buffer) -> Result<bool, Error> {
        Ok(false)
    }

    /// A communicator among the ranks that give the same `color`, ranked by `key` and then by rank here; none for
    /// `None`. A collective: every rank calls it.
    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error>;

    /// Ends every operation that has not begun to move bytes with [`Error::Aborted`], on every rank, and poisons the
    /// communicator; and so each that was [`split`](Self::split) from it, and from those: nobody is to wait in a part of what
    /// has been given up. The one that it was itself split from goes on.
    fn abort(&self);

    /// What has ended the group, if anything has that this rank knows of. A queue of a GPU goes on behind an operation that was
    /// ended: who relies on what it has done asks this afterwards.
    fn sound(&self) -> Result<(), Error> {
        Ok(())
    }

    /// What this rank has done and sent so far.
    fn stats(&self) -> Stats;
}

impl dyn Communicator + '_ {
    /// Starts `op` on the whole of `buffer` and waits for it. Nothing is copied or allocated.
    pub fn run(&self, op: Op, buffer: &mut Buffer) -> Result<(), Error> {
        let whole = buffer.split_off(0)?;
        let (whole, result) = self.complete(op, whole);
        *buffer = whole;
        result
    }

    /// Every element becomes its reduction over all ranks; any length. All ranks get the same bits.
    pub fn all_reduce(&self, buffer: &mut Buffer, reduction: Reduction) -> Result<(), Error> {
        self.run(Op::all_reduce(reduction), buffer)
    }

    /// Chunk `rank` becomes its reduction over all ranks; the other chunks are unspecified afterwards.
    pub fn reduce_scatter(&self, buffer: &mut Buffer, reduction: Reduction) -> Result<(), Error> {
        self.run(Op::reduce_scatter(reduction), buffer)
    }

    /// Chunk `q` becomes rank `q`'s chunk `q`, for all `q`.
    pub fn all_gather(&self, buffer: &mut Buffer) -> Result<(), Error> {
        self.run(Op::all_gather(), buffer)
    }

    /// Chunk `q` becomes rank `q`'s chunk `rank`, for all `q`.
    pub fn all_to_all(&self, buffer: &mut Buffer) -> Result<(), Error> {
        self.run(Op::all_to_all(), buffer)
    }

    /// The buffer becomes that of rank `root`.
    pub fn broadcast(&self, buffer: &mut Buffer, root: usize) -> Result<(), Error> {
        self.run(Op::broadcast(root), buffer)
    }

    /// Sends the buffer to rank `to`; returns once it has been received.
    pub fn send(&self, buffer: &mut Buffer, to: usize) -> Result<(), Error> {
        self.run(Op::send(to), buffer)
    }

    /// The buffer becomes what rank `from` sends, of the same length and type.
    pub fn recv(&self, buffer: &mut Buffer, from: usize) -> Result<(), Error> {
        self.run(Op::recv(from), buffer)
    }

    /// Returns once every rank has called it.
    pub fn barrier(&self) -> Result<(), Error> {
        self.run(Op::barrier(), &mut nothing()?)
    }
}

/// A buffer without elements, for operations that move none. All are parts of one, so only the first is allocated.
pub(crate) fn nothing() -> Result<Buffer, Error> {
    static NOTHING: Mutex<Option<Buffer>> = Mutex::new(None);
    let mut nothing = NOTHING.lock().unwrap_or_else(PoisonError::into_inner);
    if nothing.is_none() {
        *nothing = Some(Buffer::zeroed(0, DType::F32, &Meter::new(), Category::Staging)?);
    }
    // The branch above has filled it, so this is never a second allocation.
    match nothing.as_mut() {
        Some(buffer) => Ok(buffer.split_off(0)?),
        None => Ok(Buffer::zeroed(0, DType::F32, &Meter::new(), Category::Staging)?),
    }
}
