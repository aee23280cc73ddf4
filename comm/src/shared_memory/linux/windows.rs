//! Registered memory: sealed memfds in which a rank has its own buffers, mapped read-only by its peers.
//!
//! The buffer owns its memory and may outlive the group. When it is dropped its pages are freed at once, also where peers still have
//! them mapped: they read zeros from then on, and take the mapping away at the next registration.

use super::mapping::{Access, Mapping};
use crate::p2p::transport::{WindowAllocator, WindowMemory, WindowPlace};
use crate::shared_memory::RegionFault;
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
    open,
};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The size is final, so that no access can lie past the end and raise SIGBUS. The owner may free its pages.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
const PAGE: usize = 4096;
/// Number of cache colours, and the bytes between them, as of other buffers.
const COLOURS: usize = 16;
const STEP: usize = PAGE / COLOURS;
/// Allocations that wait to be offered, at most: each has a descriptor until then.
const MOST_WAITING: usize = 256;

/// Registered memory of a rank and its peers.
#[derive(Debug)]
pub(super) struct WindowList {
    rank: usize,
    list: Mutex<Listed>,
}

#[derive(Debug, Default)]
struct Listed {
    own: Vec<OwnWindow>,
    peers: Vec<PeerWindow>,
    allocated: usize,
}

/// Memory of this rank.
#[derive(Debug)]
struct OwnWindow {
    start: NonNull<u8>,
    place: WindowPlace,
    state: WindowState,
    memory: Weak<OwnedMemory>,
}

// SAFETY: an address that is compared, and dereferenced only by the engine, with its own argument.
unsafe impl Send for OwnWindow {}

#[derive(Debug)]
enum WindowState {
    /// It was not offered yet.
    Waiting(OwnedFd),
    Offered(u64),
    Forgotten,
}

/// Mapping in the process that allocated it.
#[derive(Debug)]
struct OwnedMemory(Mapping);

// SAFETY: plain memory, to which this value gives no access.
unsafe impl Sync for OwnedMemory {}

impl Drop for OwnedMemory {
    fn drop(&mut self) {
        // SAFETY: the buffer that used the memory is gone. Peers read zeros afterwards, if anything.
        let freed = unsafe { madvise(self.0.start().cast(), self.0.len(), Advice::LinuxRemove) };
        if let Err(error) = freed {
            tracing::debug!(%error, "pages stay until the peers unmap them");
        }
    }
}

/// Memory of a peer.
#[derive(Debug)]
struct PeerWindow {
    rank: usize,
    id: u64,
    first: usize,
    mapping: Mapping,
}

impl WindowAllocator for WindowList {
    /// Equal buffers of different ranks have different colours too: a reduction reads them together.
    fn allocate(&self, bytes: usize, apart: &[usize]) -> Option<WindowMemory> {
        let mut list = self.list();
        list.prune();
        let waiting = list.own.iter().filter(|own| matches!(own.state, WindowState::Waiting(_))).count();
        if waiting >= MOST_WAITING {
            return None;
        }
        list.allocated += 1;
        let first = first(list.allocated + 3 * self.rank, apart);
        let made = create(bytes.checked_add(first)?.checked_next_multiple_of(PAGE)?);
        let made = made.inspect_err(|error| tracing::debug!(%error, bytes, "no memory that can be shared"));
        let (mapping, file) = made.ok()?;
        let start = NonNull::new(mapping.start().wrapping_add(first))?;
        let memory = Arc::new(OwnedMemory(mapping));
        let place = WindowPlace { bytes: bytes as u64, first: first as u64 };
        let (state, alive) = (WindowState::Waiting(file), Arc::downgrade(&memory));
        list.own.push(OwnWindow { start, place, state, memory: alive });
        Some(WindowMemory { start, owner: Box::new(memory) })
    }
}

impl WindowList {
    pub(super) fn new(rank: usize) -> Self {
        WindowList { rank, list: Mutex::default() }
    }

    /// Returns the list, also after a panic (decision 119): each entry is complete before it is pushed.
    fn list(&self) -> MutexGuard<'_, Listed> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the place of memory that waits to be offered.
    pub(super) fn place(&self, start: NonNull<u8>) -> Option<WindowPlace> {
        self.list().waiting(start).map(|own| own.place)
    }

    /// Returns a descriptor, by which the memory can only be read, of the memory at `start`, which becomes window `id`.
    pub(super) fn offer(&self, start: NonNull<u8>, id: u64) -> rustix::io::Result<OwnedFd> {
        let mut list = self.list();
        list.prune();
        let own = list.waiting(start).ok_or(Errno::NOENT)?;
        match std::mem::replace(&mut own.state, WindowState::Offered(id)) {
            WindowState::Waiting(file) => readable(&file),
            _ => Err(Errno::NOENT),
        }
    }

    /// Maps window `id` of a peer, after checks that make its size final.
    pub(super) fn map(
        &self,
        rank: usize,
        id: u64,
        file: BorrowedFd<'_>,
        place: WindowPlace,
    ) -> Result<(), RegionFault> {
        let system = |error: Errno| RegionFault::System { message: error.to_string() };
        let found = fcntl_get_seals(file).map_err(system)?;
        if !found.contains(SEALS) {
            return Err(RegionFault::Seals { found: found.bits(), needed: SEALS.bits() });
        }
        let (first, len) = (place.first as usize, place.bytes as usize);
        let needed = first.saturating_add(len).checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
        let found = fstat(file).map_err(system)?.st_size;
        if found != needed as i64 {
            return Err(RegionFault::Size { found, needed });
        }
        let mapping = Mapping::repeated(file, 0, needed, 1, Access::Read).map_err(system)?;
        self.list().peers.push(PeerWindow { rank, id, first, mapping });
        Ok(())
    }

    pub(super) fn forget(&self, id: u64) {
        let mut list = self.list();
        let ours = |own: &&mut OwnWindow| matches!(own.state, WindowState::Offered(offered) if offered == id);
        list.own.iter_mut().filter(ours).for_each(|own| own.state = WindowState::Forgotten);
        list.peers.retain(|peer| peer.id != id);
    }

    pub(super) fn find(&self, address: NonNull<u8>) -> Option<(u64, usize)> {
        self.list().own.iter().find_map(|own| {
            let offset = address.addr().get().checked_sub(own.start.addr().get())?;
            match own.state {
                WindowState::Offered(id) if own.is_alive() && (offset as u64) < own.place.bytes => {
                    Some((id, offset))
                }
                _ => None,
            }
        })
    }

    /// Returns the address of byte `offset` of a peer's window, or of this rank's own without a peer.
    pub(super) fn address(&self, peer: Option<usize>, id: u64, offset: usize) -> Option<NonNull<u8>> {
        let list = self.list();
        let Some(rank) = peer else {
            let ours = |own: &&OwnWindow| matches!(own.state, WindowState::Offered(offered) if offered == id);
            let own = list.own.iter().find(ours)?;
            return NonNull::new(own.start.as_ptr().wrapping_add(offset));
        };
        let peer = list.peers.iter().find(|peer| (peer.rank, peer.id) == (rank, id))?;
        NonNull::new(peer.mapping.start().wrapping_add(peer.first + offset))
    }
}

impl Listed {
    fn waiting(&mut self, start: NonNull<u8>) -> Option<&mut OwnWindow> {
        let waits = |own: &&mut OwnWindow| {
            own.start == start && own.is_alive() && matches!(own.state, WindowState::Waiting(_))
        };
        self.own.iter_mut().find(waits)
    }

    /// Forgets memory that its buffer has given up, and the peers' windows of the same registration, which no operation uses again.
    fn prune(&mut self) {
        self.own.retain(OwnWindow::is_alive);
        let own = &self.own;
        let registered = |id| own.iter().any(|own| matches!(own.state, WindowState::Offered(it) if it == id));
        self.peers.retain(|peer| registered(peer.id));
    }
}

impl OwnWindow {
    fn is_alive(&self) -> bool {
        self.memory.strong_count() > 0
    }
}

/// Returns the offset of a buffer from the beginning of its page.
fn first(number: usize, apart: &[usize]) -> usize {
    let taken = |colour: usize| apart.iter().any(|address| address % PAGE / STEP == colour);
    let free = (0..COLOURS).map(|i| (number + i) % COLOURS).find(|colour| !taken(*colour));
    free.unwrap_or(number % COLOURS) * STEP
}

/// Opens memory again to read it.
fn readable(file: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

fn create(bytes: usize) -> rustix::io::Result<(Mapping, OwnedFd)> {
    let file = memfd_create("meshstep-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes as u64)?;
    fcntl_add_seals(&file, SEALS)?;
    let mapping = Mapping::repeated(file.as_fd(), 0, bytes, 1, Access::ReadWrite)?;
    // SAFETY: advice about this mapping, which nobody uses yet. Kernels without huge pages of shared memory refuse it.
    let _ = unsafe { madvise(mapping.start().cast(), mapping.len(), Advice::LinuxHugepage) };
    Ok((mapping, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 3 * PAGE + 8;

    fn allocated(list: &WindowList) -> WindowMemory {
        list.allocate(BYTES, &[]).unwrap()
    }

    #[test]
    fn a_peer_sees_what_the_owner_writes_until_the_buffer_is_gone() {
        let (owner, peer) = (WindowList::new(0), WindowList::new(1));
        let memory = allocated(&owner);
        let place = owner.place(memory.start).unwrap();
        let file = owner.offer(memory.start, 7).unwrap();
        assert!(owner.place(memory.start).is_none() && owner.offer(memory.start, 8).is_err(), "offered once");
        let written = Mapping::repeated(file.as_fd(), 0, PAGE, 1, Access::ReadWrite);
        assert_eq!(written.unwrap_err(), Errno::ACCESS);
        peer.map(2, 7, file.as_fd(), place).unwrap();
        let last = BYTES - 1;
        let seen = peer.address(Some(2), 7, last).unwrap();
        // SAFETY: the last byte of the memory, which only this thread uses, in both mappings.
        let (write, read) =
            unsafe { (|x: u8| memory.start.add(last).write_volatile(x), || seen.read_volatile()) };
        assert_eq!(read(), 0);
        write(9);
        assert_eq!(read(), 9);
        // SAFETY: within the memory.
        let inside = unsafe { memory.start.add(last) };
        assert_eq!((owner.find(inside), owner.address(None, 7, last)), (Some((7, last)), Some(inside)));
        // SAFETY: one past the end.
        assert_eq!(owner.find(unsafe { inside.add(1) }), None);
        drop(memory);
        assert_eq!((read(), owner.find(inside)), (0, None));
        peer.list().prune();
        assert!(peer.address(Some(2), 7, 0).is_none(), "this process has no window 7 of its own");
    }

    #[test]
    fn memory_of_another_size_or_without_seals_is_not_mapped() {
        let (owner, peer) = (WindowList::new(0), WindowList::new(1));
        let memory = allocated(&owner);
        let place = owner.place(memory.start).unwrap();
        let file = owner.offer(memory.start, 1).unwrap();
        for bytes in [0, PAGE as u64, place.bytes + PAGE as u64, u64::MAX] {
            let fault = peer.map(0, 1, file.as_fd(), WindowPlace { bytes, ..place }).unwrap_err();
            assert!(matches!(fault, RegionFault::Size { .. }), "{fault}");
        }
        let open = memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, (4 * PAGE) as u64).unwrap();
        let fault = peer.map(0, 1, open.as_fd(), place).unwrap_err();
        assert!(matches!(fault, RegionFault::Seals { found: 0, .. }), "{fault}");
        assert!(ftruncate(&file, 0).is_err(), "the size is final");
        assert!(peer.address(Some(0), 1, 0).is_none());
    }

    #[test]
    fn addresses_keep_apart_from_those_given_and_of_equal_buffers_of_other_ranks() {
        for number in 0..2 * COLOURS {
            let apart: Vec<usize> = (0..15).map(|i| 5 * PAGE + (number + i) * STEP + 3).collect();
            let first = first(number, &apart);
            assert!(first < PAGE && apart.iter().all(|address| address % PAGE / STEP != first / STEP));
        }
        assert_ne!(first(1, &[]), first(4, &[]));
    }

    #[test]
    fn only_so_many_allocations_wait_and_offers_make_room() {
        let list = WindowList::new(0);
        let mut kept: Vec<WindowMemory> = (0..MOST_WAITING).map(|_| allocated(&list)).collect();
        assert!(list.allocate(BYTES, &[]).is_none());
        list.offer(kept[3].start, 1).unwrap();
        kept.push(allocated(&list));
        assert!(list.allocate(BYTES, &[]).is_none());
        kept.truncate(10);
        allocated(&list);
        assert!(list.list().own.len() <= 11);
    }
}
