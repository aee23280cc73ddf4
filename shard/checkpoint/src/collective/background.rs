//! Saving while training goes on: a thread writes a copy of one moment, over a communicator of its own.

use super::ranks::Ranks;
use super::save::{Agreed, Save, agree_to_save};
use super::snapshot::Snapshot;
use super::write::Written;
use crate::contents::Saveable;
use crate::error::CheckpointError;
use crate::failure::{Error, Failed};
use crate::parts::{Live, SavedParts};
use crate::store::Store;
use crate::store::draft::Draft;
use meshstep_comm::Communicator;
use meshstep_shard::Options;
use meshstep_tensor::{Buffer, Place, Queue};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Background saves, one after another: the memory of their copies, their communicator, and the outcome of the last one. Dropping it waits
/// for the last save, logs its error if nothing has reported it, and frees the memory; on a GPU all ranks drop it together.
#[derive(Debug, Default)]
pub struct Saver {
    comm: Option<SaverComm>,
    last: Option<Arc<Flight>>,
    /// True if all ranks have reported the outcome of the last save.
    settled: bool,
}

/// Communicator of saves, and the one that it was split from.
#[derive(Debug)]
struct SaverComm {
    from: Arc<dyn Communicator>,
    comm: Arc<dyn Communicator>,
}

/// Background save. Dropping the handle lets the save go on; the next save after it, or the drop of its [`Saver`], waits for it.
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
    /// Time from the call of [`save_async`] to its return, including the other ranks' part.
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
    /// is the same [`Error::Failed`] on every rank. Any other error concerns only the communicator of saves, unless training has failed
    /// too: training can go on.
    pub fn join(self) -> Result<u64, Error> {
        let ended = self.flight.wait();
        self.flight.reported.store(true, Relaxed);
        ended
    }
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
    reported: AtomicBool,
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

/// State of a saver on a rank: nothing to report.
const FINE: u64 = 0;
/// The last save failed, and its error was not reported.
const UNREPORTED: u64 = 1;
/// There is no usable communicator of saves among these ranks.
const NO_COMM: u64 = 2;

/// Same as [`save`](super::save::save) of this moment, while training goes on. Collective. The call takes as long as copying this rank's
/// part to host memory, after the last step has finished, on a GPU too. The copy is counted as staging memory; `saver` keeps it for its
/// next save.
///
/// A thread writes the file, and its ranks agree over a communicator that is split off once; aborting training's communicator ends the
/// save. On a GPU, collectives that ranks launch in different orders may deadlock, so the thread only writes: the step becomes the
/// newest in [`Saving::join`], the next save, or the drop of the saver, which all ranks reach together. A failure of the save changes
/// nothing here. [`Saving::join`] returns it; if any rank has not joined, the next save with this saver, or [after](Save::after) it,
/// returns that error instead, on every rank, and the save after that works again. A save waits for the previous one of its saver.
///
/// ```
/// # use meshstep_optim::AdamW;
/// # use meshstep_checkpoint::{Error, Save, Saver, Store, save_async};
/// # use meshstep_shard::{Optimizer, Options};
/// # use meshstep_tensor::{DType, Layout};
/// # let dir = std::env::temp_dir().join(format!("meshstep-async-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&dir)?;
/// # let store = Store::new(&dir);
/// let saved = meshstep_comm::loopback::spawn(4, |comm| -> Result<u64, Error> {
///     # let layout = Layout::builder().param("w", &[3, 5], DType::F32).build()?;
///     let mut opt = Optimizer::new(comm, layout, AdamW::default(), |_, _| Ok(()), Options::default())?;
///     let mut saver = Saver::default();
///     let saving = save_async(&mut opt, &mut saver, &store, Save { step: Some(100), ..Save::default() })?;
///     println!("stood still: {:?}", saving.stall());
///     // Steps are taken here.
///     saving.join()
/// })?;
/// assert_eq!(saved.into_iter().collect::<Result<Vec<_>, Error>>()?, [100; 4]);
/// # std::fs::remove_dir_all(&dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn save_async<T: Saveable + ?Sized>(
    thing: &mut T,
    saver: &mut Saver,
    store: &Store,
    mut save: Save<'_>,
) -> Result<Saving, Error> {
    let begun = Instant::now();
    let mut contents = thing.contents();
    let (parts, placing) = contents.all();
    let after = save.after.take();
    let mut savers: Vec<&mut Saver> = after.into_iter().chain([&mut *saver]).collect();
    let agreed = agree_to_save(parts, "save in the background", &save, (&*placing, &mut savers))?;
    let hook = if save.progress.is_some() { Err(CheckpointError::Progress) } else { Ok(()) };
    let (flight, bytes, copying) = parts.apart(|parts| saver.begin(parts, store, agreed, hook))?;
    Ok(Saving { flight, stall: Stall { bytes, copying, whole: begun.elapsed() } })
}

impl Saver {
    /// Waits until this rank's thread has ended the last save.
    pub(crate) fn finish(&self) {
        self.last.iter().for_each(|last| drop(last.wait()));
    }

    /// Returns the error of a last save that failed, if some rank has not reported it. Collective over `world`.
    pub(crate) fn report(
        savers: &mut [&mut Self],
        ranks: &Ranks,
        world: &Arc<dyn Communicator>,
    ) -> Result<(), Error> {
        let known = ranks.words(savers.iter().fold(FINE, |known, saver| known | saver.known(world)))?;
        if known.iter().any(|&known| known & NO_COMM != 0) {
            for saver in savers.iter_mut() {
                saver.comm = None;
                saver.last.iter().for_each(|last| last.broken.store(false, Relaxed));
            }
        }
        let failed = known.iter().any(|&known| known & UNREPORTED != 0);
        let open = savers.iter().filter(|saver| failed && !saver.settled);
        let error = open.filter_map(|saver| saver.last.as_ref()).find_map(|last| last.failed(ranks.rank()));
        let same = if failed { ranks.same(error) } else { Ok(()) };
        for saver in savers {
            saver.settled = true;
            saver.last.iter().for_each(|last| last.reported.store(true, Relaxed));
        }
        same
    }

    fn known(&self, world: &Arc<dyn Communicator>) -> u64 {
        let last = self.last.as_ref();
        let broken = last.is_some_and(|last| last.broken.load(Relaxed));
        let own = self.comm.as_ref().is_some_and(|comm| Arc::ptr_eq(&comm.from, world));
        let failed = !self.settled && last.is_some_and(|last| last.is_unreported());
        let comm = if own && !broken { FINE } else { NO_COMM };
        comm | if failed { UNREPORTED } else { FINE }
    }

    /// Begins an agreed save. Collective.
    fn begin(
        &mut self,
        parts: &mut dyn SavedParts,
        store: &Store,
        agreed: Agreed,
        hook: Result<(), CheckpointError>,
    ) -> Result<(Arc<Flight>, u64, Duration), Error> {
        let (world, from) = (parts.group(), parts.ranks());
        if self.comm.is_none() {
            let comm = from.split(Some(0), world.rank() as i64)?;
            // Every rank passes a colour, so every rank gets a communicator.
            self.comm = comm.map(|comm| SaverComm { from: Arc::clone(&from), comm });
        }
        let copying = Instant::now();
        let made = hook.and_then(|()| self.prepare(parts, store, agreed));
        let copying = copying.elapsed();
        let (flight, mut job, send) = world.agree(made)?;
        if parts.queue().place() != Place::Cpu {
            job.opened = Some(job.agreed.open(store, &job.ranks)?);
        }
        let bytes = job.snapshot.bytes();
        // The thread waits for the job.
        let _ = send.send(job);
        (self.last, self.settled) = (Some(Arc::clone(&flight)), false);
        Ok((flight, bytes, copying))
    }

    /// Allocates the memory of this rank's save. Once every rank has succeeded, the save can begin.
    fn prepare(
        &mut self,
        parts: &mut dyn SavedParts,
        store: &Store,
        agreed: Agreed,
    ) -> Result<(Arc<Flight>, Job, Sender<Job>), CheckpointError> {
        let comm = self.comm.as_ref().map_or_else(|| parts.ranks(), |of| Arc::clone(&of.comm));
        let own = parts.optimizer().options();
        let options = Options { queue: queue_beside(&own.queue)?, ..own.clone() };
        let ranks = Ranks::new(&comm, &options);
        let last = self.last.take();
        let spare = last.map_or_else(Vec::new, |last| std::mem::take(&mut *lock(&last.spare)));
        let (flight, send) = Flight::new(agreed.step())?;
        let snapshot =
            Snapshot::of(&mut Live(parts), (&agreed.contents, &agreed.parts), spare, &options.meter)?;
        Ok((flight, Job { agreed, store: store.clone(), ranks, snapshot, opened: None }, send))
    }
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
            reported: AtomicBool::new(false),
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
        if let Err(Error::Shard(_)) = ended {
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

    fn is_unreported(&self) -> bool {
        matches!(self.ended.get(), Some(Err(_))) && !self.reported.load(Relaxed)
    }

    /// Returns the error in a form that can be sent to every rank.
    fn failed(&self, rank: usize) -> Option<Failed> {
        match self.ended.get()? {
            Ok(_) => None,
            Err(Error::Failed(failed)) => Some((**failed).clone()),
            Err(error) => {
                let error = CheckpointError::Lost { step: self.step, message: error.to_string() };
                Some(Failed { rank, error })
            }
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        let Some(last) = self.last.take().filter(|_| !std::thread::panicking()) else { return };
        let ended = last.wait();
        drop(std::mem::take(&mut *lock(&last.spare)));
        if let (Err(error), false) = (ended, last.reported.load(Relaxed)) {
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
