//! Every collective, slow and obvious: all buffers in one place.

use meshstep_comm::{Op, Reduction};
use meshstep_tensor::{Element, bf16, f16};
use std::ops::Range;

/// Element operations of the naive collectives, with `half`'s conversions and not with this crate's.
pub(crate) trait Naive: Element + Copy {
    fn from_random(bits: u64) -> Self;
    /// Reduces `values`, in order.
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
    let nan = || values.iter().copied().find(|&x| is_nan(x));
    match reduction {
        Reduction::Sum | Reduction::PreMulSum { .. } => sum(),
        Reduction::SumThenMax { .. } => unreachable!("an element has one of the two"),
        Reduction::Pairwise => unreachable!("`tree` adds two values at a time"),
        Reduction::Mean => mean(sum(), values.len()),
        Reduction::Max => {
            nan().unwrap_or_else(|| values.iter().copied().reduce(|a, b| if b > a { b } else { a }).unwrap())
        }
        Reduction::Min => {
            nan().unwrap_or_else(|| values.iter().copied().reduce(|a, b| if b < a { b } else { a }).unwrap())
        }
    }
}

/// Returns mostly values of similar size, so that rounding matters, and some random bit patterns.
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
                let times = |(rank, &x)| match own(reduction, rank) {
                    Reduction::PreMulSum { factor } => $widen(x) * factor as $wide,
                    _ => $widen(x),
                };
                let wide = values.iter().enumerate().map(times);
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
    /// Sums keep the rounding errors of each addition (Dekker) and of each product, and are rounded at the end.
    fn reduce(values: &[Self], reduction: Reduction) -> Self {
        if let Reduction::PreMulSum { .. } = reduction {
            return sum_of_products(values, reduction);
        }
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
                // Halving is exact except for subnormal numbers, which are rounded once.
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

fn sum_of_products(values: &[f64], reduction: Reduction) -> f64 {
    let product = |rank: usize| {
        let Reduction::PreMulSum { factor } = own(reduction, rank) else { unreachable!() };
        let rounded = values[rank] * factor;
        (rounded, values[rank].mul_add(factor, -rounded))
    };
    let (mut high, mut low) = product(0);
    for (rounded, left) in (1..values.len()).map(product) {
        let sum = high + rounded;
        low += if high.abs() >= rounded.abs() { (high - sum) + rounded } else { (rounded - sum) + high };
        low += left;
        high = sum;
    }
    if low != 0.0 && high.is_finite() { high + low } else { high }
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

/// Returns the reduction as rank `rank` calls it: with its own factor, if the reduction has factors; rank 0's is the given one.
pub(crate) fn own(reduction: Reduction, rank: usize) -> Reduction {
    let Reduction::PreMulSum { factor } = reduction else { return reduction };
    let bits = random(&mut (factor.to_bits() ^ rank as u64));
    let size = (bits >> 12) as f64 / (1u64 << 50) as f64;
    let factor = match bits % 8 {
        _ if rank == 0 => factor,
        0 => 0.0,
        1 | 2 => -size,
        _ => size,
    };
    Reduction::PreMulSum { factor }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    AllReduce(Reduction),
    ReduceScatter(Reduction),
    AllGather,
    AllToAll,
    Broadcast,
    SendRecv,
}

impl What {
    /// Returns the call of `rank`, if any; `a` is the root or the sender and `b` the receiver.
    pub(crate) fn op(self, rank: usize, [a, b]: [usize; 2]) -> Option<Op> {
        Some(match self {
            What::AllReduce(reduction) => Op::all_reduce(own(reduction, rank)),
            What::ReduceScatter(reduction) => Op::reduce_scatter(own(reduction, rank)),
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

/// Returns the result of each rank and its range; outside of it the result is unspecified.
pub(crate) fn naive<T: Naive>(what: What, all: &[Vec<T>], [a, b]: [usize; 2]) -> Vec<(Range<usize>, Vec<T>)> {
    let (n, len) = (all.len(), all[0].len());
    let part = |rank: usize| rank * (len / n)..(rank + 1) * (len / n);
    let reduced = |range: Range<usize>, how: Reduction| {
        let mut column = Vec::with_capacity(n);
        let one = |i: usize| {
            column.clear();
            column.extend(all.iter().map(|values| values[i]));
            let how = match how {
                Reduction::SumThenMax { sums } => {
                    if i < sums {
                        Reduction::Sum
                    } else {
                        Reduction::Max
                    }
                }
                how => how,
            };
            if how == Reduction::Pairwise { tree(&column) } else { T::reduce(&column, how) }
        };
        range.map(one).collect::<Vec<T>>()
    };
    // Vectors are long, and copied whole.
    match what {
        What::AllReduce(how) => vec![(0..len, reduced(0..len, how)); n],
        What::ReduceScatter(how) => (0..n).map(|rank| (part(rank), reduced(part(rank), how))).collect(),
        What::AllGather => {
            let parts: Vec<&[T]> = all.iter().enumerate().map(|(of, values)| &values[part(of)]).collect();
            vec![(0..len, parts.concat()); n]
        }
        What::AllToAll => {
            let to = |rank: usize| all.iter().map(|values| &values[part(rank)]).collect::<Vec<&[T]>>();
            (0..n).map(|rank| (0..len, to(rank).concat())).collect()
        }
        What::Broadcast => vec![(0..len, all[a].clone()); n],
        What::SendRecv => {
            (0..n).map(|rank| (0..len, all[if rank == b { a } else { rank }].clone())).collect()
        }
    }
}

/// Returns the sum of a first part and of the rest, where the first part is the largest power of two that leaves a rest.
fn tree<T: Naive>(values: &[T]) -> T {
    if let [value] = values {
        return *value;
    }
    let (first, rest) = values.split_at(values.len().next_power_of_two() / 2);
    T::reduce(&[tree(first), tree(rest)], Reduction::Sum)
}

/// Small random generator: a case is a few numbers, and its data any length.
pub(crate) fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (*seed ^ (*seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
