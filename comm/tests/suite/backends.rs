//! The backends that every table of collectives and failures runs on, and their equality with loopback.

use crate::naive::{Naive, own, random};
use meshstep_comm::{Action, Communicator, Error, Op, Reduction, loopback, p2p};
use meshstep_tensor::{Buffer, Category, Meter, bf16, f16};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// A backend, as a row of every table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Backend {
    Loopback,
    /// Messages between threads, through streams of `room` bytes, with `host_size` ranks on each pretended host.
    Messages {
        room: usize,
        host_size: usize,
    },
}

/// All backends. Streams of an odd size cut elements and frames at any byte.
pub(crate) const BACKENDS: [Backend; 5] = [
    Backend::Loopback,
    Backend::Messages { room: 64 << 10, host_size: usize::MAX },
    Backend::Messages { room: 64 << 10, host_size: 1 },
    Backend::Messages { room: 64 << 10, host_size: 2 },
    Backend::Messages { room: 16_381, host_size: 3 },
];

impl Backend {
    /// Runs `body` on each rank, like `loopback::spawn_with`.
    pub(crate) fn spawn_with<T: Send>(
        self,
        config: loopback::Config,
        body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
    ) -> Result<Vec<T>, Error> {
        match self {
            Backend::Loopback => loopback::spawn_with(config, body),
            Backend::Messages { room, host_size } => {
                let loopback::Config { ranks, timeout, clock, faults } = config;
                let config =
                    p2p::in_process::InProcessConfig { ranks, timeout, clock, faults, room, host_size };
                p2p::in_process::spawn_with(config, body)
            }
        }
    }

    /// Communicators of the ranks of a world, for the caller's own threads.
    pub(crate) fn world(self, ranks: usize) -> Vec<Arc<dyn Communicator>> {
        match self {
            Backend::Loopback => loopback::world(loopback::Config::new(ranks)).unwrap(),
            Backend::Messages { room, host_size } => {
                let config = p2p::in_process::InProcessConfig {
                    room,
                    host_size,
                    ..p2p::in_process::InProcessConfig::new(ranks)
                };
                p2p::in_process::world(config).unwrap()
            }
        }
    }

    /// Runs `body` on each of `ranks` ranks.
    pub(crate) fn spawn<T: Send>(
        self,
        ranks: usize,
        body: impl Fn(Arc<dyn Communicator>) -> T + Sync,
    ) -> Result<Vec<T>, Error> {
        self.spawn_with(loopback::Config::new(ranks), body)
    }
}

/// One step of a program: an operation on a buffer of its own, in the world or in a group.
#[derive(Clone, Debug)]
struct Step {
    op: StepOp,
    dtype: usize,
    len: usize,
    in_group: bool,
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
        Just(Reduction::Max),
        Just(Reduction::Min),
        (-4.0..4.0).prop_map(|factor| Reduction::PreMulSum { factor }),
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
    let lens = vec![0, 1, 31, 33, 127, 129, 1023, 1025, 4095, 8191, 8192, 8193, 16_385, 65_537, 100_003];
    let len = prop_oneof![2 => 0usize..100, 3 => prop::sample::select(lens)];
    let step = (op, 0..5usize, len, any::<bool>());
    let step = step.prop_map(|(op, dtype, len, in_group)| Step { op, dtype, len, in_group });
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
        how => own(how, me),
    };
    let op = match step.op {
        StepOp::AllReduce(how) => Op::all_reduce(integers(how)),
        StepOp::ReduceScatter(how) => Op::reduce_scatter(integers(how)),
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
    let mut buffer = Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap();
    comm.run(op, &mut buffer).unwrap();
    let result = buffer.typed::<T>().unwrap();
    let specified = if matches!(op.action(), Action::ReduceScatter(_)) {
        me * len / n..(me + 1) * len / n
    } else {
        0..len
    };
    bytemuck::cast_slice(&result[specified]).to_vec()
}

/// Runs all steps on all ranks; returns the results of each.
fn run_program(backend: Backend, n: usize, steps: &[Step], seed: u64) -> Vec<Vec<Vec<u8>>> {
    // A hang is an error soon.
    let config = loopback::Config { timeout: Duration::from_secs(10), ..loopback::Config::new(n) };
    let results = backend.spawn_with(config, |comm| {
        let mut group = comm.split(Some(0), 0).unwrap().unwrap();
        let mut results = Vec::new();
        for (i, step) in steps.iter().enumerate() {
            if let StepOp::Split(colors) = step.op {
                let (color, key) = (comm.rank() as u32 % colors, -(comm.rank() as i64));
                group = comm.split(Some(color), key).unwrap().unwrap();
            }
            let comm = if step.in_group { &group } else { &comm };
            results.push(run_step(comm, step, seed.wrapping_add(i as u64)));
        }
        results
    });
    results.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: meshstep_cases::cases(60, 5_000), failure_persistence: None, ..ProptestConfig::default()
    })]
    #[test]
    fn every_backend_has_the_bits_of_loopback(
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
}
