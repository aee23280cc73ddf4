//! Failures of an all-reduce of lent values: the values are as before, and the errors are an all-reduce's.

use crate::backends::BACKENDS;
use crate::failures::common::*;
use meshstep_comm::{Action, Clock, Error, Faults, Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, SliceMut};
use std::time::Duration;

const LEN: usize = 9;

/// Calls it on values of 1; returns the values as well.
fn keep(comm: &Comm, within: Option<Duration>) -> (Vec<f32>, Result<u64, Error>) {
    let mut values = vec![1.0f32; LEN];
    let room = Buffer::zeroed(LEN, DType::F32, &Meter::new(), Category::Staging).unwrap();
    let (first, second) = values.split_at_mut(4);
    let mut slices = [SliceMut::from(first), SliceMut::from(second)];
    let (room, result) = comm.all_reduce_keeping(Reduction::Sum, within, &mut slices, room);
    assert_eq!(room.len(), LEN, "the buffer comes back");
    (values, result)
}

/// Fails the test if the values have changed.
fn unchanged(comm: &Comm) -> Outcome {
    let (values, result) = keep(comm, None);
    assert_eq!(values, [1.0; LEN]);
    result.map(drop)
}

#[test]
fn another_call_is_a_mismatch() {
    each_rank(|c| if c.rank() == 1 { run(c, Op::barrier(), 0) } else { unchanged(c) }, is_mismatch);
    const MAX: Op = Op::all_reduce(Reduction::Max);
    each_rank(|c| if c.rank() == 1 { run(c, MAX, LEN) } else { unchanged(c) }, is_mismatch);
    let sum = Op::all_reduce(Reduction::Sum);
    each_rank(
        |c| if c.rank() == 1 { run(c, Op::all_reduce(Reduction::Sum), LEN + 1) } else { unchanged(c) },
        move |_, _, error| {
            let Error::Mismatch { calls, .. } = error else { panic!("{error}") };
            assert!(calls.iter().flatten().all(|call| call.action == sum.action()));
        },
    );
}

#[test]
fn a_rank_that_left_or_aborted() {
    each_rank(
        |c| {
            if c.rank() == 1 {
                return Err(Error::Aborted { rank: 1 });
            }
            unchanged(c)
        },
        |_, rank, error| {
            let left = Error::Left { rank: 1, op_number: 0 };
            assert_eq!(error, if rank == 1 { Error::Aborted { rank: 1 } } else { left });
        },
    );
    each_rank(
        |c| {
            if c.rank() == 1 {
                c.abort();
            }
            unchanged(c)?;
            unchanged(c)
        },
        |_, _, error| assert_eq!(error.cause(), &Error::Aborted { rank: 1 }),
    );
}

#[test]
fn a_rank_that_is_too_late_or_never_comes() {
    const PATIENCE: Duration = Duration::from_secs(100);
    for &backend in BACKENDS {
        for faults in [Faults::none().delay(1, 1, 100_000 * SECOND), Faults::none().drop_op(1, 1)] {
            let config = loopback::Config { clock: Clock::manual(), faults, ..loopback::Config::new(2) };
            let errors = while_time_passes(backend, config, |comm| {
                // Streams are open then: a second is a millisecond of this machine.
                comm.barrier().unwrap();
                let (values, result) = keep(comm, Some(PATIENCE));
                assert_eq!(values, [1.0; LEN]);
                let later = unchanged(comm).unwrap_err();
                (result.unwrap_err(), later)
            });
            for (error, later) in &errors {
                assert_eq!(error, &errors[0].0);
                assert!(matches!(later, Error::Poisoned { .. }), "{later}");
            }
            let Error::Timeout { called, missing, after, .. } = &errors[0].0 else {
                panic!("{}", errors[0].0)
            };
            assert_eq!((called.action, called.len), (Action::AllReduce(Reduction::Sum), LEN));
            assert_eq!((*after, &missing[..]), (PATIENCE, &[1][..]));
        }
    }
}

#[test]
fn damage_is_seen_by_all_or_by_one() {
    for &backend in BACKENDS {
        let sums = |faults| {
            let config = loopback::Config { faults, ..loopback::Config::new(4) };
            backend
                .spawn_with(config, |comm| {
                    let (values, result) = keep(&comm, None);
                    result.unwrap();
                    values
                })
                .unwrap()
        };
        let right = vec![4.0f32; LEN];
        let everywhere = sums(Faults::none().corrupt_input(2, 0));
        assert!(everywhere.iter().all(|sum| sum != &right && sum == &everywhere[0]));
        for (rank, sum) in sums(Faults::none().corrupt_result(2, 0)).iter().enumerate() {
            assert_eq!(sum == &right, rank != 2);
        }
    }
}

/// Operations that were started before it run first, also on the communication thread.
#[test]
fn it_waits_for_its_turn() {
    for &backend in BACKENDS {
        let sums = backend.spawn(4, |comm| {
            let queue = meshstep_tensor::Queue::cpu();
            let started: Vec<_> = (0..20)
                .map(|_| comm.start(Op::all_reduce(Reduction::Sum), floats(500), &queue).unwrap())
                .collect();
            let (values, result) = keep(&comm, None);
            result.unwrap();
            started.into_iter().for_each(|started| started.wait(&queue).1.unwrap());
            values
        });
        assert!(sums.unwrap().iter().all(|sum| *sum == [4.0; LEN]));
    }
}
