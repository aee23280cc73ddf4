//! Updates, norms and accumulations allocate nothing: small vectors at all times, large ones once the threads have started.

use crate::common::{DTYPES, Memory, rules, segment, tried};
use meshstep_optim::{
    AdamW, Alone, Flat, History, Isa, Lbfgs, LineSearch, Loss, Norm, NormAccumulator, Rule as _, Scalars,
    accumulate,
};
use meshstep_tensor::{DType, Meter, Place, Queue, Slice, SliceMut, Threads};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local!(static COUNT: Cell<usize> = const { Cell::new(0) });

/// System allocator that counts this thread's allocations.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged. The counter is a const-initialised thread local without a destructor, so
// access to it allocates nothing.
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
    let rules = rules();
    for (column, dtypes) in DTYPES.into_iter().enumerate() {
        for (_, rule) in rules.iter().enumerate().filter(|(row, _)| tried(column * rules.len() + row, 4)) {
            let Memory { mut params, mut grads, mut state, mut copy, .. } =
                Memory::random(&**rule, dtypes, len, 1);
            let mut state: Vec<SliceMut<'_>> = state.iter_mut().map(|s| s.slice_mut()).collect();
            for isa in Isa::available() {
                let (params, grads) = (params.slice_mut(), grads.slice_mut());
                let mut copy = copy.as_mut().map(|copy| copy.slice_mut());
                let mut state: [SliceMut<'_>; 5] = {
                    let mut slots = state.iter_mut().map(|s| s.reborrow());
                    std::array::from_fn(|_| slots.next().unwrap_or(SliceMut::empty(dtypes.0, Place::Cpu)))
                };
                let state = &mut state[..rule.state().len()];
                let copy = copy.as_mut().map(|copy| copy.reborrow());
                let flat = Flat { params, grads, state, copy, remainder: None };
                let count = allocations(|| {
                    rule.update_on(isa, flat, &segments, &scalars, &Queue::cpu()).unwrap();
                });
                assert_eq!(count, 0, "{rule:?} {dtypes:?} {isa}");
            }
        }
    }
}

/// From the second evaluation on; the closure itself allocates nothing either.
#[test]
fn iterations_of_lbfgs_allocate_nothing() {
    for line_search in [LineSearch::None, LineSearch::StrongWolfe] {
        let rule = Lbfgs { lr: 0.1, max_iter: 60, line_search, history_len: 9, ..Lbfgs::default() };
        let rule = Lbfgs { tolerance_change: 0.0, ..rule };
        let mut state = rule.state(5_000, DType::F64, &Meter::new()).unwrap();
        let (mut x, mut calls, mut at_first) = (vec![0.5f64; 5_000], 0, 0);
        let closure = |x: Slice<'_>, mut g: SliceMut<'_>| {
            calls += 1;
            at_first = if calls == 2 { COUNT.get() } else { at_first };
            let (x, g) = (x.typed::<f64>().unwrap(), g.typed_mut::<f64>().unwrap());
            g.iter_mut().zip(x).enumerate().for_each(|(i, (g, x))| *g = x * x * x * (1.0 + i as f64 / 100.0));
            let quartic = |(i, x): (usize, &f64)| x.powi(4) / 4.0 * (1.0 + i as f64 / 100.0);
            Ok::<_, std::convert::Infallible>(Loss::Whole(x.iter().enumerate().map(quartic).sum()))
        };
        let report = rule.step((&mut x[..]).into(), closure, &Alone, &mut state).unwrap();
        assert_eq!(COUNT.get() - at_first, 0, "{report:?}");
        assert!(report.evaluations > 20 && state.pairs() == 9, "{report:?}");
    }
}

#[test]
fn iterations_with_rounded_pairs_allocate_nothing() {
    for (history, line_search) in [
        (History::Bf16, LineSearch::None),
        (History::F16, LineSearch::None),
        (History::F16, LineSearch::StrongWolfe),
    ] {
        let rule = Lbfgs { lr: 0.1, max_iter: 40, line_search, history_len: 9, history, ..Lbfgs::default() };
        let rule = Lbfgs { tolerance_change: 0.0, tolerance_grad: 0.0, ..rule };
        let mut state = rule.state(5_000, DType::F32, &Meter::new()).unwrap();
        let (mut x, mut calls, mut at_first) = (vec![0.5f32; 5_000], 0, 0);
        let closure = |x: Slice<'_>, mut g: SliceMut<'_>| {
            calls += 1;
            at_first = if calls == 2 { COUNT.get() } else { at_first };
            let (x, g) = (x.typed::<f32>().unwrap(), g.typed_mut::<f32>().unwrap());
            g.iter_mut().zip(x).enumerate().for_each(|(i, (g, x))| *g = x * x * x * (1.0 + i as f32 / 100.0));
            let quartic = |(i, x): (usize, &f32)| f64::from(*x).powi(4) / 4.0 * (1.0 + i as f64 / 100.0);
            Ok::<_, std::convert::Infallible>(Loss::Whole(x.iter().enumerate().map(quartic).sum()))
        };
        let report = rule.step((&mut x[..]).into(), closure, &Alone, &mut state).unwrap();
        assert_eq!(COUNT.get() - at_first, 0, "{report:?}");
        assert!(report.evaluations > 20 && state.pairs() == 9, "{report:?}");
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
    let add = || accumulate((&mut dst[..]).into(), (&src[..]).into(), 0.5, false, &Queue::cpu()).unwrap();
    assert_eq!(allocations(add), 0);
}

#[test]
fn several_threads_allocate_nothing() {
    let queue = Queue::cpu_on(&Threads::new(3).unwrap());
    let len = 1 << 21;
    let (mut p, mut g, mut m, mut v) = (vec![1f32; len], vec![0.5f32; len], vec![0f32; len], vec![0f32; len]);
    let mut round = || {
        let mut state = [(&mut m[..]).into(), (&mut v[..]).into()];
        let (params, grads) = ((&mut p[..]).into(), (&mut g[..]).into());
        let flat = Flat { params, grads, state: &mut state, copy: None, remainder: None };
        AdamW::default().update(flat, &[segment(0..len, 1)], &Scalars::default(), &queue).unwrap();
        let mut norm = NormAccumulator::new(Norm::L2);
        norm.add_on(Isa::detect(), queue.threads(), (&p[..]).into()).unwrap();
        accumulate((&mut p[..]).into(), (&g[..]).into(), 0.5, false, &queue).unwrap();
    };
    round();
    assert_eq!(allocations(|| (0..5).for_each(|_| round())), 0);
}
