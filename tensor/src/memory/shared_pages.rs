//! Allocations too small for huge pages of their own share a region of them.
//!
//! A region belongs to the thread that allocates: the vectors of a rank lie side by side, on the memory of the thread that wrote them
//! first. It is unmapped when its thread has begun another one, or has ended, and its last allocation is freed: a thread keeps at most one
//! region that nothing uses, and vectors that outlive their neighbours keep the neighbours' pages too.

use super::map_huge;
use memmap2::MmapMut;
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;

/// Address space of a region; the kernel gives memory to the huge pages that are written.
const REGION: usize = 16 << 20;

/// Memory that allocations hold while they live.
#[derive(Debug)]
pub(super) struct SharedPages {
    start: NonNull<u8>,
    _map: MmapMut,
}

// SAFETY: a region is plain memory; whoever holds an allocation of it is its only user.
unsafe impl Send for SharedPages {}
// SAFETY: as above; `&SharedPages` gives only the address.
unsafe impl Sync for SharedPages {}

/// SharedPages in which this thread allocates.
struct Current {
    region: Arc<SharedPages>,
    /// First byte after the allocations so far.
    next: usize,
    /// First byte that no allocation has had: from here on the memory is zero.
    fresh: usize,
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

/// Allocates `bytes` zeroed bytes that begin `past` bytes after a multiple of `align`; `None` if there is no memory. `align + past +
/// bytes` must not exceed the length of a region.
pub(super) fn allocate(bytes: usize, past: usize, align: usize) -> Option<(NonNull<u8>, Arc<SharedPages>)> {
    let in_current = |current: &RefCell<Option<Current>>| {
        let mut current = current.borrow_mut();
        if let Some(found) = current.as_mut().and_then(|current| current.take(bytes, past, align)) {
            return Some(found);
        }
        *current = Some(Current::new()?);
        current.as_mut()?.take(bytes, past, align)
    };
    // A thread that is ending has no current region any more.
    CURRENT.try_with(in_current).unwrap_or_else(|_| Current::new()?.take(bytes, past, align))
}

impl Current {
    fn new() -> Option<Self> {
        let (start, map) = map_huge(REGION)?;
        Some(Current { region: Arc::new(SharedPages { start, _map: map }), next: 0, fresh: 0 })
    }

    /// Allocates in the rest of the region, or in all of it if every allocation is freed.
    fn take(&mut self, bytes: usize, past: usize, align: usize) -> Option<(NonNull<u8>, Arc<SharedPages>)> {
        if Arc::get_mut(&mut self.region).is_some() {
            self.next = 0;
        }
        let first = self.next.checked_next_multiple_of(align)?.checked_add(past)?;
        let end = first.checked_add(bytes).filter(|&end| end <= REGION)?;
        // SAFETY: `first <= end <= REGION`, the length of the mapping from `start` on.
        let base = unsafe { self.region.start.add(first) };
        if first < self.fresh {
            // SAFETY: the bytes are in the mapping, and every allocation that had them is freed: those that live end before `next`.
            unsafe { base.write_bytes(0, end.min(self.fresh) - first) };
        }
        (self.next, self.fresh) = (end, self.fresh.max(end));
        Some((base, Arc::clone(&self.region)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;
    const MIB: usize = 1 << 20;

    /// Distance of the bytes that a test looks at: Miri takes minutes for some million.
    const STEP: usize = if cfg!(miri) { 4093 } else { 1 };

    fn bytes(at: NonNull<u8>, len: usize) -> impl Iterator<Item = &'static mut u8> {
        // SAFETY: the tests hold the region of every allocation that they look at.
        let all = unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) };
        all.iter_mut().step_by(STEP)
    }

    fn fill(at: NonNull<u8>, len: usize, value: u8) {
        bytes(at, len).for_each(|byte| *byte = value);
    }

    fn are(at: NonNull<u8>, len: usize, value: u8) -> bool {
        bytes(at, len).all(|byte| *byte == value)
    }

    /// In a thread of its own, so that no other test has allocated in the region.
    fn alone(test: impl FnOnce() + Send + 'static) {
        std::thread::spawn(test).join().unwrap();
    }

    #[test]
    fn allocations_lie_side_by_side_apart_and_zeroed() {
        alone(|| {
            let held: Vec<_> = (0..40).map(|i| (allocate(MIB, i * 64, PAGE).unwrap(), i)).collect();
            let mut ranges: Vec<_> = held.iter().map(|((at, _), _)| at.addr().get()).collect();
            for ((at, _), i) in &held {
                assert_eq!(at.addr().get() % PAGE, i * 64);
                assert!(are(*at, MIB, 0));
                fill(*at, MIB, 1);
            }
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[1] - pair[0] >= MIB));
            let regions = held.chunk_by(|((_, a), _), ((_, b), _)| Arc::ptr_eq(a, b)).count();
            assert_eq!(regions, 3, "40 MiB in regions of 16 MiB");
        });
    }

    #[test]
    fn freed_memory_is_used_again_once_all_is_freed_and_is_zero() {
        alone(|| {
            let (first, one) = allocate(3 * MIB, 0, PAGE).unwrap();
            fill(first, 3 * MIB, 7);
            let (second, two) = allocate(MIB, 0, PAGE).unwrap();
            drop(one);
            let (third, three) = allocate(MIB, 0, PAGE).unwrap();
            assert!(third > second, "the region is not empty");
            drop((two, three));
            let (again, _all) = allocate(6 * MIB, 0, PAGE).unwrap();
            assert_eq!(again, first);
            assert!(are(again, 6 * MIB, 0));
        });
    }

    #[test]
    fn memory_outlives_the_thread_that_allocated_it() {
        let made = std::thread::spawn(|| {
            let (at, region) = allocate(MIB, 0, PAGE).unwrap();
            fill(at, MIB, 5);
            (at.addr(), region)
        });
        let (at, region) = made.join().unwrap();
        let first = region.start;
        assert_eq!(first.addr(), at);
        assert!(are(first, MIB, 5));
    }
}
