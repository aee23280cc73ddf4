//! Calls that must fail: a caller's mistakes, ranks that differ, aborts, departures and deadlines.

use super::seat::{CheckedCalls, RankChecks};
use crate::{Error, Op, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::time::{Duration, Instant};

/// Deadline of operations that cannot end otherwise.
const DEADLINE: Duration = Duration::from_millis(500);
/// Longest time after which such an operation returns.
const LATE: Duration = Duration::from_secs(60);

/// Checks that mistakes of the caller are refused before another rank is involved.
pub(super) fn refusals(rank: &RankChecks) -> CheckedCalls {
    let (me, n) = (rank.rank, rank.ranks);
    let floats = |len: usize| rank.buffer(&vec![1f32; len]);
    let words = || rank.buffer(&[1u64; 12]);
    let by = Reduction::PreMulSum { factor: 2.0 };
    let both = Reduction::SumThenMax { sums: 3 };
    let mut wrong = vec![
        (Op::broadcast(n), floats(1)?, Error::InvalidRank { rank: n, world_size: n }),
        (Op::send(n), floats(1)?, Error::InvalidRank { rank: n, world_size: n }),
        (Op::recv(me), floats(1)?, Error::ToSelf { rank: me }),
        (Op::send(me), floats(1)?, Error::ToSelf { rank: me }),
        (Op::all_reduce(Reduction::Mean), words()?, Error::MeanOfIntegers { dtype: DType::U64 }),
        (Op::all_reduce(by), words()?, Error::FactorsOfIntegers { dtype: DType::U64 }),
        (Op::all_reduce(both), floats(12)?, Error::WordsOnly { dtype: DType::F32 }),
        (Op::reduce_scatter(both), words()?, Error::WholeOnly),
    ];
    if n > 1 {
        let (len, padded) = (n + 1, 2 * n);
        for op in [Op::all_gather(), Op::all_to_all(), Op::reduce_scatter(Reduction::Sum)] {
            wrong.push((op, floats(len)?, Error::Uneven { len, world_size: n, padded }));
        }
    }
    let halves = Buffer::from_slice(&[1u16; 12], &Meter::new(), Category::Grads);
    let halves = rank.ok(halves)?;
    wrong.push((Op::all_reduce(Reduction::Sum), halves, Error::UnsupportedDType { dtype: DType::U16 }));
    let count = wrong.len() as u64;
    for (op, buffer, expected) in wrong {
        let (len, dtype) = (buffer.len(), buffer.dtype());
        rank.begin(format!("{} of {len} {dtype}, which is a mistake", op.action()));
        let refused = rank.comm.start(op, buffer, &Queue::cpu());
        let (outcome, back) = match refused {
            Err((buffer, error)) => (Err(error), buffer.len()),
            Ok(started) => (started.wait(&Queue::cpu()).1, len),
        };
        rank.refused(outcome, &format!("at once the error: {expected}"), |error| *error == expected)?;
        rank.hold(back == len, || format!("the buffer came back with {back} elements"))?;
    }
    rank.begin("all_reduce(sum) after mistakes");
    rank.ok(rank.call(&rank.comm, Op::all_reduce(Reduction::Sum), 10))?;
    rank.ok(rank.comm.sound())?;
    Ok(count + 2)
}

/// Kinds of calls that differ, each in a world of its own.
pub(super) const MISMATCHES: usize = 6;

/// Checks calls that differ between rank 0 and the others.
pub(super) fn mismatches(rank: &RankChecks) -> CheckedCalls {
    let (odd, n) = (rank.rank == 0, rank.ranks);
    let sum = Op::all_reduce(Reduction::Sum);
    let (name, op, len) = match rank.round {
        0 => ("different operations", if odd { Op::all_gather() } else { sum }, 8 * n),
        1 => ("different lengths", Op::all_gather(), if odd { 8 * n } else { 9 * n }),
        2 => ("different roots", Op::broadcast(usize::from(odd)), 8),
        3 => ("different reductions", if odd { Op::all_reduce(Reduction::Max) } else { sum }, 8),
        4 => ("a send without a receive", if odd { Op::send(1) } else { Op::barrier() }, 8),
        _ => ("different types", sum, 8),
    };
    rank.begin(name);
    let op = op.within(DEADLINE);
    let outcome = if rank.round == 5 && odd {
        rank.comm.run(op, &mut rank.buffer(&[1u64; 8])?)
    } else {
        rank.call(&rank.comm, op, len)
    };
    fails_for_all(rank, outcome, "an error on every rank, as Mismatch or past the deadline", |error| {
        matches!(
            error,
            Error::Mismatch { .. } | Error::Timeout { .. } | Error::Stuck { .. } | Error::Remote { .. }
        )
    })
}

/// Checks an error of a group, and that it ends all later calls.
fn fails_for_all(
    rank: &RankChecks,
    outcome: Result<(), Error>,
    expected: &str,
    fits: impl Fn(&Error) -> bool,
) -> CheckedCalls {
    rank.refused(outcome, expected, &fits)?;
    for _ in 0..2 {
        let later = rank.call(&rank.comm, Op::barrier(), 0);
        rank.refused(later, "the failure again, from every later call", |_| true)?;
    }
    rank.refused(rank.comm.split(Some(0), 0), "the failure again, from a split", |_| true)?;
    Ok(4)
}

/// Checks that an abort on the last rank ends operations of the world and of a group below it.
pub(super) fn abort(rank: &RankChecks) -> CheckedCalls {
    let last = rank.ranks - 1;
    rank.begin("split before an abort");
    let group = rank.ok(rank.comm.split(Some(0), 0))?;
    let Some(group) = group else {
        return rank.hold(false, || "no group for a color".to_owned()).map(|()| 0);
    };
    rank.meet();
    rank.begin("an operation that another rank aborts");
    if rank.rank == last {
        rank.comm.abort();
    }
    let outcome = rank.call(&rank.comm, Op::all_reduce(Reduction::Sum), 8);
    let aborted = |error: &Error| *error == Error::Aborted { rank: last };
    let expected = format!("the error: {}", Error::Aborted { rank: last });
    let calls = fails_for_all(rank, outcome, &expected, aborted)?;
    rank.meet();
    rank.begin("an operation of a group below an aborted one");
    rank.refused(rank.call(&group, Op::barrier(), 0), "an error", |_| true)?;
    Ok(calls + 1)
}

/// Checks that an operation without a rank that has left is an error.
pub(super) fn departure(rank: &RankChecks) -> CheckedCalls {
    if rank.rank + 1 == rank.ranks {
        return Ok(0); // its communicator is dropped
    }
    rank.begin("an operation after a rank has left");
    let began = Instant::now();
    let outcome = rank.call(&rank.comm, Op::barrier().within(LATE / 2), 0);
    rank.refused(outcome, "an error", |_| true)?;
    rank.hold(began.elapsed() < LATE, || format!("the error came after {:?}", began.elapsed()))?;
    Ok(1)
}

/// Checks that an operation ends at its deadline if other ranks do not call it, which then get an error too.
pub(super) fn deadline(rank: &RankChecks) -> CheckedCalls {
    rank.begin(format!("all_reduce(sum) within {DEADLINE:?}, without the other ranks"));
    let began = Instant::now();
    let mut outcome = Ok(());
    if rank.rank == 0 {
        outcome = rank.call(&rank.comm, Op::all_reduce(Reduction::Sum).within(DEADLINE), 8);
        rank.hold(began.elapsed() >= DEADLINE / 2, || "the operation ended before its deadline".to_owned())?;
        rank.hold(began.elapsed() < LATE, || format!("the operation took {:?}", began.elapsed()))?;
    }
    rank.meet();
    if rank.rank > 0 {
        outcome = rank.call(&rank.comm, Op::all_reduce(Reduction::Sum).within(LATE / 2), 8);
    }
    fails_for_all(rank, outcome, "an error past the deadline, on every rank", |error| {
        matches!(
            error,
            Error::Timeout { .. } | Error::Stuck { .. } | Error::Remote { .. } | Error::Lost { .. }
        )
    })
}
