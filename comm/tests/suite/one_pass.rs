//! Reductions, computations and gathers in one pass, against the same by three operations.

use crate::backends::{BACKENDS, Backend, Way};
use crate::naive::{Naive, random};
use meshstep_comm::{Action, Clock, Communicator, Error, Faults, Kind, Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut, Threads, bf16, f16};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

/// Length at which chunks of 3 ranks have some parts, the last one short.
const LEN: usize = 600_000;
/// Longest part on one thread.
const PART: usize = 64 << 10;
/// Backends that reduce in one pass; the others run three operations.
const IN_ONE_PASS: [Backend; 2] = [Backend::Loopback, Backend::Tcp(Way::SharedMemory)];

fn queue(threads: usize) -> Queue {
    Queue::cpu_on(&Threads::new(threads).unwrap())
}

fn chunk(len: usize, n: usize, rank: usize) -> Range<usize> {
    rank * (len / n)..(rank + 1) * (len / n)
}

/// Returns registered memory with values of this rank.
fn values<T: Naive>(comm: &Arc<dyn Communicator>, len: usize, salt: u64) -> Buffer {
    let mut buffer =
        comm.zeroed_on(&Queue::cpu(), len, T::DTYPE, (&Meter::new(), Category::Grads), &[]).unwrap();
    comm.register(&buffer).unwrap();
    let seed = salt * 1_000_003 + comm.rank() as u64;
    let each = buffer.typed_mut::<T>().unwrap().iter_mut().enumerate();
    each.for_each(|(i, x)| *x = T::from_random(random(&mut (i as u64 * 31 + seed))));
    buffer
}

fn bits<T: Naive>(values: Slice<'_>) -> Vec<u64> {
    values.typed::<T>().unwrap().iter().map(|x| x.bits()).collect()
}

/// The computation of the tests: every third element is the reduced value, the others stay.
fn compute<T: Naive>(first: usize, reduced: &[T], part: &mut [T]) {
    let each = part.iter_mut().zip(reduced).enumerate();
    each.filter(|(i, _)| (first + i).is_multiple_of(3)).for_each(|(_, (x, reduced))| *x = *reduced);
}

/// Runs the call; `before` comes before each part. Returns the buffer, the result and the parts.
fn call<T: Naive>(
    comm: &Arc<dyn Communicator>,
    reduction: Reduction,
    on: &Queue,
    (from, into): (&mut Buffer, Buffer),
    mut before: impl FnMut(usize) -> ControlFlow<()>,
) -> (Buffer, Result<(), Error>, Vec<Range<usize>>) {
    let mut parts = Vec::new();
    let mut write = |first: usize, mut reduced: SliceMut<'_>, part: SliceMut<'_>| {
        before(first)?;
        parts.push(first..first + part.len());
        compute(first, reduced.typed_mut::<T>().unwrap(), part.into_typed::<T>().unwrap());
        reduced.zero().unwrap();
        ControlFlow::Continue(())
    };
    let (into, result) = comm.reduce_and_gather(reduction, (from, into), on, &mut write);
    (into, result, parts)
}

/// Returns the bits that three operations give.
fn reference<T: Naive>(
    comm: &Arc<dyn Communicator>,
    reduction: Reduction,
    (from, into): (&mut Buffer, &mut Buffer),
) -> Vec<u64> {
    let own = chunk(from.len(), comm.world_size(), comm.rank());
    comm.reduce_scatter(from, reduction).unwrap();
    let reduced = from.typed::<T>().unwrap()[own.clone()].to_vec();
    compute(0, &reduced, &mut into.typed_mut::<T>().unwrap()[own]);
    comm.all_gather(into).unwrap();
    bits::<T>(into.as_slice())
}

fn check<T: Naive>(backend: Backend, n: usize, len: usize, threads: usize, reduction: Reduction) {
    let name = format!("{backend:?} {n} {len} {} {threads} {reduction}", T::DTYPE);
    let spawned = backend.spawn(n, |comm| {
        let reduction = match reduction {
            Reduction::PreMulSum { .. } => Reduction::PreMulSum { factor: 0.5 + comm.rank() as f64 },
            other => other,
        };
        let on = queue(threads);
        let [mut plain, mut from] = [1, 1].map(|salt| values::<T>(&comm, len, salt));
        let [mut plain_into, mut into] = [2, 2].map(|salt| values::<T>(&comm, len, salt));
        let long = len / n > PART && n > 1 && IN_ONE_PASS.contains(&backend);
        assert_eq!(comm.reduces_in_one_pass(&from, &into), long, "{name}");
        for round in 0..2 {
            let expected = reference::<T>(&comm, reduction, (&mut plain, &mut plain_into));
            // The chunks of other ranks are unspecified after a reduce-scatter.
            from = values::<T>(&comm, len, 1 + round);
            plain = values::<T>(&comm, len, 2 + round);
            let before = comm.stats();
            let (back, result, parts) =
                call::<T>(&comm, reduction, &on, (&mut from, into), |_| ControlFlow::Continue(()));
            into = back;
            result.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(bits::<T>(into.as_slice()) == expected, "{name}, round {round}");
            let mut end = 0;
            assert!(parts.iter().all(|part| std::mem::replace(&mut end, part.end) == part.start), "{name}");
            assert_eq!(end, len / n, "{name}");
            for kind in [Kind::ReduceScatter, Kind::AllGather] {
                let [before, after] = [before, comm.stats()].map(|stats| stats.of(kind));
                assert_eq!(after.operations, before.operations + 1, "{name}");
                let bytes = (len - len / n) * T::DTYPE.size();
                assert_eq!(after.bytes, before.bytes + bytes as u64, "{name}");
            }
        }
    });
    spawned.unwrap();
}

#[test]
fn it_is_a_reduce_scatter_a_computation_and_an_all_gather() {
    for &backend in BACKENDS {
        check::<f32>(backend, 3, 3 * PART + 9, 1, Reduction::Mean);
        check::<bf16>(backend, 2, 4 * PART + 2, 1, Reduction::Sum);
    }
    for backend in IN_ONE_PASS {
        check::<f16>(backend, 4, LEN, 1, Reduction::PreMulSum { factor: 1.0 });
        check::<f64>(backend, 2, 5 * PART, 3, Reduction::Mean);
        check::<u64>(backend, 3, LEN, 1, Reduction::Max);
    }
    for n in 1..=8 {
        check::<f32>(Backend::Loopback, n, n * (PART + 1), 1, Reduction::Mean);
        check::<f32>(Backend::Loopback, n, n * PART, 2 * n, Reduction::Min);
    }
    for len in [0, 1, 1000] {
        check::<f32>(Backend::Loopback, 3, 3 * len, 1, Reduction::Sum);
    }
}

/// Runs a call of f32 on each of three ranks and returns its error, the parts and `into`'s bits before and after.
fn failures(
    backend: Backend,
    config: loopback::Config,
    before: impl Fn(usize, usize) -> ControlFlow<()> + Sync,
) -> Vec<(Error, Vec<Range<usize>>)> {
    let run = |comm: Arc<dyn Communicator>| {
        let (mut from, into) = (values::<f32>(&comm, LEN, 1), values::<f32>(&comm, LEN, 2));
        let (into, result, parts) =
            call::<f32>(&comm, Reduction::Mean, &queue(1), (&mut from, into), |first| {
                before(comm.rank(), first)
            });
        assert_eq!((from.len(), into.len()), (LEN, LEN));
        (result.unwrap_err(), parts)
    };
    backend.spawn_with(config, run).unwrap()
}

#[test]
fn a_writer_that_breaks_aborts_the_group() {
    for &backend in BACKENDS {
        let breaks = |rank: usize, first: usize| {
            if rank == 1 && first > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        for (error, parts) in failures(backend, loopback::Config::new(3), breaks) {
            assert_eq!(error, Error::Aborted { rank: 1 }, "{backend:?}");
            assert!(parts.len() <= 4, "{backend:?}");
        }
    }
}

#[test]
fn a_panic_of_a_writer_reaches_its_caller_and_the_others() {
    for backend in IN_ONE_PASS {
        let seen = AtomicUsize::new(0);
        let error = backend
            .spawn(3, |comm| {
                let (mut from, into) = (values::<f32>(&comm, LEN, 1), values::<f32>(&comm, LEN, 2));
                let (_, result, _) =
                    call::<f32>(&comm, Reduction::Sum, &queue(1), (&mut from, into), |first| {
                        assert!(comm.rank() != 1 || first == 0, "no such value");
                        ControlFlow::Continue(())
                    });
                let error = result.unwrap_err();
                assert!(matches!(error, Error::Panicked { rank: 1, .. }), "{backend:?}: {error}");
                seen.fetch_add(1, SeqCst);
            })
            .unwrap_err();
        assert!(matches!(error, Error::Panicked { rank: 1, .. }), "{backend:?}: {error}");
        assert_eq!(seen.load(SeqCst), 2, "{backend:?}");
    }
}

#[test]
fn a_writer_past_the_deadline_is_named() {
    for backend in IN_ONE_PASS {
        let timeout = Duration::from_millis(1500);
        let config = loopback::Config { timeout, ..loopback::Config::new(3) };
        let sleeps = |rank, first| {
            if rank == 1 && first == PART {
                std::thread::sleep(timeout * 2);
            }
            ControlFlow::Continue(())
        };
        for (error, _) in failures(backend, config, sleeps) {
            let Error::Timeout { missing, .. } = &error else { panic!("{backend:?}: {error}") };
            assert_eq!(missing, &[1], "{backend:?}");
        }
    }
}

#[test]
fn nothing_is_written_before_all_ranks_have_called() {
    let apart = Backend::Messages { room: 64 << 10, host_size: 2 };
    for backend in IN_ONE_PASS.into_iter().chain([apart]) {
        for late in [false, true] {
            // Only a call that never comes has to be waited out.
            let timeout = if late { Duration::from_millis(300) } else { Duration::from_secs(30) };
            let config = loopback::Config { timeout, clock: Clock::real(), ..loopback::Config::new(2) };
            let ended = AtomicUsize::new(0);
            backend
                .spawn_with(config, |comm| {
                    let (mut from, into) = (values::<f32>(&comm, LEN, 1), values::<f32>(&comm, LEN, 2));
                    if comm.rank() == 1 {
                        // It never calls, or calls another operation.
                        while late && ended.load(SeqCst) == 0 {
                            std::thread::sleep(Duration::from_millis(5));
                        }
                        let error = comm.barrier().unwrap_err();
                        let as_late = matches!(error, Error::Timeout { .. });
                        let as_other = matches!(error, Error::Mismatch { .. });
                        return assert!(if late { as_late } else { as_other }, "{backend:?}: {error}");
                    }
                    let expected = bits::<f32>(into.as_slice());
                    let (into, result, parts) =
                        call::<f32>(&comm, Reduction::Mean, &queue(1), (&mut from, into), |_| {
                            ControlFlow::Continue(())
                        });
                    ended.fetch_add(1, SeqCst);
                    let error = result.unwrap_err();
                    let is_late = matches!(&error, Error::Timeout { missing, .. } if *missing == [1]);
                    assert!(if late { is_late } else { matches!(error, Error::Mismatch { .. }) }, "{error}");
                    assert_eq!(parts, vec![], "{backend:?}");
                    assert!(bits::<f32>(into.as_slice()) == expected, "{backend:?}");
                    // A refused call writes nothing either.
                    let (_, result, parts) =
                        call::<f32>(&comm, Reduction::Mean, &queue(1), (&mut from, into), |_| {
                            ControlFlow::Continue(())
                        });
                    assert!(matches!(result, Err(Error::Poisoned { .. })), "{backend:?}");
                    assert_eq!(parts, vec![], "{backend:?}");
                })
                .unwrap();
        }
    }
}

#[test]
fn faults_meet_it_as_any_operation() {
    for backend in IN_ONE_PASS {
        let by = Duration::from_millis(20);
        let faults = [
            (Faults::none(), 0),
            (Faults::none().delay(1, REGISTERED, by), 0),
            (Faults::none().corrupt_input(1, REGISTERED), 1),
            (Faults::none().corrupt_result(1, REGISTERED), 1),
        ];
        let run = |faults: Faults| {
            let config = loopback::Config { faults, ..loopback::Config::new(2) };
            let run = |comm: Arc<dyn Communicator>| {
                // Its middle is a third element, so that the reduced value shows.
                let len = 4 * PART + 4;
                let (mut from, into) = (values::<f32>(&comm, len, 1), values::<f32>(&comm, len, 2));
                let before = comm.stats().total().operations;
                if backend != Backend::Loopback {
                    assert_eq!(before, REGISTERED);
                }
                (before..REGISTERED).for_each(|_| comm.barrier().unwrap());
                let (into, result, _) =
                    call::<f32>(&comm, Reduction::Sum, &queue(1), (&mut from, into), |_| {
                        ControlFlow::Continue(())
                    });
                result.unwrap();
                bits::<f32>(into.as_slice())
            };
            backend.spawn_with(config, run).unwrap()
        };
        let expected = run(Faults::none());
        for (faults, differ) in faults {
            let name = format!("{backend:?} {faults:?}");
            let found = run(faults);
            let count = |rank: usize| found[rank].iter().zip(&expected[rank]).filter(|(a, b)| a != b).count();
            assert_eq!(count(1), differ, "{name}");
        }
    }
}

/// Operations of two registrations in shared memory: the number of the call that follows.
const REGISTERED: u64 = 6;

#[test]
fn buffers_at_different_places_are_an_error_on_every_rank() {
    let backend = Backend::Tcp(Way::SharedMemory);
    let errors = backend.spawn(2, |comm| {
        let mut from = values::<f32>(&comm, 2 * LEN, 1);
        let into = values::<f32>(&comm, LEN, 2);
        let mut second = from.split_off(LEN).unwrap();
        let from = if comm.rank() == 0 { &mut from } else { &mut second };
        let (_, result, parts) =
            call::<f32>(&comm, Reduction::Sum, &queue(1), (from, into), |_| ControlFlow::Continue(()));
        assert_eq!(parts, vec![]);
        result.unwrap_err()
    });
    for (rank, error) in errors.unwrap().into_iter().enumerate() {
        let told = error.to_string();
        assert!(told.contains("different places of their registered memory"), "{rank}: {told}");
    }
}

#[test]
fn misuse_is_refused_before_any_other_rank_is_involved() {
    for backend in IN_ONE_PASS {
        let run = |comm: Arc<dyn Communicator>| {
            let of = |len, dtype| Buffer::zeroed(len, dtype, &Meter::new(), Category::Staging).unwrap();
            let op = Op::of(Action::ReduceAndGather(Reduction::Sum));
            let error = comm.run(op, &mut of(LEN, DType::F32)).unwrap_err();
            assert_eq!(error, Error::NeedsWriter);
            for (len, dtype) in [(LEN, DType::F64), (LEN + 3, DType::F32)] {
                let (mut from, into) = (of(len, dtype), of(LEN, DType::F32));
                let (_, result, parts) =
                    call::<f32>(&comm, Reduction::Sum, &queue(1), (&mut from, into), |_| {
                        ControlFlow::Continue(())
                    });
                assert!(matches!(result, Err(Error::Buffer(_))), "{result:?}");
                assert_eq!(parts, vec![]);
            }
            let odd = LEN + 1;
            let (mut from, into) = (of(odd, DType::F32), of(odd, DType::F32));
            let (_, result, _) = call::<f32>(&comm, Reduction::Sum, &queue(1), (&mut from, into), |_| {
                ControlFlow::Continue(())
            });
            assert!(matches!(result, Err(Error::Uneven { .. })), "{result:?}");
            comm.barrier().unwrap();
        };
        backend.spawn(3, run).unwrap();
    }
}

#[test]
fn its_operation_takes_its_turn_among_started_ones() {
    for &backend in BACKENDS {
        let run = |comm: Arc<dyn Communicator>| {
            let queue = queue(1);
            let [first, into, last] = [2, 3, 4].map(|salt| values::<f32>(&comm, LEN, salt));
            let mut from = values::<f32>(&comm, LEN, 1);
            let before = comm.start(Op::all_gather(), first, &queue).unwrap();
            let (_, result, _) =
                call::<f32>(&comm, Reduction::Sum, &queue, (&mut from, into), |_| ControlFlow::Continue(()));
            result.unwrap();
            let after = comm.start(Op::all_gather(), last, &queue).unwrap();
            after.wait(&queue).1.unwrap();
            before.wait(&queue).1.unwrap();
        };
        backend.spawn(3, run).unwrap();
    }
}
