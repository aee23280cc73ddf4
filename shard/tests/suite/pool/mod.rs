//! Memory for gradients in flight, at stages 2 and 3: one bucket of each family fills while another travels, and no rank waits
//! forever for a gradient that another lacks.

mod missing;

use crate::common::draws;
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::{
    DataRank, Error, Fault, Master, MicroBatch, Missing, Optimizer, Options, Outcome, ParamGroup, Part, Plan,
    Precision, RankRoles, Sizes, Stage, StepArgs, Traffic,
};
use meshstep_tensor::DType::{self, BF16, F32};
use meshstep_tensor::{Category, Layout, LayoutBuilder, Meter, Param, SliceMut};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const RANKS: usize = 2;

const BLOCKS: usize = 6;

/// Names, lengths and types of a part's parameters in each block.
type Of = &'static [(&'static str, usize, DType)];

/// Each matrix fills a bucket, three norms fill one; in the last two rows types alternate within parts.
const FAMILIES: [&[Of]; 5] = [
    &[&[("w", 300, F32)]],
    &[&[("w", 300, F32)], &[("n", 20, F32)]],
    &[&[("w", 300, F32)], &[("n", 20, F32)], &[("q", 150, F32)]],
    &[&[("w", 300, BF16), ("n", 20, F32)]],
    &[&[("w", 300, BF16), ("n", 20, F32)], &[("q", 150, F32), ("r", 30, BF16)]],
];

/// A parameter of a block.
type Whose = (String, usize, DType);

/// Parameters in the order of a backward pass.
fn backward(parts: &[Of]) -> Vec<Whose> {
    let block = |b: usize| {
        let of_block = parts.iter().copied().flatten().rev();
        of_block.map(move |&(own, len, dtype)| (format!("{b}{own}"), len, dtype))
    };
    (0..BLOCKS).rev().flat_map(block).collect()
}

fn options(parts: &[Of], stage: Stage) -> Options {
    let mixed = parts.iter().copied().flatten().any(|param| param.2 == BF16);
    let master = if mixed { Master::F32 } else { Master::default() };
    let precision = Precision { master, ..Precision::default() };
    Options { stage, precision, bucket_len: Some(200), meter: Meter::new(), ..Options::default() }
}

fn planned(parts: &[Of], options: &Options) -> Vec<Part> {
    let each: usize = parts.iter().map(|of| of.len()).sum();
    let part = |i: usize| {
        let before: usize = parts[..i].iter().map(|of| of.len()).sum();
        let block = |layout: LayoutBuilder, b: usize| {
            let layout = layout.unit(format!("{b}"));
            let add = |layout: LayoutBuilder, &(own, len, dtype): &(&str, usize, DType)| {
                layout.param(format!("{b}{own}"), &[len], dtype)
            };
            parts[i].iter().fold(layout, add)
        };
        let layout: Layout = (0..BLOCKS).fold(Layout::builder(), block).build().unwrap();
        let positions = (0..BLOCKS).flat_map(|b| (0..parts[i].len()).map(move |p| b * each + before + p));
        Part::new(layout, Sizes::all(RANKS), [], options).unwrap().at(positions.collect()).unwrap()
    };
    (0..parts.len()).map(part).collect()
}

fn optimizer(comm: &Arc<dyn Communicator>, parts: &[Of], options: Options) -> Optimizer {
    let zeros = |_: &Param, _: SliceMut<'_>| Ok(());
    let shared =
        |part| ParamGroup { part, rules: AdamW::default().into(), among: RankRoles::all(Arc::clone(comm)) };
    let shared = planned(parts, &options).into_iter().map(shared).collect();
    let mut opt = Optimizer::empty(Arc::clone(comm), DataRank::OWN, options).unwrap();
    opt.add_parts(shared, zeros).unwrap();
    opt
}

fn values((name, len, _): &Whose, rank: usize, t: u64) -> Vec<f64> {
    let seed =
        name.bytes().fold(t + 31 * rank as u64, |seed, byte| crate::common::hash(&[seed, u64::from(byte)]));
    (0..*len).map(|j| (crate::common::hash(&[seed, j as u64]) % 64) as f64 - 32.0).collect()
}

fn hand_over(mb: &MicroBatch<'_>, param: &Whose, values: &[f64]) {
    crate::common::with_dtype(param.2, values, |grad| mb.grad(&param.0, grad)).unwrap();
}

fn traffic(outcome: Outcome) -> Traffic {
    match outcome {
        Outcome::Applied { traffic, .. } => traffic,
        skipped => panic!("{skipped:?}"),
    }
}

/// The first rank reaches the second matrix before the other has begun: the first matrix is still in flight and buckets of the
/// other families are open, and the rank waits for none of them. The pool takes the planned memory.
#[test]
fn a_bucket_fills_while_another_of_its_family_travels() {
    for (parts, stage) in
        FAMILIES.into_iter().flat_map(|parts| [(parts, Stage::Zero2), (parts, Stage::Zero3)])
    {
        let plan = Plan::of(RANKS, planned(parts, &options(parts, stage)), &options(parts, stage)).unwrap();
        let (order, begins) = (backward(parts), Barrier::new(RANKS));
        let second = order.iter().position(|param| param.0 == "4w").unwrap();
        loopback::spawn(RANKS, |comm| {
            let (rank, options) = (comm.rank(), options(parts, stage));
            let (mut opt, meter) = (optimizer(&comm, parts, options.clone()), options.meter);
            for t in 1..=3 {
                let mb = opt.micro_batch(1).unwrap();
                if rank == 1 {
                    begins.wait();
                }
                for (i, param) in order.iter().enumerate() {
                    if rank == 0 && i == second {
                        drop(mb.slot(&param.0).unwrap());
                        begins.wait();
                    }
                    hand_over(&mb, param, &values(param, rank, t));
                }
                mb.finish().unwrap();
                let traffic = traffic(opt.step(StepArgs::default()).unwrap().outcome().unwrap());
                assert_eq!(traffic.pool_grown, 0, "{parts:?} {stage:?}");
            }
            let held = plan.memory(rank, &AdamW::default());
            assert_eq!(meter.peak(Category::Buckets), held.buckets, "{parts:?} {stage:?}");
            assert_eq!(meter.live_total(), held.total(), "{parts:?} {stage:?}");
        })
        .unwrap();
    }
}

/// Each family and type has memory for its own longest two consecutive buckets, or for one if it has only one.
#[test]
fn a_pool_is_two_buckets_of_each_family() {
    // Lengths in multiples of 128 elements; three norms of 64 a bucket are 256, two blocks of r 128.
    let [w, n, q, r] = [384 + 384, 256 + 256, 256 + 256, 256 + 256];
    let expected = [4 * w, 4 * (w + n), 4 * (w + n + q), 2 * w + 4 * n, 2 * (w + r) + 4 * (n + q)];
    for (parts, bytes) in FAMILIES.into_iter().zip(expected) {
        let options = options(parts, Stage::Zero2);
        let plan = Plan::of(RANKS, planned(parts, &options), &options).unwrap();
        assert_eq!(plan.memory(0, &AdamW::default()).buckets, bytes, "{parts:?}");
        let names: Vec<String> = (0..parts.len()).flat_map(|i| names(parts, i)).collect();
        let index = |param: &Whose| names.iter().position(|name| *name == param.0).unwrap();
        assert_eq!(plan.pool_bytes(backward(parts).iter().map(index)), bytes, "{parts:?}");
        assert!(plan.pool_bytes(0..names.len()) > bytes, "{parts:?}");
    }
}

fn names(parts: &[Of], i: usize) -> Vec<String> {
    planned(parts, &options(parts, Stage::Zero2))[i]
        .layout()
        .params()
        .iter()
        .map(|p| p.name().to_owned())
        .collect()
}

/// With mixed types and parts, no bucket waits for one that fills later.
#[test]
fn buckets_travel_as_they_fill_whatever_their_types() {
    for parts in FAMILIES {
        let options = options(parts, Stage::Zero2);
        let plan = Plan::of(RANKS, planned(parts, &options), &options).unwrap();
        let order = backward(parts);
        let full = |&(part, b): &(usize, usize)| {
            let names = names(parts, part);
            let params = plan.parts()[part].buckets()[b].params.iter().map(|p| &names[p.param]);
            params.map(|name| order.iter().position(|param| param.0 == *name).unwrap()).max().unwrap()
        };
        let travel: Vec<usize> = plan.order().iter().map(full).collect();
        assert!(travel.is_sorted(), "{parts:?}: {travel:?}");
    }
}

/// Returns the results of three steps. In the first two the second rank has no gradient of the first matrix, or hands over zeros
/// if `lack` is false. The model waits for all ranks after each gradient, or gathers the next block.
fn steps(parts: &[Of], options: &Options, lack: bool) -> Vec<(Vec<String>, u64, Vec<Vec<u8>>)> {
    let config = loopback::Config { timeout: Duration::from_secs(300), ..loopback::Config::new(RANKS) };
    let order = backward(parts);
    let ends = loopback::spawn_with(config, |comm| {
        let (rank, options) = (comm.rank(), Options { meter: Meter::new(), ..options.clone() });
        let (model, meter) = (comm.split(Some(0), 0).unwrap().unwrap(), options.meter.clone());
        let gathers = options.stage == Stage::Zero3;
        let mut opt = optimizer(&comm, parts, options);
        let (live, mut said, mut grown) = (meter.live(Category::Buckets), Vec::new(), 0);
        for t in 1..=3 {
            let mb = opt.micro_batch(1).unwrap();
            for param in &order {
                let unit = gathers.then(|| mb.gather(&param.0[..1]).unwrap());
                let odd = rank == 1 && t < 3 && param.0 == "5w";
                let values = if odd { vec![0.0; param.1] } else { values(param, rank, t) };
                if !(odd && lack) {
                    hand_over(&mb, param, &values);
                }
                drop(unit);
                if !gathers {
                    model.barrier().unwrap();
                }
            }
            mb.finish().unwrap();
            said.push(match opt.step(StepArgs::default()).and_then(|step| step.outcome()) {
                Ok(outcome) => {
                    grown = traffic(outcome).pool_grown;
                    "applied".to_owned()
                }
                Err(Error::Fault { rank, fault: Fault::MissingGradient { name } }) => {
                    format!("{rank} {name}")
                }
                Err(error) => panic!("{error}"),
            });
            assert_eq!(meter.live(Category::Buckets), live, "what was taken beyond the plan is given back");
        }
        (said, grown, crate::common::params(&opt))
    });
    ends.unwrap()
}

/// A rank waits for a bucket with a gradient that another rank lacks, and that rank waits for it in the model: both continue.
#[test]
fn a_gradient_that_one_rank_lacks_holds_up_no_collective_of_the_model() {
    let began = Instant::now();
    let cases = [
        (Stage::Zero2, Missing::Zero, true),
        (Stage::Zero2, Missing::SkipIfMissingEverywhere, true),
        (Stage::Zero2, Missing::Error, true),
        (Stage::Zero3, Missing::Zero, true),
        (Stage::Zero3, Missing::Error, true),
        (Stage::Zero3, Missing::AllOrNone, true),
        (Stage::Zero1, Missing::Zero, false),
        (Stage::Zero2, Missing::Zero, false),
    ];
    let mut drawn = draws(1);
    for (stage, missing, overlap) in cases {
        for parts in [FAMILIES[0], FAMILIES[4]].into_iter().filter(|_| drawn()) {
            let wait_budget = Duration::from_millis(20);
            let options = Options { missing, overlap, wait_budget, ..options(parts, stage) };
            let ends = steps(parts, &options, true);
            let what = format!("{stage:?} {missing:?}, overlap: {overlap}, {parts:?}");
            let fails = matches!(missing, Missing::Error | Missing::AllOrNone);
            let told = if fails { "1 5w" } else { "applied" };
            for (said, ..) in &ends {
                assert_eq!(said[..], [told, told, "applied"], "{what}");
            }
            assert!(stage == Stage::Zero1 || ends[0].1 > 0, "{what}");
            assert_eq!(ends[0].2, ends[1].2, "{what}");
            if !fails {
                let wait_budget = Duration::MAX;
                let zeros = steps(parts, &Options { wait_budget, ..options }, false);
                assert_eq!((zeros[0].1, &zeros[0].2), (0, &ends[0].2), "{what}");
            }
        }
    }
    assert!(began.elapsed() < Duration::from_secs(200), "{:?}", began.elapsed());
}
