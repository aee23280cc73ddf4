//! The allocator of this program: the system's, which counts the bytes of each thread, and of all, for tests of memory bounds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

struct Watched;

#[global_allocator]
static ALLOCATOR: Watched = Watched;

thread_local! {
    /// Bytes that this thread holds, and their peak.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// Bytes that all threads hold, and their peak.
static ALL: [AtomicIsize; 2] = [const { AtomicIsize::new(0) }; 2];

/// Counts the bytes of this thread, and of all. A thread that ends has no cells left, so it is no longer counted for itself.
fn hold(bytes: isize) {
    let all = ALL[0].fetch_add(bytes, Relaxed) + bytes;
    ALL[1].fetch_max(all, Relaxed);
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

/// Returns the most bytes that all threads hold at once during `work`, in addition to those held before. Another test must not run.
pub(crate) fn most_of_all<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = ALL[0].load(Relaxed);
    ALL[1].store(before, Relaxed);
    let result = work();
    (result, (ALL[1].load(Relaxed) - before) as usize)
}

#[test]
fn memory_is_counted() {
    let (kept, most) = most(|| {
        drop(vec![1u8; 3000]);
        vec![0u8; 1000]
    });
    assert_eq!((kept.len(), most), (1000, 3000));
}
