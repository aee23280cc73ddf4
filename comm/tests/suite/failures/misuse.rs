//! Contradictory calls of ranks, and refused calls.

use crate::backends::BACKENDS;
use crate::failures::common::*;
use meshstep_comm::{Error, InFlight, Op, Reduction, loopback};
use meshstep_tensor::{Buffer, DType, Queue};

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
        |c| {
            let factor = Reduction::PreMulSum { factor: 1.0 };
            run(c, Op::all_reduce(if c.rank() == ODD { factor } else { Reduction::Sum }), 8)
        },
        |_, _, error| {
            let told = error.to_string();
            assert!(told.contains(" called all_reduce(pre_mul_sum by 1.0) of 8 f32 "), "{told}");
        },
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
fn each_rank_has_its_own_factor() {
    for &backend in BACKENDS {
        let sums = backend.spawn(4, |c| {
            let (me, by) = (c.rank(), |factor| Reduction::PreMulSum { factor });
            let mut values =
                buffer(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0].map(|x| x * (me as f32 + 1.0)));
            c.all_reduce(&mut values, by(me as f64 - 1.0)).unwrap();
            let all = values.typed::<f32>().unwrap().to_vec();
            c.reduce_scatter(&mut values, by(0.5 * me as f64)).unwrap();
            (all, values.typed::<f32>().unwrap()[2 * me..][..2].to_vec())
        });
        // -1 * 1 + 0 * 2 + 1 * 3 + 2 * 4 = 10, then (0 + 1 + 2 + 3) / 2 = 3.
        for (rank, (all, own)) in sums.unwrap().into_iter().enumerate() {
            assert_eq!(all, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0]);
            let first = 60.0 * rank as f32 + 30.0;
            assert_eq!(own, [first, first + 30.0], "rank {rank}");
        }
    }
}

#[test]
fn sends_and_receives_that_never_meet() {
    each_rank(|c| run(c, if c.rank() == 0 { Op::send(1) } else { Op::barrier() }, 8), is_mismatch);
    each_rank(|c| run(c, if c.rank() == 0 { Op::recv(1) } else { Op::all_gather() }, 8), is_mismatch);
    each_rank(|c| run(c, Op::send(c.rank() ^ 1), 8), is_mismatch);
    each_rank(|c| run(c, Op::recv((c.rank() + 1) % c.world_size()), 8), is_mismatch);
    // A pair of unequal lengths or types; the other ranks get the error too.
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
fn a_failure_is_returned_once_and_poisons_later_calls() {
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
fn an_abort_ends_waiting_operations_on_every_rank() {
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
fn queued_operations_fail_with_the_ones_ahead() {
    each_rank(
        |comm| {
            let queue = Queue::cpu();
            let odd = comm.rank() == 1;
            let ops = [if odd { Op::all_to_all() } else { Op::all_gather() }, Op::barrier(), Op::barrier()];
            // An operation started after the failure is known is refused at once.
            let started: Vec<Result<InFlight, _>> = ops.map(|op| comm.start(op, floats(8), &queue)).into();
            let end = |started: Result<InFlight, (Buffer, Error)>| match started {
                Ok(started) => started.wait(&queue),
                Err((buffer, error)) => (buffer, Err(error)),
            };
            let outcomes: Vec<_> = started.into_iter().map(end).collect();
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
    for &backend in BACKENDS {
        let outcomes = backend.spawn(4, |comm| {
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
            let integers = Error::FactorsOfIntegers { dtype: DType::U64 };
            let by = Reduction::PreMulSum { factor: 2.0 };
            assert_eq!(refused(Op::all_reduce(by), buffer(&[1u64])), integers);
            // One rank's mistake does not affect the others.
            if me == 2 {
                assert_eq!(run(&comm, Op::all_gather(), 10), Err(uneven));
            }
            run(&comm, Op::all_reduce(Reduction::Sum), 10)
        });
        assert_eq!(outcomes.unwrap(), vec![Ok(()); 4]);
    }
}

#[test]
fn no_ranks() {
    for &backend in BACKENDS {
        assert_eq!(backend.spawn(0, |_| ()).unwrap_err(), Error::ZeroRanks);
        assert_eq!(loopback::world(loopback::Config::new(0)).unwrap_err(), Error::ZeroRanks);
    }
}
