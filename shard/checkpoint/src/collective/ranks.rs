//! Agreement among all ranks of a save or a load: an error on one rank becomes the same error on all.

use crate::error::CheckpointError;
use crate::failure::{Error, Failed};
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_shard::extend::host_words;
use meshstep_shard::{Options, gather_words};
use meshstep_tensor::{Buffer, Meter, Queue};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// Interval at which rank 0 signals waiting ranks that it still works; far shorter than any deadline.
const PULSE: Duration = Duration::from_millis(100);

/// Signals of rank 0 during its work, and after it.
const BUSY: u64 = 1;
const DONE: u64 = 0;

/// Work that one rank does alone.
pub(crate) type Work<'a, T> = Box<dyn FnOnce() -> Result<T, CheckpointError> + Send + 'a>;

/// Ranks of a save or a load, with the exchanges among them.
#[derive(Clone, Debug)]
pub struct Ranks {
    comm: Arc<dyn Communicator>,
    options: Options,
}

impl Ranks {
    pub(crate) fn new(comm: &Arc<dyn Communicator>, options: &Options) -> Self {
        Ranks { comm: Arc::clone(comm), options: options.clone() }
    }

    /// Returns the number of this rank.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Returns the queue of the communicator's memory, and the meter that counts it.
    pub(crate) fn memory(&self) -> (&Queue, &Meter) {
        (&self.options.queue, &self.options.meter)
    }

    /// Returns every rank's bytes, in the order of ranks. Collective.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, meshstep_shard::Error> {
        let lens = gather_words(&*self.comm, &self.options, &[bytes.len() as u64])?;
        let words = lens.iter().max().map_or(0, |&longest| (longest as usize).div_ceil(8));
        if words == 0 {
            return Ok(vec![Vec::new(); lens.len()]);
        }
        let mut mine = padded(bytes);
        mine.resize(words, 0);
        let all = gather_words(&*self.comm, &self.options, &mine)?;
        let of = |(words, &len): (&[u64], &u64)| {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.truncate(len as usize);
            bytes
        };
        Ok(all.chunks(words).zip(&lens).map(of).collect())
    }

    /// Returns every rank's word. Collective.
    pub fn words(&self, word: u64) -> Result<Vec<u64>, meshstep_shard::Error> {
        gather_words(&*self.comm, &self.options, &[word])
    }

    /// Runs an operation on a buffer of this queue, then checks that the ranks are sound.
    pub(crate) fn travel(&self, op: Op, buffer: &mut Buffer) -> Result<(), meshstep_shard::Error> {
        host_words::run(&*self.comm, &self.options.queue, op, buffer)?;
        Ok(self.comm.sound()?)
    }

    /// Returns rank 0's word. Collective.
    pub fn first_word(&self, word: u64) -> Result<u64, meshstep_shard::Error> {
        Ok(self.words(word)?.first().copied().unwrap_or_default())
    }

    /// Replaces `words` by those of rank 0. Collective; every rank passes the same number of words.
    pub fn first_words(&self, words: &mut [u64]) -> Result<(), meshstep_shard::Error> {
        if self.rank() > 0 {
            words.fill(0);
        }
        let (queue, meter) = self.memory();
        Ok(host_words::all_reduce(&*self.comm, queue, meter, words, Reduction::Max)?)
    }

    /// Aborts the communicator on all ranks.
    pub fn abort(&self) {
        self.comm.abort();
    }

    /// Returns the failure known to the lowest rank that knows of one. Collective.
    pub fn same(&self, failed: Option<Failed>) -> Result<(), Error> {
        let known = failed.as_ref().map_or(Vec::new(), |Failed { rank, error }| {
            [&(*rank as u64).to_le_bytes()[..], &encode(error)].concat()
        });
        let known = self.gather(&known)?;
        let first = known.iter().find_map(|known| known.split_first_chunk());
        first.map_or(Ok(()), |(rank, text)| {
            let (rank, error) = (u64::from_le_bytes(*rank) as usize, decode(text));
            Err(Failed { rank, error }.into())
        })
    }

    /// Returns `made` if every rank succeeded; otherwise the error of the lowest rank that failed. Collective.
    pub fn agree<T>(&self, made: Result<T, CheckpointError>) -> Result<T, Error> {
        let objection = made.as_ref().err().map_or(Vec::new(), encode);
        let lens = self.words(objection.len() as u64)?;
        // The other ranks' errors stay with them: a thousand of them could take much memory.
        let failed = lens.iter().zip(0..).find(|(len, _)| **len > 0);
        match (failed, made) {
            (Some((&len, rank)), _) => {
                let text = self.text_of(rank, len as usize, &objection)?;
                Err(Failed { rank, error: decode(&text) }.into())
            }
            (None, Ok(made)) => Ok(made),
            // The text of this rank's error is empty.
            (None, Err(error)) => Err(Failed { rank: self.rank(), error }.into()),
        }
    }

    /// Returns rank `rank`'s text, which has `len` bytes. Collective.
    fn text_of(&self, rank: usize, len: usize, own: &[u8]) -> Result<Vec<u8>, meshstep_shard::Error> {
        let mut words = vec![0; len.div_ceil(8)];
        if self.rank() == rank {
            words = padded(own);
        }
        let (queue, meter) = self.memory();
        host_words::all_reduce(&*self.comm, queue, meter, &mut words, Reduction::Max)?;
        let mut text: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        text.truncate(len);
        Ok(text)
    }
}

/// Returns bytes as words, with zeros behind them.
fn padded(bytes: &[u8]) -> Vec<u64> {
    let (words, rest) = bytes.as_chunks();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(last);
    words.iter().copied().chain(last).map(u64::from_le_bytes).collect()
}

impl Ranks {
    /// [`agree`](Self::agree) on a result that rank 0 alone makes; rank 0 alone passes `work`. However long the work takes, no rank waits
    /// in one call for longer than [`PULSE`]. Collective.
    pub(crate) fn agree_on_first<T: Send>(&self, work: Option<Work<'_, T>>) -> Result<Option<T>, Error> {
        let Some(work) = work else {
            while self.first_word(DONE)? == BUSY {}
            return self.agree(Ok(None));
        };
        thread::scope(|scope| {
            let (working, ended) = channel::<()>();
            let work = move || {
                let _working = working;
                work()
            };
            let thread = thread::Builder::new().name("meshstep-first".to_owned()).spawn_scoped(scope, work);
            while let (Ok(_), Err(RecvTimeoutError::Timeout)) = (&thread, ended.recv_timeout(PULSE)) {
                self.first_word(BUSY)?;
            }
            let made = thread
                .map_err(CheckpointError::memory)
                .and_then(|thread| thread.join().unwrap_or_else(|panicked| resume_unwind(panicked)));
            self.first_word(DONE)?;
            self.agree(made.map(Some))
        })
    }
}

fn encode(error: &CheckpointError) -> Vec<u8> {
    // A path that is not UTF-8 cannot be serialized.
    let other = |_| serde_json::to_vec(&CheckpointError::memory(error)).unwrap_or_default();
    serde_json::to_vec(error).unwrap_or_else(other)
}

fn decode(text: &[u8]) -> CheckpointError {
    let shown = |_| CheckpointError::memory(String::from_utf8_lossy(text));
    serde_json::from_slice(text).unwrap_or_else(shown)
}
