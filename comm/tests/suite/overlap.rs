//! A started operation runs while its caller computes and waits for nothing.

use crate::backends::{BACKENDS, Backend};
use meshstep_cases::cases;
use meshstep_comm::{Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn a_started_operation_ends_while_the_caller_computes() {
    for &backend in BACKENDS {
        let len = if backend == Backend::Loopback { 1 << 18 } else { 1 << 15 };
        let sums = backend.spawn(4, |comm| {
            let values = vec![comm.rank() as f32; len];
            let buffer = Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap();
            let queue = Queue::cpu();
            let started = comm.start(Op::all_reduce(Reduction::Sum), buffer, &queue).unwrap();
            let (begun, mut work) = (Instant::now(), 1u64);
            while !started.is_done() {
                work = std::hint::black_box(work.wrapping_mul(0x5851_F42D_4C95_7F2D) + 1);
                assert!(begun.elapsed() < Duration::from_secs(30), "it does not run by itself");
            }
            let (buffer, result) = started.wait(&queue);
            result.unwrap();
            buffer.typed::<f32>().unwrap().iter().sum::<f32>()
        });
        assert_eq!(sums.unwrap(), [6.0 * len as f32; 4]);
    }
}

#[test]
fn operations_run_in_the_order_in_which_they_were_started() {
    for &backend in BACKENDS {
        backend
            .spawn(3, |comm| {
                let queue = Queue::cpu();
                let one = |value: u64| Buffer::from_slice(&[value], &Meter::new(), Category::Grads).unwrap();
                let started: Vec<_> = (0..100)
                    .map(|i| comm.start(Op::all_reduce(Reduction::Sum), one(i), &queue).unwrap())
                    .collect();
                // Waited for from the last to the first: by then all operations are done, and none was mixed up.
                let mut last = true;
                for (i, started) in started.into_iter().enumerate().rev() {
                    assert!(last || started.is_done(), "a later operation ended before operation {i}");
                    let (buffer, result) = started.wait(&queue);
                    result.unwrap();
                    assert_eq!(buffer.typed::<u64>().unwrap(), [3 * i as u64]);
                    last = false;
                }
            })
            .unwrap();
    }
}

#[test]
fn a_buffer_comes_back_only_when_no_rank_writes_to_it_any_more() {
    for &backend in BACKENDS {
        // Messages between threads pass each byte several times.
        let len = if backend == Backend::Loopback { 1 << 19 } else { 1 << 15 };
        backend
            .spawn(4, |comm| {
                let mut buffer = Buffer::zeroed(len, DType::U64, &Meter::new(), Category::Grads).unwrap();
                for round in 1..=u64::from(backend.rounds(cases(25, 39))) {
                    buffer.typed_mut::<u64>().unwrap().fill(round);
                    comm.all_reduce(&mut buffer, Reduction::Sum).unwrap();
                    // The first rank to return sees every portion, no matter which rank moved it, and may write at once.
                    let sums = buffer.typed::<u64>().unwrap();
                    assert!(sums[0] == 4 * round && sums[1..] == sums[..len - 1], "round {round}");
                }
            })
            .unwrap();
    }
}

/// Each thread of a rank runs the next operation, also one that another thread waits for: no thread is left waiting.
#[test]
fn threads_of_a_rank_wait_for_operations_of_their_own() {
    for &backend in BACKENDS {
        const THREADS: usize = 4;
        let rounds = backend.rounds(cases(100, 200)) as usize;
        for len in [1, 1 << 15] {
            let (ones, threes) = (&vec![1f32; len], &vec![3f32; len]);
            let all = backend.spawn(3, |comm| {
                let queue = Queue::cpu();
                std::thread::scope(|scope| {
                    for thread in 0..THREADS {
                        let (comm, queue) = (&comm, &queue);
                        scope.spawn(move || {
                            for round in 0..rounds {
                                // The operations are alike, so their order does not matter.
                                let mut buffer =
                                    Buffer::from_slice(ones, &Meter::new(), Category::Grads).unwrap();
                                if (round + thread) % 3 == 0 {
                                    let started =
                                        comm.start(Op::all_reduce(Reduction::Sum), buffer, queue).unwrap();
                                    let (back, result) = started.wait(queue);
                                    result.unwrap();
                                    buffer = back;
                                } else {
                                    comm.all_reduce(&mut buffer, Reduction::Sum).unwrap();
                                }
                                let [found, expected] = [buffer.typed::<f32>().unwrap(), threes.as_slice()]
                                    .map(bytemuck::cast_slice::<f32, u8>);
                                assert!(found == expected);
                            }
                        });
                    }
                });
                comm.stats().total().operations
            });
            assert_eq!(all.unwrap(), [(THREADS * rounds) as u64; 3]);
        }
    }
}

/// A started operation also runs without a waiting thread if another thread was running one at its start.
#[test]
fn operations_started_behind_a_blocking_call_end_by_themselves() {
    for &backend in BACKENDS {
        let (begun, started_behind) = (Instant::now(), AtomicBool::new(false));
        backend
            .spawn(2, |comm| {
                let queue = Queue::cpu();
                let one = || Buffer::from_slice(&[1f32], &Meter::new(), Category::Grads).unwrap();
                std::thread::scope(|scope| {
                    if comm.rank() == 0 {
                        let blocked = scope.spawn(|| comm.recv(&mut one(), 1).unwrap());
                        // The thread blocks by then, or a little later.
                        std::thread::sleep(Duration::from_millis(50));
                        let started = comm.start(Op::all_reduce(Reduction::Sum), one(), &queue).unwrap();
                        assert!(!blocked.is_finished(), "the other rank sends later");
                        started_behind.store(true, Ordering::SeqCst);
                        while !started.is_done() {
                            assert!(begun.elapsed() < Duration::from_secs(30), "no thread runs it");
                            std::thread::yield_now();
                        }
                        assert_eq!(started.wait(&queue).0.typed::<f32>().unwrap(), [2.0]);
                    } else {
                        while !started_behind.load(Ordering::SeqCst) {
                            assert!(begun.elapsed() < Duration::from_secs(30), "no operation is started");
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        comm.send(&mut one(), 0).unwrap();
                        comm.all_reduce(&mut one(), Reduction::Sum).unwrap();
                    }
                });
            })
            .unwrap();
    }
}
