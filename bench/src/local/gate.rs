//! Synchronizes joining workers with the steps of the others, so that a schedule is followed on any machine.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use meshstep_membership::InProcess;

use super::worker::PATIENCE;

/// Interval between two checks for a waiting worker.
const LOOK: Duration = Duration::from_millis(1);

/// Progress of the workers of a run, shared by all of them.
#[derive(Debug, Default)]
pub(super) struct Gate {
    seen: Mutex<Seen>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Seen {
    reached: u64,
    stopped: bool,
}

/// Stops all workers if one ends with an error or a panic.
pub(super) struct Watch<'a> {
    gate: &'a Gate,
    well: bool,
}

impl Gate {
    pub(super) fn watch(&self) -> Watch<'_> {
        Watch { gate: self, well: false }
    }

    /// Reports that a worker is about to take this step. Returns once the workers that join at this step wait for the next
    /// exchange.
    pub(super) fn reach(
        &self,
        step: u64,
        coming: impl Iterator<Item = usize>,
        members: &InProcess,
    ) -> Result<()> {
        let mut seen = self.lock();
        seen.reached = seen.reached.max(step);
        drop(seen);
        self.changed.notify_all();
        let until = Instant::now() + PATIENCE;
        for worker in coming {
            while !members.waiting().contains(&(worker as u64)) {
                ensure!(
                    Instant::now() < until,
                    "worker {worker} did not reach step {step} within {PATIENCE:?}"
                );
                self.check(&self.lock())?;
                thread::sleep(LOOK);
            }
        }
        self.check(&self.lock())
    }

    /// Waits until some worker is about to take this step.
    pub(super) fn wait_for(&self, step: u64) -> Result<()> {
        let mut seen = self.lock();
        while seen.reached < step {
            self.check(&seen)?;
            seen = self.changed.wait(seen).unwrap_or_else(PoisonError::into_inner);
        }
        self.check(&seen)
    }

    fn check(&self, seen: &Seen) -> Result<()> {
        ensure!(!seen.stopped, Stopped);
        Ok(())
    }

    /// Returns the steps seen, also after a panic (decision 119): each is one number.
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch<'_> {
    /// Marks the worker's normal end.
    pub(super) fn well(mut self) {
        self.well = true;
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.gate.lock().stopped |= !self.well;
        self.gate.changed.notify_all();
    }
}

/// The failure of another worker is the cause.
#[derive(Debug, thiserror::Error)]
#[error("another worker failed")]
pub(super) struct Stopped;
