//! Every misuse and failure, on 2 and 4 ranks: the right typed error on every rank, and nobody waits for ever.

use meshstep_comm::{Action, Clock, Communicator, Error, Faults, InFlight, Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, DType, Element, Meter, Queue};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

type Comm = Arc<dyn Communicator>;
type Outcome = Result<(), Error>;

const SECOND: Duration = Duration::from_secs(1);

fn buffer<T: Element>(values: &[T]) -> Buffer {
    Buffer::from_slice(values, &Meter::new(), Category::Grads).unwrap()
}

fn floats(len: usize) -> Buffer {
    buffer(&vec![1.0f32; len])
}

fn run(comm: &Comm, op: Op, len: usize) -> Outcome {
    comm.run(op, &mut floats(len))
}

/// Fails the test where `body` would otherwise hang it.
fn in_time<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let result = body();
        let _ = done.send(());
        result
    });
    let waited = ended.recv_timeout(Duration::from_secs(30));
    assert!(waited != Err(mpsc::RecvTimeoutError::Timeout), "a rank hangs");
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs `body` on 2 and on 4 ranks and gives every rank's outcome to `check`. The clock stands still, so no deadline
/// ever comes: what ends, ends because its cause is known.
fn each_rank(body: fn(&Comm) -> Outcome, check: impl Fn(usize, usize, Error)) {
    for n in [2, 4] {
        let config = loopback::Config { clock: Clock::manual(), ..loopback::Config::new(n) };
        let outcomes = in_time(move || loopback::spawn_with(config, |comm| body(&comm)).unwrap());
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            check(n, rank, outcome.expect_err("every rank must fail"));
        }
    }
}

fn is_mismatch(_n: usize, rank: usize, error: Error) {
    assert!(matches!(error, Error::Mismatch { .. }), "rank {rank}: {error}");
}

#[test]
fn ranks_that_call_different_things() {
    // Rank 1 differs from the others in the operation, the reduction, the root, the length, the type.
    let sum = Op::all_reduce(Reduction::Sum);
    const ODD: usize = 1;
    each_rank(|c| run(c, if c.rank() == ODD { Op::all_gather() } else { Op::broadcast(0) }, 8), is_mismatch);
    each_rank(|c| run(c, if c.rank() == ODD { Op::barrier() } else { Op::all_to_all() }, 8), is_mismatch);
    each_rank(|c| run(c, Op::broadcast(usize::from(c.rank() == ODD)), 8), is_mismatch);
    each_rank(|c| run(c, Op::all_gather(), if c.rank() == ODD { 12 } else { 8 }), is_mismatch);
    each_rank(
        |c| {
            let reduction = if c.rank() == ODD { Reduction::Mean } else { Reduction::Sum };
            run(c, Op::reduce_scatter(reduction), 8)
        },
        is_mismatch,
    );
    each_rank(
        |c| match c.rank() {
            ODD => c.all_reduce(&mut buffer(&[1u64; 8]), Reduction::Sum),
            _ => c.all_reduce(&mut floats(8), Reduction::Sum),
        },
        move |n, _, error| {
            let Error::Mismatch { op_number: 0, calls } = error else { panic!("{error}") };
            assert_eq!(calls.len(), n);
            let seen: Vec<_> = calls.iter().flatten().collect();
            assert!(seen.len() >= 2 && seen.iter().all(|call| call.action == sum.action() && call.len == 8));
            assert_eq!(calls[ODD].map(|call| call.dtype), Some(DType::U64));
        },
    );
}

#[test]
fn sends_and_receives_that_never_meet() {
    each_rank(|c| run(c, if c.rank() == 0 { Op::send(1) } else { Op::barrier() }, 8), is_mismatch);
    each_rank(|c| run(c, if c.rank() == 0 { Op::recv(1) } else { Op::all_gather() }, 8), is_mismatch);
    each_rank(|c| run(c, Op::send(c.rank() ^ 1), 8), is_mismatch);
    each_rank(|c| run(c, Op::recv((c.rank() + 1) % c.world_size()), 8), is_mismatch);
    // A pair of unequal lengths or types; the other ranks learn of it too.
    each_rank(
        |c| {
            let mut values = floats(8 + c.rank());
            match c.rank() {
                0 => c.send(&mut values, 1),
                1 => c.recv(&mut values, 0),
                _ => c.barrier(),
            }
        },
        is_mismatch,
    );
    each_rank(
        |c| match c.rank() {
            0 => c.send(&mut floats(2), 1),
            1 => c.recv(&mut buffer(&[0.0f64; 2]), 0),
            _ => c.barrier(),
        },
        is_mismatch,
    );
}

#[test]
fn a_rank_that_returns_early() {
    let body = |comm: &Comm| {
        run(comm, Op::barrier(), 0)?;
        if comm.rank() == 1 { Ok(()) } else { run(comm, Op::all_reduce(Reduction::Sum), 8) }
    };
    for n in [2, 4] {
        for (rank, outcome) in
            in_time(move || loopback::spawn(n, |comm| body(&comm)).unwrap()).into_iter().enumerate()
        {
            let expected = if rank == 1 { Ok(()) } else { Err(Error::Left { rank: 1, op_number: 1 }) };
            assert_eq!(outcome, expected);
        }
    }
}

#[test]
fn a_rank_that_drops_its_communicator_and_goes_on() {
    let outcomes = in_time(|| {
        let (gone, heard) = mpsc::channel();
        let heard = std::sync::Mutex::new(heard);
        loopback::spawn(2, move |comm| {
            if comm.rank() == 0 {
                drop(comm);
                // Still here, and returns only once the other has been told.
                return heard.lock().unwrap().recv().unwrap();
            }
            let outcome = run(&comm, Op::recv(0), 8);
            gone.send(outcome.clone()).unwrap();
            outcome
        })
        .unwrap()
    });
    assert_eq!(outcomes, vec![Err(Error::Left { rank: 0, op_number: 0 }); 2]);
}

#[test]
fn a_rank_that_panics() {
    for n in [2, 4] {
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        let theirs = Arc::clone(&seen);
        let result = in_time(move || {
            loopback::spawn(n, |comm| {
                if comm.rank() == 1 {
                    // What it has in flight goes down with it.
                    let _started = comm.start(Op::send(0), floats(4), &Queue::cpu());
                    std::panic::resume_unwind(Box::new("rank 1 is out".to_owned()));
                }
                let outcome = run(&comm, Op::all_reduce(Reduction::Sum), 8);
                theirs.lock().unwrap().push(outcome);
            })
        });
        let panicked = Error::Panicked { rank: 1, message: "rank 1 is out".to_owned() };
        assert_eq!(result, Err(panicked.clone()));
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert_eq!(seen.len(), n - 1);
        for outcome in seen {
            // The send in flight may be met by the others' all_reduce first.
            let error = outcome.unwrap_err();
            assert!(error == panicked || matches!(error, Error::Mismatch { .. }), "{error}");
        }
    }
}

#[test]
fn a_panic_on_a_thread_of_the_callers_own() {
    let mut world = loopback::world(loopback::Config::new(2)).unwrap();
    let (one, zero) = (world.pop().unwrap(), world.pop().unwrap());
    let panicking = std::thread::spawn(move || {
        let _held = one;
        std::panic::resume_unwind(Box::new(()));
    });
    assert!(panicking.join().is_err());
    let error = in_time(move || run(&zero, Op::barrier(), 0)).unwrap_err();
    assert!(matches!(error, Error::Panicked { rank: 1, .. }), "{error}");
}

/// Moves the clock until every rank has ended.
fn while_time_passes<T: Send + 'static>(
    config: loopback::Config,
    body: impl Fn(&Comm) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let clock = config.clock.clone();
    in_time(move || {
        std::thread::scope(|scope| {
            let ranks = scope.spawn(|| loopback::spawn_with(config, |comm| body(&comm)).unwrap());
            while !ranks.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
                clock.advance(SECOND);
            }
            ranks.join().unwrap()
        })
    })
}

#[test]
fn a_rank_that_is_too_late_or_never_comes() {
    let patience = 600 * SECOND;
    let faults = [Faults::none().delay(1, 0, 1000 * patience), Faults::none().drop_op(1, 0)];
    for (n, faults) in [2, 4].into_iter().flat_map(|n| faults.clone().map(|faults| (n, faults))) {
        let config = loopback::Config { clock: Clock::manual(), faults, ..loopback::Config::new(n) };
        let errors = while_time_passes(config, |comm| run(comm, Op::all_gather(), 8).unwrap_err());
        assert!(errors.iter().all(|error| error == &errors[0]), "all ranks get the one cause: {errors:?}");
        let Error::Timeout { op_number: 0, called, arrived, missing, after } = &errors[0] else {
            panic!("{}", errors[0])
        };
        assert_eq!((called.action, *after, &missing[..]), (Action::AllGather, patience, &[1][..]));
        assert_eq!(arrived.len(), n - 1);
    }
}

#[test]
fn a_deadline_of_one_call() {
    let clock = Clock::manual();
    let config = loopback::Config { clock: clock.clone(), ..loopback::Config::new(2) };
    // Rank 1 does not call at all until rank 0 has given up.
    let given_up = Barrier::new(2);
    let errors = while_time_passes(config, move |comm| {
        if comm.rank() == 1 {
            given_up.wait();
        }
        let outcome = run(comm, Op::recv(1 - comm.rank()).within(7 * SECOND), 3);
        if comm.rank() == 0 {
            given_up.wait();
        }
        outcome.unwrap_err()
    });
    let Error::Timeout { called, arrived, missing, after, .. } = &errors[0] else { panic!("{}", errors[0]) };
    assert_eq!((called.action, *after), (Action::Recv { from: 1 }, 7 * SECOND));
    assert_eq!((&arrived[..], &missing[..]), (&[0][..], &[1][..]));
    assert_eq!(errors[1], errors[0]);
    assert!(clock.now() < 600 * SECOND);
}

#[test]
fn a_delay_below_the_deadline_changes_nothing() {
    let faults = Faults::none().delay(0, 0, 50 * SECOND).delay(1, 1, 60 * SECOND);
    let (clock, timeout) = (Clock::manual(), 1_000_000 * SECOND);
    let config = loopback::Config { clock, faults, timeout, ..loopback::Config::new(2) };
    let outcomes =
        while_time_passes(config, |comm| (run(comm, Op::barrier(), 0), run(comm, Op::all_gather(), 8)));
    assert_eq!(outcomes, vec![(Ok(()), Ok(())); 2]);
}

#[test]
fn a_failure_is_told_once_and_repeated_ever_after() {
    each_rank(
        |comm| {
            let first =
                run(comm, if comm.rank() == 0 { Op::barrier() } else { Op::all_gather() }, 8).unwrap_err();
            for _ in 0..3 {
                let later = run(comm, Op::barrier(), 0).unwrap_err();
                assert!(matches!(&later, Error::Poisoned { cause } if **cause == first), "{later}");
            }
            assert_eq!(comm.split(None, 0).unwrap_err().cause(), &first);
            Err(first)
        },
        is_mismatch,
    );
}

#[test]
fn an_abort_ends_what_waits_everywhere() {
    each_rank(
        |comm| {
            if comm.rank() == 1 {
                comm.abort();
            }
            run(comm, Op::all_reduce(Reduction::Max), 8)
        },
        |_, _, error| assert_eq!(error, Error::Aborted { rank: 1 }),
    );
}

#[test]
fn what_waits_in_the_queue_fails_with_what_is_ahead_of_it() {
    each_rank(
        |comm| {
            let queue = Queue::cpu();
            let odd = comm.rank() == 1;
            let ops = [if odd { Op::all_to_all() } else { Op::all_gather() }, Op::barrier(), Op::barrier()];
            let started: Vec<InFlight> = ops.map(|op| comm.start(op, floats(8), &queue).unwrap()).into();
            let outcomes: Vec<_> = started.into_iter().map(|started| started.wait(&queue)).collect();
            assert!(outcomes.iter().all(|(buffer, _)| buffer.len() == 8), "every buffer comes back");
            let [first, second, third] = [0, 1, 2].map(|i| outcomes[i].1.clone().unwrap_err());
            assert!(matches!((&second, &third), (Error::Poisoned { .. }, Error::Poisoned { .. })));
            assert!(second.cause() == &first && third.cause() == &first);
            Err(first)
        },
        is_mismatch,
    );
}

#[test]
fn a_caller_error_gives_the_buffer_back_and_spoils_nothing() {
    let outcomes = loopback::spawn(4, |comm| {
        let me = comm.rank();
        let refused = |op, buffer: Buffer| {
            let len = buffer.len();
            let (back, error) = comm.start(op, buffer, &Queue::cpu()).unwrap_err();
            assert_eq!(back.len(), len);
            error
        };
        let uneven = Error::Uneven { len: 10, world_size: 4, padded: 12 };
        assert_eq!(refused(Op::all_gather(), floats(10)), uneven);
        assert_eq!(refused(Op::all_to_all(), floats(10)), uneven);
        assert_eq!(refused(Op::reduce_scatter(Reduction::Sum), floats(10)), uneven);
        let nobody = Error::InvalidRank { rank: 4, world_size: 4 };
        assert_eq!(refused(Op::broadcast(4), floats(1)), nobody);
        assert_eq!(refused(Op::send(4), floats(1)), nobody);
        assert_eq!(refused(Op::recv(me), floats(1)), Error::ToSelf { rank: me });
        let integers = Error::MeanOfIntegers { dtype: DType::U64 };
        assert_eq!(refused(Op::all_reduce(Reduction::Mean), buffer(&[1u64])), integers);
        // One rank's mistake is not the others'.
        if me == 2 {
            assert_eq!(run(&comm, Op::all_gather(), 10), Err(uneven));
        }
        run(&comm, Op::all_reduce(Reduction::Sum), 10)
    });
    assert_eq!(outcomes.unwrap(), vec![Ok(()); 4]);
}

#[test]
fn no_ranks() {
    assert_eq!(loopback::spawn(0, |_| ()).unwrap_err(), Error::ZeroRanks);
    assert_eq!(loopback::world(loopback::Config::new(0)).unwrap_err(), Error::ZeroRanks);
}

#[test]
fn damage_is_seen_by_all_or_by_one() {
    let sums = |faults| {
        let config = loopback::Config { faults, ..loopback::Config::new(4) };
        let sum = |comm: Comm| {
            let mut values = floats(9);
            comm.all_reduce(&mut values, Reduction::Sum).unwrap();
            values.typed::<f32>().unwrap().to_vec()
        };
        loopback::spawn_with(config, sum).unwrap()
    };
    let right = vec![4.0f32; 9];
    let everywhere = sums(Faults::none().corrupt_input(2, 0));
    assert!(everywhere.iter().all(|sum| sum != &right && sum == &everywhere[0]));
    let here = sums(Faults::none().corrupt_result(2, 0));
    for (rank, sum) in here.iter().enumerate() {
        assert_eq!(sum == &right, rank != 2);
    }
}

#[test]
fn what_is_started_runs_though_nobody_waits() {
    let meter = Meter::new();
    let outcomes = loopback::spawn(2, |comm| {
        let (queue, len) = (Queue::cpu(), 1 << 16);
        let values = Buffer::zeroed(len, DType::F32, &meter, Category::Buckets).unwrap();
        let started = comm.start(Op::all_reduce(Reduction::Sum), values, &queue).unwrap();
        if comm.rank() == 0 {
            // Leaves at once: the operation and its buffer stay behind.
            drop(started);
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
        drop(comm);
        started.wait(&queue).1
    });
    assert_eq!(outcomes.unwrap(), [Ok(()), Ok(())]);
    let waited = Instant::now();
    while meter.live(Category::Buckets) > 0 {
        assert!(waited.elapsed() < Duration::from_secs(20), "a buffer is never released");
        std::thread::yield_now();
    }
}

#[test]
fn a_communicator_kept_beyond_its_rank_is_closed() {
    let comms = loopback::spawn(2, |comm| comm).unwrap();
    let outcome = in_time(move || run(&comms[0], Op::barrier(), 0));
    assert_eq!(outcome, Err(Error::Left { rank: 0, op_number: 0 }));
}

// From here on, real threads and real time.

#[test]
fn a_real_deadline_ends_a_real_wait() {
    for n in [2, 4] {
        let config = loopback::Config { timeout: Duration::from_millis(80), ..loopback::Config::new(n) };
        let outcomes = in_time(move || {
            let started = Instant::now();
            let outcomes = loopback::spawn_with(config, |comm| {
                if comm.rank() == n - 1 {
                    std::thread::sleep(Duration::from_millis(400));
                }
                run(&comm, Op::all_reduce(Reduction::Sum), 1000)
            });
            assert!(started.elapsed() >= Duration::from_millis(80));
            outcomes.unwrap()
        });
        for outcome in outcomes {
            let error = outcome.unwrap_err();
            assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[n - 1]), "{error}");
        }
    }
}

#[test]
fn a_known_cause_does_not_wait_for_the_deadline() {
    let started = Instant::now();
    let outcomes = in_time(|| {
        loopback::spawn(4, |comm| {
            // A minute's patience, of which nothing is used up.
            let op = if comm.rank() == 3 { Op::barrier() } else { Op::all_gather() };
            run(&comm, op.within(60 * SECOND), 8)
        })
    });
    assert!(outcomes.unwrap().iter().all(|outcome| matches!(outcome, Err(Error::Mismatch { .. }))));
    assert!(started.elapsed() < 10 * SECOND);
}

#[test]
fn many_operations_under_a_short_real_deadline() {
    let finished = AtomicUsize::new(0);
    let config = loopback::Config { timeout: 20 * SECOND, ..loopback::Config::new(4) };
    let outcomes = loopback::spawn_with(config, |comm| -> Outcome {
        let queue = Queue::cpu();
        let mut waiting = std::collections::VecDeque::new();
        for i in 0..2000 {
            let op = [Op::all_reduce(Reduction::Sum), Op::all_gather(), Op::broadcast(i % 4)][i % 3];
            waiting.push_back(comm.start(op, floats(64), &queue).map_err(|(_, error)| error)?);
            if waiting.len() > 10 {
                waiting.pop_front().map_or(Ok(()), |started| started.wait(&queue).1)?;
            }
        }
        waiting.into_iter().try_for_each(|started| started.wait(&queue).1)?;
        finished.fetch_add(1, SeqCst);
        Ok(())
    });
    assert!(outcomes.unwrap().iter().all(Result::is_ok));
    assert_eq!(finished.into_inner(), 4);
}
