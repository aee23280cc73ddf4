//! Every operation with every type, rounding, and the order of started operations.

use super::seat::{CheckedCalls, RankChecks};
use super::values::{Sample, factor, random, reduced, value, values};
use crate::{Op, Reduction};
use meshstep_tensor::{Buffer, Queue, bf16, f16};
use std::ops::Range;

/// Elements of operations with buffers of any length.
const LENS: [usize; 8] = [0, 1, 2, 31, 32, 33, 1023, 5001];
/// Elements of a chunk, of operations with a chunk for each rank.
const CHUNKS: [usize; 6] = [0, 1, 7, 32, 341, 1500];

const REDUCTIONS: [Reduction; 5] = [
    Reduction::Sum,
    Reduction::Mean,
    Reduction::Max,
    Reduction::Min,
    Reduction::PreMulSum { factor: 0.0 }, // each rank has its own
];

/// Checks every operation with every type.
pub(super) fn exact(rank: &RankChecks) -> CheckedCalls {
    let calls = typed::<f32>(rank, 1)? + typed::<f64>(rank, 2)? + typed::<bf16>(rank, 3)?;
    let calls = calls + typed::<f16>(rank, 4)? + typed::<u64>(rank, 5)?;
    // Words that are summed, and maxima behind them.
    let mut words = 0;
    for (len, sums) in [(0, 3), (1, 0), (9, 4), (33, 40)] {
        words += all_reduce::<u64>(rank, Reduction::SumThenMax { sums }, len, len as u64)?;
    }
    rank.begin("barrier");
    rank.ok(rank.comm.barrier())?;
    Ok(calls + words + 1)
}

fn typed<T: Sample>(rank: &RankChecks, salt: u64) -> CheckedCalls {
    let mut calls = 0;
    let pairwise = rank.comm.reduces_pairwise().then_some(Reduction::Pairwise);
    for how in REDUCTIONS.into_iter().chain(pairwise).filter(|how| T::FLOAT || is_for_integers(*how)) {
        for len in LENS {
            calls += all_reduce::<T>(rank, how, len, salt + len as u64)?;
        }
        for chunk in CHUNKS {
            calls += reduce_scatter::<T>(rank, how, chunk, salt + chunk as u64)?;
        }
    }
    for chunk in CHUNKS {
        calls += all_gather::<T>(rank, chunk, salt)? + all_to_all::<T>(rank, chunk, salt)?;
    }
    for len in LENS {
        for root in 0..rank.ranks {
            calls += broadcast::<T>(rank, root, len, salt)?;
            // To each other rank: neighbours, and with four ranks opposite ones.
            for apart in 1..rank.ranks {
                calls += pair::<T>(rank, root, (root + apart) % rank.ranks, len, salt)?;
            }
        }
    }
    Ok(calls)
}

fn is_for_integers(how: Reduction) -> bool {
    !matches!(how, Reduction::Mean | Reduction::PreMulSum { .. })
}

/// Returns the reduction as this rank calls it.
fn own(how: Reduction, rank: usize) -> Reduction {
    match how {
        Reduction::PreMulSum { .. } => Reduction::PreMulSum { factor: factor(rank) },
        how => how,
    }
}

/// Runs `op` on this rank's values and compares `range` of the result.
fn compare<T: Sample>(
    rank: &RankChecks,
    op: Op,
    (len, salt): (usize, u64),
    range: Range<usize>,
    expected: impl Fn(usize) -> T,
) -> CheckedCalls {
    rank.begin(format!("{} of {len} {}", op.action(), T::NAME));
    let mut buffer = rank.buffer::<T>(&values(salt, rank.rank, len))?;
    rank.ok(rank.comm.run(op, &mut buffer))?;
    rank.hold(buffer.len() == len, || format!("{len} elements came back as {}", buffer.len()))?;
    let expected: Vec<T> = range.clone().map(expected).collect();
    rank.equal(&buffer, range, &expected)?;
    Ok(1)
}

fn all_reduce<T: Sample>(rank: &RankChecks, how: Reduction, len: usize, salt: u64) -> CheckedCalls {
    let op = Op::all_reduce(own(how, rank.rank));
    compare::<T>(rank, op, (len, salt), 0..len, |i| reduced(how, salt, rank.ranks, i))
}

fn reduce_scatter<T: Sample>(rank: &RankChecks, how: Reduction, chunk: usize, salt: u64) -> CheckedCalls {
    let op = Op::reduce_scatter(own(how, rank.rank));
    let mine = rank.rank * chunk..(rank.rank + 1) * chunk;
    compare::<T>(rank, op, (chunk * rank.ranks, salt), mine, |i| reduced(how, salt, rank.ranks, i))
}

fn all_gather<T: Sample>(rank: &RankChecks, chunk: usize, salt: u64) -> CheckedCalls {
    let len = chunk * rank.ranks;
    compare::<T>(rank, Op::all_gather(), (len, salt), 0..len, |i| value(salt, i / chunk, i))
}

fn all_to_all<T: Sample>(rank: &RankChecks, chunk: usize, salt: u64) -> CheckedCalls {
    let len = chunk * rank.ranks;
    let from = |i: usize| value(salt, i / chunk, rank.rank * chunk + i % chunk);
    compare::<T>(rank, Op::all_to_all(), (len, salt), 0..len, from)
}

fn broadcast<T: Sample>(rank: &RankChecks, root: usize, len: usize, salt: u64) -> CheckedCalls {
    compare::<T>(rank, Op::broadcast(root), (len, salt), 0..len, |i| value(salt, root, i))
}

/// Checks a send of one rank to another; the other ranks go on.
fn pair<T: Sample>(rank: &RankChecks, from: usize, to: usize, len: usize, salt: u64) -> CheckedCalls {
    match rank.rank {
        me if me == from => compare::<T>(rank, Op::send(to), (len, salt), 0..len, |i| value(salt, from, i)),
        me if me == to => compare::<T>(rank, Op::recv(from), (len, salt), 0..len, |i| value(salt, from, i)),
        _ => Ok(0),
    }
}

/// Checks reductions of random f32: close to the sum in f64, with the same bits on all ranks.
pub(super) fn rounding(rank: &RankChecks) -> CheckedCalls {
    let (len, n) = (1000, rank.ranks);
    let number = |rank: usize, i: usize| {
        let bits = random((rank * len + i) as u64);
        ((bits >> 40) as f32 / 8_388_608.0 - 1.0) * [1e-3, 1.0, 1e4][bits as usize % 3]
    };
    let mine: Vec<f32> = (0..len).map(|i| number(rank.rank, i)).collect();
    rank.begin(format!("all_reduce(sum) of {len} random f32"));
    let mut sums = rank.buffer(&mine)?;
    rank.ok(rank.comm.all_reduce(&mut sums, Reduction::Sum))?;
    let found = rank.ok(sums.typed::<f32>())?.to_vec();
    for (i, sum) in found.iter().enumerate() {
        let column = (0..n).map(|rank| f64::from(number(rank, i)));
        let size: f64 = column.clone().map(f64::abs).sum();
        let close = (f64::from(*sum) - column.sum::<f64>()).abs() <= 1e-6 * size;
        rank.hold(close, || format!("element {i} is {sum}, further than 1e-6 from the sum"))?;
    }
    // The ranks exchange the bits of their results.
    let mut words: Vec<u64> = vec![0; len * n];
    let place = rank.rank * len..(rank.rank + 1) * len;
    words[place].iter_mut().zip(&found).for_each(|(word, sum)| *word = u64::from(sum.to_bits()));
    let mut all = rank.buffer(&words)?;
    rank.ok(rank.comm.all_gather(&mut all))?;
    let all = rank.ok(all.typed::<u64>())?;
    let apart = (0..len * n).find(|i| all[*i] != u64::from(found[i % len].to_bits()));
    rank.hold(apart.is_none(), || format!("element {} differs between ranks", apart.unwrap_or(0) % len))?;
    rank.begin("all_reduce(max) of a NaN");
    let mut nan = rank.buffer(&[if rank.rank + 1 == n { f32::NAN } else { 1.0 }, 2.0])?;
    rank.ok(rank.comm.all_reduce(&mut nan, Reduction::Max))?;
    let found = rank.ok(nan.typed::<f32>())?;
    rank.hold(found[0].is_nan() && found[1] == 2.0, || format!("{found:?} instead of [NaN, 2.0]"))?;
    Ok(3)
}

/// Checks operations that are started together.
pub(super) fn order(rank: &RankChecks) -> CheckedCalls {
    let (queue, n, mut calls) = (Queue::cpu(), rank.ranks, 0);
    for round in 0..20u64 {
        let len = n * (1 + (round as usize * 37) % 300);
        let ops = [
            Op::all_reduce(Reduction::Sum),
            Op::all_gather(),
            Op::broadcast(round as usize % n),
            Op::barrier(),
        ];
        rank.begin(format!("all_reduce, all_gather, broadcast and barrier of {len} f32, started together"));
        let mut started = Vec::new();
        for (i, op) in ops.into_iter().enumerate() {
            let buffer = rank.buffer::<f32>(&values(4 * round + i as u64, rank.rank, len))?;
            let flight = rank.comm.start(op, buffer, &queue).map_err(|(_, error)| error);
            started.push(rank.ok(flight)?);
        }
        // The last is waited for first in every second round.
        let waits: Vec<usize> = if round % 2 == 0 { vec![0, 1, 2, 3] } else { vec![3, 2, 1, 0] };
        let mut started: Vec<Option<_>> = started.into_iter().map(Some).collect();
        let mut ended: Vec<Option<Buffer>> = vec![None, None, None, None];
        for i in waits {
            let Some(flight) = started[i].take() else { continue };
            let (buffer, result) = flight.wait(&queue);
            rank.ok(result)?;
            ended[i] = Some(buffer);
        }
        let (salt, chunk) = (4 * round, len / n);
        for (i, buffer) in ended.into_iter().enumerate() {
            let expected = |j: usize| match i {
                0 => reduced(Reduction::Sum, salt, n, j),
                1 => value::<f32>(salt + 1, j / chunk, j),
                2 => value(salt + 2, round as usize % n, j),
                _ => value(salt + 3, rank.rank, j), // a barrier leaves its buffer alone
            };
            let expected: Vec<f32> = (0..len).map(expected).collect();
            if let Some(buffer) = buffer {
                rank.equal(&buffer, 0..len, &expected)?;
                calls += 1;
            }
        }
    }
    Ok(calls)
}
