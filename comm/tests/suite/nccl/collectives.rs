//! Every collective, reduction and type against the naive implementation of loopback's tests.

use crate::naive::{Naive, What, naive, own, random};
use crate::nccl::bench::{Rank, alone, available, multiplies, patient, ranks};
use meshstep_cases::tried;
use meshstep_comm::nccl::{self, Unavailable};
use meshstep_comm::{Communicator, Error, Kind, Op, Reduction, Traffic};
use meshstep_tensor::{Buffer, Element, bf16, f16};

const REDUCTIONS: [Reduction; 5] =
    [Reduction::Sum, Reduction::Mean, Reduction::Max, Reduction::Min, Reduction::PreMulSum { factor: 0.3 }];

/// Test element, with the error of one rounding.
trait Number: Naive + Default {
    /// Returns a small whole number: sums of eight are exact.
    fn whole(bits: u64) -> Self;
    /// Returns a number of moderate size with many digits.
    fn long(bits: u64) -> Self;
    fn wide(self) -> f64;
    const EPSILON: f64;
}

macro_rules! number {
    ($t:ty, $of:expr, $wide:expr, $epsilon:expr) => {
        impl Number for $t {
            fn whole(bits: u64) -> Self {
                $of((bits % 32) as f64)
            }
            fn long(bits: u64) -> Self {
                $of((bits >> 12) as f64 / (1u64 << 49) as f64 + 0.01)
            }
            fn wide(self) -> f64 {
                $wide(self)
            }
            const EPSILON: f64 = $epsilon;
        }
    };
}
number!(f32, |x: f64| x as f32, f64::from, f32::EPSILON as f64);
number!(f64, |x| x, |x| x, f64::EPSILON);
number!(bf16, bf16::from_f64, bf16::to_f64, 1.0 / 128.0);
number!(f16, f16::from_f64, f16::to_f64, 1.0 / 1024.0);
number!(u64, |x: f64| x as u64, |x| x as f64, 0.0);

fn reduction(what: What) -> Option<Reduction> {
    match what {
        What::AllReduce(how) | What::ReduceScatter(how) => Some(how),
        _ => None,
    }
}

/// Compares one collective with the naive one: bit by bit, or up to one rounding of the addends for each rank and one more.
fn check<T: Number + Element + Clone>(rank: &Rank, what: What, len: usize, peers: [usize; 2], long: bool) {
    let (n, me) = (rank.comm.world_size(), rank.comm.rank());
    let mut seed = len as u64 + 7;
    let value = |bits| if long { T::long(bits) } else { T::whole(bits) };
    let all: Vec<Vec<T>> = (0..n).map(|_| (0..len).map(|_| value(random(&mut seed))).collect()).collect();
    let mut buffer = rank.buffer(&all[me]);
    if let Some(op) = what.op(me, peers) {
        rank.dyn_comm().run(op, &mut buffer).unwrap();
    }
    let how = reduction(what);
    let exact = match how {
        Some(Reduction::Sum | Reduction::SumThenMax { .. }) => !long,
        Some(Reduction::Mean) => !long && n.is_power_of_two(),
        Some(Reduction::PreMulSum { .. }) => false,
        _ => true,
    };
    let share = |rank, i: usize| match how.map(|how| own(how, rank)) {
        Some(Reduction::PreMulSum { factor }) => (factor * all[rank][i].wide()).abs(),
        _ => 0.0,
    };
    let (range, expected) = naive(what, &all, peers).swap_remove(me);
    let got = &rank.read::<T>(&buffer)[range.clone()];
    for (i, (got, expected)) in range.zip(got.iter().zip(expected)) {
        let size = (0..n).map(|rank| share(rank, i)).sum::<f64>().max(expected.wide());
        let close = (got.wide() - expected.wide()).abs() <= (n + 1) as f64 * T::EPSILON * size;
        assert!(
            got.bits() == expected.bits() || !exact && close,
            "{what:?} on rank {me} of {n}, element {i} of {len}: {got:?} instead of {expected:?}"
        );
    }
}

/// Checks the collectives that type `row` of five supports; half of the cases on the stand-in, where each call takes long.
fn check_all<T: Number + Element + Clone>(rank: &Rank, row: usize, float: bool) {
    let n = rank.comm.world_size();
    let all = !nccl::probe().unwrap().stand_in;
    let known = |how: &Reduction| match how {
        Reduction::Mean => float,
        Reduction::PreMulSum { .. } => float && multiplies(),
        _ => true,
    };
    let reductions = REDUCTIONS.into_iter().filter(known);
    let mut whats = vec![What::AllGather, What::AllToAll, What::Broadcast, What::SendRecv];
    whats.extend(reductions.flat_map(|how| [What::AllReduce(how), What::ReduceScatter(how)]));
    if !float {
        whats.extend([0, 20, 2000].map(|sums| What::AllReduce(Reduction::SumThenMax { sums })));
    }
    for (i, what) in whats.into_iter().enumerate() {
        let any_length = matches!(what, What::AllReduce(_) | What::Broadcast | What::SendRecv);
        for (j, len) in [0, 1, 31, 32, 33, 1000].into_iter().enumerate() {
            let len = if any_length { len } else { len / n * n };
            for (k, long) in [false, true].into_iter().enumerate() {
                if all || tried(((2 * i + k) * 5 + row) * 6 + j, 2) {
                    check::<T>(rank, what, len, [len % n, (len + 1) % n], long);
                }
            }
        }
    }
}

pub(crate) fn check_every_type(rank: &Rank) {
    check_all::<f32>(rank, 0, true);
    check_all::<f64>(rank, 1, true);
    check_all::<bf16>(rank, 2, true);
    check_all::<f16>(rank, 3, true);
    check_all::<u64>(rank, 4, false);
}

#[test]
fn collectives_equal_the_naive_ones() {
    let _alone = alone();
    for n in [1, 2, 3, 4] {
        if !available(n) {
            continue;
        }
        ranks(n, &patient(), |comm| {
            let rank = Rank::new(comm);
            check_every_type(&rank);
            let live = rank.meter.live_total();
            assert_eq!(live, 0, "buffers come back and go");
        });
    }
}

#[test]
fn large_buffers_are_whole() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    ranks(2, &patient(), |comm| check_large(&Rank::new(comm)));
}

pub(crate) fn check_large(rank: &Rank) {
    check::<f32>(rank, What::AllReduce(Reduction::Sum), 278_011, [0, 1], false);
    check::<u64>(rank, What::AllToAll, 278_012, [0, 1], true);
}

#[test]
fn groups_of_ranks_work_by_themselves() {
    let _alone = alone();
    if !available(4) {
        return;
    }
    let places = ranks(4, &patient(), |comm| {
        let rank = Rank::new(comm);
        let color = [Some(u32::MAX), Some(3), Some(u32::MAX), None][rank.comm.rank()];
        let key = [5, 0, -5, 0][rank.comm.rank()];
        let group = rank.comm.split(color, key).unwrap();
        let stats = rank.comm.stats().of(Kind::Split);
        assert_eq!(stats, Traffic { operations: 1, bytes: 0 });
        let inner = group.map(|group| {
            let mut buffer = rank.buffer(&[rank.comm.rank() as f32]);
            group.all_reduce(&mut buffer, Reduction::Sum).unwrap();
            // A group of a group, on its own.
            let alone = group.split(Some(group.rank() as u32), 0).unwrap().unwrap();
            alone.barrier().unwrap();
            (group.rank(), group.world_size(), alone.world_size(), rank.read::<f32>(&buffer)[0])
        });
        (inner, rank.sum(1.0).unwrap())
    });
    let expected = [Some((1, 2, 1, 2.0)), Some((0, 1, 1, 1.0)), Some((0, 2, 1, 2.0)), None];
    assert_eq!(places, expected.map(|place| (place, 4.0)));
}

#[test]
fn factors_need_a_newer_nccl_than_the_rest() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    ranks(2, &patient(), |comm| {
        let rank = Rank::new(comm);
        let mut buffer = rank.buffer(&[3f32, -1.0]);
        let factor = [0.5, -2.0][rank.comm.rank()];
        let told = rank.dyn_comm().all_reduce(&mut buffer, Reduction::PreMulSum { factor });
        if multiplies() {
            assert_eq!((told, rank.read::<f32>(&buffer)), (Ok(()), vec![-4.5, 1.5]));
        } else {
            let Err(Error::NoNccl(Unavailable::TooOld { needed: 21_100, .. })) = told else {
                panic!("{told:?}")
            };
        }
        assert_eq!(rank.sum(1.5), Ok(3.0));
    });
}

#[test]
fn each_call_of_a_group_has_its_own_factor() {
    let _alone = alone();
    if !available(2) || !multiplies() {
        return;
    }
    ranks(2, &patient(), |comm| use_own_factors(&Rank::new(comm)));
}

pub(crate) fn use_own_factors(rank: &Rank) {
    let me = rank.comm.rank() as f64;
    let by = |factor| Reduction::PreMulSum { factor };
    // More operations in a row than the stand-in has slots for factors.
    for _ in 0..20 {
        let calls = [
            (Op::all_reduce(by(me + 0.5)), rank.buffer(&[2f32; 3])),
            (Op::reduce_scatter(by(-me)), rank.buffer(&[3f64, 5.0])),
            (Op::all_reduce(Reduction::Sum), rank.buffer(&[7f32])),
            (Op::all_reduce(by(1.0 - me)), rank.buffer(&[bf16::from_f64(me + 1.0)])),
        ];
        let started = rank.comm.start_group(calls, &rank.queue).unwrap();
        let buffers = started.map(|one| landed(one.wait(&rank.queue)));
        assert_eq!(rank.read::<f32>(&buffers[0]), [4.0; 3]);
        assert_eq!(rank.read::<f64>(&buffers[1])[rank.comm.rank()], [-3.0, -5.0][rank.comm.rank()]);
        assert_eq!(rank.read::<f32>(&buffers[2]), [14.0]);
        assert_eq!(rank.read::<bf16>(&buffers[3]), [bf16::from_f64(1.0)]);
    }
}

#[test]
fn calls_of_a_group_go_together() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    ranks(2, &patient(), |comm| trade_in_groups(&Rank::new(comm)));
}

pub(crate) fn trade_in_groups(rank: &Rank) {
    let (me, other) = (rank.comm.rank(), 1 - rank.comm.rank());
    for _ in 0..3 {
        // Both ranks send first: without a group they would wait for each other.
        let calls = [
            (Op::send(other), rank.buffer(&[me as f32; 5])),
            (Op::recv(other), rank.buffer(&[9f32; 5])),
            (Op::all_reduce(Reduction::Sum), rank.buffer(&[1f32; 3])),
            (Op::all_to_all(), rank.buffer(&[2 * me as u64, 2 * me as u64 + 1])),
            (Op::all_to_all(), rank.buffer(&[10 + me as u64, 20 + me as u64])),
        ];
        let started = rank.comm.start_group(calls, &rank.queue).unwrap();
        let buffers = started.map(|one| landed(one.wait(&rank.queue)));
        assert_eq!(rank.read::<f32>(&buffers[0]), [me as f32; 5]);
        assert_eq!(rank.read::<f32>(&buffers[1]), [other as f32; 5]);
        assert_eq!(rank.read::<f32>(&buffers[2]), [2.0; 3]);
        assert_eq!(rank.read::<u64>(&buffers[3]), [me as u64, 2 + me as u64]);
        let part = 10 * (me as u64 + 1);
        assert_eq!(rank.read::<u64>(&buffers[4]), [part, part + 1]);
    }
}

#[test]
fn sent_bytes_are_counted_as_a_ring_sends_them() {
    let _alone = alone();
    if !available(2) {
        return;
    }
    ranks(2, &patient(), |comm| {
        let rank = Rank::new(comm);
        let comm = rank.dyn_comm();
        let mut buffer = rank.buffer(&[1f32; 10]);
        comm.all_reduce(&mut buffer, Reduction::Mean).unwrap();
        comm.all_gather(&mut buffer).unwrap();
        comm.barrier().unwrap();
        let stats = comm.stats();
        assert_eq!(stats.of(Kind::AllReduce), Traffic { operations: 1, bytes: 40 });
        assert_eq!(stats.of(Kind::AllGather), Traffic { operations: 1, bytes: 20 });
        assert_eq!(stats.total(), Traffic { operations: 3, bytes: 60 });
        let record = rank.comm.flight_record();
        let lines: Vec<&str> = record.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("operation 0 ") && lines[0].contains("all_reduce(mean) of 10 f32"));
        assert!(!record.contains("not seen"), "{record}");
    });
}

fn landed((buffer, ended): (Buffer, Result<(), Error>)) -> Buffer {
    ended.unwrap();
    buffer
}
