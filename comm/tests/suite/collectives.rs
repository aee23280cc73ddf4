//! Every collective, reduction and type, on 1 to 8 ranks, against a naive implementation that holds all buffers in one place.

use crate::backends::{BACKENDS, Backend};
use crate::naive::{Naive, What, naive, random};
use meshstep_comm::{Reduction, loopback};
use meshstep_tensor::{Buffer, Category, Meter, bf16, f16};
use proptest::prelude::*;

/// Returns random elements. A very long vector repeats them, except in the long run, with a prime period, so that no two portions
/// are alike.
fn drawn<T: Naive>(len: usize, seed: &mut u64) -> Vec<T> {
    let period = if meshstep_cases::long() { len } else { len.min(65_537) };
    let mut values: Vec<T> = (0..period).map(|_| T::from_random(random(seed))).collect();
    while values.len() < len {
        values.extend_from_within(..period.min(len - values.len()));
    }
    values
}

fn bytes<T: Naive>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn check<T: Naive>(backend: Backend, what: What, n: usize, len: usize, peers: [usize; 2], mut seed: u64) {
    let before: Vec<Vec<T>> = (0..n).map(|_| drawn(len, &mut seed)).collect();
    let after = backend.spawn(n, |comm| {
        let mut buffer = Buffer::from_slice(&before[comm.rank()], &Meter::new(), Category::Grads).unwrap();
        if let Some(op) = what.op(comm.rank(), peers) {
            comm.run(op, &mut buffer).unwrap();
        }
        buffer.typed::<T>().unwrap().to_vec()
    });
    let after = after.unwrap();
    for (rank, (got, (range, expected))) in after.iter().zip(naive(what, &before, peers)).enumerate() {
        assert_eq!(got.len(), len);
        let got = &got[range.clone()];
        assert_eq!(got.len(), expected.len());
        // Compares element by element only if some differ, as NaN may.
        if bytes(got) == bytes(&expected) {
            continue;
        }
        for (i, (got, expected)) in range.zip(got.iter().zip(expected)) {
            let same = got.bits() == expected.bits() || got.is_nan() && expected.is_nan();
            assert!(same, "rank {rank}, element {i}: {got:?} instead of {expected:?}");
        }
    }
    if let What::AllReduce(_) = what {
        assert!(after.iter().all(|values| bytes(values) == bytes(&after[0])), "ranks differ");
    }
}

fn reduction() -> impl Strategy<Value = Reduction> {
    let factors = prop_oneof![
        3 => -4.0..4.0,
        1 => prop::sample::select(vec![0.0, -0.0, 1.0, 0.5, 1e30, f64::INFINITY, f64::NAN]),
        1 => any::<f64>(),
    ];
    prop_oneof![
        1 => Just(Reduction::Sum),
        1 => Just(Reduction::Mean),
        1 => Just(Reduction::Pairwise),
        1 => Just(Reduction::Max),
        1 => Just(Reduction::Min),
        2 => factors.prop_map(|factor| Reduction::PreMulSum { factor }),
    ]
}

/// Half of the cases run on loopback.
fn backends() -> impl Strategy<Value = Backend> {
    prop_oneof![Just(Backend::Loopback), prop::sample::select(BACKENDS.to_vec())]
}

fn what() -> impl Strategy<Value = What> {
    prop_oneof![
        3 => reduction().prop_map(What::AllReduce),
        1 => length().prop_map(|sums| What::AllReduce(Reduction::SumThenMax { sums })),
        3 => reduction().prop_map(What::ReduceScatter),
        1 => Just(What::AllGather),
        1 => Just(What::AllToAll),
        1 => Just(What::Broadcast),
        1 => Just(What::SendRecv),
    ]
}

/// Lengths around the ends of vectors, blocks and parts, and any length in between.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        3 => 0usize..70,
        2 => 70usize..3000,
        1 => prop::sample::select(vec![0, 1, 1023, 1024, 1025, 4096, 8191, 8193, 20_000, 65_537, 200_003]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: meshstep_cases::cases(400, 80_000), ..ProptestConfig::default() })]
    #[test]
    fn collectives_equal_the_naive_ones(
        backend in backends(), what in what(), dtype in 0..5, n in 1usize..=8, len in length(), peers in any::<[usize; 2]>(), seed in any::<u64>()
    ) {
        let peers = peers.map(|peer| peer % n);
        let any_length = matches!(what, What::AllReduce(_) | What::Broadcast | What::SendRecv);
        let len = if any_length { len } else { len / n * n };
        let floats = match what {
            What::AllReduce(how) | What::ReduceScatter(how) => {
                matches!(how, Reduction::Mean | Reduction::PreMulSum { .. })
            }
            _ => false,
        };
        match dtype {
            _ if matches!(what, What::AllReduce(Reduction::SumThenMax { .. })) => {
                check::<u64>(backend, what, n, len, peers, seed);
            }
            0 => check::<f32>(backend, what, n, len, peers, seed),
            1 => check::<f64>(backend, what, n, len, peers, seed),
            2 => check::<bf16>(backend, what, n, len, peers, seed),
            3 => check::<f16>(backend, what, n, len, peers, seed),
            _ if floats => {}
            _ => check::<u64>(backend, what, n, len, peers, seed),
        }
    }
}

fn mean_of_equals<T: Naive>(n: usize, values: &[T]) {
    let means = loopback::spawn(n, |comm| {
        let mut buffer = Buffer::from_slice(values, &Meter::new(), Category::Grads).unwrap();
        comm.all_reduce(&mut buffer, Reduction::Mean).unwrap();
        buffer.typed::<T>().unwrap().to_vec()
    });
    for (mean, value) in means.unwrap().concat().into_iter().zip(values.iter().cycle()) {
        assert!(
            mean.bits() == value.bits() || mean.is_nan() && value.is_nan(),
            "{mean:?} of {n} times {value:?}"
        );
    }
}

#[test]
fn the_mean_of_equal_values_is_that_value() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let mut seed = 5;
    let floats: Vec<f32> = (0..10_000).map(|_| f32::from_bits(random(&mut seed) as u32)).collect();
    // bf16 has the range of its accumulator, so the sum of eight of the largest is infinite.
    let bf16s = bits.iter().map(|&b| bf16::from_bits(b));
    let bf16s: Vec<bf16> = bf16s.filter(|x| x.is_nan() || x.to_f32().abs() < f32::MAX / 8.0).collect();
    for n in 1..=8 {
        mean_of_equals(n, &bf16s);
        mean_of_equals(n, &bits.iter().map(|&b| f16::from_bits(b)).collect::<Vec<_>>());
        mean_of_equals(n, &floats);
    }
}

#[test]
fn the_mean_of_equal_numbers_is_that_number() {
    for n in 1..=8 {
        let start: Vec<f64> =
            (1..2000u64).map(|i| f64::from_bits(i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 2)).collect();
        let start: Vec<f64> = start.into_iter().filter(|x| x.abs() < 1e300 && x.abs() > 1e-300).collect();
        let ends = loopback::spawn(n, |comm| {
            let mut values = Buffer::from_slice(&start, &Meter::new(), Category::Grads).unwrap();
            comm.all_reduce(&mut values, Reduction::Mean).unwrap();
            values.typed::<f64>().unwrap().to_vec()
        });
        assert!(ends.unwrap().iter().all(|end| *end == start), "{n} ranks");
    }
}

/// A sum of products that would lose half in f64 if they were rounded.
#[test]
fn products_of_f64_are_rounded_with_their_sum() {
    let (x, factor) = (1.0 + f64::EPSILON, 1.0 - f64::EPSILON);
    let sums = loopback::spawn(2, |comm| {
        let mut values =
            Buffer::from_slice(&[[x, -1.0][comm.rank()]], &Meter::new(), Category::Grads).unwrap();
        let factor = [factor, 1.0][comm.rank()];
        comm.all_reduce(&mut values, Reduction::PreMulSum { factor }).unwrap();
        values.typed::<f64>().unwrap()[0]
    });
    // (1 + e) (1 - e) - 1.
    assert_eq!(sums.unwrap(), [-f64::EPSILON * f64::EPSILON; 2]);
}

/// Data larger than the caches is copied by another path.
#[test]
fn buffers_larger_than_caches_arrive_whole() {
    let backend = Backend::Loopback;
    let len = (11 << 20) + 6;
    check::<u64>(backend, What::SendRecv, 2, len / 4, [1, 0], 5);
    // One of them is enough for `cargo xtask check`.
    if meshstep_cases::tried(1, 1) {
        check::<bf16>(backend, What::AllGather, 2, len, [0, 1], 3);
        check::<f32>(backend, What::Broadcast, 3, len / 3, [1, 0], 4);
    }
}
