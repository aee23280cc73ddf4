//! Threads share the work of calls: every part is done once, whoever does it, and nobody waits for a helper that does not come.

use crate::{Helper, Queue, SplitParts, Threads};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A rayon pool of two threads, and threads that use it.
fn in_pool(count: usize) -> (Arc<rayon::ThreadPool>, Threads) {
    let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap());
    let of_threads = Arc::clone(&pool);
    (pool, Threads::executor(count, move |helper| of_threads.spawn(|| helper.run())))
}

fn all() -> Vec<Threads> {
    let new = |count| Threads::new(count).unwrap();
    vec![Threads::shared(), Threads::caller(), new(0), new(1), new(2), new(3), new(9), in_pool(3).1]
}

/// Sums the indices of all elements, and adds 1 to each.
fn work(threads: &Threads, values: &mut [u32], part: usize) -> usize {
    let len = values.len();
    let parts = SplitParts::new(values, len, part, |values: &mut [u32], at| values.split_at_mut(at));
    let work = |sum: &mut usize, (first, part): (usize, &mut [u32])| {
        for (i, x) in part.iter_mut().enumerate() {
            *x += 1;
            *sum += first + i;
        }
    };
    threads.fold(parts, || 0, work, |sum, other| *sum += other)
}

/// Returns a number of repetitions, or a few percent of it under Miri, which takes minutes for some million operations.
fn repeated(times: usize) -> usize {
    if cfg!(miri) { times.div_ceil(50) } else { times }
}

#[test]
fn every_part_is_done_once() {
    for threads in all() {
        let long = [(repeated(1000), 7), (repeated(1000), 1), (repeated(100_000), 100)];
        for (len, part) in [(0, 3), (1, 3), (3, 3), (4, 3)].into_iter().chain(long) {
            let mut values = vec![0; len];
            assert_eq!(work(&threads, &mut values, part), len * len.saturating_sub(1) / 2, "{threads:?}");
            assert!(values.iter().all(|&x| x == 1), "{threads:?} {len} {part}");
        }
    }
}

#[test]
fn many_callers_share_helpers() {
    for threads in all() {
        thread::scope(|scope| {
            for _ in 0..6 {
                let threads = threads.clone();
                scope.spawn(move || {
                    for round in 0..repeated(200) {
                        let len = repeated(3000);
                        let mut values = vec![0; len];
                        assert_eq!(work(&threads, &mut values, 30 + round), len * (len - 1) / 2);
                        assert!(values.iter().all(|&x| x == 1));
                    }
                });
            }
        });
    }
}

#[test]
fn work_within_work_ends() {
    for threads in all() {
        let sum = AtomicUsize::new(0);
        threads.for_each(0..20usize, |_| {
            threads.for_each(0..20usize, |i| {
                sum.fetch_add(i, SeqCst);
            });
        });
        assert_eq!(sum.into_inner(), 20 * 190);
    }
}

/// A part on each thread waits for the others, so it ends only if as many threads as there are parts work at once.
#[test]
fn helpers_work_beside_the_caller() {
    for threads in [Threads::new(2).unwrap(), Threads::new(5).unwrap(), in_pool(2).1] {
        let all = Barrier::new(threads.count());
        threads.for_each(0..threads.count(), |_| {
            all.wait();
        });
    }
}

#[test]
fn a_panic_reaches_the_caller_after_all_have_returned() {
    for threads in all() {
        for bad in [0, 50, 99] {
            let (at_work, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let ended = catch_unwind(AssertUnwindSafe(|| {
                threads.for_each(0..100usize, |i| {
                    at_work.fetch_add(1, SeqCst);
                    assert!(i != bad, "part {bad}");
                    done.fetch_add(1, SeqCst);
                });
            }));
            let text = ended.unwrap_err().downcast::<String>().unwrap();
            assert_eq!((*text, at_work.into_inner()), (format!("part {bad}"), done.into_inner() + 1));
            assert_eq!(work(&threads, &mut [0; 50], 3), 50 * 49 / 2, "{threads:?} work on");
        }
    }
}

/// All threads of the pool are occupied: the caller does everything itself, and few helpers wait in the pool.
#[test]
fn a_busy_pool_delays_nothing() {
    let (pool, threads) = in_pool(3);
    let (release, held) = (Arc::new(Barrier::new(3)), Arc::new(Barrier::new(3)));
    for _ in 0..2 {
        let (release, held) = (Arc::clone(&release), Arc::clone(&held));
        pool.spawn(move || {
            held.wait();
            release.wait();
        });
    }
    held.wait();
    let start = Instant::now();
    for _ in 0..repeated(100) {
        assert_eq!(work(&threads, &mut [0; 50], 3), 50 * 49 / 2);
    }
    assert!(start.elapsed() < Duration::from_secs(if cfg!(miri) { 300 } else { 5 }));
    release.wait();
    drop(threads);
}

#[test]
fn late_and_dropped_helpers_find_no_work() {
    let kept: Arc<Mutex<Vec<Helper>>> = Arc::default();
    let keep = Arc::clone(&kept);
    let threads = Threads::executor(4, move |helper| keep.lock().unwrap().push(helper));
    let ten = || assert_eq!(work(&threads, &mut [0; 10], 1), 45);
    (0..10).for_each(|_| ten());
    let late = std::mem::take(&mut *kept.lock().unwrap());
    assert_eq!(late.len(), 3, "no more than one for each place");
    late.into_iter().take(2).for_each(Helper::run);
    ten();
    assert_eq!(kept.lock().unwrap().len(), 3, "helpers that came, or were dropped, are replaced");
    assert_eq!(format!("{threads:?} {:?}", kept.lock().unwrap()[0]), "Threads(4) Helper");
}

#[test]
fn parts_are_long_and_balanced() {
    let threads = Threads::new(2).unwrap();
    assert_eq!(Threads::caller().part_len(1 << 30, 1000), 1 << 30);
    for (len, least, part) in [
        (0, 1000, 1),
        (1, 1000, 1),
        (1999, 1000, 1999),
        (2001, 1000, 251),
        (10_000, 1000, 625),
        (1 << 30, 1000, 1 << 26),
        (5, 0, 1),
    ] {
        assert_eq!(threads.part_len(len, least), part, "{len}");
    }
}

#[test]
fn queues_hold_their_threads() {
    let (two, other) = (Threads::new(2).unwrap(), Threads::new(2).unwrap());
    let queue = Queue::cpu_on(&two);
    assert_eq!(
        (queue.threads(), Queue::cpu().threads(), &Queue::default()),
        (&two, &Threads::shared(), &Queue::cpu())
    );
    assert_eq!(queue, queue.clone());
    for different in [Queue::cpu(), Queue::cpu_on(&other), Queue::cpu_on(&Threads::caller())] {
        assert_ne!(queue, different);
    }
    assert_eq!([two.count(), Threads::caller().count()], [2, 1]);
    assert_eq!(format!("{:?} {:?}", Threads::shared(), Threads::caller()), "Threads::shared Threads::caller");
}

/// The test's process has other work, so its shared threads are set already, or are set here.
#[test]
fn shared_threads_are_set_once() {
    Threads::set_shared(Threads::new(3).unwrap());
    assert!(Threads::shared().count() >= 1);
    assert!(!Threads::set_shared(Threads::caller()));
}
