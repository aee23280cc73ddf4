//! The search finds every plan that fits and orders them by bytes.

use meshstep_cases::{Effort, effort, long};
use meshstep_optim::{AdamW, Sgd};
use meshstep_parallel3d::models::{Gpt2, Llama3};
use meshstep_parallel3d::{Axis, Cluster, Error, Found, Mesh, MeshError, Model, Placement, Plan, Space};
use meshstep_shard::{Master, Options, Owners, Stage};
use meshstep_tensor::DType::{BF16, F32};

const STAGES: [Stage; 5] =
    [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3, Stage::WholeParams(Owners::SortedGreedy)];

/// Model with rows that divide among four ranks but not among eight.
fn model() -> Model {
    let cut = Placement::whole().cut(Axis::Tp, 0);
    let model = Model::builder().param("cut", &[36, 70], BF16, cut);
    model.param("whole", &[700], BF16, Placement::whole()).build().unwrap()
}

fn mesh(dp: usize, cp: usize, tp: usize) -> Mesh {
    Mesh::new([(Axis::Dp, dp), (Axis::Cp, cp), (Axis::Tp, tp)]).unwrap()
}

/// Slow, obvious search: every plan in turn, over all its ranks. A larger cluster's results include those of a smaller one.
fn all(cluster: &Cluster, space: &Space) -> Vec<Found> {
    let (model, mut found) = (model(), Vec::new());
    for (tp, cp) in [1, 2, 4, 8].into_iter().flat_map(|tp| [1, 2, 4, 8].map(|cp| (tp, cp))) {
        if tp * cp > cluster.ranks || tp > cluster.ranks_per_node {
            continue;
        }
        let mesh = mesh(cluster.ranks / tp / cp, cp, tp);
        for &stage in &space.stages {
            for &recipe in &space.recipes {
                for &bucket_len in &space.bucket_lens {
                    let options =
                        Options { stage, precision: recipe.precision, bucket_len, ..space.options.clone() };
                    let Ok(plan) = Plan::new(&mesh, &model, AdamW::default(), &options) else { continue };
                    let totals = plan.totals();
                    let (memory, wire) = (totals.most_held.1, totals.most_sent.1);
                    if memory.total() <= cluster.memory {
                        let mesh = mesh.clone();
                        found.push(Found { mesh, stage, recipe, bucket_len, memory, wire });
                    }
                }
            }
        }
    }
    found.sort_by_key(|found| (found.wire.total(), found.memory.total()));
    found
}

#[test]
fn nothing_that_fits_is_left_out() {
    let space = Space { stages: STAGES.to_vec(), bucket_lens: vec![None, Some(100)], ..Space::default() };
    let all = all(&Cluster { ranks: 8, memory: u64::MAX, ranks_per_node: 8 }, &space);
    let mut counts = Vec::new();
    for memory in [0, 20_000, 40_000, u64::MAX] {
        for ranks_per_node in [1, 2, 8] {
            let cluster = Cluster { ranks: 8, memory, ranks_per_node };
            let found = Plan::search(&model(), &cluster, AdamW::default(), &space).unwrap();
            let fits = |found: &&Found| {
                found.memory.total() <= memory && found.mesh.degree(Axis::Tp) <= ranks_per_node
            };
            assert_eq!(found, all.iter().filter(fits).cloned().collect::<Vec<_>>(), "{cluster:?}");
            counts.push(found.len());
        }
    }
    // 5 stages, 2 recipes for bf16, 2 buckets; (tp, cp): 4, 4 + 3, 4 + 3 + 2.
    assert_eq!(counts[9..], [4 * 20, 7 * 20, 9 * 20]);
    assert_eq!(counts[..3], [0; 3]);
    assert!(counts[3] < counts[6] && counts[6] < counts[9], "{counts:?}");
}

/// Masters apply to bf16 only, and meshes that do not divide the vocabulary are skipped.
#[test]
fn what_contradicts_itself_is_passed_over() {
    let model = Gpt2::SMALL.model(F32).build().unwrap();
    let cluster = Cluster { ranks: 8, memory: 80_000_000_000, ranks_per_node: 8 };
    let found = Plan::search(&model, &cluster, AdamW::default(), &Space::default()).unwrap();
    assert!(!found.is_empty());
    assert!(found.iter().all(|found| found.mesh.degree(Axis::Tp) == 1));
    assert!(found.iter().all(|found| found.recipe.precision.master == Master::None));
    // Stages that gather only once send least; ties go to the lowest memory.
    assert_eq!((found[0].stage, found[0].mesh.clone()), (Stage::Zero2, mesh(8, 1, 1)));
    let options = found[0].options(&Space::default());
    let plan = Plan::new(&found[0].mesh, &model, AdamW::default(), &options).unwrap();
    assert_eq!((plan.totals().most_held.1, plan.totals().most_sent.1), (found[0].memory, found[0].wire));
}

#[test]
fn what_cannot_be_is_an_error() {
    let four = Llama3 { layers: 4, ..Llama3::B8 }.model(BF16, 4).build().unwrap();
    let cluster = Cluster { ranks: 10, memory: u64::MAX, ranks_per_node: 8 };
    // Any number of ranks returns quickly.
    let endless = Cluster { ranks: 1 << 36, ..cluster };
    let found = Plan::search(&four, &endless, AdamW::default(), &Space::default());
    assert!(found.is_err(), "{found:?}");
    let last = Model::builder().stage(usize::MAX).param("w", &[7], F32, Placement::whole()).build().unwrap();
    let error = Plan::search(&last, &cluster, Sgd::default(), &Space::default()).unwrap_err();
    assert!(matches!(error, Error::NoStages { stages: usize::MAX, .. }), "{error}");
    let error = Plan::search(&four, &cluster, AdamW::default(), &Space::default()).unwrap_err();
    assert!(matches!(error, Error::NoStages { ranks: 10, stages: 4 }), "{error}");
    let odd = Placement::whole().cut_in_blocks(Axis::Tp, 0, [5, 5]);
    let odd = Model::builder().param("odd", &[7], F32, odd).build().unwrap();
    let error = Plan::search(&odd, &cluster, Sgd::default(), &Space::default()).unwrap_err();
    assert!(matches!(error, Error::Mesh(MeshError::Blocks { extent: 7, .. })), "{error}");
    let only = Space { recipes: Space::default().recipes[1..2].to_vec(), ..Space::default() };
    let f32s = Model::builder().param("w", &[7], F32, Placement::whole()).build().unwrap();
    let error = Plan::search(&f32s, &cluster, Sgd::default(), &only).unwrap_err();
    assert!(matches!(error, Error::Shard(meshstep_shard::Error::UnusedPrecision { .. })), "{error}");
}

/// 405 billion parameters on 16,384 ranks of 80 GB: every plan that fits divides at least the state, and the sizes are known.
#[test]
fn the_largest_model_fits_its_cluster() {
    // Short runs use one block for each pipeline stage.
    let layers = if effort() == Effort::Tenth { 16 } else { Llama3::B405.layers };
    let model = Llama3 { layers, ..Llama3::B405 }.model(BF16, 16).build().unwrap();
    let mut space = Space::default();
    if !long() {
        space.stages = vec![Stage::Zero1, Stage::Zero3];
        // The search skips bf16 parameters without masters, so short runs try only f32 masters.
        space.recipes = vec![space.recipes[1]];
        space.bucket_lens.truncate(1);
    }
    let cluster = Cluster { ranks: 16_384, memory: 80_000_000_000, ranks_per_node: 8 };
    let found = Plan::search(&model, &cluster, AdamW::default(), &space).unwrap();
    assert!(found.iter().any(|found| found.mesh.to_string() == "pp=16,dp=128,cp=1,tp=8"));
    assert!(found.is_sorted_by_key(|found| found.wire.total()));
    assert_eq!(found[0].mesh.degree(Axis::Tp), 8);
}
