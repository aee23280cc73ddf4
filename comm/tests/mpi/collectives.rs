//! Every collective, reduction and type under `mpirun`, with the bits of the same rank on loopback.

use crate::drawn::{Drawn, own, random};
use meshstep_comm::mpi::World;
use meshstep_comm::{Action, Communicator, Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, SliceMut, bf16, f16};
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::Arc;

pub(crate) type Comm = Arc<dyn Communicator>;

/// Elements for each rank: 0, and the sizes of a message, of a tile and of several tiles.
const LENS: [usize; 5] = [0, 1, 33, 4097, 40_000];

/// Reductions of integers, and then those that only floats have.
const REDUCTIONS: [Reduction; 5] =
    [Reduction::Sum, Reduction::Max, Reduction::Min, Reduction::Mean, Reduction::PreMulSum { factor: -1.75 }];

/// Results of one rank, by name.
pub(crate) type Results = Vec<(String, Vec<u8>)>;

/// Most results of a comparison.
const MOST: usize = 128;

/// Compares what `body` returns on each rank with what it returns on the same rank of loopback, which rank 0 runs for all.
pub(crate) fn compare(comm: &Comm, body: impl Fn(&Comm) -> Results + Sync) {
    let (me, n) = (comm.rank(), comm.world_size());
    let found = hashes(body(comm));
    let mut expected = vec![0u64; n * MOST];
    if me == 0 {
        let of_ranks = loopback::spawn(n, |comm| hashes(body(&comm))).unwrap();
        for (of_rank, place) in of_ranks.iter().zip(expected.chunks_exact_mut(MOST)) {
            place.iter_mut().zip(of_rank).for_each(|(place, (_, hash))| *place = *hash);
        }
    }
    let mut expected = Buffer::from_slice(&expected, &Meter::new(), Category::Staging).unwrap();
    comm.run(Op::broadcast(0), &mut expected).unwrap();
    let expected = &expected.typed::<u64>().unwrap()[me * MOST..];
    assert!(!found.is_empty() && expected[found.len()] == 0, "rank {me} of {n} has {} results", found.len());
    for ((name, found), expected) in found.iter().zip(expected) {
        assert!(found == expected, "{name} on rank {me} of {n} differs from loopback's");
    }
}

/// Returns the hash of each result; none is 0.
fn hashes(results: Results) -> Vec<(String, u64)> {
    let hash = |bytes: &[u8]| {
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        hasher.finish().max(1)
    };
    results.into_iter().map(|(name, bytes)| (name, hash(&bytes))).collect()
}

pub(crate) fn every_type(world: World) {
    let comm = world.communicator();
    for len in LENS {
        compare(&comm, |comm| every_op::<f32>(comm, len));
        compare(&comm, |comm| every_op::<f64>(comm, len));
        compare(&comm, |comm| every_op::<bf16>(comm, len));
        compare(&comm, |comm| every_op::<f16>(comm, len));
        compare(&comm, |comm| every_op::<u64>(comm, len));
    }
}

/// Runs all collectives on `len` elements for each rank, and sends and receives.
fn every_op<T: Drawn>(comm: &Comm, len: usize) -> Results {
    let (me, n) = (comm.rank(), comm.world_size());
    let reductions = if T::DTYPE.is_float() { &REDUCTIONS[..] } else { &REDUCTIONS[..3] };
    let mut ops: Vec<Op> = reductions
        .iter()
        .flat_map(|&how| [Op::all_reduce(own(how, me)), Op::reduce_scatter(own(how, me))])
        .collect();
    if T::DTYPE == DType::U64 {
        ops.push(Op::all_reduce(Reduction::SumThenMax { sums: 20 }));
    }
    ops.extend([Op::all_gather(), Op::all_to_all(), Op::broadcast(0), Op::broadcast(n - 1), Op::barrier()]);
    let mut results: Vec<_> = ops.iter().map(|&op| run::<T>(comm, op, len * n)).collect();
    // A length that does not divide, where it need not.
    results.push(run::<T>(comm, Op::all_reduce(Reduction::Sum), len * n + 1));
    if n > 1 && me == 0 {
        results.push(run::<T>(comm, Op::send(n - 1), len));
    } else if n > 1 && me == n - 1 {
        results.push(run::<T>(comm, Op::recv(0), len));
    }
    results
}

/// Runs one operation on values of its own; returns its name and the bytes of its result.
fn run<T: Drawn>(comm: &Comm, op: Op, len: usize) -> (String, Vec<u8>) {
    let mut buffer = drawn::<T>(comm, len);
    comm.run(op, &mut buffer).unwrap();
    (format!("{op:?} on {len} elements of {}", T::DTYPE), specified::<T>(comm, op, &buffer))
}

/// Random values, different on each rank.
fn drawn<T: Drawn>(comm: &Comm, len: usize) -> Buffer {
    let mut seed = (comm.rank() as u64 + 1) << 40 ^ len as u64;
    let values: Vec<T> = (0..len).map(|_| T::from_random(random(&mut seed))).collect();
    Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap()
}

/// Returns the bytes of a result; of a reduce-scatter only this rank's chunk is specified.
fn specified<T: Drawn>(comm: &Comm, op: Op, buffer: &Buffer) -> Vec<u8> {
    let values = buffer.typed::<T>().unwrap();
    let chunk = values.len() / comm.world_size();
    let of_rank = comm.rank() * chunk..(comm.rank() + 1) * chunk;
    let is_scatter = matches!(op.action(), Action::ReduceScatter(_));
    bytemuck::cast_slice(if is_scatter { &values[of_rank] } else { values }).to_vec()
}

/// Several operations are in flight at a time, in the world and in a group, and are waited for in reverse.
pub(crate) fn started(world: World) {
    compare(&world.communicator(), |comm| {
        let group = comm.split(Some(0), -(comm.rank() as i64)).unwrap().unwrap();
        let queue = Queue::cpu();
        let start = |i: usize| {
            let comm = if i % 3 == 2 { &group } else { comm };
            let len = [5, 70_000, 1, 33_000][i % 4] * comm.world_size();
            let op = [Op::all_reduce(Reduction::Mean), Op::reduce_scatter(Reduction::Sum), Op::all_gather()]
                [i / 2 % 3];
            let started = comm.start(op, drawn::<f32>(comm, len), &queue);
            (comm, op, started.map_err(|(_, error)| error).unwrap())
        };
        let started: Vec<_> = (0..12).map(start).collect();
        let wait = |(comm, op, started): (&Comm, Op, meshstep_comm::InFlight)| {
            let (buffer, result) = started.wait(&queue);
            result.unwrap();
            (format!("started {op:?}"), specified::<f32>(comm, op, &buffer))
        };
        started.into_iter().rev().map(wait).collect()
    });
}

pub(crate) fn groups(world: World) {
    groups_of(&world.communicator());
}

/// Groups of every other rank in reverse, groups of these, and a group without the last rank.
pub(crate) fn groups_of(comm: &Comm) {
    compare(comm, |comm| {
        let (me, n) = (comm.rank(), comm.world_size());
        let half = comm.split(Some((me % 2) as u32), -(me as i64)).unwrap().unwrap();
        let again = half.split(Some(0), -(half.rank() as i64)).unwrap().unwrap();
        let most = comm.split((me + 1 < n).then_some(7), 0).unwrap();
        assert_eq!((most.is_some(), half.world_size()), (me + 1 < n, (n + 1 - me % 2) / 2));
        let all = [Some(half), Some(again), most, Some(Arc::clone(comm))];
        all.iter().flatten().flat_map(|group| every_op::<f32>(group, 1000)).collect()
    });
}

/// All-reduces that keep the former values.
pub(crate) fn kept_values(world: World) {
    compare(&world.communicator(), |comm| {
        let both = |len: usize| {
            let mut values = drawn::<f32>(comm, len);
            let kept = Buffer::zeroed(len, values.dtype(), &Meter::new(), Category::Staging).unwrap();
            let (first, second) = values.typed_mut::<f32>().unwrap().split_at_mut(len / 3);
            let lent = &mut [SliceMut::from(first), SliceMut::from(second)];
            let (kept, non_finite) = comm.all_reduce_keeping(Reduction::Sum, None, lent, kept);
            let non_finite = non_finite.unwrap().to_le_bytes();
            let bytes = [values, kept].map(|b| bytemuck::cast_slice(b.typed::<f32>().unwrap()).to_vec());
            (format!("{len} kept values"), [bytes.concat(), non_finite.to_vec()].concat())
        };
        [1, 4097, 100_003].map(both).into()
    });
}
