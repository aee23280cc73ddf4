//! The same bits as on one rank, on every mesh, at every stage.

use super::{End, PARTS, model, options, rules, train};
use crate::common::{arrangements, run_with};
use meshstep_cases::{long, tried};
use meshstep_optim::{Blocks, Muon, Rounding};
use meshstep_parallel3d::{Axis, Model, Placement};
use meshstep_shard::{Combine, Groups, Moments, Options, Owners, Precision, Stage};
use meshstep_tensor::DType::{BF16, F32};

const MESHES: [&str; 21] = [
    "dp=1",
    "dp=2",
    "dp=3",
    "dp=4",
    "dp=8",
    "tp=2",
    "tp=2,dp=2",
    "tp=2,dp=3",
    "tp=2,dp=4",
    "tp=4",
    "tp=4,dp=2",
    "tp=4,dp=3",
    "tp=2,dp=8",
    "tp=4,dp=4",
    "tp=4,dp=8",
    "tp=2,cp=2,dp=2",
    "tp=2,cp=3",
    "dp_replicate=2,dp_shard=2",
    "dp_replicate=3,dp_shard=1,tp=2",
    "dp_replicate=2,dp_shard=2,tp=2",
    "dp_replicate=2,dp_shard=3,tp=2",
];

const STAGES: [Stage; 5] =
    [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3, Stage::WholeParams(Owners::SortedGreedy)];

fn end(model: &Model, mesh: &str, options: &Options, batches: usize) -> End {
    let (rules, nothing) = (rules(), &|_: &mut _| ());
    train((model, mesh), (&rules, options), (0..2, batches), [nothing, nothing])
}

#[test]
fn every_mesh_stage_and_number_of_micro_batches_has_the_bits_of_one_rank() {
    const { assert!(PARTS.is_multiple_of(4)) };
    let expected = end(&model(F32), "dp=1", &options(Stage::Replicated), 1);
    let one = end(&model(F32), "dp=1", &options(Stage::Replicated), 4);
    assert!(one == expected);
    let all = MESHES.into_iter().flat_map(|mesh| STAGES.map(|stage| (mesh, stage)));
    let all = all.flat_map(|on| [1, 4].map(|batches| (on, batches)));
    for (i, ((mesh, stage), batches)) in all.enumerate() {
        if tried(i, 2) || mesh.starts_with("tp=2,dp=2") {
            let end = end(&model(F32), mesh, &options(stage), batches);
            assert!(end == expected, "{mesh}, {stage:?}, {batches} micro-batches");
        }
    }
}

#[test]
fn buckets_of_any_length_have_the_same_bits() {
    let expected = end(&model(F32), "dp=1", &options(Stage::Replicated), 1);
    for bucket_len in [1, 64, 333, 100_000] {
        for (mesh, stage) in [("tp=2,dp=3", Stage::Zero1), ("tp=4,dp=2", Stage::Zero3)] {
            let options = Options { bucket_len: Some(bucket_len), ..options(stage) };
            assert!(end(&model(F32), mesh, &options, 1) == expected, "{mesh}, {stage:?}, {bucket_len}");
        }
    }
}

/// Cut in runs, and in blocks of different lengths: several segments of a parameter on one rank.
fn runs(dtype: meshstep_tensor::DType) -> Model {
    let cut = |dim| Placement::whole().cut(Axis::Tp, dim);
    Model::builder()
        .param("up", &[16, 9], dtype, cut(0))
        .param("down", &[5, 48], dtype, cut(1))
        .param("qkv", &[32, 5], dtype, Placement::whole().cut_in_blocks(Axis::Tp, 0, [16, 8, 8]))
        .param("conv1d", &[7, 64], dtype, Placement::whole().cut_in_blocks(Axis::Tp, 1, [32, 16, 16]))
        .param("heads", &[3, 16, 5], dtype, cut(1))
        .build()
        .unwrap()
}

#[test]
fn every_precision_has_the_bits_of_one_rank() {
    let muon = |blocks| Muon { blocks, momentum: 0.5, weight_decay: 0.2, ..Muon::moonshot() };
    let rules = Groups::new(muon(Blocks::Whole)).with(muon(Blocks::Batch), ["heads"]);
    let recipes = [
        (BF16, Moments::Full, Rounding::Stochastic),
        (BF16, Moments::BF16, Rounding::Stochastic),
        (F32, Moments::BF16, Rounding::Stochastic),
    ];
    for (r, (dtype, moments, rounding)) in recipes.into_iter().enumerate() {
        let options = |stage| {
            let precision = Precision { moments, rounding, seed: 7, ..Precision::default() };
            let grads = (dtype == BF16).then_some(F32);
            Options {
                stage,
                combine: Combine::Weighted,
                grads,
                precision,
                bucket_len: Some(300),
                ..Options::default()
            }
        };
        let expected = run_with(&runs(dtype), "tp=1", (&rules, &options(Stage::Replicated)));
        for (_, mesh, stage) in arrangements().filter(|(i, ..)| long() || i % 3 == r % 3) {
            let end = run_with(&runs(dtype), mesh, (&rules, &options(stage)));
            assert!(end == expected, "{mesh} {stage:?} {dtype} {moments:?}");
        }
    }
}
