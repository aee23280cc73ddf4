//! One allocation: CPU memory (zeroed, aligned, cache-coloured, on huge pages if large) or GPU memory.

mod shared_pages;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{Category, Claim, Error, Meter, Place};
use memmap2::MmapMut;
use shared_pages::SharedPages;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Allocations from this size on are on huge pages, up to the second size on pages that they share with others of their thread: an
/// update streams several buffers at once, and with 4 KiB pages it spends 13 to 15% of its time in page-table walks. Measured: a clipped
/// step of four ranks with 16 buckets took 1.2 times that with one while buckets of 4 MiB had small pages.
const HUGE_FROM: usize = 256 << 10;
const ALONE_ABOVE: usize = 4 << 20;
const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4096;
/// Number of cache colours: start offsets a multiple of a cache line apart, which repeat after this many large allocations.
const COLOURS: usize = 16;
/// Bytes between colours.
const STEP: usize = PAGE / COLOURS;
/// Bytes between colours on huge pages. There, addresses that are equal modulo 128 KiB share sets of the second-level cache; all
/// colours together cover those 128 KiB. A clipped step of four ranks takes 0.94 of the time.
const HUGE_STEP: usize = STEP + 2 * PAGE;
const SETS: usize = 128 << 10;
/// Vectors on shared pages from this size on have the colours of huge pages.
const SHORT: usize = 1 << 20;

/// Allocation shared by the buffers that own ranges of it, counted for as long as it lives.
#[derive(Debug)]
pub(crate) struct Slab {
    base: NonNull<u8>,
    origin: Origin,
    /// `None` if another library counts the memory.
    _claim: Option<Claim>,
}

#[derive(Debug)]
enum Origin {
    Heap {
        start: NonNull<u8>,
        layout: Layout,
    },
    Map(#[expect(dead_code, reason = "held for its Drop, which unmaps")] MmapMut),
    SharedPages(#[expect(dead_code, reason = "held while this part of it is in use")] Arc<SharedPages>),
    Lent(
        #[expect(dead_code, reason = "held for its Drop, which frees the memory")] Box<dyn Any + Send + Sync>,
    ),
    #[cfg(feature = "cuda")]
    Device(cuda::Memory),
    #[cfg(feature = "cuda")]
    Foreign(cuda::Foreign),
}

// SAFETY: a slab is plain memory that hands out only a pointer. A write through it needs ownership of the range written
// (`Buffer`), so moving or sharing the slab between threads causes no race.
unsafe impl Send for Slab {}
// SAFETY: as above; `&Slab` gives only the address.
unsafe impl Sync for Slab {}

impl Slab {
    /// Allocates `bytes` zeroed bytes, at an address that modulo 4096 differs from those of `apart`.
    pub(crate) fn zeroed(
        bytes: usize,
        apart: &[usize],
        meter: &Meter,
        category: Category,
    ) -> Result<Self, Error> {
        let refused = || Error::OutOfMemory { bytes, category };
        let colour = colour(bytes, apart);
        let made = match bytes {
            _ if bytes < HUGE_FROM => heap(bytes, colour * STEP),
            _ if bytes > ALONE_ABOVE => map(bytes, colour * HUGE_STEP),
            _ => {
                // The colours of huge pages would take too much of a short vector.
                let (step, align) = if bytes < SHORT { (STEP, PAGE) } else { (HUGE_STEP, SETS) };
                let shared = shared_pages::allocate(bytes, colour * step, align);
                let shared = shared.map(|(base, pages)| (base, Origin::SharedPages(pages)));
                shared.or_else(|| heap(bytes, colour * STEP))
            }
        };
        let (base, origin) = made.ok_or_else(refused)?;
        Ok(Slab { base, origin, _claim: Some(meter.claim(category, bytes as u64)) })
    }

    /// Wraps memory of the CPU that other code has allocated and counts.
    pub(crate) fn lent(base: NonNull<u8>, keep: Box<dyn Any + Send + Sync>) -> Self {
        Slab { base, origin: Origin::Lent(keep), _claim: None }
    }

    /// Allocates uninitialised memory on a stream's device.
    #[cfg(feature = "cuda")]
    pub(crate) fn on_device(
        stream: &cuda::Stream,
        bytes: usize,
        meter: &Meter,
        category: Category,
    ) -> Result<Self, Error> {
        let memory = cuda::Memory::new(stream.device(), bytes, category)?;
        // Zero bytes need no allocation; any address aligned for every element type will do.
        let base = NonNull::new(std::ptr::without_provenance_mut(memory.address() as usize));
        let base = base.unwrap_or(NonNull::<u64>::dangling().cast());
        Ok(Slab { base, origin: Origin::Device(memory), _claim: Some(meter.claim(category, bytes as u64)) })
    }

    /// Wraps device memory that another library has allocated and counts.
    #[cfg(feature = "cuda")]
    pub(crate) fn foreign(base: NonNull<u8>, memory: cuda::Foreign) -> Self {
        Slab { base, origin: Origin::Foreign(memory), _claim: None }
    }

    /// Place of the memory.
    pub(crate) fn place(&self) -> Place {
        match &self.origin {
            Origin::Heap { .. } | Origin::Map(_) | Origin::SharedPages(_) | Origin::Lent(_) => Place::Cpu,
            #[cfg(feature = "cuda")]
            Origin::Device(memory) => Place::Cuda(memory.device().ordinal()),
            #[cfg(feature = "cuda")]
            Origin::Foreign(memory) => Place::Cuda(memory.device().ordinal()),
        }
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if let Origin::Heap { start, layout } = self.origin {
            // SAFETY: `start` came from `alloc_zeroed` with this very `layout` and is freed once, here.
            unsafe { dealloc(start.as_ptr(), layout) }
        }
    }
}

/// Returns the colour of an allocation: the number of steps from its page to its start. Successive allocations get different
/// colours, none of those of `apart`. Streams with addresses equal modulo 4096 look alike to the store buffer and stall each
/// other.
fn colour(bytes: usize, apart: &[usize]) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    if bytes < PAGE {
        return 0;
    }
    let next = NEXT.fetch_add(1, Relaxed);
    let taken = |colour: &usize| apart.iter().any(|address| address % PAGE / STEP == *colour);
    let free = (0..COLOURS).map(|i| (next % COLOURS + i) % COLOURS).find(|colour| !taken(colour));
    free.unwrap_or(next % COLOURS)
}

fn heap(bytes: usize, past: usize) -> Option<(NonNull<u8>, Origin)> {
    let align = if bytes < PAGE { 64 } else { PAGE };
    let layout = Layout::from_size_align((bytes + past).max(1), align).ok()?;
    // SAFETY: the size is at least 1.
    let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    // SAFETY: the allocation has `bytes + past` bytes, so `past` is inside it or one past its end.
    let base = unsafe { start.add(past) };
    Some((base, Origin::Heap { start, layout }))
}

fn map(bytes: usize, past: usize) -> Option<(NonNull<u8>, Origin)> {
    let (start, map) = map_huge(bytes.checked_add(past)?)?;
    // SAFETY: the mapping has `past + bytes` bytes from `start` on.
    Some((unsafe { start.add(past) }, Origin::Map(map)))
}

/// Maps `bytes` zeroed bytes that begin at a huge page, and asks for huge pages.
fn map_huge(bytes: usize) -> Option<(NonNull<u8>, MmapMut)> {
    let len = bytes.checked_add(HUGE_PAGE)?;
    let mut map = MmapMut::map_anon(len).ok()?;
    let skip = map.as_ptr().align_offset(HUGE_PAGE);
    advise_huge(&map, skip, len - skip);
    // SAFETY: `skip` is below `HUGE_PAGE`, so `skip + bytes` does not exceed `len`, the mapping's length.
    let start = unsafe { NonNull::new(map.as_mut_ptr())?.add(skip) };
    Some((start, map))
}

// Miri has no advice.
#[cfg(all(target_os = "linux", not(miri)))]
fn advise_huge(map: &MmapMut, start: usize, len: usize) {
    // A kernel without transparent huge pages returns an error; the memory works as well with small pages.
    let _ = map.advise_range(memmap2::Advice::HugePage, start, len);
}

#[cfg(any(not(target_os = "linux"), miri))]
fn advise_huge(_map: &MmapMut, _start: usize, _len: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifteen_allocations_in_a_row_differ_modulo_a_page() {
        let meter = Meter::new();
        let slabs: Vec<Slab> = [PAGE, 3 * PAGE + 5, ALONE_ABOVE + 1, PAGE, PAGE, ALONE_ABOVE + 1, PAGE]
            .map(|bytes| Slab::zeroed(bytes, &[], &meter, Category::State).unwrap())
            .into();
        let mut places: Vec<usize> = slabs.iter().map(|s| s.base().addr().get() % PAGE).collect();
        places.sort();
        places.dedup();
        // Other tests allocate meanwhile, so a colour may repeat; the streams of one update must not all agree.
        assert!(places.len() >= slabs.len() - 2, "{places:?}");
    }

    #[test]
    fn colours_of_huge_pages_cover_the_sets_of_the_second_cache() {
        let mut places: Vec<usize> =
            (0..COLOURS).map(|colour| colour * HUGE_STEP % (128 << 10) / (2 * PAGE)).collect();
        places.sort();
        places.dedup();
        assert_eq!(places.len(), COLOURS);
        for bytes in [SHORT, ALONE_ABOVE, ALONE_ABOVE + 1] {
            let slab = Slab::zeroed(bytes, &[], &Meter::new(), Category::State).unwrap();
            let past = slab.base().addr().get() % SETS;
            assert!((0..COLOURS).any(|colour| colour * HUGE_STEP % SETS == past), "{bytes} bytes: {past}");
        }
    }

    #[test]
    fn an_allocation_keeps_apart_from_every_given_address() {
        let meter = Meter::new();
        let mut streams: Vec<usize> = vec![5 * PAGE + 700, 3, PAGE - 1];
        for bytes in [PAGE, ALONE_ABOVE + 1, HUGE_FROM, SHORT].repeat(3) {
            let slab = Slab::zeroed(bytes, &streams, &meter, Category::State).unwrap();
            let address = slab.base().addr().get();
            assert!(streams.iter().all(|s| s % PAGE != address % PAGE), "{address} {streams:?}");
            streams.push(address);
        }
    }

    #[test]
    fn memory_is_aligned_and_zero() {
        let meter = Meter::new();
        for bytes in
            [0, 1, 63, 64, 4095, 4096, 4097, HUGE_FROM, HUGE_FROM, SHORT, ALONE_ABOVE, ALONE_ABOVE + 1]
        {
            let slab = Slab::zeroed(bytes, &[], &meter, Category::Params).unwrap();
            assert_eq!(slab.base().addr().get() % 64, 0, "{bytes} bytes");
            // SAFETY: the slab has `bytes` readable bytes, which are not written meanwhile.
            let view = unsafe { std::slice::from_raw_parts(slab.base().as_ptr(), bytes) };
            // Miri takes minutes for some million bytes.
            assert!(view.iter().step_by(if cfg!(miri) { 4093 } else { 1 }).all(|&b| b == 0));
            assert_eq!(meter.live(Category::Params), bytes as u64);
        }
        assert_eq!(meter.live(Category::Params), 0);
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        let meter = Meter::new();
        let refused = Slab::zeroed(usize::MAX / 2, &[], &meter, Category::State);
        assert!(matches!(refused, Err(Error::OutOfMemory { category: Category::State, .. })));
        assert_eq!(meter.peak_total(), 0);
    }
}
