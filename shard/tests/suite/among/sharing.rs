//! Eight ranks that share parameters in different ways, and the same parameters on one rank.

use crate::common::{fetch, put};
use meshstep_comm::{Communicator, Reduction, loopback};
use meshstep_optim::{AdamW, Rule};
use meshstep_shard::{
    Combine, DataRank, Error, Optimizer, Options, Outcome, RankRoles, StepArgs, WeightError,
};
use meshstep_tensor::{DType, Layout, Slice};
use std::sync::Arc;

const STEPS: usize = 4;
pub(crate) const CUT: usize = 150;
const WHOLE: usize = 70;
const PARTIAL: usize = 33;
/// Parameters in the order of their gradients.
const PARAMS: [(&str, usize); 3] = [("partial", PARTIAL), ("cut", CUT), ("whole", WHOLE)];
const AT: StepArgs = StepArgs { lr: 0.1, max_norm: Some(50.0), grad_scale: 1.0 };

/// Parameters, and the bits of each step's norm and factor.
pub(crate) type End = (Vec<Vec<f32>>, Vec<(u64, u64)>);

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

    /// Index of the rank's data.
    fn data(self) -> usize {
        self.replica * 2 + self.shard
    }
}

/// Gradients with exact sums and means over four ranks.
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

pub(crate) fn layout(params: &[(&str, usize)]) -> Layout {
    let add = |layout: meshstep_tensor::LayoutBuilder, (name, len): &(&str, usize)| {
        layout.param(*name, &[*len], DType::F32)
    };
    params.iter().fold(Layout::builder(), add).build().unwrap()
}

fn norm_of(outcome: Outcome) -> (u64, u64) {
    match outcome {
        Outcome::Applied { norm, coef, .. } => (norm.to_bits(), coef.to_bits()),
        Outcome::Skipped { .. } => panic!("gradients are finite"),
    }
}

/// Element of a parameter on a single rank: the cut parameter is the concatenation of its parts.
fn joined(name: &str, i: usize, of: impl Fn(&str, usize) -> f32) -> f32 {
    if name == "cut" { of(["cut0", "cut1"][i / CUT], i % CUT) } else { of(name, i) }
}

/// Runs all parameters on one rank.
pub(crate) fn alone(rule: impl Rule + Clone + 'static, combine: Combine) -> End {
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

/// Builds the optimizer of one rank: one parameter cut along tp, one whole and replicated, one whole with a partial gradient on
/// each rank.
pub(crate) fn shared(
    world: Arc<dyn Communicator>,
    rule: impl Rule + Clone + 'static,
    options: Options,
) -> Result<Optimizer, Error> {
    let seat = Seat::of(world.rank());
    let of = groups(&*world, seat);
    let mean = if options.combine == Combine::Mean { Reduction::Mean } else { Reduction::Sum };
    let replicas = (of.replicas, mean);
    let cut = RankRoles {
        shards: Arc::clone(&of.shards),
        extra_reductions: vec![replicas.clone()],
        replicas: of.data,
        counts_in_norm: seat.replica == 0,
        parts: Default::default(),
        tensors: None,
    };
    let whole = RankRoles {
        replicas: Arc::clone(&world),
        counts_in_norm: seat.replica == 0 && seat.tp == 0,
        ..cut.clone()
    };
    let partial = RankRoles { extra_reductions: vec![replicas, (of.tp, Reduction::Sum)], ..whole.clone() };
    let place = DataRank { index: seat.data() as u64, ranks: 2, first: seat.tp == 0 };
    let mut opt = Optimizer::empty(world, place, options)?;
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

/// Hands over this rank's gradients of a step, without those named in `lacks`, and with a NaN in those named in `breaks`.
fn hand_over(
    opt: &mut Optimizer,
    seat: Seat,
    step: usize,
    lacks: Option<&str>,
    breaks: Option<&str>,
) -> Result<(), Error> {
    let queue = opt.options().queue.clone();
    let mb = opt.micro_batch(1)?;
    for (name, len) in PARAMS.into_iter().filter(|(name, _)| lacks != Some(name)) {
        let mut grad = values(len, |i| grad(&own(name, seat), i, seat.data(), step));
        if breaks == Some(name) {
            grad[7] = f32::NAN;
        }
        mb.grad(name, put((&grad[..]).into(), &queue).as_slice())?;
    }
    mb.finish()
}

/// Runs one rank of eight; returns its parameters in the order `cut`, `whole`, `partial`.
pub(crate) fn on_rank(
    world: Arc<dyn Communicator>,
    rule: impl Rule + Clone + 'static,
    options: Options,
) -> End {
    let (opt, norms) = steps(world, rule, options, STEPS).unwrap();
    // Each parameter is a unit of its own.
    let param = |name: &str| {
        let unit = opt.gather(name).unwrap();
        let bytes = fetch(unit.param(name).unwrap(), &opt.options().queue);
        bytes.chunks(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
    };
    (["cut", "whole", "partial"].map(param).to_vec(), norms)
}

/// Takes the given number of steps; returns the norm and factor of each.
pub(crate) fn steps(
    world: Arc<dyn Communicator>,
    rule: impl Rule + Clone + 'static,
    options: Options,
    count: usize,
) -> Result<(Optimizer, Vec<(u64, u64)>), Error> {
    let seat = Seat::of(world.rank());
    let mut opt = shared(world, rule, options)?;
    let mut norms = Vec::new();
    for step in 0..count {
        hand_over(&mut opt, seat, step, None, None)?;
        norms.push(norm_of(opt.step(AT)?.outcome()?));
    }
    Ok((opt, norms))
}

/// Returns a rank's outcomes if rank 6 lacks a gradient, if rank 5 has a NaN, and afterwards; and its number of updates.
pub(crate) fn troubled(world: Arc<dyn Communicator>, options: Options) -> (Vec<String>, u64) {
    let (rank, seat) = (world.rank(), Seat::of(world.rank()));
    let mut opt = shared(world, AdamW::default(), options).unwrap();
    let mut said = Vec::new();
    for step in 0..3 {
        let lacks = ((step, rank) == (0, 6)).then_some("whole");
        let breaks = ((step, rank) == (1, 5)).then_some("cut");
        hand_over(&mut opt, seat, step, lacks, breaks).unwrap();
        said.push(match opt.step(AT).and_then(|pending| pending.outcome()) {
            Ok(Outcome::Applied { .. }) => "applied".to_owned(),
            Ok(Outcome::Skipped { .. }) => "skipped".to_owned(),
            Err(error) => error.to_string(),
        });
    }
    (said, opt.state("cut").unwrap().t)
}

/// Returns a rank's errors if ranks that compute the same micro-batches give them different weights.
pub(crate) fn weighed(world: Arc<dyn Communicator>, options: Options) -> [Option<WeightError>; 6] {
    let (rank, seat) = (world.rank(), Seat::of(world.rank()));
    let mut opt = shared(world, AdamW::default(), options).unwrap();
    let queue = opt.options().queue.clone();
    let weights = |step: usize| match (step, rank) {
        (1, 5) | (3, 5) => [0, 2],
        (3, 3) => [2, 2],
        (4, 7) => [2, 1],
        _ => [1, 2],
    };
    std::array::from_fn(|step| {
        for (batch, weight) in weights(step).into_iter().enumerate() {
            let mb = if batch == 0 { opt.accumulate(weight) } else { opt.micro_batch(weight) }.unwrap();
            for (name, len) in PARAMS {
                let grad = values(len, |i| grad(&own(name, seat), i, seat.data(), step));
                mb.grad(name, put((&grad[..]).into(), &queue).as_slice()).unwrap();
            }
            mb.finish().unwrap();
        }
        match opt.step(AT).and_then(|pending| pending.outcome()) {
            Ok(_) => None,
            Err(Error::Weights(told)) => Some(told),
            Err(other) => panic!("{other}"),
        }
    })
}
