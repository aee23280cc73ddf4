//! Sums and maxima over the ranks of a group, for update rules.

use crate::error::Error;
use crate::ranks::host_words::run;
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_optim::{Reduce, ReduceError};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::sync::{Arc, Mutex, PoisonError};

/// [`Reduce`] over a communicator: each fold is one small all-reduce of u64.
///
/// Its words grow to the longest fold and are kept. On a GPU words are uploaded and downloaded: the host waits.
///
/// ```
/// use meshstep_optim::Reduce;
/// use meshstep_shard::Folding;
/// use meshstep_tensor::Meter;
///
/// let sums = meshstep_comm::loopback::spawn(3, |comm| {
///     let (mut sums, mut maxima) = ([1], [comm.rank() as u64]);
///     Folding::new(comm, &Meter::new()).unwrap().fold(&mut sums, &mut maxima).unwrap();
///     (sums, maxima)
/// })?;
/// assert!(sums.into_iter().all(|folded| folded == ([3], [2])));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Folding {
    comm: Arc<dyn Communicator>,
    queue: Queue,
    meter: Meter,
    /// Words of the sums, and of the maxima behind them.
    room: Mutex<Buffer>,
}

impl Folding {
    /// Folds over the ranks of `comm`, with buffers on the CPU.
    pub fn new(comm: Arc<dyn Communicator>, meter: &Meter) -> Result<Self, meshstep_tensor::Error> {
        let room = Mutex::new(Buffer::zeroed(0, DType::U64, meter, Category::Staging)?);
        Ok(Folding { comm, queue: Queue::cpu(), meter: meter.clone(), room })
    }

    /// Folds through memory of the queue's place, where the communicator's buffers are.
    pub fn on(self, queue: &Queue) -> Result<Self, meshstep_tensor::Error> {
        Folding { queue: queue.clone(), ..self }.with_room((0, 0))
    }

    /// Allocates memory for folds of this many sums and maxima, so that folds allocate nothing.
    pub fn with_room(self, (sums, maxima): (usize, usize)) -> Result<Self, meshstep_tensor::Error> {
        let room = Mutex::new(self.vector(sums + maxima)?);
        Ok(Folding { room, ..self })
    }

    fn vector(&self, len: usize) -> Result<Buffer, meshstep_tensor::Error> {
        Buffer::zeroed_on(&self.queue, len, DType::U64, &self.meter, Category::Staging)
    }

    fn exchange(&self, [sums, maxima]: [&mut [u64]; 2]) -> Result<(), meshstep_comm::Error> {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let words = sums.len() + maxima.len();
        if room.len() < words {
            *room = self.vector(words)?;
        }
        let spare = room.split_off(words)?;
        let done = self.travel(&mut room, sums, maxima);
        *room = room.take().join(spare).unwrap_or_else(|_| unreachable!("joined where it was cut"));
        // An aborted exchange lets the stream continue, and leaves words that are not the ranks' sums.
        done.and_then(|()| self.comm.sound())
    }

    /// Reduces the words in `room`, which has as many.
    fn travel(
        &self,
        room: &mut Buffer,
        sums: &mut [u64],
        maxima: &mut [u64],
    ) -> Result<(), meshstep_comm::Error> {
        let (queue, cut) = (&self.queue, sums.len());
        queue.upload((&*sums).into(), room.as_mut().slice(0..cut)?)?;
        queue.upload((&*maxima).into(), room.as_mut().slice(cut..cut + maxima.len())?)?;
        let op = Op::all_reduce(Reduction::SumThenMax { sums: cut });
        run(&*self.comm, queue, op, room)?;
        queue.download(room.as_slice().slice(0..cut)?, sums.into())?;
        Ok(queue.download(room.as_slice().slice(cut..cut + maxima.len())?, maxima.into())?)
    }
}

impl Reduce for Folding {
    fn fold(&self, sums: &mut [u64], maxima: &mut [u64]) -> Result<(), ReduceError> {
        self.exchange([sums, maxima]).map_err(ReduceError::new)
    }

    fn part(&self) -> usize {
        self.comm.rank()
    }
}

/// Converts the error of a fold.
pub(crate) fn from_fold(error: ReduceError) -> Error {
    match error.downcast::<meshstep_comm::Error>() {
        Ok(error) => error.into(),
        Err(other) => Error::Closure { source: Arc::new(other) },
    }
}
