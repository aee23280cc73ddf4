//! Every collective, reduction and type, on 1 to 8 ranks, against a naive one that holds all buffers in one place.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use meshstep_comm::{Op, Reduction, loopback};
use meshstep_tensor::{Buffer, Category, Element, Meter, bf16, f16};
use proptest::prelude::*;

/// What the naive collectives need of an element; written with `half`'s conversions, not with this crate's.
trait Naive: Element + Copy {
    fn from_random(bits: u64) -> Self;
    /// The reduction of `values`, in order.
    fn reduce(values: &[Self], reduction: Reduction) -> Self;
    fn bits(self) -> u64;
    fn is_nan(self) -> bool;
}

fn fold<A: Copy + PartialOrd>(
    values: impl Iterator<Item = A>,
    reduction: Reduction,
    mut add: impl FnMut(A, A) -> A,
    mean: fn(A, usize) -> A,
    is_nan: fn(A) -> bool,
) -> A {
    let values: Vec<A> = values.collect();
    let mut sum = || values[1..].iter().fold(values[0], |a, &b| add(a, b));
    let nan = values.iter().copied().find(|&x| is_nan(x));
    match reduction {
        Reduction::Sum => sum(),
        Reduction::Mean => mean(sum(), values.len()),
        Reduction::Max => {
            nan.unwrap_or(values.iter().copied().reduce(|a, b| if b > a { b } else { a }).unwrap())
        }
        Reduction::Min => {
            nan.unwrap_or(values.iter().copied().reduce(|a, b| if b < a { b } else { a }).unwrap())
        }
    }
}

/// Mostly values of similar size, so that rounding matters; some of any bit pattern.
fn float(bits: u64, any: f64) -> f64 {
    match bits % 8 {
        0 => any,
        1 => 0.0,
        2 => -0.0,
        _ => ((bits >> 16) as f64 / (1u64 << 40) as f64).mul_add(2.0, -128.0),
    }
}

macro_rules! naive_float {
    ($t:ty, $wide:ty, $uint:ty, $of_f64:expr, $widen:expr, $narrow:expr) => {
        impl Naive for $t {
            fn from_random(bits: u64) -> Self {
                if bits % 8 == 0 { <$t>::from_bits((bits >> 8) as $uint) } else { $of_f64(float(bits, 0.0)) }
            }
            fn reduce(values: &[Self], reduction: Reduction) -> Self {
                let wide = values.iter().map(|&x| $widen(x));
                $narrow(fold::<$wide>(wide, reduction, |a, b| a + b, |a, n| a / n as $wide, |x| x.is_nan()))
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
            fn is_nan(self) -> bool {
                <$t>::is_nan(self)
            }
        }
    };
}
naive_float!(f32, f64, u32, |x: f64| x as f32, f64::from, |x: f64| x as f32);
naive_float!(bf16, f32, u16, bf16::from_f64, bf16::to_f32, bf16::from_f32);
naive_float!(f16, f32, u16, f16::from_f64, f16::to_f32, f16::from_f32);

impl Naive for f64 {
    fn from_random(bits: u64) -> Self {
        if bits.is_multiple_of(8) { f64::from_bits(bits >> 8) } else { float(bits, 0.0) }
    }
    /// Sums keep what each addition rounds off, as Dekker writes it, and are rounded at the end.
    fn reduce(values: &[Self], reduction: Reduction) -> Self {
        let mut low = 0.0;
        let plus = |a: f64, b: f64| {
            let sum = a + b;
            low += if a.abs() >= b.abs() { (a - sum) + b } else { (b - sum) + a };
            sum
        };
        let high = fold(values.iter().copied(), reduction, plus, |a, _| a, f64::is_nan);
        match reduction {
            Reduction::Sum if low != 0.0 && high.is_finite() => high + low,
            Reduction::Mean => {
                let n = values.len() as f64;
                let quotient = high / n;
                // Halving is exact but for subnormal numbers, which are rounded once.
                let left = if values.len().is_power_of_two() { 0.0 } else { quotient.mul_add(-n, high) };
                let rest = (left + low) / n;
                if rest != 0.0 && quotient.is_finite() { quotient + rest } else { quotient }
            }
            _ => high,
        }
    }
    fn bits(self) -> u64 {
        self.to_bits()
    }
    fn is_nan(self) -> bool {
        f64::is_nan(self)
    }
}

impl Naive for u64 {
    fn from_random(bits: u64) -> Self {
        bits
    }
    fn reduce(values: &[Self], reduction: Reduction) -> Self {
        fold(values.iter().copied(), reduction, u64::wrapping_add, |_, _| unreachable!(), |_| false)
    }
    fn bits(self) -> u64 {
        self
    }
    fn is_nan(self) -> bool {
        false
    }
}

#[derive(Clone, Copy, Debug)]
enum What {
    AllReduce(Reduction),
    ReduceScatter(Reduction),
    AllGather,
    AllToAll,
    Broadcast,
    SendRecv,
}

impl What {
    /// What `rank` calls, if anything, where `a` is the root or the sender and `b` the receiver.
    fn op(self, rank: usize, [a, b]: [usize; 2]) -> Option<Op> {
        Some(match self {
            What::AllReduce(reduction) => Op::all_reduce(reduction),
            What::ReduceScatter(reduction) => Op::reduce_scatter(reduction),
            What::AllGather => Op::all_gather(),
            What::AllToAll => Op::all_to_all(),
            What::Broadcast => Op::broadcast(a),
            What::SendRecv if a == b => Op::barrier(),
            What::SendRecv if rank == a => Op::send(b),
            What::SendRecv if rank == b => Op::recv(a),
            What::SendRecv => return None,
        })
    }
}

/// `None` where the result is unspecified.
fn naive<T: Naive>(what: What, all: &[Vec<T>], [a, b]: [usize; 2]) -> Vec<Vec<Option<T>>> {
    let (n, len) = (all.len(), all[0].len());
    let part = len / n;
    let column = |i: usize| all.iter().map(|values| values[i]).collect::<Vec<T>>();
    let element = |rank: usize, i: usize| match what {
        What::AllReduce(reduction) => Some(T::reduce(&column(i), reduction)),
        What::ReduceScatter(reduction) if i / part == rank => Some(T::reduce(&column(i), reduction)),
        What::ReduceScatter(_) => None,
        What::AllGather => Some(all[i / part][i]),
        What::AllToAll => Some(all[i / part][rank * part + i % part]),
        What::Broadcast => Some(all[a][i]),
        What::SendRecv if rank == b => Some(all[a][i]),
        What::SendRecv => Some(all[rank][i]),
    };
    (0..n).map(|rank| (0..len).map(|i| element(rank, i)).collect()).collect()
}

/// A small generator, so that a case is a few numbers and its data any length.
fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (*seed ^ (*seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn check<T: Naive>(what: What, n: usize, len: usize, peers: [usize; 2], mut seed: u64) {
    let before: Vec<Vec<T>> =
        (0..n).map(|_| (0..len).map(|_| T::from_random(random(&mut seed))).collect()).collect();
    let after = loopback::spawn(n, |comm| {
        let mut buffer = Buffer::from_slice(&before[comm.rank()], &Meter::new(), Category::Grads).unwrap();
        if let Some(op) = what.op(comm.rank(), peers) {
            comm.run(op, &mut buffer).unwrap();
        }
        buffer.typed::<T>().unwrap().to_vec()
    });
    let after = after.unwrap();
    for (rank, (got, expected)) in after.iter().zip(naive(what, &before, peers)).enumerate() {
        assert_eq!(got.len(), expected.len());
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let Some(expected) = expected else { continue };
            let same = got.bits() == expected.bits() || got.is_nan() && expected.is_nan();
            assert!(same, "rank {rank}, element {i}: {got:?} instead of {expected:?}");
        }
    }
    if let What::AllReduce(_) = what {
        let bits = |values: &Vec<T>| values.iter().map(|x| x.bits()).collect::<Vec<_>>();
        assert!(after.iter().all(|values| bits(values) == bits(&after[0])), "ranks differ");
    }
}

fn reduction() -> impl Strategy<Value = Reduction> {
    prop_oneof![Just(Reduction::Sum), Just(Reduction::Mean), Just(Reduction::Max), Just(Reduction::Min)]
}

fn what() -> impl Strategy<Value = What> {
    prop_oneof![
        3 => reduction().prop_map(What::AllReduce),
        3 => reduction().prop_map(What::ReduceScatter),
        1 => Just(What::AllGather),
        1 => Just(What::AllToAll),
        1 => Just(What::Broadcast),
        1 => Just(What::SendRecv),
    ]
}

/// Around the sizes at which vectors, blocks and parts end, and anything in between.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        3 => 0usize..70,
        2 => 70usize..3000,
        1 => prop::sample::select(vec![0, 1, 1023, 1024, 1025, 4096, 8191, 8193, 20_000]),
    ]
}

fn cases(normal: u32) -> ProptestConfig {
    let long = std::env::var_os("MESHSTEP_LONG").is_some();
    ProptestConfig { cases: if long { normal * 20 } else { normal }, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(4000))]
    #[test]
    fn collectives_equal_the_naive_ones(
        what in what(), dtype in 0..5, n in 1usize..=8, len in length(), peers in any::<[usize; 2]>(), seed in any::<u64>()
    ) {
        let peers = peers.map(|peer| peer % n);
        let any_length = matches!(what, What::AllReduce(_) | What::Broadcast | What::SendRecv);
        let len = if any_length { len } else { len / n * n };
        let mean = matches!(what, What::AllReduce(Reduction::Mean) | What::ReduceScatter(Reduction::Mean));
        match dtype {
            0 => check::<f32>(what, n, len, peers, seed),
            1 => check::<f64>(what, n, len, peers, seed),
            2 => check::<bf16>(what, n, len, peers, seed),
            3 => check::<f16>(what, n, len, peers, seed),
            _ if mean => {}
            _ => check::<u64>(what, n, len, peers, seed),
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
    // bf16 reaches as far as its accumulator, so the sum of eight of the very largest is infinite.
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
