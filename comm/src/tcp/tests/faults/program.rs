//! Random programs of collectives: each step's result as a hash, and the time it took.

use super::schedule::{Dice, PATIENT};
use crate::{Action, Communicator, Error, Op, Reduction};
use meshstep_tensor::{Buffer, Category, Element, Meter, Queue, bf16, f16};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Elements: one message, some of a tile, and several tiles.
const LENS: [usize; 12] = [1, 2, 33, 500, 4097, 8192, 9001, 20_000, 50_000, 70_001, 100_003, 180_000];
/// Values repeat after a number of elements that no length, chunk or tile has as a divisor.
const BLOCK: usize = 1021;

/// One step, in the world or in a group of its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) call: Call,
    dtype: u64,
    len: usize,
    pub(super) in_group: bool,
    /// True if the operation runs while its caller could compute.
    started: bool,
    /// Deadline, if it is not the schedule's.
    within: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Call {
    AllReduce(Reduction),
    ReduceScatter(Reduction),
    AllGather,
    AllToAll,
    Broadcast(usize),
    Pair(usize, usize),
    Barrier,
    Split(u32),
}

impl Step {
    /// Step of all ranks, of f32.
    fn plain(call: Call, len: usize) -> Self {
        Step { call, dtype: 0, len, in_group: false, started: false, within: None }
    }

    fn draw(dice: &mut Dice) -> Self {
        let reduction = match dice.below(5) {
            0 => Reduction::Mean,
            1 => Reduction::Max,
            2 => Reduction::Min,
            3 => Reduction::PreMulSum { factor: 0.75 },
            _ => Reduction::Sum,
        };
        let call = match dice.below(12) {
            0..3 => Call::AllReduce(reduction),
            3 | 4 => Call::ReduceScatter(reduction),
            5 | 6 => Call::AllGather,
            7 => Call::AllToAll,
            8 => Call::Broadcast(dice.below(4)),
            9 => Call::Pair(dice.below(4), dice.below(4)),
            10 => Call::Barrier,
            _ => Call::Split(1 + dice.below(2) as u32),
        };
        let (dtype, len) = (dice.next(), LENS[dice.below(LENS.len())]);
        let (in_group, started) = (dice.below(3) == 0, dice.below(3) == 0);
        Step { call, dtype, len, in_group, started, within: None }
    }

    /// True if every rank of the world calls it, and none returns before.
    pub(super) fn is_of_all(&self) -> bool {
        !self.in_group && !matches!(self.call, Call::Pair(..)) || matches!(self.call, Call::Split(_))
    }

    /// Returns the operation of rank `me`, or `None` if it takes no part.
    fn op(&self, me: usize, n: usize, is_float: bool) -> Option<Op> {
        let allowed = |how| match how {
            Reduction::Mean | Reduction::PreMulSum { .. } if !is_float => Reduction::Sum,
            how => how,
        };
        Some(match self.call {
            Call::AllReduce(how) => Op::all_reduce(allowed(how)),
            Call::ReduceScatter(how) => Op::reduce_scatter(allowed(how)),
            Call::AllGather => Op::all_gather(),
            Call::AllToAll => Op::all_to_all(),
            Call::Broadcast(root) => Op::broadcast(root % n),
            Call::Pair(from, to) if from % n == to % n => Op::barrier(),
            Call::Pair(from, to) if me == from % n => Op::send(to % n),
            Call::Pair(from, to) if me == to % n => Op::recv(from % n),
            Call::Pair(..) => return None,
            Call::Barrier | Call::Split(_) => Op::barrier(),
        })
    }
}

/// Returns a program of 3 to 9 steps and a barrier: a rank that goes on to the next generation aborts the groups of this one.
pub(super) fn draw(dice: &mut Dice) -> Vec<Step> {
    let count = 3 + dice.below(7);
    let mut steps: Vec<Step> = (0..count).map(|_| Step::draw(dice)).collect();
    steps.push(Step::plain(Call::Barrier, 0));
    steps
}

/// Program of a new generation, in which every rank reads bytes of all others. Ranks may begin it long after each other.
pub(super) fn check() -> Vec<Step> {
    let steps = [(Call::AllReduce(Reduction::Sum), 33), (Call::AllGather, 50_000), (Call::Barrier, 0)];
    let step = |(call, len)| Step { within: Some(PATIENT), ..Step::plain(call, len) };
    steps.map(step).to_vec()
}

/// Order to a rank before a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Go,
    /// The rank calls another operation than its peers.
    CallAnother,
    /// It ends the program.
    End,
}

/// Result of a step on one rank: the hash of what is specified of its buffer.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    pub(super) result: Result<u64, Error>,
    pub(super) took: Duration,
}

/// Runs the steps up to the first error. `order` is asked before each.
pub(super) fn run(
    world: &Arc<dyn Communicator>,
    steps: &[Step],
    seed: u64,
    mut order: impl FnMut(usize) -> Order,
) -> Vec<Ended> {
    let (mut group, mut all) = (Arc::clone(world), Vec::new());
    for (number, step) in steps.iter().enumerate() {
        let mut step = *step;
        match order(number) {
            Order::End => break,
            Order::CallAnother => step.call = another(step.call),
            Order::Go => {}
        }
        let begin = Instant::now();
        let result = match step.call {
            Call::Split(colors) => split(world, colors).map(|formed| group = formed).map(|()| 0),
            _ => on(if step.in_group { &group } else { world }, &step, seed + number as u64),
        };
        all.push(Ended { result, took: begin.elapsed() });
        if all.last().is_some_and(|ended| ended.result.is_err()) {
            break;
        }
    }
    all
}

fn another(call: Call) -> Call {
    if call == Call::AllGather { Call::Barrier } else { Call::AllGather }
}

fn split(world: &Arc<dyn Communicator>, colors: u32) -> Result<Arc<dyn Communicator>, Error> {
    let rank = world.rank();
    let formed = world.split(Some(rank as u32 % colors), -(rank as i64))?;
    Ok(formed.unwrap())
}

fn on(comm: &Arc<dyn Communicator>, step: &Step, seed: u64) -> Result<u64, Error> {
    match step.dtype % 5 {
        0 | 1 => typed(comm, step, seed, |bits| bits as i32 as f32 / 1024.0),
        2 => typed(comm, step, seed, |bits| bits as i32 as f64 / 3.0),
        3 if step.dtype.is_multiple_of(2) => {
            typed(comm, step, seed, |bits| f16::from_f32((bits % 500) as f32))
        }
        3 => typed(comm, step, seed, |bits| bf16::from_f32(bits as i32 as f32)),
        _ => typed::<u64>(comm, step, seed, |bits| bits),
    }
}

fn typed<T: Element + Copy>(
    comm: &Arc<dyn Communicator>,
    step: &Step,
    seed: u64,
    value: impl Fn(u64) -> T,
) -> Result<u64, Error> {
    let (me, n) = (comm.rank(), comm.world_size());
    let Some(op) = step.op(me, n, T::DTYPE.is_float()) else { return Ok(0) };
    let op = step.within.map_or(op, |within| op.within(within));
    let chunks = matches!(op.action(), Action::ReduceScatter(_) | Action::AllGather | Action::AllToAll);
    let len = if chunks { step.len / n * n } else { step.len };
    let mut dice = Dice::new(seed << 8 | me as u64);
    let mut values: Vec<T> = (0..BLOCK.min(len)).map(|_| value(dice.next())).collect();
    while values.len() < len {
        values.extend_from_within(..values.len().min(len - values.len()));
    }
    // Registration is of all ranks of the group.
    let registers = op.action().peer().is_none() && step.within.is_none() && seed.is_multiple_of(2);
    let buffer = if registers {
        registered(comm, step.len, &values)?
    } else {
        Buffer::from_slice(&values, &Meter::new(), Category::Grads)?
    };
    let (buffer, result) = if step.started { start(comm, op, buffer) } else { comm.complete(op, buffer) };
    result?;
    let result = buffer.typed::<T>()?;
    let part = if matches!(op.action(), Action::ReduceScatter(_)) {
        me * len / n..(me + 1) * len / n
    } else {
        0..len
    };
    Ok(twox_hash::XxHash3_64::oneshot(bytemuck::cast_slice(&result[part])))
}

/// Returns the values in the beginning of a registered buffer of `len` elements.
fn registered<T: Element>(comm: &Arc<dyn Communicator>, len: usize, values: &[T]) -> Result<Buffer, Error> {
    let counted = (&Meter::new(), Category::Grads);
    let mut buffer = comm.zeroed_on(&Queue::cpu(), len, T::DTYPE, counted, &[])?;
    comm.register(&buffer)?;
    buffer.split_off(values.len())?;
    buffer.typed_mut::<T>()?.copy_from_slice(values);
    Ok(buffer)
}

fn start(comm: &Arc<dyn Communicator>, op: Op, buffer: Buffer) -> (Buffer, Result<(), Error>) {
    let queue = Queue::cpu();
    match comm.start(op, buffer, &queue) {
        Ok(started) => started.wait(&queue),
        Err((buffer, error)) => (buffer, Err(error)),
    }
}
