//! Sums and maxima over the ranks of a group, as update rules ask for them.

use crate::Error;
use crate::exchange::group;
use meshstep_comm::Communicator;
use meshstep_optim::{Reduce, ReduceError};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::sync::{Arc, Mutex, PoisonError};

/// [`Reduce`] over a communicator: each fold is one group of two small all-reduces of u64.
///
/// Its vectors grow to the longest fold and are kept.
#[derive(Debug)]
pub struct Folding {
    comm: Arc<dyn Communicator>,
    meter: Meter,
    /// Sums and maxima.
    room: Mutex<[Buffer; 2]>,
}

impl Folding {
    /// Folds over the ranks of `comm`.
    pub fn new(comm: Arc<dyn Communicator>, meter: &Meter) -> Result<Self, meshstep_tensor::Error> {
        let nothing = || Buffer::zeroed(0, DType::U64, meter, Category::Staging);
        Ok(Folding { comm, meter: meter.clone(), room: Mutex::new([nothing()?, nothing()?]) })
    }

    /// Keeps room for folds of this many sums and maxima, so that none of them allocates.
    pub fn with_room(self, (sums, maxima): (usize, usize)) -> Result<Self, meshstep_tensor::Error> {
        let room = |len| Buffer::zeroed(len, DType::U64, &self.meter, Category::Staging);
        let room = Mutex::new([room(sums)?, room(maxima)?]);
        Ok(Folding { room, ..self })
    }

    fn exchange(&self, words: [&mut [u64]; 2]) -> Result<(), meshstep_comm::Error> {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        for (buffer, words) in room.iter_mut().zip(&words) {
            if buffer.len() < words.len() {
                *buffer = Buffer::zeroed(words.len(), DType::U64, &self.meter, Category::Staging)?;
            }
            buffer.typed_mut::<u64>()?[..words.len()].copy_from_slice(words);
        }
        let [sums, maxima] = &mut *room;
        let spare = [sums.split_off(words[0].len())?, maxima.split_off(words[1].len())?];
        let done = group(&*self.comm, [&Queue::cpu(); 2], sums, maxima);
        for ((buffer, spare), words) in room.iter_mut().zip(spare).zip(words) {
            words.copy_from_slice(buffer.typed()?);
            let joined = buffer.take().join(spare);
            *buffer = joined.unwrap_or_else(|_| unreachable!("joined where it was cut"));
        }
        done
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

/// What made a fold fail.
pub(crate) fn from_fold(error: ReduceError) -> Error {
    match error.downcast::<meshstep_comm::Error>() {
        Ok(error) => error.into(),
        Err(other) => Error::Closure { source: Arc::new(other) },
    }
}
