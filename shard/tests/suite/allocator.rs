//! The allocator of this program: the system's, with optional counting of requests and refusal of one buffer.
//!
//! Tests of steps count the allocations of all ranks ([`Counts`]). Tests of failures refuse one buffer of one thread
//! ([`without`]).

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

struct Watched;

#[global_allocator]
static ALLOCATOR: Watched = Watched;

thread_local! {
    /// True if this thread's allocations are counted in [`NUMBER`].
    static COUNTED: Cell<bool> = const { Cell::new(false) };
    /// Number of this thread's buffers before the refused one.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    /// Flag that is set when this thread's buffer is refused.
    static TOLD: Cell<Option<&'static AtomicBool>> = const { Cell::new(None) };
}

static COUNTS: AtomicBool = AtomicBool::new(false);
static NUMBER: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

fn count(bytes: usize) {
    if COUNTS.load(SeqCst) {
        let counted = COUNTED.try_with(Cell::get).unwrap_or(false);
        NUMBER.fetch_add(usize::from(counted), SeqCst);
        LARGEST.fetch_max(bytes, SeqCst);
    }
}

/// Returns true if the allocation is refused. Only buffers are: nothing else is aligned to 64 bytes.
fn refuses(layout: Layout) -> bool {
    let left = LEFT.try_with(Cell::get).ok().flatten().filter(|_| layout.align() >= 64);
    left.is_some_and(|left| {
        LEFT.set(left.checked_sub(1));
        TOLD.get().filter(|_| left == 0).into_iter().for_each(|told| told.store(true, SeqCst));
        left == 0
    })
}

// SAFETY: every method passes its arguments on to the system's allocator unchanged, or returns null, which means that there is no
// memory. The cells have no destructors and constant initial values, so using them allocates nothing.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if refuses(layout) {
            return std::ptr::null_mut();
        }
        count(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if refuses(layout) {
            return std::ptr::null_mut();
        }
        count(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if refuses(layout) {
            return std::ptr::null_mut();
        }
        count(size);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

/// Runs `body` with buffer `at` of this thread refused. Returns true if `body` asked for that buffer.
pub(crate) fn without<T>(at: Option<usize>, body: impl FnOnce() -> T) -> (T, bool) {
    LEFT.set(at);
    let end = body();
    (end, LEFT.replace(None).is_none())
}

/// Sets `told` when a buffer of this thread is refused.
pub(crate) fn tell(told: Option<&'static AtomicBool>) {
    TOLD.set(told);
}

/// Allocation count of the process: the number made by participating threads, and the largest of any thread. The test harness's
/// own thread allocates a little whenever it runs, so it does not participate.
pub(crate) struct Counts;

impl Counts {
    /// Adds this thread to the count.
    pub(crate) fn take_part() {
        COUNTED.set(true);
    }

    pub(crate) fn reset() {
        NUMBER.store(0, SeqCst);
        LARGEST.store(0, SeqCst);
    }

    pub(crate) fn run(on: bool) {
        COUNTS.store(on, SeqCst);
    }

    pub(crate) fn number() -> usize {
        NUMBER.load(SeqCst)
    }

    pub(crate) fn largest() -> usize {
        LARGEST.load(SeqCst)
    }
}
