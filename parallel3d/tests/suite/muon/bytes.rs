//! Counted bytes are the planned ones, on every rank, by category and by communicator.

use super::{model, options, rules};
use crate::accounting::measure_model;
use meshstep_cases::tried;
use meshstep_parallel3d::{Axis, Cluster, Found, Mesh, Plan, Purpose, Space};
use meshstep_shard::{Memory, Options, Owners, Stage, Wire};
use meshstep_tensor::DType::F32;

const MESHES: [&str; 9] = [
    "tp=2",
    "tp=2,dp=2",
    "tp=2,dp=3",
    "tp=4,dp=2",
    "tp=2,cp=2,dp=2",
    "dp_replicate=2,dp_shard=2",
    "dp_replicate=3,dp_shard=2",
    "dp_replicate=2,dp_shard=2,tp=2",
    "dp_replicate=2,tp=4",
];
const STAGES: [Stage; 5] =
    [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3, Stage::WholeParams(Owners::SortedGreedy)];

fn arrangements() -> impl Iterator<Item = (&'static str, Stage)> {
    MESHES.into_iter().flat_map(|mesh| STAGES.map(|stage| (mesh, stage)))
}

#[test]
fn every_rank_holds_and_sends_what_is_planned() {
    for (i, (mesh, stage)) in arrangements().enumerate() {
        for (b, bucket_len) in [Some(100), None].into_iter().enumerate() {
            if tried(2 * i + b, 2) {
                let options = Options { bucket_len, ..options(stage) };
                measure_model(mesh, (&model(F32), F32), &rules(), &options);
            }
        }
    }
}

/// Totals and extremes by kinds of ranks are those of all ranks.
#[test]
fn kinds_stand_for_all_ranks() {
    for (mesh, stage) in arrangements() {
        let mesh: Mesh = mesh.parse().unwrap();
        let plan = Plan::new(&mesh, &model(F32), rules(), &options(stage)).unwrap();
        let ranks: Vec<(Memory, Wire)> = (0..mesh.world_size())
            .map(|rank| (plan.rank(rank).unwrap().memory(), plan.rank(rank).unwrap().wire()))
            .collect();
        let totals = plan.totals();
        let sum = (ranks.iter().map(|rank| rank.0).sum(), ranks.iter().map(|rank| rank.1).sum());
        assert_eq!((totals.memory, totals.wire), sum, "{mesh} {stage:?}");
        let most = |of: fn(&(Memory, Wire)) -> u64| ranks.iter().map(of).max().unwrap();
        assert_eq!(totals.most_held.1.total(), most(|rank| rank.0.total()), "{mesh} {stage:?}");
        assert_eq!(totals.most_sent.1.total(), most(|rank| rank.1.total()), "{mesh} {stage:?}");
    }
}

/// Ranks along tp share the work, and every piece returns: all ranks together send each element that is away from its owner twice.
#[test]
fn matrices_travel_along_tp_and_shards_of_one_replica() {
    let mesh: Mesh = "dp_replicate=2,dp_shard=2,tp=2".parse().unwrap();
    for (stage, axes) in [(Stage::Replicated, "tp"), (Stage::Zero3, "dp_shard x tp")] {
        let plan = Plan::new(&mesh, &model(F32), rules(), &options(stage)).unwrap();
        let text = plan.to_string();
        assert!(text.contains("exchanged: the mesh cuts them"), "{text}");
        let of_rank = |rank| plan.rank(rank).unwrap().sends().unwrap();
        let matrices: Vec<_> =
            (0..8).flat_map(of_rank).filter(|sends| sends.purpose == Purpose::Matrices).collect();
        assert!(matrices.iter().any(|sends| sends.axes.to_string() == axes), "{stage:?}: {matrices:?}");
        let along = |sends: &&meshstep_parallel3d::Sends| sends.axes.to_string() == axes;
        let ranks = matrices.iter().filter(along).count();
        assert_eq!(ranks, 8, "{stage:?}: all ranks take part");
    }
}

/// Ranks that exchange matrices differ, so a search reports the largest of all ranks.
#[test]
fn a_search_has_the_memory_and_traffic_of_the_rank_with_most() {
    let stages: Vec<Stage> = STAGES[..4].to_vec();
    let space = Space { stages, bucket_lens: vec![Some(100)], ..Space::default() };
    let cluster = Cluster { ranks: 4, memory: u64::MAX, ranks_per_node: 4 };
    let found = Plan::search(&model(F32), &cluster, rules(), &space).unwrap();
    assert!(found.iter().any(|found| found.mesh.degree(Axis::Tp) == 2 && found.stage == Stage::Zero3));
    for Found { mesh, stage, memory, wire, .. } in &found {
        let of = found.iter().find(|found| (&found.mesh, &found.stage) == (mesh, stage)).unwrap();
        let totals = Plan::new(mesh, &model(F32), rules(), &of.options(&space)).unwrap().totals();
        assert_eq!((*memory, *wire), (totals.most_held.1, totals.most_sent.1), "{mesh} {stage:?}");
    }
}
