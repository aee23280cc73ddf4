//! Saving while training goes on: a thread writes a copy of one moment, over a communicator of its own.

use super::ranks::{Failed, Ranks};
use super::save::{Agreed, Save, agree_to_save, apart};
use super::snapshot::Snapshot;
use super::write::Written;
use crate::checkpoint::error::CheckpointError;
use crate::checkpoint::format::placement::{ModelPlacement, Unsharded};
use crate::checkpoint::saveable::Saveable;
use crate::checkpoint::store::{Draft, Store};
use crate::{Error, Optimizer, Options};
use meshstep_comm::Communicator;
use meshstep_tensor::{Buffer, Place, Queue};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Background save. Dropping the handle lets the save go on; the optimizer's next save, or its drop, waits for it.
#[derive(Debug)]
pub struct Saving {
    flight: Arc<Flight>,
    stall: Stall,
}

/// Pause of training caused by a background save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Bytes copied on this rank.
    pub bytes: u64,
    /// Time of the copy.
    pub copying: Duration,
    /// Time from the call of [`Optimizer::save_async`] to its return, including the other ranks' part.
    pub whole: Duration,
}

impl Saving {
    /// Returns the step that names the checkpoint.
    pub fn step(&self) -> u64 {
        self.flight.step
    }

    /// Returns the pause of training.
    pub fn stall(&self) -> Stall {
        self.stall
    }

    /// Returns the bytes this rank has written, and the total; zeros until the first write.
    pub fn progress(&self) -> (u64, u64) {
        (self.flight.written.load(Relaxed), self.flight.total.load(Relaxed))
    }

    /// Returns true if the save has ended, with a checkpoint or an error. On a GPU: true if this rank has written its file.
    pub fn is_done(&self) -> bool {
        self.flight.ended.get().is_some() || lock(&self.flight.rest).is_some()
    }

    /// Waits for the save and returns the step that names the checkpoint; on a GPU all ranks must call this together. A failure of the save
    /// is the same [`Error::Checkpoint`] on every rank. Any other error concerns only the communicator of saves, unless training has failed
    /// too: training can go on.
    pub fn join(self) -> Result<u64, Error> {
        let ended = self.flight.wait();
        self.flight.heard.store(true, Relaxed);
        ended
    }
}

/// State of an optimizer's background saves.
#[derive(Debug, Default)]
pub(crate) struct Background {
    comm: Option<Arc<dyn Communicator>>,
    last: Option<Arc<Flight>>,
}

/// Background save, and the thread that carries it out.
#[derive(Debug)]
struct Flight {
    step: u64,
    written: AtomicU64,
    total: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
    ended: OnceLock<Result<u64, Error>>,
    /// True if the outcome was reported to the caller.
    heard: AtomicBool,
    /// True if the communicator of saves is unusable.
    broken: AtomicBool,
    rest: Mutex<Option<Rest>>,
    /// Memory of the snapshot, for reuse once it is written.
    spare: Mutex<Vec<Buffer>>,
}

/// Work of the thread.
struct Job {
    agreed: Agreed,
    store: Store,
    ranks: Ranks,
    snapshot: Snapshot,
    /// Draft begun in advance, if ranks cannot agree in the background (GPU).
    opened: Option<Option<Draft>>,
}

/// Collective part of a save that remains when each rank has written its file.
#[derive(Debug)]
struct Rest {
    agreed: Agreed,
    ranks: Ranks,
    draft: Option<Draft>,
    written: Result<Written, CheckpointError>,
}

const PANICKED: &str = "the thread that saves panicked";

/// State of the previous save on a rank: nothing to report.
const FINE: u64 = 0;
/// The previous save failed, and its error was not reported.
const UNHEARD: u64 = 1;
/// The communicator of saves is unusable.
const BROKEN: u64 = 2;

impl Optimizer {
    /// Same as [`save`](Self::save) of this moment, while training goes on. Collective. The call takes as long as copying this rank's part
    /// to host memory, after the last step has finished, on a GPU too. The copy is counted as staging memory and kept for the next save
    /// until [`release_snapshot`](Self::release_snapshot).
    ///
    /// A thread writes the file, and its ranks agree over a communicator that is split off once; aborting training's communicator ends the
    /// save. On a GPU, collectives that ranks launch in different orders may deadlock, so the thread only writes: the step becomes the
    /// newest in [`Saving::join`], the next save, or the drop of the optimizer, which all ranks reach together. A failure of the save
    /// changes nothing here. [`Saving::join`] returns it; if any rank has not joined, the next save of either kind returns that error
    /// instead, on every rank, and the save after that works again. A save waits for the previous one, and so does dropping the optimizer.
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
        self.save_async_placed(store, save, &Unsharded { ranks })
    }

    /// [`save_async`](Self::save_async) with parameters cut as `placing` describes.
    pub fn save_async_placed(
        &mut self,
        store: &Store,
        save: Save<'_>,
        placing: &dyn ModelPlacement,
    ) -> Result<Saving, Error> {
        save_all_async(self, store, save, placing)
    }

    /// Frees the memory of the last [`save_async`](Self::save_async), if that has ended.
    pub fn release_snapshot(&mut self) {
        self.background.last.iter().for_each(|last| drop(std::mem::take(&mut *lock(&last.spare))));
    }

    /// Returns the error of the previous save if it failed and some rank has not reported it. Collective.
    pub(crate) fn hear_of_last_save(&mut self, ranks: &Ranks) -> Result<(), Error> {
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

    /// Drops the communicator of saves; the next background save is of other ranks.
    pub(crate) fn forget_savers(&mut self) {
        self.background.comm = None;
    }

    /// Waits until this rank's thread has ended the previous save.
    pub(crate) fn finish_last_save(&mut self) {
        self.background.last.iter().for_each(|last| drop(last.wait()));
    }
}

/// Begins to save the contents of `saveable`. Collective.
pub(crate) fn save_all_async<K: Saveable>(
    saveable: &mut K,
    store: &Store,
    save: Save<'_>,
    placing: &dyn ModelPlacement,
) -> Result<Saving, Error> {
    let begun = Instant::now();
    let agreed = agree_to_save(saveable, "save in the background", &save, placing)?;
    let hook = if save.progress.is_some() { Err(CheckpointError::Progress) } else { Ok(()) };
    let (flight, bytes, copying) = apart(saveable, |saveable| begin(saveable, store, agreed, hook))?;
    Ok(Saving { flight, stall: Stall { bytes, copying, whole: begun.elapsed() } })
}

fn begin<K: Saveable>(
    saveable: &mut K,
    store: &Store,
    agreed: Agreed,
    hook: Result<(), CheckpointError>,
) -> Result<(Arc<Flight>, u64, Duration), Error> {
    let (world, comm) = (Ranks::of(saveable), saveable.ranks());
    let background = &mut saveable.optimizer().background;
    if background.comm.is_none() {
        background.comm = comm.split(Some(0), world.rank() as i64)?;
    }
    let copying = Instant::now();
    let made = hook.and_then(|()| prepare(saveable, store, agreed));
    let copying = copying.elapsed();
    let (flight, mut job, send) = world.agree(made)?;
    if saveable.queue().place() != Place::Cpu {
        job.opened = Some(job.agreed.open(store, &job.ranks)?);
    }
    let bytes = job.snapshot.bytes();
    // The thread waits for the job.
    let _ = send.send(job);
    saveable.optimizer().background.last = Some(Arc::clone(&flight));
    Ok((flight, bytes, copying))
}

/// Allocates the memory of this rank's save. Once every rank has succeeded, the save can begin.
fn prepare<K: Saveable>(
    saveable: &mut K,
    store: &Store,
    agreed: Agreed,
) -> Result<(Arc<Flight>, Job, Sender<Job>), CheckpointError> {
    let world = saveable.ranks();
    let opt = saveable.optimizer();
    let comm = opt.background.comm.clone().unwrap_or(world);
    let options = Options { queue: queue_beside(&opt.params.options.queue)?, ..opt.params.options.clone() };
    let ranks = Ranks::new(&comm, &options);
    let last = opt.background.last.take();
    let spare = last.map_or_else(Vec::new, |last| std::mem::take(&mut *lock(&last.spare)));
    let (flight, send) = Flight::new(agreed.step())?;
    let snapshot = Snapshot::of(saveable, (&agreed.contents, &agreed.parts), spare, &options.meter)?;
    Ok((flight, Job { agreed, store: store.clone(), ranks, snapshot, opened: None }, send))
}

impl Flight {
    /// Starts the thread, which waits for a job; it ends if the sender is dropped.
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
            // No rank must wait for a message that this rank will not send.
            self.broken.store(true, Relaxed);
            ranks.abort();
        }
        let _ = self.ended.set(ended.map(|()| self.step));
    }

    /// Waits for the outcome. Concurrent callers wait for the first one.
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

    /// Returns the error in a form that can be sent to every rank.
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

/// Returns a queue for the agreement of a background save, ordered neither before nor after training's work.
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
