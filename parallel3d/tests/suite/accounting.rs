//! Plans against measurements: every rank holds, sends and owns exactly the planned bytes and elements.

use meshstep_cases::{long, tried};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Lamb, Sgd};
use meshstep_parallel3d::{
    Axis, Gradient, Holds, Mesh, Model, ModelBuilder, Optimizer, Parameter, Piece, Placement, Plan, Purpose,
    RankPlan, Sends,
};
use meshstep_shard::{
    Combine, Groups, Master, Missing, NonFinite, Options, Outcome, Owners, Precision, Stage, Step, StepArgs,
};
use meshstep_tensor::DType::{self, BF16, F32};
use meshstep_tensor::{Buffer, Category, Meter};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Includes three ranks along `tp`, so that lengths of further reductions do not divide evenly.
const MESHES: [&str; 11] = [
    "tp=2,cp=2,dp=2",
    "tp=1",
    "tp=2,dp=4",
    "cp=4,dp=2",
    "tp=8",
    "dp=8",
    "dp_replicate=2,dp_shard=2,tp=2",
    "dp_replicate=2,dp_shard=2,cp=2",
    "dp_replicate=3,dp_shard=2",
    "tp=3,dp=2",
    "tp=2,cp=1,dp=2",
];
const STAGES: [Stage; 6] = [
    Stage::Replicated,
    Stage::Zero1,
    Stage::Zero2,
    Stage::Zero3,
    Stage::WholeParams(Owners::SortedGreedy),
    Stage::WholeParams(Owners::RoundRobin),
];

/// Returns every mesh with every stage.
fn arrangements() -> impl Iterator<Item = (&'static str, Stage)> {
    MESHES.into_iter().flat_map(|mesh| STAGES.map(|stage| (mesh, stage)))
}

/// Every kind of placement, and one parameter without elements.
fn model(dtype: DType) -> Model {
    let whole = Placement::whole();
    Model::builder()
        .param("wte", &[48, 3], dtype, whole.clone().cut(Axis::Tp, 0))
        .unit("in")
        .param("pos", &[5, 3], dtype, whole.clone())
        .unit("block")
        .param("ln", &[70], dtype, whole.clone().gradient(Gradient::PartialSum))
        .param("qkv", &[96, 3], dtype, whole.clone().cut_in_blocks(Axis::Tp, 0, [48, 24, 24]))
        .param("nothing", &[0, 3], dtype, whole.clone())
        .unit("out")
        .param("out", &[3, 24], dtype, whole.clone().cut(Axis::Tp, 1))
        .param("qk_norm", &[4], dtype, whole.clone().gradient(Gradient::PartialMean))
        .param("cube", &[3, 24, 5], dtype, whole.cut(Axis::Tp, 1))
        .tied("head", "wte", &[48, 3])
        .build()
        .unwrap()
}

/// Counts the bytes of a step on every rank and compares them with the plan.
fn measure(mesh: &str, dtype: DType, rules: &Groups, options: &Options) {
    measure_model(mesh, (&model(dtype), dtype), rules, options);
}

/// Same for any model.
pub fn measure_model(mesh: &str, (model, dtype): (&Model, DType), rules: &Groups, options: &Options) {
    let mesh: Mesh = mesh.parse().unwrap();
    let plan = Plan::new(&mesh, model, rules.clone(), options).unwrap();
    loopback::spawn(mesh.world_size(), |world: Arc<dyn Communicator>| {
        let planned = plan.rank(world.rank()).unwrap();
        let own = Options { meter: Meter::new(), ..options.clone() };
        let mut opt =
            Optimizer::new(world, mesh.clone(), model, rules.clone(), |_, _, _| Ok(()), own).unwrap();
        for _ in 0..2 {
            let before = sent(&opt, &planned);
            let outcome = step(&mut opt, &planned, options.grads.unwrap_or(dtype));
            let what = format!("rank {} of {mesh}, {dtype}: {options:?}", planned.rank());
            let Outcome::Applied { traffic, .. } = outcome else { panic!("{what}: {outcome:?}") };
            let meter = &opt.optimizer().options().meter;
            for (category, bytes) in planned.memory().by_category() {
                assert_eq!(meter.peak(category), bytes, "{category} on {what}");
            }
            let total = planned.memory().total();
            assert_eq!((traffic.peak, meter.live_total()), (total, total), "{what}");
            assert_eq!((traffic.sent, traffic.pool_grown), (planned.wire().total(), 0), "{what}");
            let sends: u64 = planned.sends().unwrap().iter().map(|sends| sends.bytes).sum();
            assert_eq!(sends, planned.wire().total(), "{what}");
            if options.non_finite == NonFinite::Skip {
                let after = sent(&opt, &planned);
                for (comm, (count, expected)) in &after {
                    assert_eq!(count - before[comm].0, *expected, "on one communicator of {what}");
                }
            }
        }
    })
    .unwrap();
}

/// Gathers every unit forwards and backwards, each while the next is in flight, and hands gradients over in travel order.
fn step(opt: &mut Optimizer, planned: &RankPlan<'_>, dtype: DType) -> Outcome {
    let units: Vec<String> = opt.optimizer().units().map(str::to_owned).collect();
    let mb = opt.micro_batch(1).unwrap();
    for pass in [units.iter().collect::<Vec<_>>(), units.iter().rev().collect()] {
        let mut next = None;
        for (i, unit) in pass.iter().enumerate() {
            let here = next.take().unwrap_or_else(|| mb.start_gather(unit).unwrap()).wait().unwrap();
            next = pass.get(i + 1).map(|unit| mb.start_gather(unit).unwrap());
            drop(here);
        }
    }
    for Holds { parameter, used, .. } in planned.holds() {
        let len = elements(&used);
        let grad = Buffer::zeroed(len, dtype, &Meter::new(), Category::Framework).unwrap();
        mb.grad(&parameter.name, grad.as_slice()).unwrap();
    }
    mb.finish().unwrap();
    opt.step(StepArgs::default()).unwrap().outcome().unwrap()
}

fn elements(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.local.iter().map(|range| range.len()).product::<usize>()).sum()
}

/// Returns for each communicator the bytes it has sent and the bytes that the plan expects in a step.
fn sent(opt: &Optimizer, planned: &RankPlan<'_>) -> BTreeMap<usize, (u64, u64)> {
    let mut sent = BTreeMap::new();
    // Unit gathers use separate communicators.
    let apart =
        |sends: &Sends| opt.optimizer().options().stage == Stage::Zero3 && sends.purpose == Purpose::Gather;
    for sends in planned.sends().unwrap().into_iter().filter(|sends| !apart(sends)) {
        let comms = opt.communicators();
        let whole = sends.group.len() == comms.world().world_size();
        let comm = if whole { comms.world() } else { comms.along(sends.axes).unwrap() };
        assert_eq!(comm.world_size(), sends.group.len());
        let key = Arc::as_ptr(comm).cast::<()>() as usize;
        sent.entry(key).or_insert((comm.stats().total().bytes, 0)).1 += sends.bytes;
    }
    sent
}

#[test]
fn every_rank_of_every_mesh_and_stage_holds_and_sends_what_is_planned() {
    let adam = Groups::new(AdamW::default()).with(AdamW { weight_decay: 0.0, ..AdamW::default() }, ["ln"]);
    let all = arrangements().flat_map(|on| [None, Some(100)].map(|bucket_len| (on, bucket_len)));
    for (_, ((mesh, stage), bucket_len)) in all.enumerate().filter(|(i, _)| tried(*i, 5)) {
        measure(mesh, F32, &adam, &Options { stage, bucket_len, ..Options::default() });
    }
}

/// Parameters of one sharing with different rules have buckets of their own.
#[test]
fn mixed_rules_are_planned_too() {
    let rules = Groups::new(AdamW::default())
        .with(Sgd { momentum: 0.9, ..Sgd::default() }, ["qkv", "out", "nothing", "pos"]);
    for (i, (mesh, stage)) in arrangements().enumerate() {
        if tried(i, 10) {
            measure(mesh, F32, &rules, &Options { stage, bucket_len: Some(100), ..Options::default() });
        }
        if tried(i, 10) && matches!(stage, Stage::Zero1 | Stage::Zero2 | Stage::Zero3) {
            let rules = Groups::new(AdamW::default()).with(Lamb::default(), ["cube", "wte"]);
            measure(mesh, F32, &rules, &Options { stage, ..Options::default() });
        }
    }
}

#[test]
fn other_types_rules_and_policies_are_planned_too() {
    let precision = Precision { master: Master::F32, ..Precision::default() };
    let adam = || Groups::new(AdamW::default());
    let all = arrangements().flat_map(|on| [None, Some(150)].map(|bucket_len| (on, bucket_len)));
    for (i, ((mesh, stage), bucket_len)) in all.enumerate() {
        let on = Options { stage, bucket_len, ..Options::default() };
        let masters = Options { precision, combine: Combine::Weighted, ..on.clone() };
        let mut policies = vec![
            (BF16, adam(), masters.clone()),
            (BF16, adam(), Options { grads: Some(F32), ..masters }),
            (F32, Sgd::default().into(), Options { missing: Missing::AllOrNone, ..on.clone() }),
            (F32, adam(), Options { non_finite: NonFinite::Propagate, ..on.clone() }),
        ];
        if matches!(stage, Stage::Zero1 | Stage::Zero2 | Stage::Zero3) {
            policies.push((F32, Lamb::default().into(), on));
        }
        for (_, (dtype, rules, options)) in
            policies.into_iter().enumerate().filter(|(p, _)| tried(5 * i + p, 10))
        {
            measure(mesh, dtype, &rules, &options);
        }
    }
}

/// Blocks of matrices and norms, which form two families.
fn blocks() -> Model {
    let whole = Placement::whole();
    let norm = whole.clone().gradient(Gradient::PartialSum);
    let (rows, columns) = (whole.clone().cut(Axis::Tp, 0), whole.cut(Axis::Tp, 1));
    let block = |model: ModelBuilder, i: usize| {
        let name = |own: &str| format!("{i}.{own}");
        let attention = model.unit(format!("block {i}")).param(name("ln"), &[40], F32, norm.clone());
        let attention = attention.param(name("qkv"), &[24, 20], F32, rows.clone());
        let mlp = attention.param(name("out"), &[10, 24], F32, columns.clone());
        let mlp =
            mlp.param(name("ln2"), &[40], F32, norm.clone()).param(name("up"), &[32, 9], F32, rows.clone());
        mlp.param(name("down"), &[9, 32], F32, columns.clone())
    };
    let first = Model::builder().param("wte", &[48, 20], F32, rows.clone());
    let last = (0..5).fold(first, block).unit("last").param("ln", &[40], F32, norm.clone());
    last.param("head", &[48, 20], F32, rows.clone()).build().unwrap()
}

/// Takes steps with gradients in backward order, last parameter first. Returns the pool's peak and all parameter bits of this rank.
fn backward(opt: &mut Optimizer, model: &Model, plan: &RankPlan<'_>) -> (u64, Vec<u32>) {
    let len = |p: &Parameter| elements(&plan.holds().find(|holds| holds.parameter == p).unwrap().used);
    let mut bits = Vec::new();
    let steps = if long() { 3 } else { 2 };
    for t in 1..=steps {
        let mb = opt.micro_batch(1).unwrap();
        for (i, parameter) in model.parameters().iter().enumerate().rev() {
            let value = |j| ((i * 31 + j * 7 + plan.rank() * 5 + t) % 17) as f32 / 3.0 - 2.5;
            let grad: Vec<f32> = (0..len(parameter)).map(value).collect();
            mb.grad(&parameter.name, &grad[..]).unwrap();
        }
        mb.finish().unwrap();
        match opt.step(StepArgs { max_norm: Some(1.0), ..StepArgs::default() }).unwrap().outcome().unwrap() {
            Outcome::Applied { norm, .. } => bits.push((norm as f32).to_bits()),
            skipped => panic!("{skipped:?}"),
        }
    }
    for Parameter { name, .. } in model.parameters() {
        let unit = opt.gather(opt.optimizer().unit_of(name).unwrap().unwrap()).unwrap();
        bits.extend(unit.param(name).unwrap().typed::<f32>().unwrap().iter().map(|x| x.to_bits()));
    }
    (opt.optimizer().options().meter.peak(Category::Buckets), bits)
}

/// For any mix of families the pool is as long as with buckets that arrive whole. All stages end with the same bits.
#[test]
fn a_backward_pass_takes_the_pool_that_is_planned() {
    for (m, (model, families)) in [(blocks(), 2), (model(F32), 4)].into_iter().enumerate() {
        let meshes = ["tp=2,dp=2", "tp=2,cp=2,dp=2", "dp_replicate=2,dp_shard=2,tp=2"];
        for (n, mesh) in meshes.into_iter().enumerate() {
            let mesh: Mesh = mesh.parse().unwrap();
            let buckets = [Some(100), None, Some(500)].into_iter().enumerate();
            // Short runs try one length on each mesh, a different one for each model; long runs try all.
            let own = |b: usize| long() || b == (m + n) % 3;
            for (_, bucket_len) in buckets.filter(|(b, _)| own(*b) && tried(9 * m + 3 * n + b, 1)) {
                let mut first: Option<Vec<Vec<u32>>> = None;
                for stage in [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3] {
                    let options = Options { stage, bucket_len, ..Options::default() };
                    let what = format!("{stage:?} {bucket_len:?} on {mesh}");
                    let plan = Plan::new(&mesh, &model, AdamW::default(), &options).unwrap();
                    let planned = pool_backwards(&plan, &model);
                    assert_eq!(plan.pipeline()[0].families().count(), families, "{what}");
                    assert_eq!(planned, plan.rank(0).unwrap().memory().buckets, "{what}");
                    let ends = loopback::spawn(mesh.world_size(), |world: Arc<dyn Communicator>| {
                        let rank = plan.rank(world.rank()).unwrap();
                        let (mesh, own) = (mesh.clone(), Options { meter: Meter::new(), ..options.clone() });
                        let rules = AdamW::default();
                        let mut opt =
                            Optimizer::new(world, mesh, &model, rules, |_, _, _| Ok(()), own).unwrap();
                        let (peak, bits) = backward(&mut opt, &model, &rank);
                        assert_eq!(peak, planned, "rank {} at {what}", rank.rank());
                        bits
                    });
                    let ends = ends.unwrap();
                    assert!(*first.get_or_insert_with(|| ends.clone()) == ends, "{what}");
                }
            }
        }
    }
}

fn pool_backwards(plan: &Plan, model: &Model) -> u64 {
    let stage = &plan.pipeline()[0];
    let params = stage.families().flat_map(|(_, part)| part.layout().params());
    let names: Vec<&str> = params.map(|param| param.name()).collect();
    let index = |p: &Parameter| names.iter().position(|name| *name == p.name).unwrap();
    stage.plan().pool_bytes(model.parameters().iter().rev().map(index))
}

/// Row-major indices of boxes, in the parameter (`global` true) or in the rank's storage.
fn indices(pieces: &[Piece], shape: &[usize], global: bool) -> Vec<usize> {
    let of = |piece: &Piece| {
        let ranges = if global { &piece.global } else { &piece.local };
        ranges.iter().zip(shape).fold(vec![0], |flat, (range, &extent)| {
            flat.iter().flat_map(|i| range.clone().map(move |at| i * extent + at)).collect()
        })
    };
    pieces.iter().flat_map(of).collect()
}

/// Over all ranks every element is stored once per copy, and owned so that the norm counts it once.
#[test]
fn every_element_is_stored_owned_and_counted_as_often_as_it_is_to_be() {
    let model = model(F32);
    for mesh in MESHES {
        let mesh: Mesh = mesh.parse().unwrap();
        for stage in STAGES {
            let options = Options { stage, bucket_len: Some(100), ..Options::default() };
            let plan = Plan::new(&mesh, &model, AdamW::default(), &options).unwrap();
            for (p, parameter) in model.parameters().iter().enumerate() {
                let len: usize = parameter.shape.iter().product();
                let (mut stored, mut owned, mut counted) = (vec![0; len], vec![0; len], vec![0; len]);
                let mut sharing = None;
                for rank in 0..mesh.world_size() {
                    let rank = plan.rank(rank).unwrap();
                    let mut holds = rank.holds();
                    let holds = holds.find(|holds| holds.parameter == &model.parameters()[p]).unwrap();
                    indices(&holds.stored, &parameter.shape, true).iter().for_each(|&i| stored[i] += 1);
                    let own = indices(&holds.owned, &parameter.shape, true);
                    own.iter().for_each(|&i| owned[i] += 1);
                    own.iter().for_each(|&i| counted[i] += usize::from(holds.counts));
                    sharing = Some(holds.sharing);
                }
                let sharing = sharing.unwrap();
                let what = format!("{} on {mesh} at {stage:?}", parameter.name);
                let (replicas, shards) = (mesh.degree(sharing.replicas), mesh.degree(sharing.shards()));
                // Stage 0 divides the counting of elements, not their ownership.
                let divided = if stage == Stage::Replicated { 1 } else { shards };
                let stores = if stage == Stage::Zero3 { replicas / shards } else { replicas };
                assert!(stored.iter().all(|&n| n == stores), "{what}: {stored:?}");
                assert!(owned.iter().all(|&n| n == replicas / divided), "{what}: {owned:?}");
                assert!(counted.iter().all(|&n| n == shards / divided), "{what}: {counted:?}");
            }
        }
    }
}

/// The optimizer has state exactly for the elements that the plan gives the rank.
#[test]
fn owned_pieces_are_those_with_state() {
    let model = model(F32);
    for (_, (mesh, stage)) in arrangements().enumerate().filter(|(i, _)| tried(*i, 1)) {
        let mesh: Mesh = mesh.parse().unwrap();
        loopback::spawn(mesh.world_size(), |world: Arc<dyn Communicator>| {
            let (rank, mesh) = (world.rank(), mesh.clone());
            let options = Options { stage, bucket_len: Some(100), ..Options::default() };
            let opt =
                Optimizer::new(world, mesh, &model, AdamW::default(), |_, _, _| Ok(()), options).unwrap();
            for Holds { parameter, used, owned, .. } in opt.plan().rank(rank).unwrap().holds() {
                let shape = parameter.placement.local_shape(&parameter.name, &parameter.shape, opt.mesh());
                let mut own = indices(&owned, &shape.unwrap(), false);
                own.sort();
                let range = opt.state(&parameter.name).unwrap().range;
                assert_eq!(own, range.collect::<Vec<_>>(), "{} on rank {rank}", parameter.name);
                let unit = opt.gather(opt.optimizer().unit_of(&parameter.name).unwrap().unwrap()).unwrap();
                assert_eq!(elements(&used), unit.param(&parameter.name).unwrap().len());
            }
        })
        .unwrap();
    }
}

/// Totals by kind of rank equal a sum over all ranks.
#[test]
fn totals_are_those_of_all_ranks_one_by_one() {
    let model = model(F32);
    for mesh in MESHES.into_iter().chain(["tp=3,dp=7", "dp_replicate=5,dp_shard=3,tp=3", "dp=70"]) {
        let mesh: Mesh = mesh.parse().unwrap();
        for stage in STAGES {
            let options = Options { stage, ..Options::default() };
            let plan = Plan::new(&mesh, &model, AdamW::default(), &options).unwrap();
            let ranks: Vec<_> = (0..mesh.world_size()).map(|rank| plan.rank(rank).unwrap()).collect();
            let totals = plan.totals();
            assert_eq!(totals.ranks, ranks.len());
            assert_eq!(totals.memory, ranks.iter().map(|rank| rank.memory()).sum(), "{mesh} {stage:?}");
            assert_eq!(totals.wire, ranks.iter().map(|rank| rank.wire()).sum(), "{mesh} {stage:?}");
            let held: Vec<u64> = ranks.iter().map(|rank| rank.memory().total()).collect();
            let sent: Vec<u64> = ranks.iter().map(|rank| rank.wire().total()).collect();
            let first = |all: &[u64]| all.iter().position(|n| n == all.iter().max().unwrap()).unwrap();
            assert_eq!(totals.most_held, (first(&held), ranks[first(&held)].memory()), "{mesh} {stage:?}");
            assert_eq!(totals.most_sent, (first(&sent), ranks[first(&sent)].wire()), "{mesh} {stage:?}");
            assert!(plan.kinds().iter().map(|kind| kind.ranks).sum::<usize>() == ranks.len());
        }
    }
}
