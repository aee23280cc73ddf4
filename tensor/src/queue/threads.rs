//! Threads that share the work of one call on CPU memory.

use super::crew::{Crew, Helper};
use std::fmt;
use std::num::NonZero;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::available_parallelism;

/// Threads that share the work of one call: the calling thread, and helpers that are free.
///
/// The calling thread never waits for a helper to begin. It takes one part of the work after the other, and a helper that is late or
/// occupied takes fewer parts or none, so work that occupies other threads delays a call by at most one part.
///
/// Clones share their helpers. Results do not depend on the choice; only the time does. Why they are no rayon pool:
/// `docs/decisions/89-threads.md`.
///
/// ```
/// use meshstep_tensor::{Queue, Threads};
/// use std::sync::Arc;
///
/// let own = Queue::cpu_on(&Threads::new(4)?); // three helpers of its own
/// let alone = Queue::cpu_on(&Threads::caller());
///
/// let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(3).build()?);
/// let in_pool = Queue::cpu_on(&Threads::executor(4, move |helper| pool.spawn(|| helper.run())));
/// # assert_eq!(in_pool.threads().count(), 4);
/// # let mut x = vec![1f32; 100];
/// # in_pool.threads().for_each(x.chunks_mut(7), |part| part.fill(2.0));
/// # assert_eq!(x, [2.0; 100]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct Threads(Choice);

#[derive(Clone, Default)]
enum Choice {
    /// The process's.
    #[default]
    Shared,
    Caller,
    Crew(Arc<Crew>),
}

/// Threads of the process that [`Threads::shared`] stands for.
static SHARED: OnceLock<Threads> = OnceLock::new();

/// Parts of the work for each thread: enough for balance.
const PARTS: usize = 8;

/// Parts of the least work that is worth a second thread. Measured: AdamW of 131,072 elements on two threads takes 25 us, and with
/// one part for each thread 37.
const FINER: usize = 4;

impl Threads {
    /// Returns the threads that the whole process shares, the default: as many as the process may use at once, the calling one
    /// included, or those of [`set_shared`](Self::set_shared). Helpers start with the first work that they can share; if the system
    /// refuses threads, there are fewer.
    pub const fn shared() -> Self {
        Threads(Choice::Shared)
    }

    /// Returns the calling thread alone.
    pub const fn caller() -> Self {
        Threads(Choice::Caller)
    }

    /// Starts helpers for `count` threads in all. They end when the last clone is dropped. With a count of at most 1 there are none.
    pub fn new(count: usize) -> std::io::Result<Self> {
        if count <= 1 {
            return Ok(Self::caller());
        }
        let crew = Crew::new(count - 1, None);
        crew.start_threads()?;
        Ok(Threads(Choice::Crew(Arc::new(crew))))
    }

    /// Returns the calling thread and up to `count - 1` helpers that `start` runs on other threads, for example on those of a rayon
    /// pool. For work worth sharing, `start` is called with helpers, and runs each once, whenever it likes; a helper that comes late
    /// finds no work. A helper never blocks.
    pub fn executor(count: usize, start: impl Fn(Helper) + Send + Sync + 'static) -> Self {
        if count <= 1 {
            return Self::caller();
        }
        Threads(Choice::Crew(Arc::new(Crew::new(count - 1, Some(Box::new(start))))))
    }

    /// Sets what [`shared`](Self::shared) stands for in this process. Returns `false`, without effect, after the first call or the first
    /// work.
    pub fn set_shared(threads: Threads) -> bool {
        assert!(!matches!(threads.0, Choice::Shared), "shared threads are set to others");
        SHARED.set(threads).is_ok()
    }

    /// Returns the number of threads that share work, the calling one included.
    pub fn count(&self) -> usize {
        1 + self.crew().map_or(0, |crew| crew.helpers())
    }

    /// Returns the length of parts into which to cut work on `len` elements. Work of less than twice `least` elements stays whole: waking
    /// a second thread takes longer than it saves. Parts of longer work are short enough for balance.
    pub fn part_len(&self, len: usize, least: usize) -> usize {
        let most = len / least.max(1);
        if most <= 1 {
            return len.max(1);
        }
        match self.count() {
            1 => len,
            count => len.div_ceil((FINER * most).min(PARTS * count)),
        }
    }

    /// Calls `work` with every part, on several threads at once. The calling thread takes parts from the front, helpers from the back.
    pub fn for_each<I>(&self, parts: I, work: impl Fn(I::Item) + Sync)
    where
        I: DoubleEndedIterator + ExactSizeIterator + Send,
    {
        self.fold(parts, || (), |(), part| work(part), |(), ()| ());
    }

    /// Folds parts into sums that begin as `zero`, one sum on each thread, and merges the sums. Order and grouping vary, so `merge` must be
    /// exact: commutative and associative.
    pub fn fold<I, S: Send>(
        &self,
        mut parts: I,
        zero: impl Fn() -> S + Sync,
        work: impl Fn(&mut S, I::Item) + Sync,
        merge: impl Fn(&mut S, S) + Sync,
    ) -> S
    where
        I: DoubleEndedIterator + ExactSizeIterator + Send,
    {
        let most = parts.len();
        let Some(crew) = (if most > 1 { self.crew() } else { None }) else {
            let mut sum = zero();
            parts.by_ref().for_each(|part| work(&mut sum, part));
            return sum;
        };
        let (parts, total) = (Mutex::new(parts), Mutex::new(None));
        let take = |from_front: bool| {
            let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
            if from_front { parts.next() } else { parts.next_back() }
        };
        crew.run(most - 1, &|from_front| {
            let Some(first) = take(from_front) else { return };
            let mut own = zero();
            work(&mut own, first);
            while let Some(part) = take(from_front) {
                work(&mut own, part);
            }
            let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *total {
                Some(total) => merge(total, own),
                none => *none = Some(own),
            }
        });
        total.into_inner().unwrap_or_else(PoisonError::into_inner).unwrap_or_else(zero)
    }

    fn crew(&self) -> Option<&Crew> {
        match &self.0 {
            Choice::Caller => None,
            Choice::Crew(crew) => Some(crew),
            Choice::Shared => match &SHARED.get_or_init(Self::of_process).0 {
                Choice::Crew(crew) => Some(crew),
                _ => None,
            },
        }
    }

    /// Returns the process's threads, which its first work starts.
    fn of_process() -> Self {
        match available_parallelism().map_or(1, NonZero::get) {
            1 => Self::caller(),
            count => Threads(Choice::Crew(Arc::new(Crew::new(count - 1, None)))),
        }
    }
}

impl PartialEq for Threads {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Choice::Shared, Choice::Shared) | (Choice::Caller, Choice::Caller) => true,
            (Choice::Crew(own), Choice::Crew(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }
}

impl Eq for Threads {}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Choice::Shared => f.write_str("Threads::shared"),
            Choice::Caller => f.write_str("Threads::caller"),
            Choice::Crew(crew) => write!(f, "Threads({})", 1 + crew.helpers()),
        }
    }
}
