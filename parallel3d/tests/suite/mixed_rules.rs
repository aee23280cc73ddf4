//! Groups of different rules on meshes: the same bits on every mesh and at every stage, and refusals on every rank.

use crate::common::{arrangements, model, run_with};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{AdamW, Lion, Muon};
use meshstep_parallel3d::{Axis, Error, Mesh, Model, Optimizer, Placement, Plan};
use meshstep_shard::{Combine, Groups, Options, Stage};
use meshstep_tensor::DType::F32;
use std::sync::Arc;

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

/// Two matrices of hidden layers, one of them cut along tp, and a norm.
fn blocks() -> Model {
    let cut = Placement::whole().cut(Axis::Tp, 0);
    Model::builder()
        .param("ln", &[10], F32, Placement::whole())
        .param("up", &[12, 10], F32, cut)
        .param("down", &[10, 12], F32, Placement::whole())
        .build()
        .unwrap()
}

fn muon() -> Groups {
    Groups::new(AdamW::default()).with(Muon::default(), ["up", "down"])
}

#[test]
fn muon_beside_adamw_runs_where_ranks_share_all_parameters() {
    let run = |mesh, stage| run_with(&blocks(), mesh, (&muon(), &options(stage)));
    let expected = run("tp=1", Stage::Replicated);
    let stages = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];
    for (mesh, stage) in stages.into_iter().flat_map(|stage| ["dp=2", "dp=4"].map(|mesh| (mesh, stage))) {
        assert_eq!(run(mesh, stage), expected, "{mesh} {stage:?}");
    }
}

#[test]
fn muon_beside_adamw_is_refused_on_every_rank_where_a_mesh_cuts_matrices() {
    for (mesh, stage) in [
        ("tp=2,dp=2", Stage::Zero1),
        ("dp_replicate=2,dp_shard=2", Stage::Zero1),
        ("dp_replicate=2,dp_shard=2", Stage::Zero3),
    ] {
        let parsed: Mesh = mesh.parse().unwrap();
        let refused = |error: &Error| matches!(error, Error::Shard(meshstep_shard::Error::Shared { what, .. }) if what.contains("muon"));
        let planned = Plan::new(&parsed, &blocks(), muon(), &options(stage)).unwrap_err();
        assert!(refused(&planned), "{mesh}: {planned}");
        let errors = loopback::spawn(4, |world: Arc<dyn Communicator>| {
            Optimizer::new(world, parsed.clone(), &blocks(), muon(), |_, _, _| Ok(()), options(stage))
                .unwrap_err()
        });
        errors.unwrap().iter().for_each(|error| assert!(refused(error), "{mesh}: {error}"));
    }
}
