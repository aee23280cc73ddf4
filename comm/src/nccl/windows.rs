//! NCCL allocations, registered as windows in the same order on every rank and deregistered before they are freed.

use super::core::{Core, device_error};
use super::launch::Patience;
use super::table::{SYMMETRIC, Table};
use crate::{Action, Called, Error};
use meshstep_tensor::cuda::Device;
use meshstep_tensor::{Buffer, Category, Claim, DType, Meter, Queue};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Acquire};
use std::sync::{Arc, Weak};

/// Granularity of a window's memory: `NCCL_WIN_REQUIRED_ALIGNMENT`.
const ALIGNMENT: usize = 4096;

/// NCCL allocation, with its window if it has one.
#[derive(Debug)]
pub(super) struct Room {
    start: usize,
    /// Size in bytes, rounded up.
    bytes: usize,
    /// Place to which NCCL writes the window, perhaps after the registering call; null until then.
    window: Arc<AtomicPtr<c_void>>,
    asked: bool,
}

/// Owner kept by a buffer: its drop ends the window, and then frees the memory.
#[derive(Debug)]
struct WindowMemory {
    device: Device,
    core: Weak<Core>,
    start: usize,
    _claim: Claim,
}

impl Core {
    /// Allocates zeros with NCCL's allocator.
    pub(super) fn window_memory(
        self: &Arc<Self>,
        queue: &Queue,
        (len, dtype): (usize, DType),
        (meter, category): (&Meter, Category),
    ) -> Result<Buffer, meshstep_tensor::Error> {
        let bytes = len.checked_mul(dtype.size()).ok_or(meshstep_tensor::Error::TooLarge { len, dtype })?;
        let start = self.allocate(bytes.next_multiple_of(ALIGNMENT)).map_err(|error| {
            tracing::warn!(%error, bytes, "NCCL has no memory");
            meshstep_tensor::Error::OutOfMemory { bytes, category }
        })?;
        let (device, core) = (self.device().clone(), Arc::downgrade(self));
        let memory = WindowMemory { device, core, start, _claim: meter.claim(category, bytes as u64) };
        // SAFETY: NCCL has just allocated this many bytes, which `memory` frees; no other code knows them.
        let mut buffer = unsafe { Buffer::from_raw_on(queue, start as u64, len, dtype, memory)? };
        queue.zero(buffer.as_mut())?;
        Ok(buffer)
    }

    fn allocate(&self, bytes: usize) -> Result<usize, Error> {
        let table = Table::get()?;
        let (alloc, _) = table.memory()?;
        self.device().make_current().map_err(device_error)?;
        let mut start = null_mut();
        // SAFETY: the place outlives the call, and the device is current.
        table.told("ncclMemAlloc", unsafe { alloc(&mut start, bytes) }, null_mut())?;
        let start = start.addr();
        self.rooms.lock().push(Room { start, bytes, window: Arc::default(), asked: false });
        Ok(start)
    }

    /// Registers the buffer's memory as a window; returns true if NCCL made one. The flight record shows it as a barrier.
    pub(super) fn register(&self, buffer: &Buffer) -> Result<bool, Error> {
        let _turn = self.turn();
        self.ledger().refuse()?;
        self.outside_captures(&self.stream)?;
        let called = Called {
            op_number: 0,
            action: Action::Barrier,
            len: buffer.len(),
            dtype: buffer.dtype(),
            by: None,
        };
        let op_number = self.number(std::iter::once(called))?;
        let patience = Patience { called: Called { op_number, ..called }, within: self.options.deadline };
        let start = buffer.as_ptr().addr().get();
        let found = {
            let rooms = self.rooms.lock();
            let mut own = rooms.iter().filter(|room| room.start == start && !room.asked);
            own.next().map(|room| (room.bytes, Arc::clone(&room.window)))
        };
        // Ranks compare sizes before the call of NCCL, which would hang on a difference.
        let mine = found.as_ref().map_or(0, |(bytes, _)| *bytes as u64);
        let all = self.gather(&[mine], None, patience)?;
        self.ledger().done(patience.called, self.now());
        if mine == 0 || all.iter().any(|&bytes| bytes != mine) {
            return Err(Error::UnlikeMemory { bytes: all });
        }
        let Some((bytes, window)) = found else { return Err(Error::UnlikeMemory { bytes: all }) };
        let asked = self.ask_for_window(start, bytes, &window, patience);
        asked.map_err(|error| self.broke(error))?;
        let made = !window.load(Acquire).is_null();
        tracing::debug!(rank = self.rank, bytes, made, "memory was registered as a window");
        Ok(made)
    }

    fn ask_for_window(
        &self,
        start: usize,
        bytes: usize,
        window: &Arc<AtomicPtr<c_void>>,
        patience: Patience,
    ) -> Result<(), Error> {
        let register = Table::get()?.windows()?.0;
        // From here on NCCL may write the window, so the room keeps the place.
        self.rooms.lock().iter_mut().filter(|room| room.start == start).for_each(|room| room.asked = true);
        // SAFETY: the memory is `bytes` bytes of NCCL's allocator; the place stays with the room until the window or the
        // communicator has ended.
        let ask = |comm| unsafe { register(comm, start as *mut c_void, bytes, window.as_ptr(), SYMMETRIC) };
        self.raw.call("ncclCommWindowRegister", ask)?;
        self.wait_until(patience, || self.raw.state())
    }

    /// Ends the window of the memory at `start`. Returns true if NCCL no longer accesses the memory.
    fn end_window(&self, start: usize) -> bool {
        let mut rooms = self.rooms.lock();
        let Some(index) = rooms.iter().position(|room| room.start == start) else { return true };
        let room = rooms.swap_remove(index);
        drop(rooms);
        let ended = self.deregister(&room);
        ended.inspect_err(|error| tracing::warn!(%error, "a window of NCCL could not be ended")).is_ok()
    }

    fn deregister(&self, room: &Room) -> Result<(), Error> {
        let window = room.window.swap(null_mut(), Acquire);
        if window.is_null() {
            return Ok(());
        }
        let deregister = Table::get()?.windows()?.1;
        // SAFETY: the window was made for this communicator and is not used after this. A communicator that has ended has ended
        // its windows, and `call` does not reach it.
        self.raw.call("ncclCommWindowDeregister", |comm| unsafe { deregister(comm, window) })?;
        let called =
            Called { op_number: 0, action: Action::Barrier, len: room.bytes, dtype: DType::U64, by: None };
        self.wait_until(Patience { called, within: self.options.abort_within }, || self.raw.state())
    }

    /// Ends all windows before the rank leaves the group. Their memory stays until its buffers are dropped.
    pub(super) fn end_windows(&self) {
        let rooms = std::mem::take(&mut *self.rooms.lock());
        for room in rooms {
            if let Err(error) = self.deregister(&room) {
                tracing::warn!(%error, "a window of NCCL could not be ended");
            }
        }
    }
}

impl Drop for WindowMemory {
    fn drop(&mut self) {
        if self.device.make_current().is_err() {
            return;
        }
        let ended = self.core.upgrade().is_none_or(|core| core.end_window(self.start));
        // The function was found when the memory was allocated.
        let free = Table::get().and_then(Table::memory).map(|(_, free)| free);
        if let (true, Ok(free)) = (ended, free) {
            // SAFETY: NCCL allocated the memory, no window uses it, and no stream uses it: the buffer's drop has waited.
            let code = unsafe { free(self.start as *mut c_void) };
            tracing::debug!(code, "memory of NCCL was freed");
        }
    }
}
