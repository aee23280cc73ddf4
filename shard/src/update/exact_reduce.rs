//! Sums and maxima over the ranks of a group, for update rules.

use crate::error::Error;
use crate::ranks::host_words::all_reduce_both;
use meshstep_comm::Communicator;
use meshstep_optim::{Reduce, ReduceError};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::sync::{Arc, Mutex, PoisonError};

/// [`Reduce`] over a communicator: each fold is one group of two small all-reduces of u64.
///
/// Its vectors grow to the longest fold and are kept. On a GPU words are uploaded and downloaded: the host waits.
#[derive(Debug)]
pub struct Folding {
    comm: Arc<dyn Communicator>,
    queue: Queue,
    meter: Meter,
    /// Vectors of the sums and of the maxima.
    room: Mutex<[Buffer; 2]>,
}

impl Folding {
    /// Folds over the ranks of `comm`, with buffers on the CPU.
    pub fn new(comm: Arc<dyn Communicator>, meter: &Meter) -> Result<Self, meshstep_tensor::Error> {
        let nothing = || Buffer::zeroed(0, DType::U64, meter, Category::Staging);
        let room = Mutex::new([nothing()?, nothing()?]);
        Ok(Folding { comm, queue: Queue::cpu(), meter: meter.clone(), room })
    }

    /// Folds through memory of the queue's place, where the communicator's buffers are.
    pub fn on(self, queue: &Queue) -> Result<Self, meshstep_tensor::Error> {
        Folding { queue: queue.clone(), ..self }.with_room((0, 0))
    }

    /// Allocates memory for folds of this many sums and maxima, so that folds allocate nothing.
    pub fn with_room(self, (sums, maxima): (usize, usize)) -> Result<Self, meshstep_tensor::Error> {
        let room = |len| self.vector(len);
        let room = Mutex::new([room(sums)?, room(maxima)?]);
        Ok(Folding { room, ..self })
    }

    fn vector(&self, len: usize) -> Result<Buffer, meshstep_tensor::Error> {
        Buffer::zeroed_on(&self.queue, len, DType::U64, &self.meter, Category::Staging)
    }

    fn exchange(&self, words: [&mut [u64]; 2]) -> Result<(), meshstep_comm::Error> {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        for (buffer, words) in room.iter_mut().zip(&words) {
            if buffer.len() < words.len() {
                *buffer = self.vector(words.len())?;
            }
            self.queue.upload((&**words).into(), buffer.as_mut().slice(0..words.len())?)?;
        }
        let [sums, maxima] = &mut *room;
        let spare = [sums.split_off(words[0].len())?, maxima.split_off(words[1].len())?];
        let mut done = all_reduce_both(&*self.comm, [&self.queue; 2], sums, maxima);
        for ((buffer, spare), words) in room.iter_mut().zip(spare).zip(words) {
            done = done.and_then(|()| Ok(self.queue.download(buffer.as_slice(), words.into())?));
            let joined = buffer.take().join(spare);
            *buffer = joined.unwrap_or_else(|_| unreachable!("joined where it was cut"));
        }
        // An aborted exchange lets the stream continue, and leaves words that are not the ranks' sums.
        done.and_then(|()| self.comm.sound())
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
