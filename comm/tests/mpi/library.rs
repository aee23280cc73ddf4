//! Reductions by the MPI library.

use crate::collectives::{Comm, compare};
use crate::drawn::random;
use crate::ranks;
use meshstep_comm::mpi::{Error, Options, Reductions, ThreadLevel, world};
use meshstep_comm::{Communicator, Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, Element, Meter, Queue, bf16};
use std::time::{Duration, Instant};

fn by_library(options: Options) -> Options {
    Options { reductions: Reductions::Library, ..options }
}

/// Elements for each rank: an odd number, and one that travels with the call.
const LENS: [usize; 2] = [9_003, 33];
/// Elements of more than one block.
const LONG: usize = 600_001;

/// Sums of small integers are exact in every order; other values are near loopback's.
pub(crate) fn reduce(options: Options) {
    let world = world(&by_library(options)).unwrap().communicator();
    let group = world.split(Some((world.rank() % 2) as u32), -(world.rank() as i64)).unwrap().unwrap();
    for len in LENS {
        for comm in [&world, &group] {
            exact::<f32>(comm, len, |bits| (bits % 64) as f32 - 32.0);
            exact::<f64>(comm, len, |bits| (bits % 64) as f64 - 32.0);
            exact::<u64>(comm, len, |bits| bits);
            near_loopbacks(comm, len);
        }
    }
    several_blocks(&world);
    others_are_ours(&group);
    maxima_are_ours(&world);
    in_flight(&world);
    overlapping(&world);
}

/// Compares with loopback to the bit.
fn exact<T: Element + Copy>(comm: &Comm, len: usize, of: fn(u64) -> T) {
    compare(comm, |comm| {
        let (me, n) = (comm.rank(), comm.world_size());
        let mut kinds = vec![Reduction::Sum];
        // A mean over 2 or 4 ranks is exact too.
        kinds.extend((T::DTYPE.is_float() && n.is_power_of_two()).then_some(Reduction::Mean));
        let run = |op: Op| {
            let mut seed = me as u64 + 1;
            let values: Vec<T> = (0..len * n).map(|_| of(random(&mut seed))).collect();
            let mut buffer = Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap();
            comm.run(op, &mut buffer).unwrap();
            buffer.typed::<T>().unwrap().to_vec()
        };
        let mut results = Vec::new();
        for how in kinds {
            let name = format!("{how:?} of {len} elements of {}", T::DTYPE);
            results.push((format!("all_reduce, {name}"), bytes(&run(Op::all_reduce(how)))));
            let own = me * len..(me + 1) * len;
            results.push((format!("reduce_scatter, {name}"), bytes(&run(Op::reduce_scatter(how))[own])));
        }
        results
    });
}

/// Sums of rank numbers, in blocks with odd ends.
fn several_blocks(comm: &Comm) {
    let (me, n) = (comm.rank(), comm.world_size());
    for op in [Op::all_reduce(Reduction::Sum), Op::reduce_scatter(Reduction::Sum)] {
        let values: Vec<f64> = (0..LONG * n).map(|i| (i % 1000 + me) as f64).collect();
        let mut buffer = Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap();
        comm.run(op, &mut buffer).unwrap();
        let sum = |i: usize| (i % 1000 * n + n * (n - 1) / 2) as f64;
        let own = me * LONG..(me + 1) * LONG;
        let sums = &buffer.typed::<f64>().unwrap()[own.clone()];
        assert!(own.zip(sums).all(|(i, found)| *found == sum(i)), "{op:?} differs");
    }
}

fn bytes<T: Element>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

fn rough(rank: usize, len: usize) -> Vec<f32> {
    let mut seed = rank as u64 + 77;
    (0..len).map(|_| (random(&mut seed) >> 40) as f32 / 1e6 - 8.0).collect()
}

fn near_loopbacks(comm: &Comm, len: usize) {
    let mean = |comm: &dyn Communicator| {
        let values = rough(comm.rank(), len);
        let mut buffer = Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap();
        comm.run(Op::all_reduce(Reduction::Mean), &mut buffer).unwrap();
        buffer.typed::<f32>().unwrap().to_vec()
    };
    let expected = loopback::spawn(comm.world_size(), |comm| mean(&*comm)).unwrap().swap_remove(0);
    let found = mean(&**comm);
    assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1e-5), "means differ from loopback's");
    assert!(found.iter().any(|mean| *mean != 0.0));
}

/// What the library does not take has loopback's bits.
fn others_are_ours(comm: &Comm) {
    compare(comm, |comm| {
        let (me, n) = (comm.rank(), comm.world_size());
        let values = rough(me, 50_000 * n);
        let mut scaled = Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap();
        let factor = 0.3 + me as f64;
        comm.run(Op::all_reduce(Reduction::PreMulSum { factor }), &mut scaled).unwrap();
        let halves: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
        let mut halves = Buffer::from_slice(&halves, &Meter::new(), Category::Grads).unwrap();
        comm.run(Op::reduce_scatter(Reduction::Sum), &mut halves).unwrap();
        let own = &halves.typed::<bf16>().unwrap()[me * 50_000..(me + 1) * 50_000];
        let scaled = bytes(scaled.typed::<f32>().unwrap());
        vec![("PreMulSum".to_owned(), scaled), ("bf16".to_owned(), bytes(own))]
    });
}

/// Maxima and minima of NaNs with payloads and of zeros of both signs have loopback's bits.
fn maxima_are_ours(comm: &Comm) {
    compare(comm, |comm| {
        let (me, n) = (comm.rank(), comm.world_size());
        let mut results = Vec::new();
        for how in [Reduction::Max, Reduction::Min] {
            let mut seed = me as u64 + 1;
            let value = |bits: u64| match bits % 4 {
                0 => 0.0,
                1 => -0.0,
                2 => f32::from_bits(0x7fc0_0001 + me as u32),
                _ => (bits >> 40) as f32 - 8e6,
            };
            let values: Vec<f32> = (0..LENS[0] * n).map(|_| value(random(&mut seed))).collect();
            let ordered = values.iter().map(|value| value.to_bits() as u64).collect::<Vec<_>>();
            let mut floats = Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap();
            let mut words = Buffer::from_slice(&ordered, &Meter::new(), Category::Grads).unwrap();
            comm.run(Op::all_reduce(how), &mut floats).unwrap();
            comm.run(Op::all_reduce(how), &mut words).unwrap();
            results.push((format!("{how:?} of f32"), bytes(floats.typed::<f32>().unwrap())));
            results.push((format!("{how:?} of u64"), bytes(words.typed::<u64>().unwrap())));
        }
        results
    });
}

/// Communicators of groups that overlap are created at the same time, on each rank in another order.
fn overlapping(world: &Comm) {
    let (queue, n) = (Queue::cpu(), world.world_size());
    let me = world.rank();
    let mut groups = Vec::new();
    for left_out in (0..n).chain([n, n]) {
        let color = (me != left_out).then_some(0);
        groups.extend(world.split(color, (me as i64 + left_out as i64) % n as i64).unwrap());
    }
    let len = groups.len();
    groups.rotate_left(me % len);
    let start = |comm: &Comm| {
        let ones = Buffer::from_slice(&vec![1.0f32; 20_000], &Meter::new(), Category::Grads).unwrap();
        let op = Op::all_reduce(Reduction::Sum);
        (comm.start(op, ones, &queue).map_err(|(_, error)| error).unwrap(), comm.world_size())
    };
    for (started, ranks) in groups.iter().map(start).collect::<Vec<_>>() {
        let (sums, result) = started.wait(&queue);
        result.unwrap();
        assert!(sums.typed::<f32>().unwrap().iter().all(|sum| *sum == ranks as f32));
    }
}

/// Reductions of two groups are in flight at the same time.
fn in_flight(world: &Comm) {
    let (queue, n) = (Queue::cpu(), world.world_size());
    let other = world.split(Some(0), 0).unwrap().unwrap();
    let start = |i: usize| {
        let ones = Buffer::from_slice(&vec![1.0f32; 20_000 + i], &Meter::new(), Category::Grads).unwrap();
        let comm = [world, &other][i % 2];
        comm.start(Op::all_reduce(Reduction::Sum), ones, &queue).map_err(|(_, error)| error).unwrap()
    };
    for started in (0..8).map(start).collect::<Vec<_>>() {
        let (sums, result) = started.wait(&queue);
        result.unwrap();
        assert!(sums.typed::<f32>().unwrap().iter().all(|sum| *sum == n as f32));
    }
}

/// Rank 1 is stopped, most likely within a reduction; the others give up, and end the job.
pub(crate) fn stop(options: Options) {
    let comm = world(&by_library(options)).unwrap().communicator();
    let mut ones = Buffer::from_slice(&vec![1.0f32; 3_000_000], &Meter::new(), Category::Grads).unwrap();
    if comm.rank() == 1 {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(500));
            ranks::stop_this_process();
        });
    }
    let op = Op::all_reduce(Reduction::Sum).within(Duration::from_secs(1));
    let began = Instant::now();
    let error = loop {
        if let Err(error) = comm.run(op, &mut ones) {
            break error;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "rank 1 goes on");
    };
    assert!(matches!(error, meshstep_comm::Error::Timeout { .. }), "{error}");
    println!("error: {error}");
    drop(comm);
    println!("a rank survived MPI_Abort");
}

/// Ranks with different options get an error at their first operation.
pub(crate) fn differ(options: Options) {
    let rank = ranks::launched_rank();
    let options = if rank == 0 { by_library(options) } else { options };
    let comm = world(&options).unwrap().communicator();
    let error = comm.barrier().unwrap_err().to_string();
    let hint = "run the same build with the same mpi::Options::reductions on every rank";
    assert!(error.contains(hint), "{error}");
    println!("error: {hint}");
}

pub(crate) fn too_few_threads(options: Options) {
    let options = Options { threads: ThreadLevel::Serialized, ..by_library(options) };
    let error = world(&options).unwrap_err();
    assert!(matches!(error, Error::LibraryReductions { given: ThreadLevel::Serialized, .. }), "{error}");
}
