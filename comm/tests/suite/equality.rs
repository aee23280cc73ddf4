//! Programs of operations that end with loopback's bits on every backend: a table of all of them, and random ones.

use crate::backends::{BACKENDS, Backend};
use crate::naive::{Naive, own, random};
use meshstep_comm::{Action, Communicator, Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, Meter, Queue, bf16, f16};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// Lengths around the ends of vectors, messages, tiles and records.
const LENS: [usize; 15] =
    [0, 1, 31, 33, 127, 129, 1023, 1025, 4095, 8191, 8192, 8193, 16_385, 65_537, 100_003];

/// One step of a program: an operation on a buffer of its own, in the world or in a group.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    op: StepOp,
    dtype: usize,
    len: usize,
    in_group: bool,
    /// True if the buffer is the end of a registered one.
    registered: bool,
}

#[derive(Clone, Copy, Debug)]
enum StepOp {
    AllReduce(Reduction),
    ReduceScatter(Reduction),
    AllGather,
    AllToAll,
    Broadcast(usize),
    Pair(usize, usize),
    Barrier,
    Split(u32),
}

fn reductions() -> impl Strategy<Value = Reduction> {
    prop_oneof![
        Just(Reduction::Sum),
        Just(Reduction::Mean),
        Just(Reduction::Pairwise),
        Just(Reduction::Max),
        Just(Reduction::Min),
        (-4.0..4.0).prop_map(|factor| Reduction::PreMulSum { factor }),
        (0..9000usize).prop_map(|sums| Reduction::SumThenMax { sums }),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let op = prop_oneof![
        3 => reductions().prop_map(StepOp::AllReduce),
        2 => reductions().prop_map(StepOp::ReduceScatter),
        2 => Just(StepOp::AllGather),
        1 => Just(StepOp::AllToAll),
        1 => any::<usize>().prop_map(StepOp::Broadcast),
        2 => any::<[usize; 2]>().prop_map(|[a, b]| StepOp::Pair(a, b)),
        1 => Just(StepOp::Barrier),
        1 => (1u32..4).prop_map(StepOp::Split),
    ];
    let len = prop_oneof![2 => 0usize..100, 3 => prop::sample::select(LENS.to_vec())];
    let step = (op, 0..5usize, len, any::<bool>(), any::<bool>());
    let step =
        step.prop_map(|(op, dtype, len, in_group, registered)| Step { op, dtype, len, in_group, registered });
    prop::collection::vec(step, 1..10)
}

/// Runs a step; returns the bytes of its result, but for those that are unspecified.
fn run_step(comm: &Arc<dyn Communicator>, step: &Step, seed: u64) -> Vec<u8> {
    match step.dtype {
        0 => run_typed::<f32>(comm, step, seed),
        1 => run_typed::<f64>(comm, step, seed),
        2 => run_typed::<bf16>(comm, step, seed),
        3 => run_typed::<f16>(comm, step, seed),
        _ => run_typed::<u64>(comm, step, seed),
    }
}

fn run_typed<T: Naive>(comm: &Arc<dyn Communicator>, step: &Step, seed: u64) -> Vec<u8> {
    let (me, n) = (comm.rank(), comm.world_size());
    let integers = |how| match how {
        Reduction::Mean | Reduction::PreMulSum { .. } if !T::DTYPE.is_float() => Reduction::Sum,
        Reduction::SumThenMax { .. } if T::DTYPE.is_float() => Reduction::Max,
        how => own(how, me),
    };
    let in_chunks = |how| if matches!(how, Reduction::SumThenMax { .. }) { Reduction::Sum } else { how };
    let op = match step.op {
        StepOp::AllReduce(how) => Op::all_reduce(integers(how)),
        StepOp::ReduceScatter(how) => Op::reduce_scatter(integers(in_chunks(how))),
        StepOp::AllGather => Op::all_gather(),
        StepOp::AllToAll => Op::all_to_all(),
        StepOp::Broadcast(root) => Op::broadcast(root % n),
        StepOp::Pair(from, to) if from % n == to % n => Op::barrier(),
        StepOp::Pair(from, to) if me == from % n => Op::send(to % n),
        StepOp::Pair(from, to) if me == to % n => Op::recv(from % n),
        StepOp::Pair(..) => return Vec::new(),
        StepOp::Barrier | StepOp::Split(_) => Op::barrier(),
    };
    let even = matches!(op.action(), Action::ReduceScatter(_) | Action::AllGather | Action::AllToAll);
    let len = if even { step.len / n * n } else { step.len };
    let mut seed = seed ^ (me as u64 + 1) << 40;
    let values: Vec<T> = (0..len).map(|_| T::from_random(random(&mut seed))).collect();
    // Registration is of all ranks.
    let mut buffer = if step.registered && !matches!(step.op, StepOp::Pair(..)) {
        registered(comm, &values)
    } else {
        Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap()
    };
    comm.run(op, &mut buffer).unwrap();
    let result = buffer.typed::<T>().unwrap();
    let specified = if matches!(op.action(), Action::ReduceScatter(_)) {
        me * len / n..(me + 1) * len / n
    } else {
        0..len
    };
    bytemuck::cast_slice(&result[specified]).to_vec()
}

/// Returns the values in the end of a registered buffer.
fn registered<T: Naive>(comm: &Arc<dyn Communicator>, values: &[T]) -> Buffer {
    let (queue, counted, before) = (Queue::cpu(), (&Meter::new(), Category::Grads), 7);
    let mut whole = comm.zeroed_on(&queue, before + values.len(), T::DTYPE, counted, &[]).unwrap();
    comm.register(&whole).unwrap();
    let mut buffer = whole.split_off(before).unwrap();
    buffer.typed_mut::<T>().unwrap().copy_from_slice(values);
    buffer
}

/// Returns every operation and reduction with every type for `n` ranks, each with one of the lengths; in a long run with all of them.
pub(crate) fn table(n: usize) -> Vec<Step> {
    let factor = Reduction::PreMulSum { factor: -0.37 };
    let words = Reduction::SumThenMax { sums: 100 };
    let reductions = [Reduction::Sum, Reduction::Mean, Reduction::Max, Reduction::Min, factor, words];
    let reduced = reductions.into_iter().flat_map(|how| [StepOp::AllReduce(how), StepOp::ReduceScatter(how)]);
    let moved = [StepOp::AllGather, StepOp::AllToAll, StepOp::Broadcast(n / 2), StepOp::Pair(n - 1, 0)];
    let ops: Vec<StepOp> = reduced.chain(moved).chain([StepOp::Barrier, StepOp::Split(2)]).collect();
    let mut steps = Vec::new();
    for (o, op) in ops.into_iter().enumerate() {
        for dtype in 0..5 {
            let key = meshstep_cases::hash(&[n as u64, o as u64, dtype as u64]) as usize % LENS.len();
            let some = meshstep_cases::cases(1, LENS.len() as u32) as usize;
            // 4 and 15 have no common divisor.
            let lens = (0..some).map(|i| LENS[(key + 4 * i) % LENS.len()]);
            steps.extend(lens.map(|len| Step {
                op,
                dtype,
                len,
                in_group: (o + dtype) % 3 == 0,
                registered: false,
            }));
        }
    }
    steps
}

/// Runs all steps on one rank; returns the result of each.
pub(crate) fn run_steps(comm: &Arc<dyn Communicator>, steps: &[Step], seed: u64) -> Vec<Vec<u8>> {
    let mut group = comm.split(Some(0), 0).unwrap().unwrap();
    let mut results = Vec::new();
    for (i, step) in steps.iter().enumerate() {
        if let StepOp::Split(colors) = step.op {
            let (color, key) = (comm.rank() as u32 % colors, -(comm.rank() as i64));
            group = comm.split(Some(color), key).unwrap().unwrap();
        }
        let comm = if step.in_group { &group } else { comm };
        results.push(run_step(comm, step, seed.wrapping_add(i as u64)));
    }
    results
}

/// Runs all steps on all ranks; returns the results of each.
fn run_program(backend: Backend, n: usize, steps: &[Step], seed: u64) -> Vec<Vec<Vec<u8>>> {
    // A hang is an error soon.
    let config = loopback::Config { timeout: Duration::from_secs(20), ..loopback::Config::new(n) };
    backend.spawn_with(config, |comm| run_steps(&comm, steps, seed)).unwrap()
}

/// Returns every operation with every type on registered buffers that are large enough to be read in place.
#[cfg(unix)]
fn registered_table(n: usize) -> Vec<Step> {
    const LONG: [usize; 4] = [16_385, 65_537, 100_003, 300_007];
    let long = |(i, step): (usize, Step)| Step { len: LONG[(i + n) % LONG.len()], registered: true, ..step };
    table(n).into_iter().enumerate().map(long).collect()
}

#[cfg(unix)]
#[test]
fn registered_buffers_have_the_bits_of_loopback() {
    use crate::backends::Way;
    for n in 1..=8 {
        let steps = registered_table(n);
        let expected = run_program(Backend::Loopback, n, &steps, 11);
        for way in [Way::SharedMemory, Way::Halves, Way::Sockets] {
            assert!(run_program(Backend::Tcp(way), n, &steps, 11) == expected, "{way:?}, {n} ranks");
        }
    }
}

#[test]
fn every_operation_type_and_world_size_has_the_bits_of_loopback() {
    for n in 1..=8 {
        let steps = table(n);
        let expected = run_program(Backend::Loopback, n, &steps, 7);
        for &backend in &BACKENDS[1..] {
            for (rank, (found, expected)) in
                run_program(backend, n, &steps, 7).iter().zip(&expected).enumerate()
            {
                let same = found.iter().zip(expected).map(|(found, expected)| found == expected);
                let differing: Vec<&Step> =
                    steps.iter().zip(same).filter(|(_, same)| !same).map(|(step, _)| step).collect();
                assert!(differing.is_empty(), "{backend:?}, rank {rank} of {n}: {differing:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: meshstep_cases::cases(60, 5_000), failure_persistence: None, ..ProptestConfig::default()
    })]
    #[test]
    fn streams_of_any_room_have_the_bits_of_loopback(
        steps in steps(), n in 1usize..=8, room in prop::sample::select(vec![61, 1021, 64 << 10]), host_size in 1usize..=8, seed: u64
    ) {
        // Bytes pass a narrow stream one handful at a time.
        let cut = |step: &Step| Step { len: step.len.min(room * 40 / n), ..step.clone() };
        let steps: Vec<Step> = steps.iter().map(cut).collect();
        let messages = Backend::Messages { room, host_size };
        prop_assert_eq!(
            run_program(messages, n, &steps, seed), run_program(Backend::Loopback, n, &steps, seed)
        );
    }

    #[test]
    fn random_programs_have_the_bits_of_loopback_on_every_backend(
        backend in prop::sample::select(BACKENDS[1..].to_vec()), steps in steps(), n in 1usize..=8, seed: u64
    ) {
        prop_assert_eq!(
            run_program(backend, n, &steps, seed), run_program(Backend::Loopback, n, &steps, seed)
        );
    }
}
