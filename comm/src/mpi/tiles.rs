//! Memory of one stream: a ring of tiles that MPI reads or writes while a message is under way.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Bytes of a tile, the longest message. Of 32, 64 and 128 KiB the last moved the most bytes per second between two processes of one
/// host (Open MPI 4.1.4 without CMA, medians of the scenario `large`).
pub(super) const TILE: usize = 128 * 1024;

/// Tiles of a stream in one direction: as many messages are under way at a time.
pub(super) const TILES: usize = 4;

/// Tiles of one stream. Their memory has no other user than MPI and the stream, which takes turns by requests: a tile whose request
/// is under way belongs to MPI.
#[derive(Debug)]
pub(super) struct Tiles {
    start: NonNull<u8>,
}

// SAFETY: the memory belongs to this value alone, on whatever thread it is.
unsafe impl Send for Tiles {}

/// The tiles; each starts on a new page.
const MEMORY: Layout = match Layout::from_size_align(TILES * TILE, 4096) {
    Ok(layout) => layout,
    Err(_) => panic!("the tiles of a stream are a valid layout"),
};

impl Tiles {
    pub(super) fn new() -> Self {
        // SAFETY: the layout has a size above 0.
        let start = unsafe { alloc_zeroed(MEMORY) };
        NonNull::new(start).map_or_else(|| handle_alloc_error(MEMORY), |start| Tiles { start })
    }

    /// Returns the whole of a tile, for MPI.
    pub(super) fn whole(&self, tile: usize) -> *mut [u8] {
        assert!(tile < TILES, "a stream has {TILES} tiles, no tile {tile}");
        // SAFETY: the tile lies in the allocation.
        let first = unsafe { self.start.as_ptr().add(tile * TILE) };
        std::ptr::slice_from_raw_parts_mut(first, TILE)
    }

    /// Returns the bytes of a tile.
    ///
    /// # Safety
    /// No message is under way in the tile, or it is a send.
    pub(super) unsafe fn bytes(&self, tile: usize) -> &[u8] {
        // SAFETY: the memory was zeroed when it was allocated; no one writes it, as no message is received into it.
        unsafe { &*self.whole(tile) }
    }

    /// Returns the bytes of a tile, to be written.
    ///
    /// # Safety
    /// No message is under way in the tile.
    pub(super) unsafe fn bytes_mut(&mut self, tile: usize) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { &mut *self.whole(tile) }
    }
}

impl Drop for Tiles {
    /// Frees the memory. A stream with a message under way forgets its tiles instead.
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), MEMORY) };
    }
}
