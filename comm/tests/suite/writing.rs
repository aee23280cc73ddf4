//! All-gathers of chunks that are written meanwhile, against all-gathers of the same values.

use crate::backends::{BACKENDS, Backend};
use crate::naive::{Naive, random};
use meshstep_comm::{Clock, Communicator, Error, Faults, Kind, Op, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut, Threads, bf16, f16};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Length at which chunks of 3 ranks have some parts, the last one short.
const LEN: usize = 600_000;
/// Longest part on one thread.
const PART: usize = 64 << 10;

fn chunk(len: usize, n: usize, rank: usize) -> Range<usize> {
    rank * (len / n)..(rank + 1) * (len / n)
}

fn queue(threads: usize) -> Queue {
    Queue::cpu_on(&Threads::new(threads).unwrap())
}

/// Value of element `i` of a chunk.
fn value<T: Naive>(rank: usize, i: usize) -> T {
    T::from_random(random(&mut (i as u64 * 31 + rank as u64 + 1)))
}

/// Gathers with a writer of this rank's values; returns the buffer, the result and the parts.
fn gather<T: Naive>(
    comm: &Arc<dyn Communicator>,
    on: &Queue,
    buffer: Buffer,
    mut before: impl FnMut(usize) -> ControlFlow<()>,
) -> (Buffer, Result<(), Error>, Vec<Range<usize>>) {
    let (rank, mut parts) = (comm.rank(), Vec::new());
    let (buffer, result) = comm.all_gather_written(buffer, on, &mut |first, part: SliceMut<'_>| {
        let part = part.into_typed::<T>().unwrap();
        before(first)?;
        parts.push(first..first + part.len());
        part.iter_mut().enumerate().for_each(|(i, x)| *x = value(rank, first + i));
        ControlFlow::Continue(())
    });
    (buffer, result, parts)
}

/// Returns memory that the backend can register, and registers it.
fn registered(comm: &Arc<dyn Communicator>, len: usize, dtype: DType) -> Buffer {
    let buffer = comm.zeroed_on(&Queue::cpu(), len, dtype, (&Meter::new(), Category::Params), &[]).unwrap();
    comm.register(&buffer).unwrap();
    buffer
}

fn bits<T: Naive>(values: Slice<'_>) -> Vec<u64> {
    values.typed::<T>().unwrap().iter().map(|x| x.bits()).collect()
}

/// Ranks of which those in `plain` call the plain all-gather.
fn check<T: Naive>(backend: Backend, n: usize, len: usize, threads: usize, plain: &[usize]) {
    let name = format!("{backend:?} {n} {len} {} {threads} {plain:?}", T::DTYPE);
    let expected: Vec<u64> = (0..n)
        .flat_map(|rank| (0..chunk(len, n, rank).len()).map(move |i| value::<T>(rank, i).bits()))
        .collect();
    backend
        .spawn(n, |comm| {
            let (on, mut buffer) = (queue(threads), registered(&comm, len, T::DTYPE));
            let own = chunk(len, n, comm.rank());
            for round in 0..3 {
                buffer.as_mut().zero().unwrap();
                if plain.contains(&comm.rank()) {
                    let values = &mut buffer.typed_mut::<T>().unwrap()[own.clone()];
                    values.iter_mut().enumerate().for_each(|(i, x)| *x = value(comm.rank(), i));
                    comm.all_gather(&mut buffer).unwrap();
                } else {
                    let (back, result, parts) =
                        gather::<T>(&comm, &on, buffer, |_| ControlFlow::Continue(()));
                    buffer = back;
                    result.unwrap_or_else(|error| panic!("{name}: {error}"));
                    // Consecutive, and all of the chunk.
                    let mut end = 0;
                    assert!(
                        parts.iter().all(|part| std::mem::replace(&mut end, part.end) == part.start),
                        "{name}"
                    );
                    assert_eq!(end, own.len(), "{name}");
                }
                assert!(bits::<T>(buffer.as_slice()) == expected, "{name}, round {round}");
            }
            let stats = comm.stats().of(Kind::AllGather);
            // Registering gathers words too.
            assert!(stats.operations >= 3, "{name}");
        })
        .unwrap();
}

#[test]
fn it_is_an_all_gather_of_what_was_written() {
    for &backend in BACKENDS {
        check::<f32>(backend, 3, LEN, 1, &[]);
        check::<f32>(backend, 2, 4 * PART + 2, 1, &[1]);
        check::<bf16>(backend, 4, LEN, 1, &[0, 2]);
    }
    let backend = Backend::Loopback;
    for n in 1..=8 {
        check::<f32>(backend, n, n * (PART + 1), 1, &[]);
        check::<f64>(backend, n, n * (2 * PART - 1), 2, &[n - 1]);
    }
    check::<f16>(backend, 3, LEN, 1, &[]);
    check::<u64>(backend, 2, LEN, 4, &[]);
    // Several threads for each rank, and buffers that are small or empty.
    check::<f32>(backend, 2, LEN, 8, &[]);
    check::<f32>(backend, 2, 20 * PART, 8, &[0]);
    for len in [0, 1, 1000] {
        check::<f32>(backend, 3, 3 * len, 1, &[]);
    }
}

/// Rank 1 arrives when rank 0 has written two parts, or its whole chunk.
#[test]
fn parts_written_before_the_others_arrive_are_sent() {
    for &backend in BACKENDS {
        for parts in [2, 5] {
            let (written, on) = (AtomicUsize::new(0), queue(1));
            let expected: Vec<u64> =
                (0..2).flat_map(|rank| (0..LEN / 2).map(move |i| value::<f32>(rank, i).bits())).collect();
            backend
                .spawn(2, |comm| {
                    let buffer = registered(&comm, LEN, DType::F32);
                    // Ranks that are processes do not write before all have arrived.
                    let late = comm.rank() == 1 && backend == Backend::Loopback;
                    while late && written.load(SeqCst) < parts {
                        std::thread::yield_now();
                    }
                    let (buffer, result, _) = gather::<f32>(&comm, &on, buffer, |_| {
                        if comm.rank() == 0 && written.fetch_add(1, SeqCst) + 1 == parts {
                            std::thread::sleep(Duration::from_millis(10));
                        }
                        ControlFlow::Continue(())
                    });
                    result.unwrap();
                    assert!(bits::<f32>(buffer.as_slice()) == expected, "{backend:?} {parts}");
                })
                .unwrap();
        }
    }
}

#[test]
fn parts_have_a_length_for_each_thread_of_a_rank() {
    for (ranks, threads, longest) in [(2, 1, PART), (2, 2, PART), (2, 6, 3 * PART), (4, 8, 2 * PART)] {
        loopback::spawn(ranks, |comm| {
            let buffer = registered(&comm, ranks * 7 * PART, DType::F32);
            let (_, result, parts) =
                gather::<f32>(&comm, &queue(threads), buffer, |_| ControlFlow::Continue(()));
            result.unwrap();
            assert_eq!(parts.iter().map(Range::len).max(), Some(longest), "{ranks} {threads}");
        })
        .unwrap();
    }
}

#[test]
fn a_writer_that_breaks_aborts_the_group() {
    for &backend in BACKENDS {
        let errors = backend
            .spawn(3, |comm| {
                let buffer = registered(&comm, LEN, DType::F32);
                let mut calls = 0;
                let (buffer, result, _) = gather::<f32>(&comm, &queue(1), buffer, |first| {
                    calls += 1;
                    let breaks = comm.rank() == 1 && first > 0;
                    if breaks { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                });
                assert_eq!(calls, if comm.rank() == 1 { 2 } else { 4 }, "{backend:?}");
                assert_eq!(buffer.len(), LEN);
                let later = comm.barrier().unwrap_err();
                assert!(matches!(later, Error::Poisoned { .. }), "{backend:?}: {later}");
                result.unwrap_err()
            })
            .unwrap();
        assert_eq!(errors, vec![Error::Aborted { rank: 1 }; 3], "{backend:?}");
    }
}

#[test]
fn a_panic_of_a_writer_reaches_its_caller_and_the_others() {
    for &backend in BACKENDS {
        let seen = AtomicUsize::new(0);
        let error = backend
            .spawn(3, |comm| {
                let buffer = registered(&comm, LEN, DType::F32);
                let (_, result, _) = gather::<f32>(&comm, &queue(1), buffer, |first| {
                    assert!(comm.rank() != 1 || first == 0, "no such value");
                    ControlFlow::Continue(())
                });
                let error = result.unwrap_err();
                assert!(matches!(error, Error::Panicked { rank: 1, .. }), "{backend:?}: {error}");
                seen.fetch_add(1, SeqCst);
            })
            .unwrap_err();
        let Error::Panicked { rank: 1, message } = error else { panic!("{error}") };
        assert!(message.contains("no such value"), "{message}");
        assert_eq!(seen.load(SeqCst), 2, "{backend:?}");
    }
}

#[test]
fn a_writer_past_the_deadline_is_named_by_the_others() {
    for &backend in BACKENDS {
        let timeout = Duration::from_millis(1500);
        let config = loopback::Config { timeout, ..loopback::Config::new(3) };
        let errors = backend
            .spawn_with(config, |comm| {
                let buffer = registered(&comm, LEN, DType::F32);
                let (_, result, parts) = gather::<f32>(&comm, &queue(1), buffer, |first| {
                    if comm.rank() == 1 && first == PART {
                        std::thread::sleep(timeout * 2);
                    }
                    ControlFlow::Continue(())
                });
                assert_eq!(parts.len(), 4, "{backend:?}: the chunk is written whatever happens");
                result.unwrap_err()
            })
            .unwrap();
        for error in errors {
            let Error::Timeout { missing, .. } = &error else { panic!("{backend:?}: {error}") };
            assert_eq!(missing, &[1], "{backend:?}");
        }
    }
}

#[test]
fn a_chunk_is_written_though_the_others_never_come() {
    for &backend in BACKENDS {
        let config = loopback::Config {
            timeout: Duration::from_secs(30),
            clock: Clock::real(),
            ..loopback::Config::new(2)
        };
        backend
            .spawn_with(config, |comm| {
                if comm.rank() == 1 {
                    // It leaves after the other has failed.
                    return while comm.sound().is_ok() && comm.barrier().is_ok() {};
                }
                let buffer = Buffer::zeroed(LEN, DType::F32, &Meter::new(), Category::Params).unwrap();
                let (buffer, result, _) =
                    gather::<f32>(&comm, &queue(1), buffer, |_| ControlFlow::Continue(()));
                let error = result.unwrap_err();
                assert!(matches!(error, Error::Mismatch { .. }), "{backend:?}: {error}");
                let written = &bits::<f32>(buffer.as_slice())[chunk(LEN, 2, 0)];
                assert!(written.iter().enumerate().all(|(i, &bits)| bits == value::<f32>(0, i).bits()));
                // A refused call writes the chunk too.
                let (_, result, parts) =
                    gather::<f32>(&comm, &queue(1), buffer, |_| ControlFlow::Continue(()));
                assert!(matches!(result, Err(Error::Poisoned { .. })), "{backend:?}");
                assert_eq!(parts.last().map(|part| part.end), Some(chunk(LEN, 2, 0).len()));
            })
            .unwrap();
    }
}

#[test]
fn faults_meet_it_as_any_all_gather() {
    for &backend in BACKENDS {
        for corrupts in [false, true] {
            let by = Duration::from_millis(20);
            let faults =
                if corrupts { Faults::none().corrupt_input(1, 0) } else { Faults::none().delay(1, 0, by) };
            let config = loopback::Config { faults, ..loopback::Config::new(2) };
            let bits = backend
                .spawn_with(config, |comm| {
                    // Not registered, so that it is the first operation.
                    let buffer = Buffer::zeroed(LEN, DType::F32, &Meter::new(), Category::Params).unwrap();
                    let (buffer, result, _) =
                        gather::<f32>(&comm, &queue(1), buffer, |_| ControlFlow::Continue(()));
                    result.unwrap();
                    bits::<f32>(buffer.as_slice())
                })
                .unwrap();
            let expected = (0..2)
                .flat_map(|rank| (0..chunk(LEN, 2, rank).len()).map(move |i| value::<f32>(rank, i).bits()));
            let differ = bits[0].iter().zip(expected).filter(|(found, expected)| **found != *expected);
            // The bit in the middle is flipped once the chunk is written.
            assert_eq!(differ.count(), usize::from(corrupts), "{backend:?}");
        }
    }
}

#[test]
fn its_operation_takes_its_turn_among_started_ones() {
    for &backend in BACKENDS {
        backend
            .spawn(3, |comm| {
                let queue = queue(1);
                let make = |len| registered(&comm, len, DType::F32);
                let [first, buffer, last] = [LEN, LEN, 999].map(make);
                let before = comm.start(Op::all_gather(), first, &queue).unwrap();
                let (_, result, _) = gather::<f32>(&comm, &queue, buffer, |_| ControlFlow::Continue(()));
                result.unwrap();
                let after = comm.start(Op::all_gather(), last, &queue).unwrap();
                after.wait(&queue).1.unwrap();
                before.wait(&queue).1.unwrap();
            })
            .unwrap();
    }
}
