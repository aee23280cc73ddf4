//! A communicator of NCCL, every call of whose functions is one at a time, and none after it has ended.

use super::id::UniqueId;
use super::table::{Config, Handle, IN_PROGRESS, NO_COLOR, Table};
use crate::sync::real::Mutex;
use crate::{Action, Error, Reduction};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Acquire};
use std::thread;
use std::time::Duration;

/// Between two questions whether a communicator has ended.
const POLL: Duration = Duration::from_micros(200);

/// A handle, from when NCCL is asked for it until it is destroyed or aborted.
#[derive(Debug)]
pub(super) struct Raw {
    table: &'static Table,
    /// Where NCCL writes the handle, perhaps after the call that asked for it: it must not move, nor go before NCCL is done.
    place: Box<AtomicPtr<std::ffi::c_void>>,
    /// Whether it has ended. Held during each call but the last, which may wait for a capture whose next call finds out here.
    ended: Mutex<bool>,
}

impl Raw {
    fn new(table: &'static Table) -> Self {
        Raw { table, place: Box::default(), ended: Mutex::new(false) }
    }

    /// Asks for the communicator of one rank on the current device; [`state`](Self::state) says when it is there. An old
    /// library returns only then.
    pub(super) fn init(
        table: &'static Table,
        id: &UniqueId,
        rank: usize,
        world_size: usize,
    ) -> Result<Self, Error> {
        let raw = Raw::new(table);
        let (n, r, id) = (number(world_size)?, number(rank)?, id.raw());
        // SAFETY: the place stays where it is until the communicator has ended; the settings are copied during the call.
        let (function, code) = unsafe {
            match table.init_config {
                Some(init) => {
                    let mut config = Config::not_blocking();
                    ("ncclCommInitRankConfig", init(raw.place.as_ptr(), n, id, r, &mut config))
                }
                None => ("ncclCommInitRank", (table.init)(raw.place.as_ptr(), n, id, r)),
            }
        };
        match table.told(function, code, null_mut()) {
            Ok(_) => Ok(raw),
            Err(error) => {
                // What failed at once may have left a handle.
                raw.abort();
                Err(error)
            }
        }
    }

    /// Asks for the communicator of those who give the same colour, ranked by key; whose handle stays null until this one's
    /// [`state`](Self::state) is settled. `None` where the library does not know how.
    pub(super) fn split(&self, color: Option<usize>, key: usize) -> Option<Result<Raw, Error>> {
        let split = self.table.split?;
        let child = Raw::new(self.table);
        let asked = || -> Result<(), Error> {
            let color = color.map_or(Ok(NO_COLOR), number)?;
            let (key, mut config) = (number(key)?, Config::not_blocking());
            // SAFETY: as in `init`.
            let ask = |comm| unsafe { split(comm, color, key, child.place.as_ptr(), &mut config) };
            self.call("ncclCommSplit", ask).map(drop)
        };
        Some(asked().map(|()| child))
    }

    /// Whether what was asked for is done. The first error found stays.
    pub(super) fn state(&self) -> Result<bool, Error> {
        let Some(ask) = self.table.async_error else { return Ok(true) };
        let mut code = 0;
        // SAFETY: the place for a number outlives the call.
        let asked = self.call("ncclCommGetAsyncError", |comm| unsafe { ask(comm, &mut code) })?;
        let settled = self.table.told("ncclCommGetAsyncError", code, self.handle())?;
        Ok(asked && settled)
    }

    /// Refuses an action that the library is too old for.
    pub(super) fn knows(&self, action: Action) -> Result<(), Error> {
        if let Some(Reduction::PreMulSum { .. }) = action.reduction() {
            self.table.factors()?;
        }
        Ok(())
    }

    /// Calls a function with the handle, unless the communicator has ended; whether the work is done.
    pub(super) fn call(
        &self,
        function: &'static str,
        f: impl FnOnce(Handle) -> c_int,
    ) -> Result<bool, Error> {
        self.with(|table, comm| table.told(function, f(comm), comm))
    }

    /// Runs `f` alone with the handle, unless the communicator has ended.
    pub(super) fn with(
        &self,
        f: impl FnOnce(&'static Table, Handle) -> Result<bool, Error>,
    ) -> Result<bool, Error> {
        let ended = self.ended.lock();
        if *ended || self.handle().is_null() { Ok(true) } else { f(self.table, self.handle()) }
    }

    /// Ends everything that is going on, and the communicator. Returns when NCCL is done, which may be never: callers run it
    /// [within a time](super::with_deadline::run).
    pub(super) fn abort(&self) {
        // SAFETY: the handle lives, as it has not ended, and is not used after this.
        self.end(|table, comm| unsafe { (table.abort)(comm) });
    }

    /// Begins to part from the other ranks, where the library does that apart from destroying.
    pub(super) fn finalize(&self) -> Result<bool, Error> {
        let Some(finalize) = self.table.finalize else { return Ok(true) };
        // SAFETY: the handle lives, as it has not ended.
        self.call("ncclCommFinalize", |comm| unsafe { finalize(comm) })
    }

    /// Frees the communicator, all of whose work is done. Returns when NCCL is done, as [`abort`](Self::abort) does.
    pub(super) fn destroy(&self) {
        // SAFETY: the handle lives, as it has not ended, and is not used after this.
        self.end(|table, comm| unsafe { (table.destroy)(comm) });
    }

    /// An error of the last call is nobody's any more: there is nothing left to do about it.
    fn end(&self, with: impl FnOnce(&Table, Handle) -> c_int) {
        let ended = std::mem::replace(&mut *self.ended.lock(), true);
        if !ended && !self.handle().is_null() {
            let code = with(self.table, self.handle());
            if code == IN_PROGRESS {
                self.wait_for_end();
            }
            tracing::debug!(code, "a communicator of NCCL has ended");
        }
    }

    /// Waits for an abort or a destroy that goes on after its call. NCCL knows the handle until it is done; any other answer
    /// than "in progress" is the end.
    fn wait_for_end(&self) {
        let Some(ask) = self.table.async_error else { return };
        let mut code = IN_PROGRESS;
        // SAFETY: the handle is asked about only while NCCL says that it is not done; the place outlives the call.
        while unsafe { ask(self.handle(), &mut code) } == 0 && code == IN_PROGRESS {
            thread::sleep(POLL);
        }
    }

    fn handle(&self) -> Handle {
        self.place.load(Acquire)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if !*self.ended.lock() {
            // NCCL may still write here: the place is left to it.
            std::mem::forget(std::mem::take(&mut self.place));
        }
    }
}

fn number(number: usize) -> Result<c_int, Error> {
    c_int::try_from(number).map_err(|_| Error::InvalidRank { rank: number, world_size: c_int::MAX as usize })
}
