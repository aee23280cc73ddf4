//! Parameters that are frozen between steps: the steps of an optimizer without them, and their own state afterwards.

use crate::common::{STAGES, adamw};
use meshstep_comm::loopback;
use meshstep_optim::{Lbfgs, Sgd};
use meshstep_shard::{
    Clip, Error, Missing, NonFinite, Optimizer, Options, Outcome, ShardedLbfgs, Stage, StepArgs,
};
use meshstep_tensor::{DType, Layout, LayoutBuilder, Param, SliceMut};

const LENS: [(&str, usize); 5] = [("a", 70), ("b", 33), ("c", 64), ("d", 5), ("e", 129)];
/// Alone in their buckets, or beside others.
const FROZEN: [&str; 2] = ["b", "e"];

fn layout(of: impl Fn(&str) -> bool) -> Layout {
    let add = |b: LayoutBuilder, &(name, len): &(&str, usize)| b.param(name, &[len], DType::F32);
    LENS.iter().filter(|(name, _)| of(name)).fold(Layout::builder(), add).build().unwrap()
}

fn built(
    comm: std::sync::Arc<dyn meshstep_comm::Communicator>,
    layout: Layout,
    options: &Options,
) -> Optimizer {
    let from = |p: &Param, mut out: SliceMut<'_>| {
        let first = p.name().as_bytes()[0] as f32;
        out.copy_from((&(0..p.len()).map(|i| first + i as f32).collect::<Vec<_>>()).into())
    };
    Optimizer::new(comm, layout, adamw(), from, options.clone()).unwrap()
}

/// Takes step `t` in `batches` micro-batches with gradients for the parameters of `of`, and returns the norm.
fn step(opt: &mut Optimizer, t: u64, batches: usize, of: impl Fn(&str) -> bool) -> f64 {
    let rank = opt.comm().rank() as f32;
    for batch in 0..batches {
        let mb = if batch + 1 == batches { opt.micro_batch(1) } else { opt.accumulate(1) }.unwrap();
        for (name, len) in LENS.into_iter().rev().filter(|(name, _)| of(name)) {
            let grad: Vec<f32> = (0..len).map(|i| (i % 7) as f32 * 0.25 + rank * 0.5 - t as f32).collect();
            mb.grad(name, &grad).unwrap();
        }
        mb.finish().unwrap();
    }
    let max_norm = (opt.options().non_finite == NonFinite::Skip).then_some(1.5);
    match opt.step(StepArgs { lr: 0.1, max_norm, ..StepArgs::default() }).unwrap().outcome().unwrap() {
        Outcome::Applied { norm, .. } => norm,
        Outcome::Skipped { .. } => panic!("skipped"),
    }
}

fn values(opt: &mut Optimizer, of: impl Fn(&str) -> bool) -> Vec<(u64, Vec<f32>)> {
    let mut all = Vec::new();
    for (name, len) in LENS.into_iter().filter(|(name, _)| of(name)) {
        let mut out = vec![0f32; len];
        opt.read(name, &mut out).unwrap();
        all.push((opt.state(name).unwrap().t, out));
    }
    all
}

fn everything() -> Vec<(Options, usize)> {
    let mut all = Vec::new();
    for stage in STAGES {
        for bucket_len in [None, Some(1), Some(100)] {
            for (overlap, batches) in [(true, 1), (true, 2), (false, 1)] {
                all.push((Options { stage, bucket_len, overlap, ..Options::default() }, batches));
            }
        }
        for missing in [Missing::Zero, Missing::SkipIfMissingEverywhere, Missing::AllOrNone] {
            all.push((Options { stage, missing, bucket_len: Some(100), ..Options::default() }, 1));
        }
        let non_finite = NonFinite::Propagate;
        all.push((Options { stage, non_finite, bucket_len: Some(100), ..Options::default() }, 1));
    }
    all.push((Options { clip: Clip::BeforeReduce, ..Options::default() }, 2));
    all
}

#[test]
fn steps_are_those_of_an_optimizer_without_the_frozen_parameters() {
    let trains = |name: &str| !FROZEN.contains(&name);
    for (options, batches) in everything() {
        let ends = loopback::spawn(3, |comm| {
            let mut opt = built(comm.clone(), layout(|_| true), &options);
            let mut without = built(comm, layout(trains), &options);
            opt.set_frozen(FROZEN, true).unwrap();
            let kept = values(&mut opt, |name| !trains(name));
            for t in 1..4 {
                let norms = [&mut opt, &mut without].map(|opt| step(opt, t, batches, trains));
                assert_eq!(norms[0].to_bits(), norms[1].to_bits(), "{options:?}");
            }
            assert_eq!(values(&mut opt, trains), values(&mut without, trains), "{options:?}");
            assert_eq!(values(&mut opt, |name| !trains(name)), kept, "{options:?}");
            opt.verify().unwrap();
            values(&mut opt, |_| true)
        });
        let ends = ends.unwrap();
        assert!(ends.iter().all(|end| *end == ends[0]), "{options:?}");
    }
}

/// Two steps, two frozen ones, two steps: the frozen parameter ends as after four steps, if nothing clips.
#[test]
fn state_continues_after_thawing() {
    for stage in STAGES {
        let options =
            Options { stage, non_finite: NonFinite::Propagate, bucket_len: Some(100), ..Options::default() };
        let ends = loopback::spawn(2, |comm| {
            let mut opt = built(comm.clone(), layout(|_| true), &options);
            let mut whole = built(comm, layout(|_| true), &options);
            let (frozen, all) = (|name: &str| FROZEN.contains(&name), |_: &str| true);
            for t in 1..3 {
                step(&mut opt, t, 1, all);
            }
            opt.set_frozen(|p: &Param| FROZEN.contains(&p.name()), true).unwrap();
            assert!(opt.is_frozen("b").unwrap() && !opt.is_frozen("a").unwrap());
            for t in 7..9 {
                step(&mut opt, t, 1, |name| !FROZEN.contains(&name));
            }
            opt.set_frozen(FROZEN.map(str::to_owned).to_vec(), false).unwrap();
            for t in 3..5 {
                step(&mut opt, t, 1, all);
            }
            let _: Vec<f64> = (1..5).map(|t| step(&mut whole, t, 1, all)).collect();
            assert_eq!(values(&mut opt, frozen), values(&mut whole, frozen), "{stage:?}");
            opt.state("a").unwrap().t
        });
        assert_eq!(ends.unwrap(), [6, 6], "{stage:?}");
    }
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    loopback::spawn(2, |comm| {
        let rank = comm.rank();
        let table = layout(|_| true);
        let mut opt = built(comm.clone(), table, &Options::default());
        let error = opt.set_frozen(if rank == 0 { ["a"] } else { ["b"] }, true).unwrap_err().to_string();
        assert_eq!(
            error,
            "ranks disagree on this call: rank 0 has freeze [\"a\"], rank 1 has freeze [\"b\"]"
        );
        let error = opt.set_frozen([if rank == 0 { "x" } else { "b" }], true).unwrap_err().to_string();
        assert!(error.contains("no parameter \"x\""), "{error}");
        assert!(!LENS.iter().any(|(name, _)| opt.is_frozen(name).unwrap()));
        opt.set_frozen(["a"], true).unwrap();
        let mb = opt.micro_batch(1).unwrap();
        assert!(matches!(mb.grad("a", &[0f32; 70]), Err(Error::FrozenParam { name }) if name == "a"));
        assert!(matches!(mb.slot("a"), Err(Error::FrozenParam { .. })));
        mb.finish().unwrap();
        assert!(matches!(opt.set_frozen(["a"], false), Err(Error::StepDue)));
        opt.discard_gradients().unwrap();
        // All parameters may rest: the step does nothing.
        opt.set_frozen(|_: &Param| true, true).unwrap();
        assert_eq!(step(&mut opt, 1, 1, |_| false), 0.0);
        opt.set_frozen(|_: &Param| true, false).unwrap();
        step(&mut opt, 1, 1, |_| true);

        let layout =
            Layout::builder().param("w", &[3], DType::F32).frozen("f", &[2], DType::F32).build().unwrap();
        let options = Options { stage: Stage::Zero1, ..Options::default() };
        let mut opt = Optimizer::new(comm, layout, Sgd::default(), |_, _| Ok(()), options).unwrap();
        assert!(opt.is_frozen("f").unwrap());
        assert!(matches!(opt.set_frozen(["f"], false), Err(Error::FrozenParam { .. })));
        opt.set_frozen(["w"], true).unwrap();
        let error = ShardedLbfgs::over(opt, Lbfgs::default()).map(drop).unwrap_err().to_string();
        assert!(error.contains("set_frozen"), "{error}");
    })
    .unwrap();
}
