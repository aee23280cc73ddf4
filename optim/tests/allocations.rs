//! Updates, norms and hand-overs allocate nothing. Small ones, that is: rayon's own queues grow as it likes.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail by panicking and say what they skip"
)]

mod common;

use common::{DTYPES, Memory, rules, segment};
use meshstep_optim::{Flat, Isa, Norm, NormAccumulator, Scalars, accumulate};
use meshstep_tensor::{Queue, SliceMut};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local!(static COUNT: Cell<usize> = const { Cell::new(0) });

/// The system's allocator, counting this thread's allocations.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the counter is a const-initialised thread local without
// a destructor, so touching it allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `alloc` above with this layout, so from the system's allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> usize {
    let before = COUNT.get();
    work();
    COUNT.get() - before
}

#[test]
fn updates_allocate_nothing() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1, "the counter counts");
    let len = 60_000;
    let scalars = Scalars { lr: 0.1, grad_scale: 1.0, zero_grads: true, ..Scalars::default() };
    let segments = [segment(0..100, 1), segment(100..len, 2)];
    for rule in rules() {
        for dtypes in DTYPES {
            let Memory { mut params, mut grads, mut state, mut copy } =
                Memory::random(&*rule, dtypes, len, 1);
            let mut state: Vec<SliceMut<'_>> = state.iter_mut().map(|s| s.slice_mut()).collect();
            for isa in Isa::available() {
                let (params, grads) = (params.slice_mut(), grads.slice_mut());
                let mut copy = copy.as_mut().map(|copy| copy.slice_mut());
                let mut state: [SliceMut<'_>; 5] = {
                    let mut slots = state.iter_mut().map(|s| s.reborrow());
                    std::array::from_fn(|_| slots.next().unwrap_or(SliceMut::empty(dtypes.0)))
                };
                let state = &mut state[..rule.state().len()];
                let copy = copy.as_mut().map(|copy| copy.reborrow());
                let flat = Flat { params, grads, state, copy };
                let count = allocations(|| {
                    rule.update_on(isa, flat, &segments, &scalars, &Queue::cpu()).unwrap();
                });
                assert_eq!(count, 0, "{rule:?} {dtypes:?} {isa}");
            }
        }
    }
}

#[test]
fn norms_and_hand_overs_allocate_nothing() {
    let (mut dst, src) = (vec![1f32; 60_000], vec![f32::MIN_POSITIVE; 60_000]);
    for norm in [Norm::L1, Norm::L2, Norm::Inf, Norm::P(3.0)] {
        let mut accumulator = NormAccumulator::new(norm);
        let count = allocations(|| {
            accumulator.add((&src[..]).into()).unwrap();
            std::hint::black_box(accumulator.finish());
        });
        assert_eq!(count, 0, "{norm:?}");
    }
    let add = || accumulate((&mut dst[..]).into(), (&src[..]).into(), 0.5, false).unwrap();
    assert_eq!(allocations(add), 0);
}
