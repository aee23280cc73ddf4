//! Ranks that are late, missing, or bring corrupted bytes; on a manual clock, and on the real one.

use crate::backends::BACKENDS;
use crate::failures::common::*;
use meshstep_cases::{long, tried};
use meshstep_comm::{Action, Clock, Error, Faults, Op, Reduction, loopback};
use meshstep_tensor::Queue;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

#[test]
fn a_rank_that_is_too_late_or_never_comes() {
    for &backend in BACKENDS {
        let patience = 600 * SECOND;
        let faults = [Faults::none().delay(1, 0, 1000 * patience), Faults::none().drop_op(1, 0)];
        let all = [2, 4].into_iter().flat_map(|n| faults.clone().map(|faults| (n, faults))).enumerate();
        // Each number of ranks and each fault once; in the long run each pair of them.
        let chosen = |i: usize| (long() || i.is_multiple_of(3)) && tried(i, 1);
        for (_, (n, faults)) in all.filter(|(i, _)| chosen(*i)) {
            let config = loopback::Config { clock: Clock::manual(), faults, ..loopback::Config::new(n) };
            let errors =
                while_time_passes(backend, config, |comm| run(comm, Op::all_gather(), 8).unwrap_err());
            assert!(
                errors.iter().all(|error| error == &errors[0]),
                "all ranks get the one cause: {errors:?}"
            );
            let Error::Timeout { op_number: 0, called, arrived, missing, after } = &errors[0] else {
                panic!("{}", errors[0])
            };
            assert_eq!((called.action, *after, &missing[..]), (Action::AllGather, patience, &[1][..]));
            assert_eq!(arrived.len(), n - 1);
        }
    }
}

#[test]
fn a_deadline_of_one_call() {
    for &backend in BACKENDS {
        let clock = Clock::manual();
        let timeout = 1_000_000 * SECOND;
        let config = loopback::Config { clock: clock.clone(), timeout, ..loopback::Config::new(2) };
        // Rank 1 makes no call until rank 0 has given up.
        let given_up = Barrier::new(2);
        let errors = while_time_passes(backend, config, move |comm| {
            if comm.rank() == 1 {
                given_up.wait();
            }
            let outcome = run(comm, Op::recv(1 - comm.rank()).within(7 * SECOND), 3);
            if comm.rank() == 0 {
                given_up.wait();
            }
            outcome.unwrap_err()
        });
        let Error::Timeout { called, arrived, missing, after, .. } = &errors[0] else {
            panic!("{}", errors[0])
        };
        assert_eq!((called.action, *after), (Action::Recv { from: 1 }, 7 * SECOND));
        assert_eq!((&arrived[..], &missing[..]), (&[0][..], &[1][..]));
        assert_eq!(errors[1], errors[0]);
        assert!(clock.now() < timeout);
    }
}

#[test]
fn a_delay_below_the_deadline_changes_nothing() {
    for &backend in BACKENDS {
        let faults = Faults::none().delay(0, 0, 50 * SECOND).delay(1, 1, 60 * SECOND);
        let (clock, timeout) = (Clock::manual(), 1_000_000 * SECOND);
        let config = loopback::Config { clock, faults, timeout, ..loopback::Config::new(2) };
        let outcomes = while_time_passes(backend, config, |comm| {
            (run(comm, Op::barrier(), 0), run(comm, Op::all_gather(), 8))
        });
        assert_eq!(outcomes, vec![(Ok(()), Ok(())); 2]);
    }
}

/// It leaves the operation unchanged, which then succeeds.
#[test]
fn a_wait_with_an_end_of_its_own() {
    for &backend in BACKENDS {
        let (clock, timeout) = (Clock::manual(), 1_000_000 * SECOND);
        let config = loopback::Config { clock: clock.clone(), timeout, ..loopback::Config::new(2) };
        let waited = Barrier::new(2);
        let outcomes = while_time_passes(backend, config, move |comm| {
            if comm.rank() == 1 {
                waited.wait();
                return run(comm, Op::all_gather(), 8);
            }
            let started = comm.start(Op::all_gather(), floats(8), &Queue::cpu()).unwrap();
            let before = clock.now();
            assert!(!started.ends_within(Duration::ZERO) && !started.ends_within(7 * SECOND));
            assert!(clock.now() >= before + 7 * SECOND);
            waited.wait();
            assert!(
                started.ends_within(Duration::MAX)
                    && started.ends_within(Duration::ZERO)
                    && started.is_done()
            );
            started.wait(&Queue::cpu()).1
        });
        assert_eq!(outcomes, [Ok(()), Ok(())]);
    }
}

#[test]
fn damage_is_seen_by_all_or_by_one() {
    for &backend in BACKENDS {
        let sums = |faults| {
            let config = loopback::Config { faults, ..loopback::Config::new(4) };
            let sum = |comm: Comm| {
                let mut values = floats(9);
                comm.all_reduce(&mut values, Reduction::Sum).unwrap();
                values.typed::<f32>().unwrap().to_vec()
            };
            backend.spawn_with(config, sum).unwrap()
        };
        let right = vec![4.0f32; 9];
        let everywhere = sums(Faults::none().corrupt_input(2, 0));
        assert!(everywhere.iter().all(|sum| sum != &right && sum == &everywhere[0]));
        let here = sums(Faults::none().corrupt_result(2, 0));
        for (rank, sum) in here.iter().enumerate() {
            assert_eq!(sum == &right, rank != 2);
        }
    }
}

// From here on, real threads and real time.

#[test]
fn a_real_deadline_ends_a_real_wait() {
    for &backend in BACKENDS {
        for n in [2, 4] {
            let timeout = Duration::from_millis(600);
            let config = loopback::Config { timeout, ..loopback::Config::new(n) };
            let outcomes = in_time(move || {
                let (started, failed) = (Instant::now(), AtomicUsize::new(0));
                let outcomes = backend.spawn_with(config, |comm| {
                    while comm.rank() == n - 1 && failed.load(SeqCst) < n - 1 {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    let outcome = run(&comm, Op::all_reduce(Reduction::Sum), 1000);
                    failed.fetch_add(1, SeqCst);
                    outcome
                });
                assert!(started.elapsed() >= timeout);
                outcomes.unwrap()
            });
            for outcome in outcomes {
                let error = outcome.unwrap_err();
                assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[n - 1]), "{error}");
            }
        }
    }
}

#[test]
fn a_known_cause_does_not_wait_for_the_deadline() {
    for &backend in BACKENDS {
        let started = Instant::now();
        let outcomes = in_time(move || {
            backend.spawn(4, |comm| {
                // A deadline of a minute, of which nothing is used up.
                let op = if comm.rank() == 3 { Op::barrier() } else { Op::all_gather() };
                run(&comm, op.within(60 * SECOND), 8)
            })
        });
        assert!(outcomes.unwrap().iter().all(|outcome| matches!(outcome, Err(Error::Mismatch { .. }))));
        assert!(started.elapsed() < 10 * SECOND);
    }
}

#[test]
fn many_operations_under_a_short_real_deadline() {
    for &backend in BACKENDS {
        let finished = AtomicUsize::new(0);
        let config = loopback::Config { timeout: 20 * SECOND, ..loopback::Config::new(4) };
        let outcomes = backend.spawn_with(config, |comm| -> Outcome {
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
}
