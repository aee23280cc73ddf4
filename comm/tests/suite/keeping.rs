//! All-reduces of values where they lie, against all-reduces of the same values in a buffer.

use crate::backends::{BACKENDS, Backend};
use crate::naive::{Naive, own, random};
use meshstep_comm::{Communicator, Error, InFlight, Kind, Op, Reduction, Stats, loopback};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue, Slice, SliceMut, bf16, f16};
use proptest::prelude::*;
use std::sync::Arc;

/// Backend with the default implementation.
#[derive(Debug)]
struct Default(Arc<dyn Communicator>);

impl Communicator for Default {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn start(&self, op: Op, buffer: Buffer, after: &Queue) -> Result<InFlight, (Buffer, Error)> {
        self.0.start(op, buffer, after)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, Error> {
        self.0.split(color, key)
    }

    fn abort(&self) {
        self.0.abort();
    }

    fn stats(&self) -> Stats {
        self.0.stats()
    }
}

/// How a rank calls the all-reduce.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Keeping,
    Default,
    Buffer,
}

fn call(seed: &mut u64) -> Call {
    [Call::Keeping, Call::Keeping, Call::Default, Call::Buffer][(random(seed) % 4) as usize]
}

/// Cuts `len` into random lengths, also of 0; none are longer than `longest`.
fn cuts(mut len: usize, longest: usize, seed: &mut u64) -> Vec<usize> {
    let mut lens = Vec::new();
    while len > 0 {
        let next = (random(seed) as usize % (longest + 1)).min(len);
        lens.push(next);
        len -= next;
    }
    lens.extend(random(seed).is_multiple_of(2).then_some(0));
    lens
}

/// Slices of these lengths with a few elements between them, in one vector.
struct Apart<T> {
    memory: Vec<T>,
    lens: Vec<usize>,
    gap: usize,
}

impl<T: Naive> Apart<T> {
    fn new(values: &[T], lens: Vec<usize>, gap: usize) -> Self {
        let (mut memory, mut rest) = (Vec::new(), values);
        for &len in &lens {
            let (now, after) = rest.split_at(len);
            memory.extend(vec![T::from_random(1); gap]);
            memory.extend_from_slice(now);
            rest = after;
        }
        assert!(rest.is_empty());
        Apart { memory, lens, gap }
    }

    fn slices(&mut self) -> Vec<SliceMut<'_>> {
        let (mut rest, mut slices) = (&mut self.memory[..], Vec::new());
        for &len in &self.lens {
            let (now, after) = rest[self.gap..].split_at_mut(len);
            slices.push(SliceMut::from(now));
            rest = after;
        }
        slices
    }

    fn values(&self) -> Vec<T> {
        let (mut rest, mut values) = (&self.memory[..], Vec::new());
        for &len in &self.lens {
            let (now, after) = rest[self.gap..].split_at(len);
            values.extend_from_slice(now);
            rest = after;
        }
        values
    }
}

/// Values of a rank after the call, the former ones, and the count; the last two only for calls that have them.
type Ended<T> = (Vec<T>, Option<(Vec<T>, u64)>);

fn reduce<T: Naive>(
    comm: &Arc<dyn Communicator>,
    call: Call,
    reduction: Reduction,
    values: &mut Apart<T>,
    room: &mut Buffer,
) -> Ended<T> {
    let default = Default(Arc::clone(comm));
    let comm: &dyn Communicator = if call == Call::Default { &default } else { &**comm };
    if call == Call::Buffer {
        let mut buffer = Buffer::from_slice(&values.values(), &Meter::new(), Category::Grads).unwrap();
        comm.all_reduce(&mut buffer, reduction).unwrap();
        return (buffer.typed::<T>().unwrap().to_vec(), None);
    }
    let whole = room.take();
    let (kept, found) = comm.all_reduce_keeping(reduction, None, &mut values.slices(), whole);
    let former = kept.typed::<T>().unwrap().to_vec();
    *room = kept;
    (values.values(), Some((former, found.unwrap())))
}

fn same<T: Naive>(a: &[T], b: &[T]) -> bool {
    let alike = |(a, b): (&T, &T)| a.bits() == b.bits() || a.is_nan() && b.is_nan();
    a.len() == b.len() && a.iter().zip(b).all(alike)
}

/// Compares every call with an all-reduce of buffers; `finite` is the type's test.
fn check<T: Naive>(
    backend: Backend,
    n: usize,
    (len, longest): (usize, usize),
    reduction: Reduction,
    seed: u64,
    finite: fn(T) -> bool,
) {
    backend
        .spawn(n, |comm| {
            let rank = comm.rank();
            let mut seed = seed ^ (rank as u64) << 32;
            let values: Vec<T> = (0..len).map(|_| T::from_random(random(&mut seed))).collect();
            let reduction = own(reduction, rank);
            let mut expected = Buffer::from_slice(&values, &Meter::new(), Category::Grads).unwrap();
            comm.all_reduce(&mut expected, reduction).unwrap();
            let expected = expected.typed::<T>().unwrap();
            let non_finite = expected.iter().filter(|&&x| !finite(x)).count() as u64;
            // The buffer of the former values begins anywhere in its memory.
            let offset = (random(&mut seed) % 20) as usize;
            let mut room = Buffer::zeroed(offset + len, T::DTYPE, &Meter::new(), Category::Staging).unwrap();
            let mut room = room.split_off(offset).unwrap();
            for round in 0..3 {
                let (lens, gap) = (cuts(len, longest, &mut seed), random(&mut seed) as usize % 3);
                let call = if round == 0 { Call::Keeping } else { call(&mut seed) };
                let mut apart = Apart::new(&values, lens, gap);
                let around = apart.memory.len();
                let (now, kept) = reduce(&comm, call, reduction, &mut apart, &mut room);
                assert!(same(&now, expected), "rank {rank}: {call:?} {:?}", apart.lens);
                assert_eq!(apart.memory.len(), around);
                if let Some((former, found)) = kept {
                    assert!(
                        former.iter().zip(&values).all(|(a, b)| a.bits() == b.bits()),
                        "rank {rank}: {call:?}"
                    );
                    assert_eq!(found, non_finite, "rank {rank}: {call:?}");
                    let gap = T::from_random(1).bits();
                    let (mut at, lens) = (0, &apart.lens);
                    for len in lens {
                        assert!(
                            apart.memory[at..at + apart.gap].iter().all(|x| x.bits() == gap),
                            "beside it"
                        );
                        at += apart.gap + len;
                    }
                }
            }
        })
        .unwrap();
}

fn reductions() -> impl Strategy<Value = Reduction> {
    prop_oneof![
        2 => Just(Reduction::Mean),
        1 => Just(Reduction::Sum),
        1 => Just(Reduction::Pairwise),
        1 => Just(Reduction::Max),
        1 => Just(Reduction::Min),
        2 => (-4.0..4.0).prop_map(|factor| Reduction::PreMulSum { factor }),
    ]
}

/// Lengths around the ends of vectors, blocks and parts, and any length in between.
fn length() -> impl Strategy<Value = usize> {
    let ends = vec![0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 8191, 65_537, 131_073];
    prop_oneof![1 => 0usize..3000, 2 => prop::sample::select(ends)]
}

fn check_type(
    backend: Backend,
    dtype: usize,
    n: usize,
    lens: (usize, usize),
    reduction: Reduction,
    seed: u64,
) {
    let integers = matches!(reduction, Reduction::Sum | Reduction::Max | Reduction::Min);
    match dtype {
        0 => check::<f32>(backend, n, lens, reduction, seed, f32::is_finite),
        1 => check::<f64>(backend, n, lens, reduction, seed, f64::is_finite),
        2 => check::<bf16>(backend, n, lens, reduction, seed, bf16::is_finite),
        3 => check::<f16>(backend, n, lens, reduction, seed, f16::is_finite),
        _ if integers => check::<u64>(backend, n, lens, reduction, seed, |_| true),
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: meshstep_cases::cases(150, 20_000), failure_persistence: None, ..ProptestConfig::default()
    })]
    #[test]
    fn values_where_they_lie_get_the_bits_of_a_buffer(
        backend in prop::sample::select(BACKENDS.to_vec()), dtype in 0..5usize, n in 1usize..=8, len in length(), longest in 1usize..5000, reduction in reductions(),
        seed in any::<u64>()
    ) {
        check_type(backend, dtype, n, (len, longest.min(len / 2 + 1)), reduction, seed);
    }
}

/// Former values of long vectors are kept by another path.
#[test]
fn long_vectors_in_many_slices() {
    for (dtype, longest) in [(0, 300_000), (1, 65_536), (2, 1_000_003), (3, 500_000), (4, 70_000)] {
        if meshstep_cases::tried(dtype, 2) {
            let lens = ((2 << 20) + 77, longest);
            check_type(Backend::Loopback, dtype, 2 + dtype % 2, lens, Reduction::Sum, 9 + dtype as u64);
        }
    }
}

#[test]
fn it_counts_as_an_all_reduce() {
    loopback::spawn(3, |comm| {
        let (mut a, mut b) = ([1f32; 5], [2f32; 9]);
        let room = Buffer::zeroed(14, DType::F32, &Meter::new(), Category::Staging).unwrap();
        let mut slices = [SliceMut::from(&mut a), SliceMut::from(&mut b)];
        let (_, found) = comm.all_reduce_keeping(Reduction::Sum, None, &mut slices, room);
        assert_eq!((found, a, b), (Ok(0), [3.0; 5], [6.0; 9]));
        let whole = comm.stats();
        let mut buffer = Buffer::zeroed(14, DType::F32, &Meter::new(), Category::Grads).unwrap();
        comm.all_reduce(&mut buffer, Reduction::Sum).unwrap();
        assert_eq!(comm.stats().of(Kind::AllReduce).bytes, 2 * whole.of(Kind::AllReduce).bytes);
        assert_eq!((whole.total().operations, whole.of(Kind::AllReduce).operations), (1, 1));
    })
    .unwrap();
}

#[test]
fn memory_that_does_not_agree_is_refused_before_any_other_rank_is_involved() {
    loopback::spawn(2, |comm| {
        let default = Default(Arc::clone(&comm));
        for comm in [&*comm as &dyn Communicator, &default] {
            let room = |len, dtype| Buffer::zeroed(len, dtype, &Meter::new(), Category::Staging).unwrap();
            let mut x = [1f32, 2.0, 3.0];
            let mut try_with = |kept: Buffer| {
                let len = kept.len();
                let (kept, found) =
                    comm.all_reduce_keeping(Reduction::Mean, None, &mut [SliceMut::from(&mut x)], kept);
                assert_eq!(kept.len(), len, "the buffer comes back");
                found.unwrap_err()
            };
            let short = meshstep_tensor::Error::WrongLen { given: 3, expected: 2 };
            assert_eq!(try_with(room(2, DType::F32)), Error::Buffer(short));
            let other = meshstep_tensor::Error::WrongDType { asked: DType::F64, holds: DType::F32 };
            assert_eq!(try_with(room(3, DType::F64)), Error::Buffer(other));
            assert_eq!(x, [1.0, 2.0, 3.0]);
            let mut words = [1u64, 2];
            let (_, found) = comm.all_reduce_keeping(
                Reduction::Mean,
                None,
                &mut [SliceMut::from(&mut words)],
                room(2, DType::U64),
            );
            assert_eq!(found, Err(Error::MeanOfIntegers { dtype: DType::U64 }));
            assert_eq!(words, [1, 2]);
            // The communicator is usable.
            let (_, found) = comm.all_reduce_keeping(
                Reduction::Mean,
                None,
                &mut [SliceMut::from(&mut x)],
                room(3, DType::F32),
            );
            assert_eq!((found, x), (Ok(0), [1.0, 2.0, 3.0]));
        }
    })
    .unwrap();
}

/// The former values, copied back, undo it.
#[test]
fn what_was_kept_goes_back() {
    loopback::spawn(2, |comm| {
        let mut x = [[1f32, f32::INFINITY, 3.0], [5.0, 6.0, 7.0]][comm.rank()];
        let before = x;
        let room = Buffer::zeroed(3, DType::F32, &Meter::new(), Category::Staging).unwrap();
        let (kept, found) =
            comm.all_reduce_keeping(Reduction::Mean, None, &mut [SliceMut::from(&mut x)], room);
        assert_eq!((found, x), (Ok(1), [3.0, f32::INFINITY, 5.0]));
        SliceMut::from(&mut x).copy_from(Slice::from(kept.typed::<f32>().unwrap())).unwrap();
        assert_eq!(x, before);
    })
    .unwrap();
}

#[test]
fn one_rank_leaves_and_keeps_the_bits_of_a_signalling_nan() {
    let bits = [0x7f80_0001, 0x8000_0000, 0x3f80_0000];
    for &backend in BACKENDS {
        backend
            .spawn(1, |comm| {
                let mut values = bits.map(f32::from_bits);
                let kept = Buffer::zeroed(3, DType::F32, &Meter::new(), Category::Staging).unwrap();
                let mut slices = [SliceMut::from(&mut values)];
                let (kept, found) = comm.all_reduce_keeping(Reduction::Sum, None, &mut slices, kept);
                assert_eq!(found, Ok(1), "{backend:?}");
                assert_eq!(values.map(f32::to_bits), bits, "{backend:?}");
                let kept: Vec<u32> =
                    kept.typed::<f32>().unwrap().iter().map(|value| value.to_bits()).collect();
                assert_eq!(kept, bits, "{backend:?}");
            })
            .unwrap();
    }
}
