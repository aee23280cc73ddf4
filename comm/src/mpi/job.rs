//! The job as one process sees it: all ranks that the launcher has started, and the end of MPI.

use super::Options;
use super::announcements::Announcements;
use super::calls::{CallFault, Calls, Requests};
use super::pause::Pause;
use super::process::{self, MainThread};
use super::streams::GroupStreams;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time that the ranks have, once all have met at the end, to receive what was still sent.
const SETTLING: Duration = Duration::from_millis(200);

/// The job. Transports share it; its drop is the end of MPI in this process.
#[derive(Debug)]
pub(super) struct MpiJob {
    pub(super) calls: Calls,
    pub(super) announcements: Announcements,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// GroupStreams of transports that were dropped.
    left: Mutex<Vec<GroupStreams>>,
    left_count: AtomicUsize,
    /// True if MPI has an operation that cannot end, so that MPI_Finalize would wait for it.
    stuck: AtomicBool,
    /// The first failure.
    failure: Mutex<Option<String>>,
    /// The thread that initialised MPI; `None` if the program did so itself.
    main: Option<MainThread>,
    deadline: Duration,
    abort_within: Duration,
}

impl MpiJob {
    pub(super) fn new(
        calls: Calls,
        announcements: Announcements,
        [rank, world_size]: [usize; 2],
        main: Option<MainThread>,
        options: &Options,
    ) -> Self {
        let Options { deadline, abort_within, .. } = *options;
        let (left, left_count, failure) = (Mutex::default(), AtomicUsize::new(0), Mutex::default());
        MpiJob {
            calls,
            announcements,
            rank,
            world_size,
            left,
            left_count,
            stuck: AtomicBool::new(false),
            failure,
            main,
            deadline,
            abort_within,
        }
    }

    /// Marks the job as failed: at its end the ranks wait for one another only briefly.
    pub(super) fn fail(&self, cause: &dyn Display) {
        lock(&self.failure).get_or_insert_with(|| cause.to_string());
    }

    /// Gives up an operation that MPI has.
    pub(super) fn give_up(&self) {
        self.stuck.store(true, Ordering::Relaxed);
    }

    /// Takes the streams of a transport that is dropped, and keeps them until both ends have finished.
    pub(super) fn leave(&self, streams: GroupStreams) {
        let mut left = lock(&self.left);
        left.push(streams);
        self.left_count.store(left.len(), Ordering::Relaxed);
        drop(left);
        self.sweep();
    }

    /// Moves the bytes of dropped transports, and frees those that have finished. Returns true if none is left.
    pub(super) fn sweep(&self) -> bool {
        if self.left_count.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let mut left = lock(&self.left);
        left.retain_mut(|streams| !streams.discard(&self.calls, &self.announcements));
        self.left_count.store(left.len(), Ordering::Relaxed);
        left.is_empty()
    }

    /// Waits until all ranks have come here; false if that takes longer than `at_most`.
    fn meet(&self, at_most: Duration) -> Result<bool, CallFault> {
        let mut requests = Requests::default();
        let slot = requests.grow(1);
        self.calls.barrier(&mut requests, slot)?;
        let pause = Pause::begin();
        while !requests.is_free(slot) {
            self.sweep();
            if !self.calls.test(&mut requests, |_| {})? && !pause.once(at_most) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Ends what is still under way, once all ranks have met.
    fn settle(&self) -> Result<(), CallFault> {
        let pause = Pause::begin();
        while !self.sweep() && pause.once(SETTLING) {}
        let pause = Pause::begin();
        while !self.announcements.end(&self.calls)? && pause.once(SETTLING) {}
        Ok(())
    }

    /// Ends MPI together with the other ranks; false if a rank did not come.
    fn end_together(&mut self, at_most: Duration) -> Result<bool, CallFault> {
        if !self.meet(at_most)? {
            return Ok(false);
        }
        if self.stuck.load(Ordering::Relaxed) {
            let message = "a reduction of the library was given up and cannot be cancelled".to_owned();
            return Err(CallFault { call: "MPI_Finalize", message });
        }
        self.settle()?;
        match self.main.take() {
            Some(main) => main.finalize(at_most),
            None if lock(&self.left).is_empty() => self.calls.free().map(|()| true),
            None => Ok(true),
        }
    }
}

impl Drop for MpiJob {
    /// Ends MPI. All ranks come here, and wait for one another: after a failure briefly, and a rank that does not come is ended
    /// together with the whole job.
    fn drop(&mut self) {
        let failure = lock(&self.failure).take();
        let at_most = if failure.is_some() { self.abort_within } else { self.deadline };
        match self.end_together(at_most) {
            Ok(true) => process::ended(failure),
            Ok(false) => {
                let late = format!("not every rank came to the end of the job within {at_most:?}");
                process::abort(
                    &failure.map_or(late.clone(), |failure| format!("{late}, after a failure: {failure}")),
                );
            }
            Err(fault) => process::abort(&fault),
        }
    }
}

/// Locks also after a panic (decision 119): the values under these locks change in one assignment or call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
