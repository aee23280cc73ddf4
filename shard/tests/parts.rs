//! Several parts at once: planned together, allocated together, refused together.
#![allow(clippy::unwrap_used, reason = "tests say what is wrong by failing")]

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::{Among, At, DataPlace, Error, Optimizer, Options, Part, Plan, Shared, Sizes, Stage};
use meshstep_tensor::{Category, DType, Layout, Meter, Param, SliceMut};
use std::sync::Arc;

const RANKS: usize = 2;
const STAGES: [Stage; 4] = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];

fn layout(names: &[&str], len: usize) -> Layout {
    let add = |layout: meshstep_tensor::LayoutBuilder, name: &&str| layout.param(*name, &[len], DType::F32);
    names.iter().fold(Layout::builder(), add).build().unwrap()
}

fn part(names: &[&str], len: usize, ranks: usize, options: &Options) -> Part {
    Part::new(layout(names, len), Sizes::all(ranks), [], options).unwrap()
}

fn shared(part: Part, comm: &Arc<dyn Communicator>) -> Shared {
    Shared { part, rules: AdamW::default().into(), among: Among::all(Arc::clone(comm)) }
}

fn zeros(_: &Param, _: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    Ok(())
}

fn options(stage: Stage) -> Options {
    Options { stage, bucket_len: Some(64), meter: Meter::new(), ..Options::default() }
}

/// The second part has the longer buckets; gradients in registration order fill all of them, those of the second part last.
#[test]
fn memory_is_that_of_all_parts_together() {
    for stage in STAGES {
        let parts = |options: &Options| {
            vec![part(&["a", "b", "c"], 64, RANKS, options), part(&["d", "e"], 300, RANKS, options)]
        };
        let plan = Plan::of(RANKS, parts(&options(stage)), &options(stage)).unwrap();
        loopback::spawn(RANKS, |comm| {
            let options = options(stage);
            let shared: Vec<Shared> = parts(&options).into_iter().map(|part| shared(part, &comm)).collect();
            let meter = options.meter.clone();
            let mut opt = Optimizer::empty(Arc::clone(&comm), DataPlace::OWN, options).unwrap();
            opt.add_parts(shared, zeros).unwrap();
            let memory = plan.memory(comm.rank(), &AdamW::default());
            for (category, bytes) in memory.by_category() {
                assert_eq!(meter.peak(category), bytes, "{category} at {stage:?}");
            }
            assert_eq!((meter.peak_total(), meter.live_total()), (memory.total(), memory.total()));
            let mb = opt.micro_batch(1).unwrap();
            for (name, len) in [("a", 64), ("b", 64), ("c", 64), ("d", 300), ("e", 300)] {
                mb.grad(name, &vec![1f32; len][..]).unwrap();
            }
            mb.finish().unwrap();
            let _ = opt.step(At::default()).unwrap().outcome().unwrap();
            assert_eq!(meter.peak(Category::Buckets), plan.pool_bytes(0..5), "at {stage:?}");
        })
        .unwrap();
    }
}

/// Parts of another plan, or with names that are taken: every rank is told, and the optimizer goes on without them.
#[test]
fn what_does_not_belong_together_is_refused() {
    loopback::spawn(RANKS, |comm| {
        let options = options(Stage::Zero1);
        let part = |name: &str, ranks, options: &Options| part(&[name], 64, ranks, options);
        let mut opt = Optimizer::empty(Arc::clone(&comm), DataPlace::OWN, options.clone()).unwrap();
        let mut refused = |parts: Vec<Part>| {
            let parts = parts.into_iter().map(|part| shared(part, &comm)).collect();
            opt.add_parts(parts, zeros).unwrap_err()
        };
        let other = refused(vec![part("a", RANKS, &options), part("b", 4, &options)]);
        assert!(matches!(other, Error::Shared { .. }), "{other}");
        let zero2 = Options { stage: Stage::Zero2, ..options.clone() };
        let other = refused(vec![part("a", RANKS, &zero2)]);
        assert!(matches!(other, Error::Shared { .. }), "{other}");
        let twice = refused(vec![part("a", RANKS, &options), part("a", RANKS, &options)]);
        assert!(matches!(twice, Error::NameTaken { name } if name == "a"));
        opt.add_parts(vec![shared(part("a", RANKS, &options), &comm)], zeros).unwrap();
        assert_eq!(opt.params().count(), 1);
    })
    .unwrap();
    assert!(matches!(
        Part::new(layout(&["a"], 1), Sizes::all(0), [], &Options::default()),
        Err(Error::NoRanks)
    ));
}
