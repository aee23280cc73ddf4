//! Several parts at once: planned together, allocated together, refused together.

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::AdamW;
use meshstep_shard::{
    DataRank, Error, Optimizer, Options, Outcome, ParamGroup, Part, Plan, RankRoles, Sizes, Stage, StepArgs,
    UnitError,
};
use meshstep_tensor::{Category, DType, Layout, LayoutBuilder, Meter, Param, SliceMut};
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

fn shared(part: Part, comm: &Arc<dyn Communicator>) -> ParamGroup {
    ParamGroup { part, rules: AdamW::default().into(), among: RankRoles::all(Arc::clone(comm)) }
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
            let shared: Vec<ParamGroup> =
                parts(&options).into_iter().map(|part| shared(part, &comm)).collect();
            let meter = options.meter.clone();
            let mut opt = Optimizer::empty(Arc::clone(&comm), DataRank::OWN, options).unwrap();
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
            let _ = opt.step(StepArgs::default()).unwrap().outcome().unwrap();
            assert_eq!(meter.peak(Category::Buckets), plan.pool_bytes(0..5), "at {stage:?}");
        })
        .unwrap();
    }
}

/// Four blocks of two parameters, one of each part. With positions (`told`), the second part's come first in their blocks.
fn blocks(options: &Options, told: bool) -> Vec<Part> {
    let part = |(i, own)| {
        let block = |layout: LayoutBuilder, block| {
            layout.unit(format!("{block}")).param(format!("{block}{own}"), &[len(own)], DType::F32)
        };
        let layout = (0..4).fold(Layout::builder(), block).build().unwrap();
        let part = Part::new(layout, Sizes::all(RANKS), [], options).unwrap();
        if told { part.at((0..4).map(|block| 2 * block + 1 - i).collect()).unwrap() } else { part }
    };
    ["w", "n"].into_iter().enumerate().map(part).collect()
}

fn len(name: &str) -> usize {
    if name.ends_with('n') { 20 } else { 300 }
}

/// Takes steps with gradients in the order of `names`. Returns how often the pool has grown, and its peak bytes.
fn pool(opt: &mut Optimizer, names: &[String]) -> (u64, u64) {
    let mut grown = 0;
    for _ in 0..3 {
        let mb = opt.micro_batch(1).unwrap();
        names.iter().for_each(|name| mb.grad(name, &vec![1f32; len(name)][..]).unwrap());
        mb.finish().unwrap();
        match opt.step(StepArgs::default()).unwrap().outcome().unwrap() {
            Outcome::Applied { traffic, .. } => grown = traffic.pool_grown,
            skipped => panic!("{skipped:?}"),
        }
    }
    (grown, opt.options().meter.peak(Category::Buckets))
}

/// Without positions, parameters stand by their unit, and within it in the order of the parts.
#[test]
fn buckets_of_parts_travel_as_a_backward_pass_fills_them() {
    for (stage, told) in [Stage::Zero2, Stage::Zero3].into_iter().flat_map(|s| [(s, true), (s, false)]) {
        let plan = Plan::of(RANKS, blocks(&options(stage), told), &options(stage)).unwrap();
        let (parts, names) = if told { ([0, 1], ["w", "n"]) } else { ([1, 0], ["n", "w"]) };
        let order: Vec<_> = (0..4).flat_map(|b| parts.map(|part| (part, b))).collect();
        assert_eq!(plan.order(), order);
        let backward = (0..4).rev().flat_map(|block| names.map(|own| format!("{block}{own}")));
        let backward: Vec<String> = backward.collect();
        loopback::spawn(RANKS, |comm| {
            let options = options(stage);
            let shared = blocks(&options, told).into_iter().map(|part| shared(part, &comm)).collect();
            let mut opt = Optimizer::empty(Arc::clone(&comm), DataRank::OWN, options).unwrap();
            opt.add_parts(shared, zeros).unwrap();
            let planned = plan.memory(comm.rank(), &AdamW::default()).buckets;
            assert_eq!(pool(&mut opt, &backward), (0, planned), "{stage:?}, told: {told}");
            // Buckets added later go last.
            opt.add_param_group(layout(&["0late n", "1late n"], 20), AdamW::default(), zeros).unwrap();
            let late = ["1late n", "0late n"].map(str::to_owned);
            // They have memory of their own: two buckets.
            let planned = planned + 2 * 128 * 4;
            assert_eq!(pool(&mut opt, &[&backward[..], &late].concat()), (0, planned), "{stage:?}");
            assert_eq!(pool(&mut opt, &[&late[..], &backward].concat()), (0, planned), "{stage:?}");
        })
        .unwrap();
    }
}

/// An optimizer allocates from a plan: both refuse a name for two things.
#[test]
fn names_of_two_are_refused_by_plan_and_optimizer() {
    for stage in STAGES {
        let before = || Layout::builder().param("u", &[4], DType::F32);
        let unit = |param: &str| Layout::builder().unit("u").param(param, &[4], DType::F32);
        let twice = [before(), unit("u")];
        let gathered = [[before(), unit("w")], [unit("w"), before()]];
        for (layouts, taken) in [(twice, true)].into_iter().chain(gathered.map(|layouts| (layouts, false))) {
            let layouts = layouts.map(|layout| layout.build().unwrap());
            let parts = |options: &Options| {
                layouts.clone().map(|layout| Part::new(layout, Sizes::all(RANKS), [], options).unwrap())
            };
            let planned = Plan::of(RANKS, parts(&options(stage)).into(), &options(stage)).map(drop);
            let made = loopback::spawn(RANKS, |comm| {
                let options = options(stage);
                let shared: Vec<ParamGroup> = parts(&options).map(|part| shared(part, &comm)).into();
                Optimizer::empty(comm, DataRank::OWN, options).unwrap().add_parts(shared, zeros)
            });
            for told in made.unwrap().into_iter().chain([planned]) {
                match told {
                    Ok(()) => assert!(!taken && stage != Stage::Zero3),
                    Err(Error::NameTaken { name }) => assert!(taken && name == "u"),
                    Err(Error::Unit(UnitError::TwoOfOneName { name })) => {
                        assert!(!taken && stage == Stage::Zero3 && name == "u");
                    }
                    Err(other) => panic!("{other}"),
                }
            }
        }
    }
}

/// Inputs to the order of buckets must agree on all ranks.
#[test]
fn ranks_that_would_send_in_another_order_are_refused() {
    let options = options(Stage::Zero2);
    let part = |name: &str, units: &[&str]| {
        let layout = units.iter().fold(Layout::builder(), |layout, unit| layout.unit(*unit));
        let layout = layout.param(name, &[64], DType::F32).build().unwrap();
        Part::new(layout, Sizes::all(RANKS), [], &options).unwrap()
    };
    let at = |name, position| part(name, &["u"]).at(vec![position]).unwrap();
    loopback::spawn(RANKS, |comm| {
        let own = Options { meter: Meter::new(), ..options.clone() };
        let mut opt = Optimizer::empty(Arc::clone(&comm), DataRank::OWN, own).unwrap();
        let mut add = |parts: [Part; 2]| opt.add_parts(parts.map(|part| shared(part, &comm)).into(), zeros);
        let first = comm.rank();
        let other = add([at("a", first), at("b", 1 - first)]).unwrap_err();
        assert!(matches!(&other, Error::Disagree { what, .. } if what == "positions"), "{other}");
        let units: &[&str] = if first == 0 { &["u", "v"] } else { &["v", "u", "v"] };
        let other = add([part("a", units), part("b", &["u"])]).unwrap_err();
        assert!(matches!(&other, Error::Disagree { what, .. } if what == "units in order"), "{other}");
        let some = add([at("a", 0), part("b", &["u"])]).unwrap_err();
        assert!(matches!(some, Error::Shared { .. }), "{some}");
        add([at("a", 0), at("b", 1)]).unwrap();
    })
    .unwrap();
}

/// Parts of another plan, or with names already taken: every rank gets an error, and the optimizer continues without them.
#[test]
fn what_does_not_belong_together_is_refused() {
    loopback::spawn(RANKS, |comm| {
        let options = options(Stage::Zero1);
        let part = |name: &str, ranks, options: &Options| part(&[name], 64, ranks, options);
        let mut opt = Optimizer::empty(Arc::clone(&comm), DataRank::OWN, options.clone()).unwrap();
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
