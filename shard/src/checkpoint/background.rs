//! Saving while training goes on: a copy of one moment is written by a thread, whose ranks have a communicator of their own.

use super::contents::Keeper;
use super::error::CheckpointError;
use super::placing::{Alike, Placing};
use super::ranks::{Failed, Ranks};
use super::save::{Agreed, Save, agree_to_save, apart};
use super::snapshot::Snapshot;
use super::store::{Draft, Store};
use super::write::Written;
use crate::{Error, Optimizer, Options};
use meshstep_comm::Communicator;
use meshstep_tensor::{Buffer, Place, Queue};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A save on its way. Dropping it lets the save go on: the optimizer's next one, or its drop, waits for it.
#[derive(Debug)]
pub struct Saving {
    flight: Arc<Flight>,
    stall: Stall,
}

/// How long training stood still for a save that goes on beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Bytes copied on this rank.
    pub bytes: u64,
    /// What that took.
    pub copying: Duration,
    /// From the call of [`Optimizer::save_async`] to its return, the other ranks' part in it too.
    pub whole: Duration,
}

impl Saving {
    /// What the checkpoint is called.
    pub fn step(&self) -> u64 {
        self.flight.step
    }

    /// How long training stood still.
    pub fn stall(&self) -> Stall {
        self.stall
    }

    /// Bytes this rank has written, and bytes it writes, once it has begun.
    pub fn progress(&self) -> (u64, u64) {
        (self.flight.written.load(Relaxed), self.flight.total.load(Relaxed))
    }

    /// Whether it has ended, in a checkpoint or in an error; on a GPU, whether this rank has written its file.
    pub fn is_done(&self) -> bool {
        self.flight.ended.get().is_some() || lock(&self.flight.rest).is_some()
    }

    /// Waits for it, on a GPU a call of all ranks; tells what the checkpoint is called. What fails in the save is the same [`Error::Checkpoint`] on every rank.
    /// Any other error concerns the communicator of saves alone, unless training has failed too: steps go on.
    pub fn join(self) -> Result<u64, Error> {
        let ended = self.flight.wait();
        self.flight.heard.store(true, Relaxed);
        ended
    }
}

/// What an optimizer keeps of background saves.
#[derive(Debug, Default)]
pub(crate) struct Background {
    comm: Option<Arc<dyn Communicator>>,
    last: Option<Arc<Flight>>,
}

/// A save, and the thread that carries it out.
#[derive(Debug)]
struct Flight {
    step: u64,
    written: AtomicU64,
    total: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
    ended: OnceLock<Result<u64, Error>>,
    /// Somebody has asked what became of it.
    heard: AtomicBool,
    /// Its ranks have no communicator any more.
    broken: AtomicBool,
    rest: Mutex<Option<Rest>>,
    /// What was copied to, once that is written.
    spare: Mutex<Vec<Buffer>>,
}

/// What a thread carries out.
struct Job {
    agreed: Agreed,
    store: Store,
    ranks: Ranks,
    snapshot: Snapshot,
    /// Where ranks cannot agree meanwhile: what was begun.
    opened: Option<Option<Draft>>,
}

/// What all ranks do together once each has written its file.
#[derive(Debug)]
struct Rest {
    agreed: Agreed,
    ranks: Ranks,
    draft: Option<Draft>,
    written: Result<Written, CheckpointError>,
}

const PANICKED: &str = "the thread that saves panicked";

/// What a rank knows of the save before: nothing that others should hear.
const FINE: u64 = 0;
/// It failed, and nobody has asked.
const UNHEARD: u64 = 1;
/// Its ranks have no communicator any more.
const BROKEN: u64 = 2;

impl Optimizer {
    /// As [`save`](Self::save), of this moment, while training goes on. Collective; it takes as long as copying what this rank
    /// writes to memory of the host, which it does after the last step, on a GPU too. That memory, counted as staging, stays for
    /// the next one until [`release_snapshot`](Self::release_snapshot).
    ///
    /// Files are written by a thread, whose ranks agree through a communicator split off once: aborting training's ends the save.
    /// On a GPU, where collectives that ranks launch in different orders may wait for each other for ever, a thread only writes:
    /// the step becomes the newest in [`Saving::join`], the next save, or the optimizer's drop, to which all ranks come together.
    /// What fails there changes nothing here. [`Saving::join`] tells it; where any rank has not joined, the next save of either
    /// kind is that error instead, on every rank, and the one after it saves again. A save waits for the one before; so does
    /// dropping the optimizer.
    ///
    /// ```
    /// # use meshstep_optim::AdamW;
    /// # use meshstep_shard::checkpoint::{Save, Store};
    /// # use meshstep_shard::{Error, Optimizer, Options};
    /// # use meshstep_tensor::{DType, Layout};
    /// # let dir = std::env::temp_dir().join(format!("meshstep-async-doc-{}", std::process::id()));
    /// # std::fs::create_dir_all(&dir)?;
    /// # let store = Store::new(&dir);
    /// let saved = meshstep_comm::loopback::spawn(4, |comm| -> Result<u64, Error> {
    ///     let layout = Layout::builder().param("w", &[3, 5], DType::F32).build()?;
    ///     let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), Options::default())?;
    ///     let saving = opt.save_async(&store, Save { step: Some(100), ..Save::default() })?;
    ///     println!("stood still: {:?}", saving.stall());
    ///     // Steps are taken here.
    ///     saving.join()
    /// })?;
    /// assert_eq!(saved.into_iter().collect::<Result<Vec<_>, Error>>()?, [100; 4]);
    /// # std::fs::remove_dir_all(&dir)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_async(&mut self, store: &Store, save: Save<'_>) -> Result<Saving, Error> {
        let ranks = self.comm().world_size();
        self.save_async_placed(store, save, &Alike { ranks })
    }

    /// The same where parameters are parts of others.
    pub fn save_async_placed(
        &mut self,
        store: &Store,
        save: Save<'_>,
        placing: &dyn Placing,
    ) -> Result<Saving, Error> {
        save_all_async(self, store, save, placing)
    }

    /// Frees what the last [`save_async`](Self::save_async) has copied to, if it has ended.
    pub fn release_snapshot(&mut self) {
        self.background.last.iter().for_each(|last| drop(std::mem::take(&mut *lock(&last.spare))));
    }

    /// What became of the save before, if it failed and some rank has not asked. Collective.
    pub(super) fn hear_of_last_save(&mut self, ranks: &Ranks) -> Result<(), Error> {
        let known = self.background.last.as_ref().map_or(FINE, |last| last.known());
        let known = ranks.words(known)?;
        if known.iter().any(|&known| known & BROKEN != 0) {
            self.background.comm = None;
            self.background.last.iter().for_each(|last| last.broken.store(false, Relaxed));
        }
        if known.iter().all(|&known| known & UNHEARD == 0) {
            return Ok(());
        }
        let failed = self.background.last.as_ref().and_then(|last| last.failed(ranks.rank()));
        let same = ranks.same(failed);
        self.background.last.iter().for_each(|last| last.heard.store(true, Relaxed));
        same
    }

    /// The next save in the background is of other ranks.
    pub(crate) fn forget_savers(&mut self) {
        self.background.comm = None;
    }

    /// Waits until this rank's thread has ended the save before.
    pub(super) fn finish_last_save(&mut self) {
        self.background.last.iter().for_each(|last| drop(last.wait()));
    }
}

/// Begins to save whatever a keeper keeps. Collective.
pub(crate) fn save_all_async<K: Keeper>(
    keeper: &mut K,
    store: &Store,
    save: Save<'_>,
    placing: &dyn Placing,
) -> Result<Saving, Error> {
    let begun = Instant::now();
    let agreed = agree_to_save(keeper, "save in the background", &save, placing)?;
    let hook = if save.progress.is_some() { Err(CheckpointError::Progress) } else { Ok(()) };
    let (flight, bytes, copying) = apart(keeper, |keeper| begin(keeper, store, agreed, hook))?;
    Ok(Saving { flight, stall: Stall { bytes, copying, whole: begun.elapsed() } })
}

fn begin<K: Keeper>(
    keeper: &mut K,
    store: &Store,
    agreed: Agreed,
    hook: Result<(), CheckpointError>,
) -> Result<(Arc<Flight>, u64, Duration), Error> {
    let (world, comm) = (Ranks::of(keeper), keeper.ranks());
    let background = &mut keeper.optimizer().background;
    if background.comm.is_none() {
        background.comm = comm.split(Some(0), world.rank() as i64)?;
    }
    let copying = Instant::now();
    let made = hook.and_then(|()| prepare(keeper, store, agreed));
    let copying = copying.elapsed();
    let (flight, mut job, send) = world.agree(made)?;
    if keeper.queue().place() != Place::Cpu {
        job.opened = Some(job.agreed.open(store, &job.ranks)?);
    }
    let bytes = job.snapshot.bytes();
    // The thread waits for it.
    let _ = send.send(job);
    keeper.optimizer().background.last = Some(Arc::clone(&flight));
    Ok((flight, bytes, copying))
}

/// All that this rank needs: once every rank has it, nothing is missing.
fn prepare<K: Keeper>(
    keeper: &mut K,
    store: &Store,
    agreed: Agreed,
) -> Result<(Arc<Flight>, Job, Sender<Job>), CheckpointError> {
    let world = keeper.ranks();
    let opt = keeper.optimizer();
    let comm = opt.background.comm.clone().unwrap_or(world);
    let options = Options { queue: queue_beside(&opt.options.queue)?, ..opt.options.clone() };
    let ranks = Ranks::new(&comm, &options);
    let last = opt.background.last.take();
    let spare = last.map_or_else(Vec::new, |last| std::mem::take(&mut *lock(&last.spare)));
    let (flight, send) = Flight::new(agreed.step())?;
    let snapshot = Snapshot::of(keeper, (&agreed.contents, &agreed.parts), spare, &options.meter)?;
    Ok((flight, Job { agreed, store: store.clone(), ranks, snapshot, opened: None }, send))
}

impl Flight {
    /// Its thread, which waits for something to do; without any it ends.
    fn new(step: u64) -> Result<(Arc<Self>, Sender<Job>), CheckpointError> {
        let flight = Arc::new(Flight {
            step,
            written: AtomicU64::new(0),
            total: AtomicU64::new(0),
            thread: Mutex::default(),
            ended: OnceLock::new(),
            heard: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            rest: Mutex::default(),
            spare: Mutex::default(),
        });
        let (send, jobs) = channel();
        let its = Arc::clone(&flight);
        let thread = std::thread::Builder::new().name("meshstep-save".to_owned());
        let thread = thread.spawn(move || its.run(&jobs)).map_err(CheckpointError::memory)?;
        *lock(&flight.thread) = Some(thread);
        Ok((flight, send))
    }

    fn run(&self, jobs: &Receiver<Job>) {
        let Ok(Job { agreed, store, ranks, mut snapshot, opened }) = jobs.recv() else { return };
        let mut progress = |written, total| {
            self.written.store(written, Relaxed);
            self.total.store(total, Relaxed);
        };
        let Some(draft) = opened else {
            let carry_out = || agreed.carry_out(&store, &ranks, &mut snapshot, &mut progress);
            let panicked =
                || meshstep_comm::Error::Panicked { rank: ranks.rank(), message: PANICKED.to_owned() };
            let ended = catch_unwind(AssertUnwindSafe(carry_out)).unwrap_or_else(|_| Err(panicked().into()));
            *lock(&self.spare) = snapshot.into_memory();
            return self.end(&ranks, ended);
        };
        let write = || agreed.write(&store, &ranks, &mut snapshot, &mut progress);
        let written = catch_unwind(AssertUnwindSafe(write));
        let written = written.unwrap_or_else(|_| Err(CheckpointError::memory(PANICKED)));
        *lock(&self.spare) = snapshot.into_memory();
        *lock(&self.rest) = Some(Rest { agreed, ranks, draft, written });
    }

    fn end(&self, ranks: &Ranks, ended: Result<(), Error>) {
        if !matches!(ended, Ok(()) | Err(Error::Checkpoint(_))) {
            // Nobody is to wait for what this rank will not say.
            self.broken.store(true, Relaxed);
            ranks.abort();
        }
        let _ = self.ended.set(ended.map(|()| self.step));
    }

    /// What became of it. Who waits first keeps the others waiting.
    fn wait(&self) -> Result<u64, Error> {
        let mut thread = lock(&self.thread);
        if let Some(thread) = thread.take() {
            let _ = thread.join();
        }
        if let Some(Rest { agreed, ranks, draft, written }) = lock(&self.rest).take() {
            self.end(&ranks, agreed.close(&ranks, draft, written));
        }
        let ended = self.ended.get().cloned();
        ended.unwrap_or_else(|| unreachable!("a thread with something to do tells how it ended"))
    }

    fn known(&self) -> u64 {
        let broken = if self.broken.load(Relaxed) { BROKEN } else { FINE };
        let failed = matches!(self.ended.get(), Some(Err(_))) && !self.heard.load(Relaxed);
        broken | if failed { UNHEARD } else { FINE }
    }

    /// As every rank can be told.
    fn failed(&self, rank: usize) -> Option<Failed> {
        match self.ended.get()? {
            Ok(_) => None,
            Err(Error::Checkpoint(failed)) => Some((**failed).clone()),
            Err(error) => {
                let error = CheckpointError::Lost { step: self.step, message: error.to_string() };
                Some(Failed { rank, error })
            }
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let Some(last) = self.last.take().filter(|_| !std::thread::panicking()) else { return };
        let ended = last.wait();
        if let (Err(error), false) = (ended, last.heard.load(Relaxed)) {
            tracing::error!(step = last.step, %error, "a background save failed");
        }
    }
}

/// Where a background save's words are ordered: neither behind training's work nor before it.
#[cfg_attr(not(feature = "cuda"), expect(clippy::unnecessary_wraps, reason = "a stream may be refused"))]
fn queue_beside(queue: &Queue) -> Result<Queue, CheckpointError> {
    #[cfg(feature = "cuda")]
    if let Some(stream) = queue.stream() {
        let stream = meshstep_tensor::cuda::Stream::new(stream.device()).map_err(CheckpointError::memory)?;
        return Ok(Queue::cuda(stream));
    }
    Ok(queue.clone())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
