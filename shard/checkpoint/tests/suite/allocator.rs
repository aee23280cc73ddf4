//! The allocator of this program: the system's, which counts the bytes of each thread for tests of memory bounds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Watched;

#[global_allocator]
static ALLOCATOR: Watched = Watched;

thread_local! {
    /// Bytes that this thread holds, and their peak.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// Counts the bytes of this thread. A thread that ends has no cells left, so it is no longer counted.
fn hold(bytes: isize) {
    let count = |held: &Cell<(isize, isize)>| {
        let (now, most) = held.get();
        held.set((now + bytes, most.max(now + bytes)));
    };
    let _ = HELD.try_with(count);
}

// SAFETY: every method passes its arguments on to the system's allocator unchanged. The cell has no destructor and a constant
// initial value, so using it allocates nothing.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        hold(layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        hold(layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        hold(-(layout.size() as isize));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The old and the new memory may exist at once.
        hold(size as isize);
        hold(-(layout.size() as isize));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

/// Returns the most bytes that `work` holds at once on this thread, in addition to those held before.
pub(crate) fn most<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.with(Cell::get).0;
    HELD.with(|held| held.set((before, before)));
    let result = work();
    (result, (HELD.with(Cell::get).1 - before) as usize)
}

#[test]
fn memory_is_counted() {
    let (kept, most) = most(|| {
        drop(vec![1u8; 3000]);
        vec![0u8; 1000]
    });
    assert_eq!((kept.len(), most), (1000, 3000));
}
