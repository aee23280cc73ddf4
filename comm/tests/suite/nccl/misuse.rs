//! Errors of the caller: refused by name before any other rank is involved; the communicator stays usable.

use crate::nccl::bench::{Rank, alone, available, multiplies, options, patient, ranks, stand_in};
use meshstep_comm::nccl::{self, Options, Unavailable};
use meshstep_comm::{Communicator, Error, Op, Reduction};
use meshstep_tensor::cuda::{Device, Stream};
use meshstep_tensor::{Buffer, Category, DType, Place, Queue};
use std::time::Duration;

#[test]
fn a_callers_error_leaves_everything_as_it_was() {
    let _alone = alone();
    if !available(3) {
        return;
    }
    ranks(2, &patient(), |comm| {
        let rank = Rank::new(comm);
        let me = rank.comm.rank();
        let elsewhere = Queue::cuda(Stream::new(&Device::open(2).unwrap()).unwrap());
        let on = |queue: &Queue, len, dtype| {
            Buffer::zeroed_on(queue, len, dtype, &rank.meter, Category::Grads).unwrap()
        };
        let expected = Place::Cuda(me);
        let place = |given| meshstep_tensor::Error::Place { given, expected }.into();
        let table = [
            (
                Op::all_gather(),
                on(&rank.queue, 3, DType::F32),
                Error::Uneven { len: 3, world_size: 2, padded: 4 },
            ),
            (
                Op::reduce_scatter(Reduction::Sum),
                on(&rank.queue, 5, DType::F32),
                Error::Uneven { len: 5, world_size: 2, padded: 6 },
            ),
            (
                Op::all_to_all(),
                on(&rank.queue, 1, DType::F32),
                Error::Uneven { len: 1, world_size: 2, padded: 2 },
            ),
            (Op::broadcast(2), on(&rank.queue, 4, DType::F32), Error::InvalidRank { rank: 2, world_size: 2 }),
            (Op::send(9), on(&rank.queue, 4, DType::F32), Error::InvalidRank { rank: 9, world_size: 2 }),
            (Op::recv(me), on(&rank.queue, 4, DType::F32), Error::ToSelf { rank: me }),
            (
                Op::all_reduce(Reduction::Mean),
                on(&rank.queue, 4, DType::U64),
                Error::MeanOfIntegers { dtype: DType::U64 },
            ),
            (
                Op::all_reduce(Reduction::PreMulSum { factor: 2.0 }),
                on(&rank.queue, 4, DType::U64),
                Error::FactorsOfIntegers { dtype: DType::U64 },
            ),
            (Op::all_gather(), on(&rank.queue, 4, DType::U16), Error::UnsupportedDType { dtype: DType::U16 }),
            (Op::all_gather(), on(&Queue::cpu(), 4, DType::F32), place(Place::Cpu)),
            (Op::all_gather(), on(&elsewhere, 4, DType::F32), place(Place::Cuda(2))),
        ];
        for (op, buffer, expected) in table {
            let len = buffer.len();
            let (buffer, error) = rank.comm.start(op, buffer, &rank.queue).map(drop).unwrap_err();
            assert_eq!((error, buffer.len()), (expected.clone(), len), "{op:?}");
            // One wrong call in a group refuses the whole group.
            let calls = [(Op::barrier(), rank.buffer(&[0f32; 0])), (op, buffer)];
            let (buffers, error) = rank.comm.start_group(calls, &rank.queue).map(drop).unwrap_err();
            assert_eq!((error, buffers.len()), (expected, 2), "{op:?}");
        }
        assert_eq!(rank.sum(1.5), Ok(3.0));
        assert_eq!(rank.comm.stats().total().operations, 1);
    });
}

#[test]
fn calls_that_differ_are_named_where_they_are_compared() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    let compared = Options { check: true, ..patient() };
    // An NCCL without factors refuses them, and ranks compare nothing.
    let by = |factor| if multiplies() { Reduction::PreMulSum { factor } } else { Reduction::Min };
    // Each rank's call, and its length.
    let table: [[(Op, usize); 2]; 7] = [
        [(Op::all_gather(), 4), (Op::all_reduce(Reduction::Sum), 4)],
        [(Op::all_reduce(Reduction::Max), 4), (Op::all_reduce(Reduction::Sum), 4)],
        [(Op::all_reduce(by(0.1)), 4), (Op::all_reduce(Reduction::Sum), 4)],
        [(Op::all_gather(), 4), (Op::all_gather(), 8)],
        [(Op::broadcast(0), 4), (Op::broadcast(1), 4)],
        [(Op::send(1), 4), (Op::recv(0), 5)],
        [(Op::send(1), 4), (Op::send(0), 4)],
    ];
    for calls in table {
        let errors = ranks(2, &compared, |comm| {
            let rank = Rank::new(comm);
            assert_eq!(rank.sum(1.0), Ok(2.0));
            // Factors may differ between ranks, like the calls of a pair.
            let factor = rank.comm.rank() as f64;
            rank.dyn_comm().all_reduce(&mut rank.buffer(&[1f32]), by(factor)).unwrap();
            let both = [(Op::send(1), 6), (Op::recv(0), 6)][rank.comm.rank()];
            rank.dyn_comm().run(both.0, &mut rank.buffer(&vec![1f32; both.1])).unwrap();
            let (op, len) = calls[rank.comm.rank()];
            rank.dyn_comm().run(op, &mut rank.buffer(&vec![1f32; len])).unwrap_err()
        });
        for error in errors {
            let Error::Mismatch { op_number: 3, calls: seen } = &error else { panic!("{error:?}") };
            let seen: Vec<_> = seen.iter().map(|call| call.map(|call| (call.action, call.len))).collect();
            assert_eq!(seen, calls.map(|(op, len)| Some((op.action(), len))));
        }
    }
}

#[test]
fn calls_that_differ_end_at_the_deadline_where_they_are_not() {
    let _alone = alone();
    if !stand_in(2) {
        return;
    }
    let errors = ranks(2, &options(Duration::from_millis(300)), |comm| {
        let rank = Rank::new(comm);
        let len = 4 + 4 * rank.comm.rank();
        rank.dyn_comm().all_gather(&mut rank.buffer(&vec![1f32; len])).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Stuck { op_number: 0, .. })), "{errors:?}");
}

#[test]
fn a_device_that_is_not_there_is_refused_by_name() {
    let _alone = alone();
    if !available(1) {
        return;
    }
    let refused = nccl::spawn(&[999], patient(), |_| ()).unwrap_err();
    assert!(refused.to_string().starts_with("there is no device 999; use one below"), "{refused}");
}

#[test]
fn a_machine_without_nccl_says_what_is_missing() {
    match nccl::probe() {
        Ok(found) => assert!(found.version >= 21_000, "{found:?}"),
        Err(missing @ Unavailable::NoLibrary { .. }) => {
            let text = missing.to_string();
            assert!(text.contains("libnccl.so.2") && text.contains("install"), "{text}");
            assert_eq!(nccl::UniqueId::new().unwrap_err(), Error::NoNccl(missing.clone()));
            assert_eq!(nccl::spawn(&[0], Options::default(), |_| ()).unwrap_err(), Error::NoNccl(missing));
        }
        Err(other) => println!("a library that cannot be used: {other}"),
    }
}
