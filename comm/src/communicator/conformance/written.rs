//! Reductions and gathers that work on more than one buffer, and memory of the backend.

use super::Nonconformance;
use super::seat::{CheckedCalls, RankChecks};
use super::values::{reduced, value, values};
use crate::{Op, ReduceObserver, Reduction};
use meshstep_tensor::{Category, DType, Meter, Queue, Slice, SliceMut};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

/// Checks all of them on short and long buffers.
pub(super) fn check(rank: &RankChecks) -> CheckedCalls {
    let mut calls = memory(rank)?;
    for (salt, chunk) in [0, 1, 33, 1000, 70_001].into_iter().enumerate() {
        let (salt, len) = (salt as u64, chunk * rank.ranks);
        kept(rank, salt, len)?;
        gathered(rank, salt, chunk)?;
        one_pass(rank, salt, chunk)?;
        observed(rank, salt, len)?;
        calls += 4;
    }
    Ok(calls)
}

/// Checks that the backend's memory is zero, and that registered memory works as any other.
fn memory(rank: &RankChecks) -> CheckedCalls {
    let (len, queue) = (100 * rank.ranks, Queue::cpu());
    rank.begin(format!("zeroed_on and register of {len} f32"));
    let meter = Meter::new();
    let made = rank.comm.zeroed_on(&queue, len, DType::F32, (&meter, Category::Params), &[]);
    let mut buffer = rank.ok(made)?;
    rank.hold(buffer.len() == len && buffer.dtype() == DType::F32, || {
        format!("a buffer of {}", buffer.len())
    })?;
    rank.equal(&buffer, 0..len, &vec![0f32; len])?;
    rank.ok(rank.comm.register(&buffer))?;
    rank.ok(buffer.as_mut().copy_from(Slice::from(&values::<f32>(9, rank.rank, len)[..])))?;
    rank.ok(rank.comm.all_reduce(&mut buffer, Reduction::Sum))?;
    let expected: Vec<f32> = (0..len).map(|i| reduced(Reduction::Sum, 9, rank.ranks, i)).collect();
    rank.equal(&buffer, 0..len, &expected)?;
    Ok(3)
}

fn kept(rank: &RankChecks, salt: u64, len: usize) -> Result<(), Nonconformance> {
    rank.begin(format!("all_reduce_keeping(sum) of {len} f32"));
    let mut mine = values::<f32>(salt, rank.rank, len);
    // One element is infinite on the last rank, so also in the sum.
    if let Some(last) = mine.last_mut().filter(|_| rank.rank + 1 == rank.ranks) {
        *last = f32::INFINITY;
    }
    let before = mine.clone();
    let (first, rest) = mine.split_at_mut(len / 3);
    let mut slices = [SliceMut::from(first), SliceMut::from(rest)];
    let kept = rank.buffer(&vec![0f32; len])?;
    let (kept, found) = rank.comm.all_reduce_keeping(Reduction::Sum, None, &mut slices, kept);
    let found = rank.ok(found)?;
    rank.equal(&kept, 0..len, &before)?;
    let infinite = usize::from(len > 0);
    rank.hold(found == infinite as u64, || format!("{found} elements that are not finite, not {infinite}"))?;
    let finite = len - infinite;
    let expected: Vec<f32> = (0..finite).map(|i| reduced(Reduction::Sum, salt, rank.ranks, i)).collect();
    let sums = rank.buffer(&mine)?;
    rank.equal(&sums, 0..finite, &expected)
}

fn gathered(rank: &RankChecks, salt: u64, chunk: usize) -> Result<(), Nonconformance> {
    let len = chunk * rank.ranks;
    rank.begin(format!("all_gather_written of {len} f32"));
    let (mut next, mut failed) = (0, false);
    let mut write = |first: usize, mut part: SliceMut<'_>| {
        failed |= first != next;
        next = first + part.len();
        let values: Vec<f32> = (first..next).map(|i| value(salt, rank.rank, i)).collect();
        failed |= part.copy_from(Slice::from(&values[..])).is_err();
        ControlFlow::Continue(())
    };
    let buffer = rank.buffer(&vec![0f32; len])?;
    let (buffer, result) = rank.comm.all_gather_written(buffer, &Queue::cpu(), &mut write);
    rank.ok(result)?;
    rank.hold(!failed && next == chunk, || format!("parts end at {next} of {chunk}, or have gaps"))?;
    let expected: Vec<f32> = (0..len).map(|i| value(salt, i / chunk, i % chunk)).collect();
    rank.equal(&buffer, 0..len, &expected)
}

fn one_pass(rank: &RankChecks, salt: u64, chunk: usize) -> Result<(), Nonconformance> {
    let len = chunk * rank.ranks;
    rank.begin(format!("reduce_and_gather(sum) of {len} f32"));
    let mut from = rank.buffer::<f32>(&values(salt, rank.rank, len))?;
    let into = rank.buffer::<f32>(&values(salt + 100, rank.rank, len))?;
    let (mut next, mut failed) = (0, false);
    // The written part is its former value minus the reduced one.
    let mut write = |first: usize, mut sums: SliceMut<'_>, mut part: SliceMut<'_>| {
        failed |= first != next || sums.len() != part.len();
        next = first + part.len();
        match (sums.typed_mut::<f32>(), part.typed_mut::<f32>()) {
            (Ok(sums), Ok(part)) => part.iter_mut().zip(sums).for_each(|(x, sum)| *x -= *sum),
            _ => failed = true,
        }
        ControlFlow::Continue(())
    };
    let pair = (&mut from, into);
    let (into, result) = rank.comm.reduce_and_gather(Reduction::Sum, pair, &Queue::cpu(), &mut write);
    rank.ok(result)?;
    rank.hold(!failed && next == chunk, || format!("parts end at {next} of {chunk}, or have gaps"))?;
    let expected = |i: usize| {
        value::<f32>(salt + 100, i / chunk, i) - reduced::<f32>(Reduction::Sum, salt, rank.ranks, i)
    };
    let expected: Vec<f32> = (0..len).map(expected).collect();
    rank.equal(&into, 0..len, &expected)
}

/// Values that an observer has seen, with their indices.
#[derive(Debug, Default)]
struct SeenValues(Mutex<Vec<(usize, f32)>>);

impl ReduceObserver for SeenValues {
    fn see(&self, first: usize, values: Slice<'_>) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A slice of another type is a value that no sum has.
        let values = values.typed::<f32>().unwrap_or(&[f32::NAN]);
        seen.extend(values.iter().enumerate().map(|(i, x)| (first + i, *x)));
    }
}

fn observed(rank: &RankChecks, salt: u64, len: usize) -> Result<(), Nonconformance> {
    rank.begin(format!("start_observed of reduce_scatter(sum) of {len} f32"));
    let (queue, seen) = (Queue::cpu(), Arc::<SeenValues>::default());
    let buffer = rank.buffer::<f32>(&values(salt, rank.rank, len))?;
    let observer = Arc::clone(&seen) as Arc<dyn ReduceObserver>;
    let started = rank.comm.start_observed(Op::reduce_scatter(Reduction::Sum), buffer, &queue, observer);
    let (buffer, result) = rank.ok(started.map_err(|(_, error)| error))?.wait(&queue);
    rank.ok(result)?;
    let chunk = len / rank.ranks;
    let mine = rank.rank * chunk..(rank.rank + 1) * chunk;
    let sum = |i: usize| reduced::<f32>(Reduction::Sum, salt, rank.ranks, i);
    rank.equal(&buffer, mine.clone(), &mine.clone().map(sum).collect::<Vec<_>>())?;
    let mut seen = seen.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
    seen.sort_by_key(|(i, _)| *i);
    let once = seen.windows(2).all(|pair| pair[0].0 < pair[1].0);
    let right = seen.iter().all(|(i, x)| mine.contains(i) && *x == sum(*i));
    rank.hold(once && right, || {
        "the observer saw an element twice, of another chunk, or not reduced".to_owned()
    })
}
