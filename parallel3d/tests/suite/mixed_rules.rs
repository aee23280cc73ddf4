//! Groups of different rules on meshes: the same bits on every mesh and at every stage.

use crate::common::{arrangements, model, run_with};
use meshstep_optim::{AdamW, Lion, Muon};
use meshstep_parallel3d::{Axis, Model, Placement};
use meshstep_shard::{Combine, Groups, Options, Stage};
use meshstep_tensor::DType::F32;

fn options(stage: Stage) -> Options {
    Options { stage, combine: Combine::Weighted, bucket_len: Some(100), ..Options::default() }
}

#[test]
fn two_rules_give_the_same_bits_on_every_mesh_and_at_every_stage() {
    let decay = AdamW { weight_decay: 0.1, ..AdamW::default() };
    let rules = Groups::new(decay).with(AdamW::default(), ["ln"]).with_lr(
        Lion::default(),
        0.25,
        ["qkv", "out", "wte"],
    );
    let run = |mesh, stage| run_with(&model(F32), mesh, (&rules, &options(stage)));
    let expected = run("tp=1", Stage::Replicated);
    for (_, mesh, stage) in arrangements() {
        assert_eq!(run(mesh, stage), expected, "{mesh} {stage:?}");
    }
}

/// Two matrices of hidden layers, one of them cut along tp, and a bias.
fn blocks() -> Model {
    let cut = Placement::whole().cut(Axis::Tp, 0);
    Model::builder()
        .param("bias", &[10], F32, Placement::whole())
        .param("up", &[12, 10], F32, cut)
        .param("down", &[10, 12], F32, Placement::whole())
        .build()
        .unwrap()
}

fn muon() -> Groups {
    Groups::new(AdamW::default()).with(Muon::default(), ["up", "down"])
}

#[test]
fn muon_beside_adamw_has_the_same_bits_where_a_mesh_cuts_matrices() {
    let run = |mesh, stage| run_with(&blocks(), mesh, (&muon(), &options(stage)));
    let expected = run("tp=1", Stage::Replicated);
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];
    let meshes = ["dp=2", "tp=2,dp=2", "dp_replicate=2,dp_shard=2"];
    for (mesh, stage) in stages.into_iter().flat_map(|stage| meshes.map(|mesh| (mesh, stage))) {
        assert_eq!(run(mesh, stage), expected, "{mesh} {stage:?}");
    }
}
