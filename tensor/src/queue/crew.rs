//! Helpers, and the calls that they help.

use super::primitives::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering, TURNS, hint, thread};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, PoisonError};
use std::{fmt, io, mem};

/// Work of a call. Each thread that takes part runs it once: the calling one with `true`, helpers with `false`.
type Work<'a> = dyn Fn(bool) + Sync + 'a;

/// Function that runs a helper on another thread.
type Start = Box<dyn Fn(Helper) + Send + Sync>;

/// Helpers that serve until the crew is dropped.
pub(super) struct Crew {
    calls: Arc<CallList>,
    helpers: usize,
    /// Function that starts helpers for each call; `None` if they are threads that wait for calls.
    start: Option<Start>,
}

/// Calls in progress.
#[derive(Default)]
struct CallList {
    state: Mutex<CrewState>,
    /// Notified when a call has places for helpers.
    wanted: Condvar,
    /// Notified when the last helper of a call has left it.
    left: Condvar,
    /// Number of times that a helper has left a call.
    leaves: AtomicU64,
}

#[derive(Default)]
struct CrewState {
    calls: Vec<SharedCall>,
    /// Number of the next call.
    next: u64,
    /// Threads that sleep until a call has places.
    asleep: usize,
    /// Helpers that were started and have not looked for a call yet.
    on_the_way: usize,
    /// True once the threads of the crew have started.
    started: bool,
    closing: bool,
}

/// Call in progress, whose work is shared.
struct SharedCall {
    number: u64,
    /// Valid until the call is no longer in the list.
    work: &'static Work<'static>,
    /// Helpers that may still join.
    places: usize,
    /// Helpers at work.
    at_work: usize,
    panic: Option<Box<dyn Any + Send>>,
}

/// Sleeping threads that each thread wakes: a tree wakes many in little time.
const WOKEN: usize = 2;

impl Crew {
    pub(super) fn new(helpers: usize, start: Option<Start>) -> Self {
        Crew { calls: Arc::default(), helpers, start }
    }

    /// Starts the helpers as threads of their own, which the first call does otherwise. After an error there are fewer of them.
    pub(super) fn start_threads(&self) -> io::Result<()> {
        if mem::replace(&mut self.calls.lock().started, true) {
            return Ok(());
        }
        for _ in 0..self.helpers {
            let calls = Arc::clone(&self.calls);
            thread::Builder::new().name("meshstep-helper".to_owned()).spawn(move || calls.serve())?;
        }
        Ok(())
    }

    /// Returns the maximum number of helpers of a call.
    pub(super) fn helpers(&self) -> usize {
        self.helpers
    }

    /// Runs `work` on this thread and on up to `most` helpers that are free. Returns when all of them have returned; a helper that has
    /// not begun when this thread has ended does not begin.
    ///
    /// # Panics
    /// If the work panics on any thread.
    pub(super) fn run(&self, most: usize, work: &Work<'_>) {
        // SAFETY: only the lifetimes change. Helpers find the work in the list of calls, and `close` takes it out of the list and waits
        // until no helper runs it, on every path: `catch_unwind` keeps a panic of the work from leaving before.
        let lasting = unsafe { mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        let number = self.open(lasting, most.min(self.helpers));
        let own = catch_unwind(AssertUnwindSafe(|| work(true)));
        let panic = self.calls.close(number).or(own.err());
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Lists a call and gets helpers for it.
    fn open(&self, work: &'static Work<'static>, places: usize) -> u64 {
        let mut state = self.calls.lock();
        let number = state.next;
        state.next += 1;
        state.calls.push(SharedCall { number, work, places, at_work: 0, panic: None });
        let Some(start) = &self.start else {
            if state.started {
                self.calls.wake(state, places);
            } else {
                drop(state);
                // Without threads the caller does everything.
                let _ = self.start_threads();
            }
            return number;
        };
        // A pool that is busy keeps helpers for later; more of them would be of no use.
        let new = places.min(self.helpers - state.on_the_way);
        state.on_the_way += new;
        drop(state);
        (0..new).for_each(|_| start(Helper { calls: Arc::clone(&self.calls), looked: false }));
        number
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.calls.lock().closing = true;
        self.calls.wanted.notify_all();
    }
}

impl CallList {
    /// Returns the state, also after a panic (decision 119): work that panics holds no lock, and `close` passes the panic on.
    fn lock(&self) -> MutexGuard<'_, CrewState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes sleeping threads for a call with these places.
    fn wake(&self, state: MutexGuard<'_, CrewState>, places: usize) {
        let woken = places.min(state.asleep).min(WOKEN);
        drop(state);
        (0..woken).for_each(|_| self.wanted.notify_one());
    }

    /// Admits no more helpers to a call, waits for those at work, and removes it. Returns the panic of a helper.
    fn close(&self, number: u64) -> Option<Box<dyn Any + Send>> {
        let mut state = self.lock();
        let mut turns = 0;
        loop {
            let at = state.calls.iter().position(|call| call.number == number)?;
            state.calls[at].places = 0;
            if state.calls[at].at_work == 0 {
                return state.calls.swap_remove(at).panic;
            }
            if turns == TURNS {
                state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let leaves = self.leaves.load(Ordering::Relaxed);
            drop(state);
            while turns != TURNS && self.leaves.load(Ordering::Relaxed) == leaves {
                hint::spin_loop();
                turns += 1;
            }
            state = self.lock();
        }
    }

    /// Helps calls until the crew is dropped.
    fn serve(&self) {
        let mut state = self.lock();
        while !state.closing {
            state = match self.help(state) {
                (state, true) => state,
                (mut state, false) => {
                    state.asleep += 1;
                    let mut state = self.wanted.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.asleep -= 1;
                    state
                }
            };
        }
    }

    /// Helps the call with the fewest helpers. Returns `false` if no call has a place.
    fn help<'a>(&'a self, mut state: MutexGuard<'a, CrewState>) -> (MutexGuard<'a, CrewState>, bool) {
        let open = state.calls.iter_mut().filter(|call| call.places > 0);
        let Some(call) = open.min_by_key(|call| call.at_work) else { return (state, false) };
        call.places -= 1;
        call.at_work += 1;
        let SharedCall { number, work, places, .. } = *call;
        self.wake(state, places);
        let panic = catch_unwind(AssertUnwindSafe(|| work(false))).err();
        let mut state = self.lock();
        if let Some(call) = state.calls.iter_mut().find(|call| call.number == number) {
            call.at_work -= 1;
            call.panic = call.panic.take().or(panic);
            self.leaves.fetch_add(1, Ordering::Relaxed);
            if call.at_work == 0 {
                self.left.notify_all();
            }
        }
        (state, true)
    }
}

/// Helper to be run once on another thread: see [`Threads::executor`](super::Threads::executor).
///
/// ```
/// use meshstep_tensor::{Helper, Threads};
///
/// // Any pool of threads can help.
/// let threads = Threads::executor(4, |helper: Helper| {
///     std::thread::spawn(|| helper.run());
/// });
/// let mut squares = vec![0; 1000];
/// threads.for_each(squares.iter_mut().enumerate(), |(i, square)| *square = i * i);
/// assert_eq!(squares[999], 998_001);
/// ```
pub struct Helper {
    calls: Arc<CallList>,
    looked: bool,
}

impl Helper {
    /// Helps calls as long as one has a place.
    pub fn run(mut self) {
        self.looked = true;
        let mut state = self.calls.lock();
        state.on_the_way -= 1;
        while let (next, true) = self.calls.help(state) {
            state = next;
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if !self.looked {
            self.calls.lock().on_the_way -= 1;
        }
    }
}

impl fmt::Debug for Helper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Helper")
    }
}
