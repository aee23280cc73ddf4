//! Time grows with the number of parameters, buckets, units and groups, not with its square.

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Lbfgs};
use meshstep_shard::{Error, Groups, Optimizer, Options, Owners, Plan, ShardedLbfgs, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, LayoutBuilder, Meter, Param};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The small number, and its multiple.
const FEW: usize = 500;
const TIMES: usize = 16;
/// Bound on the ratio of times: three times the ratio of numbers, where a square has `TIMES` times it.
const BOUND: u32 = 3 * TIMES as u32;
/// Elements of each parameter: the padding of one rank, so that a bucket of this length has one parameter.
const LEN: usize = 64;
const WHOLE: Stage = Stage::WholeParams(Owners::SortedGreedy);

/// Compares the shortest times of both numbers, which further runs may lower.
fn grows_with_its_number(what: &str, time: impl Fn(usize) -> Duration) {
    let (mut few, mut many) = (Duration::MAX, Duration::MAX);
    for _ in 0..4 {
        (few, many) = (few.min(time(FEW)), many.min(time(FEW * TIMES)));
        if many <= BOUND * few {
            return;
        }
    }
    panic!("{what}: {few:?} for {FEW}, {many:?} for {TIMES} times as many");
}

fn timed<T>(work: impl FnOnce() -> T) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn name(i: usize) -> String {
    format!("model.layers.{i}.weight")
}

/// Adds `count` parameters, each in a unit of its own if `units`.
fn builder(count: usize, units: bool) -> LayoutBuilder {
    (0..count).fold(Layout::builder(), |builder, i| {
        let builder = if units { builder.unit(format!("model.layers.{i}")) } else { builder };
        builder.param(name(i), &[LEN], DType::F32)
    })
}

fn options(stage: Stage, bucket_len: Option<usize>) -> Options {
    Options { stage, bucket_len, meter: Meter::new(), ..Options::default() }
}

/// Returns the time of `work` on one rank, and of building its optimizer.
fn on_one_rank(
    layout: &Layout,
    rules: impl Into<Groups> + Clone + Send + Sync,
    options: &Options,
    work: impl Fn(&mut Optimizer, &Layout) -> Result<(), Error> + Sync,
) -> Duration {
    let of_rank = |comm: Arc<dyn Communicator>| {
        let (layout, again, rules, options) =
            (layout.clone(), layout.clone(), rules.clone(), options.clone());
        timed(|| {
            let mut opt = Optimizer::new(comm, layout, rules, |_, _| Ok(()), options).unwrap();
            work(&mut opt, &again).unwrap();
        })
    };
    loopback::spawn(1, of_rank).unwrap().remove(0)
}

/// Takes a step, with gradients in this order; units are gathered for the parameters that have one.
fn step<'p>(opt: &mut Optimizer, params: impl Iterator<Item = &'p Param>) -> Result<(), Error> {
    let mb = opt.micro_batch(1)?;
    for param in params {
        drop(param.unit().map(|unit| mb.gather(unit)).transpose()?);
        mb.grad(param.name(), &[0.5f32; LEN][..])?;
    }
    mb.finish()?;
    opt.step(StepArgs::default())?.outcome().map(drop)
}

#[test]
fn of_layouts_and_plans() {
    grows_with_its_number("a layout of units", |count| {
        let builder = builder(count, true);
        timed(|| builder.build().unwrap())
    });
    grows_with_its_number("a plan of units", |count| {
        let layout = builder(count, true).build().unwrap();
        timed(|| Plan::new(&layout, 4, &options(Stage::Zero3, None)).unwrap().memory(0, &AdamW::default()))
    });
    for bucket_len in [None, Some(LEN)] {
        grows_with_its_number("bytes of a pool", |count| {
            let layout = builder(count, false).build().unwrap();
            let plan = Plan::new(&layout, 1, &options(Stage::Zero2, bucket_len)).unwrap();
            timed(|| (plan.pool_bytes(0..count), plan.pool_bytes((0..count).rev())))
        });
    }
    grows_with_its_number("names of groups", |count| {
        let groups = Groups::new(AdamW::default()).with(AdamW::default(), (0..count).map(name));
        timed(|| groups.renamed(|_| None))
    });
}

#[test]
fn of_units() {
    grows_with_its_number("units of one parameter", |count| {
        let layout = builder(count, true).build().unwrap();
        on_one_rank(&layout, AdamW::default(), &options(Stage::Zero3, None), |opt, layout| {
            step(opt, layout.params().iter().rev())
        })
    });
    grows_with_its_number("a unit of many buckets", |count| {
        let layout = builder(0, false).unit("all");
        let layout = (0..count).fold(layout, |layout, i| layout.param(name(i), &[LEN], DType::F32));
        let (layout, options) = (layout.build().unwrap(), options(Stage::Zero3, Some(LEN)));
        on_one_rank(&layout, AdamW::default(), &options, |opt, layout| {
            let all = opt.gather("all")?;
            layout.params().iter().try_for_each(|param| all.param(param.name()).map(drop))
        })
    });
}

#[test]
fn of_buckets() {
    grows_with_its_number("buckets of one parameter", |count| {
        let layout = builder(count, false).build().unwrap();
        let options = options(Stage::Zero2, Some(LEN));
        on_one_rank(&layout, AdamW::default(), &options, |opt, layout| {
            step(opt, layout.params().iter().rev())?;
            // All buckets begin before one is sent.
            step(opt, layout.params().iter())
        })
    });
}

#[test]
fn of_parameters() {
    grows_with_its_number("whole parameters", |count| {
        let layout = builder(count, false).build().unwrap();
        on_one_rank(&layout, AdamW::default(), &options(WHOLE, None), |opt, layout| {
            step(opt, layout.params().iter())?;
            layout.params().iter().try_for_each(|param| opt.state(param.name()).map(drop))
        })
    });
    grows_with_its_number("groups of one parameter", |count| {
        let layout = builder(count, false).build().unwrap();
        let rules = (1..count)
            .fold(Groups::new(AdamW::default()), |rules, i| rules.with(AdamW::default(), [name(i)]));
        on_one_rank(&layout, rules, &options(Stage::Zero1, None), |opt, layout| {
            step(opt, layout.params().iter())
        })
    });
    grows_with_its_number("frozen parameters", |count| {
        let layout = builder(count, false).build().unwrap();
        on_one_rank(&layout, AdamW::default(), &options(Stage::Zero1, None), |opt, _| {
            opt.set_frozen(|_: &Param| true, true)?;
            opt.set_frozen(|_: &Param| true, true)?;
            opt.set_frozen(|_: &Param| true, false)
        })
    });
    grows_with_its_number("whole parameters of L-BFGS", |count| {
        let layout = builder(count, false).build().unwrap();
        let of_rank = |comm: Arc<dyn Communicator>| {
            let options = options(WHOLE, None);
            timed(|| {
                ShardedLbfgs::new(comm, layout.clone(), Lbfgs::default(), |_, _| Ok(()), options).unwrap()
            })
        };
        loopback::spawn(1, of_rank).unwrap().remove(0)
    });
}
