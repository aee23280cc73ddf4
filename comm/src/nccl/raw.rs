//! NCCL's communicator handle. Calls with it are serialised, and none is made after its end.

use super::id::UniqueId;
use super::last_call;
use super::table::{Handle, NO_COLOR, NcclConfig, Table};
use crate::sync::real::Mutex;
use crate::{Action, Error, Reduction};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Acquire};

/// A handle, from the call that creates it until it is destroyed or aborted.
#[derive(Debug)]
pub(super) struct Raw {
    table: &'static Table,
    /// Place to which NCCL writes the handle, perhaps after the creating call: it must neither move nor be freed before NCCL is
    /// done.
    place: Box<AtomicPtr<std::ffi::c_void>>,
    /// True once it has ended. The lock is held during each call except the last one, which may wait for a capture; that
    /// capture's next call finds the flag set.
    ended: Mutex<bool>,
}

impl Raw {
    fn new(table: &'static Table) -> Self {
        Raw { table, place: Box::default(), ended: Mutex::new(false) }
    }

    /// Starts creating the communicator of one rank on the current device; [`state`](Self::state) reports when it is ready. An
    /// old library returns only then.
    pub(super) fn init(
        table: &'static Table,
        id: &UniqueId,
        rank: usize,
        world_size: usize,
    ) -> Result<Self, Error> {
        let raw = Raw::new(table);
        let (n, r, id) = (number(world_size)?, number(rank)?, id.raw());
        // SAFETY: the place does not move until the communicator has ended; the settings are copied during the call.
        let (function, code) = unsafe {
            match table.init_config {
                Some(init) => {
                    let mut config = NcclConfig::not_blocking();
                    ("ncclCommInitRankConfig", init(raw.place.as_ptr(), n, id, r, &mut config))
                }
                None => ("ncclCommInitRank", (table.init)(raw.place.as_ptr(), n, id, r)),
            }
        };
        match table.told(function, code, null_mut()) {
            Ok(_) => Ok(raw),
            Err(error) => {
                // A call that failed at once may have left a handle.
                raw.abort();
                Err(error)
            }
        }
    }

    /// Starts creating the communicator of the ranks with the same color, ranked by key. Its handle stays null until this one's
    /// [`state`](Self::state) is settled. `None` if the library cannot split.
    pub(super) fn split(&self, color: Option<usize>, key: usize) -> Option<Result<Raw, Error>> {
        let split = self.table.split?;
        let child = Raw::new(self.table);
        let asked = || -> Result<(), Error> {
            let color = color.map_or(Ok(NO_COLOR), number)?;
            let (key, mut config) = (number(key)?, NcclConfig::not_blocking());
            // SAFETY: as in `init`.
            let ask = |comm| unsafe { split(comm, color, key, child.place.as_ptr(), &mut config) };
            self.call("ncclCommSplit", ask).map(drop)
        };
        Some(asked().map(|()| child))
    }

    /// Returns true if the last call has completed. The first error found stays.
    pub(super) fn state(&self) -> Result<bool, Error> {
        let Some(ask) = self.table.async_error else { return Ok(true) };
        let mut code = 0;
        // SAFETY: the place for a number outlives the call.
        let asked = self.call("ncclCommGetAsyncError", |comm| unsafe { ask(comm, &mut code) })?;
        let settled = self.table.told("ncclCommGetAsyncError", code, self.handle())?;
        Ok(asked && settled)
    }

    /// Returns an error for an action that the library is too old for.
    pub(super) fn knows(&self, action: Action) -> Result<(), Error> {
        if let Some(Reduction::PreMulSum { .. }) = action.reduction() {
            self.table.factors()?;
        }
        Ok(())
    }

    /// Calls a function with the handle, unless the communicator has ended; returns true if the call has completed.
    pub(super) fn call(
        &self,
        function: &'static str,
        f: impl FnOnce(Handle) -> c_int,
    ) -> Result<bool, Error> {
        self.with(|table, comm| table.told(function, f(comm), comm))
    }

    /// Runs `f` with the handle under the lock, unless the communicator has ended.
    pub(super) fn with(
        &self,
        f: impl FnOnce(&'static Table, Handle) -> Result<bool, Error>,
    ) -> Result<bool, Error> {
        let ended = self.ended.lock();
        if *ended || self.handle().is_null() { Ok(true) } else { f(self.table, self.handle()) }
    }

    /// Aborts all operations and the communicator. Returns when NCCL is done, which may be never: callers use
    /// [`with_deadline::run`](super::with_deadline::run).
    pub(super) fn abort(&self) {
        // SAFETY: the handle lives, as it has not ended, and is not used after this.
        self.end(|table, comm| unsafe { (table.abort)(comm) });
    }

    /// Starts to leave the group, if the library separates that from destroying.
    pub(super) fn finalize(&self) -> Result<bool, Error> {
        let Some(finalize) = self.table.finalize else { return Ok(true) };
        // SAFETY: the handle lives, as it has not ended.
        self.call("ncclCommFinalize", |comm| unsafe { finalize(comm) })
    }

    /// Frees the communicator after all its work is done. Returns when NCCL is done, like [`abort`](Self::abort).
    pub(super) fn destroy(&self) {
        // SAFETY: the handle lives, as it has not ended, and is not used after this.
        self.end(|table, comm| unsafe { (table.destroy)(comm) });
    }

    /// Ends the communicator with its last call. An error is only logged: no action is left.
    fn end(&self, with: impl Fn(&Table, Handle) -> c_int + Sync) {
        let ended = std::mem::replace(&mut *self.ended.lock(), true);
        if !ended && !self.handle().is_null() {
            let code = last_call::run(|| with(self.table, self.handle()));
            tracing::debug!(code, "a communicator of NCCL has ended");
        }
    }

    fn handle(&self) -> Handle {
        self.place.load(Acquire)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if !*self.ended.lock() {
            // NCCL may still write to the place, so it is leaked.
            std::mem::forget(std::mem::take(&mut self.place));
        }
    }
}

fn number(number: usize) -> Result<c_int, Error> {
    c_int::try_from(number).map_err(|_| Error::InvalidRank { rank: number, world_size: c_int::MAX as usize })
}
