//! Ranks that return, drop their communicator, or panic.

use crate::backends::BACKENDS;
use crate::failures::common::*;
use meshstep_comm::{Error, Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

#[test]
fn a_rank_that_returns_early() {
    for &backend in BACKENDS {
        let body = |comm: &Comm| {
            run(comm, Op::barrier(), 0)?;
            if comm.rank() == 1 { Ok(()) } else { run(comm, Op::all_reduce(Reduction::Sum), 8) }
        };
        for n in [2, 4] {
            for (rank, outcome) in
                in_time(move || backend.spawn(n, |comm| body(&comm)).unwrap()).into_iter().enumerate()
            {
                let expected = if rank == 1 { Ok(()) } else { Err(Error::Left { rank: 1, op_number: 1 }) };
                assert_eq!(outcome, expected);
            }
        }
    }
}

#[test]
fn a_rank_that_drops_its_communicator_and_goes_on() {
    for &backend in BACKENDS {
        let outcomes = in_time(move || {
            let (gone, heard) = mpsc::channel();
            let heard = std::sync::Mutex::new(heard);
            backend
                .spawn(2, move |comm| {
                    if comm.rank() == 0 {
                        drop(comm);
                        // Stays, and returns only once the other rank has its error.
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
}

#[test]
fn a_rank_that_panics() {
    for &backend in BACKENDS {
        for n in [2, 4] {
            let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
            let theirs = Arc::clone(&seen);
            let result = in_time(move || {
                backend.spawn(n, |comm| {
                    if comm.rank() == 1 {
                        // Its operations in flight fail with it.
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
                // The send in flight may first meet the others' all_reduce.
                let error = outcome.unwrap_err();
                assert!(error == panicked || matches!(error, Error::Mismatch { .. }), "{error}");
            }
        }
    }
}

#[test]
fn a_panic_on_a_thread_of_the_callers_own() {
    for &backend in BACKENDS {
        let mut world = backend.world(2);
        let (one, zero) = (world.pop().unwrap(), world.pop().unwrap());
        let panicking = std::thread::spawn(move || {
            let _held = one;
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(panicking.join().is_err());
        let error = in_time(move || run(&zero, Op::barrier(), 0)).unwrap_err();
        assert!(matches!(error, Error::Panicked { rank: 1, .. }), "{error}");
    }
}

#[test]
fn started_operations_run_without_a_wait() {
    for &backend in BACKENDS {
        let meter = Meter::new();
        let outcomes = backend.spawn(2, |comm| {
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
}

#[test]
fn a_communicator_kept_beyond_its_rank_is_closed() {
    for &backend in BACKENDS {
        let comms = backend.spawn(2, |comm| comm).unwrap();
        let outcome = in_time(move || run(&comms[0], Op::barrier(), 0));
        assert_eq!(outcome, Err(Error::Left { rank: 0, op_number: 0 }));
    }
}
