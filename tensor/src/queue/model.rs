//! Calls and helpers on loom's primitives: all orders of steps, and all values that a load may return. The work writes cells, in which
//! loom finds an access beside a write.

mod primitives {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering};
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};
    pub(super) use loom::{hint, thread};

    /// The sleep follows the first look: turns only look again.
    pub(super) const TURNS: usize = 0;
}

#[allow(
    clippy::duplicate_mod,
    dead_code,
    missing_debug_implementations,
    unreachable_pub,
    reason = "the models use a part of the file"
)]
#[path = "crew.rs"]
mod crew;

use crew::Crew;
use loom::cell::UnsafeCell;
use loom::thread;

/// Cell of the caller and cell of the helper.
#[derive(Default)]
struct Cells([UnsafeCell<u32>; 2]);

// SAFETY: each thread of a call has its own cell, and loom checks it.
unsafe impl Sync for Cells {}

impl Cells {
    fn add(&self, caller: bool) {
        // SAFETY: only this thread of the call accesses the cell.
        self.0[usize::from(caller)].with_mut(|cell| unsafe { *cell += 1 });
    }

    /// Returns the calls of the caller and of the helper; no thread is at work.
    fn counts(&self) -> [u32; 2] {
        // SAFETY: `Crew::run` has returned, and loom checks that the work is over.
        [1, 0].map(|i| self.0[i].with(|cell| unsafe { *cell }))
    }
}

fn check(crew: impl Fn() -> Crew + Send + Sync + 'static, calls: u32) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let crew = crew();
        for _ in 0..calls {
            // The work is on this stack: no helper may run it after the call.
            let cells = Cells::default();
            crew.run(1, &|caller| cells.add(caller));
            let [caller, helper] = cells.counts();
            assert!(caller == 1 && helper <= 1, "{caller} and {helper} calls");
        }
    });
}

/// Threads that wait for calls: the first call starts them, the second may find them asleep or at work, and the end of the crew ends them.
#[test]
fn no_thread_of_a_crew_runs_work_after_its_call() {
    check(|| Crew::new(1, None), 2);
}

#[test]
fn no_borrowed_helper_runs_work_after_its_call() {
    let start = |helper: crew::Helper| {
        thread::spawn(move || helper.run());
    };
    check(move || Crew::new(1, Some(Box::new(start))), 2);
}

/// A pool may drop a helper without running it; the next call gets a new one.
#[test]
fn a_dropped_helper_holds_nobody_up() {
    check(|| Crew::new(1, Some(Box::new(drop))), 2);
}
