//! How much memory a thread takes at once.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counted;

thread_local! {
    /// Bytes that this thread holds, and the most it held.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn add(bytes: isize) {
    let count = |held: &Cell<(isize, isize)>| {
        let (now, most) = held.get();
        held.set((now + bytes, most.max(now + bytes)));
    };
    // A thread that ends has none left.
    let _ = HELD.try_with(count);
}

// SAFETY: every method passes its arguments on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may be there at once.
        add(size as isize);
        add(-(layout.size() as isize));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// The most bytes that `work` holds at once, beside what was there before.
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
