//! Parameters that several groups of ranks share in several ways, stepped together: one rank's result, bit for bit.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use meshstep_comm::{Communicator, Reduction, loopback};
use meshstep_optim::{AdamW, Lamb, Rule, Strided};
use meshstep_shard::{Among, At, Combine, Error, Initial, Optimizer, Options, Outcome, Owners, Parts, Stage};
use meshstep_tensor::{DType, Layout, Slice};
use std::sync::Arc;

const STEPS: usize = 4;
const CUT: usize = 150;
const WHOLE: usize = 70;
const PARTIAL: usize = 33;

/// Two replicas of two shards of two tensor-parallel ranks.
#[derive(Clone, Copy)]
struct Seat {
    replica: usize,
    shard: usize,
    tp: usize,
}

impl Seat {
    fn of(rank: usize) -> Self {
        Seat { replica: rank / 4, shard: rank / 2 % 2, tp: rank % 2 }
    }

    /// The ranks of other data.
    fn data(self) -> usize {
        self.replica * 2 + self.shard
    }
}

/// Gradients whose sums and means over four are exact.
fn grad(name: &str, i: usize, data: usize, step: usize) -> f32 {
    let salt: usize = name.bytes().map(usize::from).sum();
    ((i * 7 + data * 13 + step * 5 + salt * 3) % 17) as f32 * 4.0 - 32.0
}

fn first(name: &str, i: usize) -> f32 {
    ((i * 3 + name.len()) % 11) as f32 / 8.0
}

fn values(len: usize, of: impl Fn(usize) -> f32) -> Vec<f32> {
    (0..len).map(of).collect()
}

fn layout(params: &[(&str, usize)]) -> Layout {
    let add = |layout: meshstep_tensor::LayoutBuilder, (name, len): &(&str, usize)| {
        layout.param(*name, &[*len], DType::F32)
    };
    params.iter().fold(Layout::builder(), add).build().unwrap()
}

const AT: At = At { lr: 0.1, max_norm: Some(50.0), grad_scale: 1.0 };

fn norm_of(outcome: Outcome) -> (u64, u64) {
    match outcome {
        Outcome::Applied { norm, coef, .. } => (norm.to_bits(), coef.to_bits()),
        Outcome::Skipped { .. } => panic!("gradients are finite"),
    }
}

/// One number of a parameter that lies on one rank: the cut one is its parts after each other.
fn joined(name: &str, i: usize, of: impl Fn(&str, usize) -> f32) -> f32 {
    if name == "cut" { of(["cut0", "cut1"][i / CUT], i % CUT) } else { of(name, i) }
}

/// All parameters on one rank.
fn alone(rule: impl Rule + Clone + 'static, combine: Combine) -> (Vec<Vec<f32>>, Vec<(u64, u64)>) {
    let params = [("cut", 2 * CUT), ("whole", WHOLE), ("partial", PARTIAL)];
    let run = |comm: Arc<dyn Communicator>| {
        let options = Options { combine: Combine::Sum, ..Options::default() };
        let initial = |p: &meshstep_tensor::Param, mut w: meshstep_tensor::SliceMut<'_>| {
            w.copy_from(Slice::from(&values(p.len(), |i| joined(p.name(), i, first))[..]))
        };
        let mut opt = Optimizer::new(comm, layout(&params), rule.clone(), initial, options).unwrap();
        let mut norms = Vec::new();
        for step in 0..STEPS {
            let mb = opt.micro_batch(1).unwrap();
            for (name, len) in params {
                let parts = if name == "partial" { 2.0 } else { 1.0 };
                let of = |name: &str, i| (0..4).map(|data| grad(name, i, data, step)).sum::<f32>();
                let sum = |i| joined(name, i, of);
                let factor = if combine == Combine::Sum { 1.0 } else { 0.25 };
                mb.grad(name, &values(len, |i| sum(i) * parts * factor)[..]).unwrap();
            }
            mb.finish().unwrap();
            norms.push(norm_of(opt.step(AT).unwrap().outcome().unwrap()));
        }
        let param = |(name, _): (&str, usize)| opt.param(name).unwrap().typed::<f32>().unwrap().to_vec();
        (params.map(param).to_vec(), norms)
    };
    loopback::spawn(1, run).unwrap().remove(0)
}

/// The communicators of one rank's groups: ranks of equal colour.
struct Groups {
    shards: Arc<dyn Communicator>,
    replicas: Arc<dyn Communicator>,
    tp: Arc<dyn Communicator>,
    data: Arc<dyn Communicator>,
}

fn groups(world: &dyn Communicator, seat: Seat) -> Groups {
    let split = |colour: usize| world.split(Some(colour as u32), 0).unwrap().unwrap();
    Groups {
        shards: split(seat.replica * 2 + seat.tp),
        replicas: split(seat.shard * 2 + seat.tp),
        tp: split(seat.data()),
        data: split(seat.tp),
    }
}

/// The optimizer of one rank: a parameter cut along tp, one whole and alike, one whole with a part of its gradient each.
fn shared(
    world: Arc<dyn Communicator>,
    rule: impl Rule + Clone + 'static,
    options: Options,
) -> Result<Optimizer, Error> {
    let seat = Seat::of(world.rank());
    let of = groups(&*world, seat);
    let mean = if options.combine == Combine::Mean { Reduction::Mean } else { Reduction::Sum };
    let replicas = (of.replicas, mean);
    let cut = Among {
        shards: Arc::clone(&of.shards),
        further: vec![replicas.clone()],
        copies: of.data,
        counts: seat.replica == 0,
        parts: Default::default(),
    };
    let whole =
        Among { copies: Arc::clone(&world), counts: seat.replica == 0 && seat.tp == 0, ..cut.clone() };
    let partial = Among { further: vec![replicas, (of.tp, Reduction::Sum)], ..whole.clone() };
    let mut opt = Optimizer::empty(world, seat.tp == 0, options)?;
    for (among, name, len) in [(cut, "cut", CUT), (whole, "whole", WHOLE), (partial, "partial", PARTIAL)] {
        let initial = |p: &meshstep_tensor::Param, mut w: meshstep_tensor::SliceMut<'_>| {
            let name = own(p.name(), seat);
            w.copy_from(Slice::from(&values(p.len(), |i| first(&name, i))[..]))
        };
        opt.add_shared(layout(&[(name, len)]), rule.clone(), among, initial)?;
    }
    Ok(opt)
}

fn own(name: &str, seat: Seat) -> String {
    if name == "cut" { format!("cut{}", seat.tp) } else { name.to_owned() }
}

fn check(rule: impl Rule + Clone + 'static, stages: &[Stage]) {
    for combine in [Combine::Mean, Combine::Sum, Combine::Weighted] {
        let (params, norms) = alone(rule.clone(), combine);
        for &stage in stages {
            for initial in [Initial::Broadcast, Initial::Compare] {
                let run = |world: Arc<dyn Communicator>| {
                    let seat = Seat::of(world.rank());
                    let options =
                        Options { stage, combine, initial, bucket_len: Some(64), ..Options::default() };
                    let mut opt = shared(world, rule.clone(), options).unwrap();
                    let mut seen = Vec::new();
                    for step in 0..STEPS {
                        let mb = opt.micro_batch(1).unwrap();
                        for (name, len) in [("partial", PARTIAL), ("cut", CUT), ("whole", WHOLE)] {
                            mb.grad(name, &values(len, |i| grad(&own(name, seat), i, seat.data(), step))[..])
                                .unwrap();
                        }
                        mb.finish().unwrap();
                        seen.push(norm_of(opt.step(AT).unwrap().outcome().unwrap()));
                    }
                    // Each is a unit of its own.
                    let param = |name: &str| {
                        let unit = opt.gather(name).unwrap();
                        unit.param(name).unwrap().typed::<f32>().unwrap().to_vec()
                    };
                    (["cut", "whole", "partial"].map(param), seen)
                };
                for (rank, ([cut, whole, partial], seen)) in
                    loopback::spawn(8, run).unwrap().into_iter().enumerate()
                {
                    let what = format!("{stage:?} {combine:?} {initial:?} rank {rank}");
                    assert_eq!(seen, norms, "{what}");
                    assert_eq!(cut, params[0][rank % 2 * CUT..][..CUT], "{what}");
                    assert_eq!((&whole, &partial), (&params[1], &params[2]), "{what}");
                }
            }
        }
    }
}

#[test]
fn ways_of_sharing_step_together_as_one_rank_does() {
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];
    let stages = [&stages[..], &[Stage::WholeParams(Owners::SortedGreedy)]].concat();
    check(AdamW::default(), &stages);
}

/// The norms of a tensor that is cut between ranks, or held by several, are the whole tensor's.
#[test]
fn sums_over_tensors_are_of_whole_tensors() {
    check(Lamb::default(), &[Stage::Zero1, Stage::Zero2, Stage::Zero3]);
}

#[test]
fn sums_that_would_count_twice_are_refused() {
    let refused = loopback::spawn(8, |world: Arc<dyn Communicator>| {
        let options = Options { stage: Stage::Replicated, ..Options::default() };
        shared(world, Lamb::default(), options).unwrap_err()
    });
    for error in refused.unwrap() {
        assert!(matches!(&error, Error::Shared { what, .. } if what.contains("lamb")), "{error}");
    }
}

/// What one rank lacks, and what is not finite on one rank, is every rank's, whatever it shares with that one.
#[test]
fn ranks_that_share_nothing_decide_together() {
    for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        let run = |world: Arc<dyn Communicator>| {
            let (rank, seat) = (world.rank(), Seat::of(world.rank()));
            let mut opt = shared(world, AdamW::default(), Options { stage, ..Options::default() }).unwrap();
            let mut said = Vec::new();
            for step in 0..3 {
                let mb = opt.micro_batch(1).unwrap();
                for (name, len) in [("partial", PARTIAL), ("cut", CUT), ("whole", WHOLE)] {
                    let mut own = values(len, |i| grad(&own(name, seat), i, seat.data(), step));
                    if (step, rank, name) == (1, 5, "cut") {
                        own[7] = f32::NAN;
                    }
                    if (step, rank, name) != (0, 6, "whole") {
                        mb.grad(name, &own[..]).unwrap();
                    }
                }
                mb.finish().unwrap();
                said.push(match opt.step(AT).and_then(|pending| pending.outcome()) {
                    Ok(Outcome::Applied { .. }) => "applied".to_owned(),
                    Ok(Outcome::Skipped { .. }) => "skipped".to_owned(),
                    Err(error) => error.to_string(),
                });
            }
            (said, opt.state("cut").unwrap().t)
        };
        let all = loopback::spawn(8, run).unwrap();
        for (said, t) in &all {
            assert!(said[0].contains("rank 6") && said[0].contains("whole"), "{said:?}");
            assert_eq!((&said[1..], *t), (&["skipped".to_owned(), "applied".to_owned()][..], 1), "{stage:?}");
        }
    }
}

/// Nothing to step with is an error on every rank.
#[test]
fn an_optimizer_without_parameters_says_so() {
    loopback::spawn(2, |world: Arc<dyn Communicator>| {
        let mut opt = Optimizer::empty(world, true, Options::default()).unwrap();
        assert!(matches!(opt.micro_batch(1).map(drop), Err(Error::NothingTrains)));
        assert!(matches!(opt.step(AT).map(drop), Err(Error::NothingTrains)));
    })
    .unwrap();
}

/// Parts that leave elements out, or have them twice, on one rank are an error on every rank, and the next try goes well.
#[test]
fn parts_that_are_not_the_parameter_are_refused() {
    let by = |run| Strided { first: 9, run, stride: 100 };
    let wrong: [Parts; 5] = [
        vec![],
        vec![(0..5, by(5))],
        vec![(0..5, by(5)), (4..10, by(5))],
        vec![(0..5, by(5)), (5..11, by(5))],
        vec![(0..10, by(0))],
    ];
    loopback::spawn(2, |world: Arc<dyn Communicator>| {
        let rank = world.rank();
        let mut opt = Optimizer::empty(Arc::clone(&world), rank == 0, Options::default()).unwrap();
        let shards = world.split(Some(rank as u32), 0).unwrap().unwrap();
        let mut add = |parts: Parts| {
            let parts = [("w".to_owned(), parts)].into();
            let among = Among { copies: Arc::clone(&shards), parts, ..Among::all(Arc::clone(&shards)) };
            opt.add_shared(layout(&[("w", 10)]), AdamW::default(), among, |_, _| Ok(()))
        };
        let right: Parts = vec![(0..4, by(2)), (4..10, by(6))];
        for wrong in &wrong {
            let error = add(if rank == 1 { wrong.clone() } else { right.clone() }).unwrap_err();
            assert_eq!(rank == 1, matches!(&error, Error::Parts { len: 10, .. }), "{error}");
            assert!(error.to_string().contains("\"w\" are not its 10 elements"), "{error}");
        }
        add(right).unwrap();
    })
    .unwrap();
}
