//! Muon on meshes whose ranks share all parameters alike: plans say which matrices are exchanged, and ranks send what is planned.

use crate::accounting::measure_model;
use meshstep_optim::Muon;
use meshstep_parallel3d::{Model, Placement, Plan, Purpose};
use meshstep_shard::{Groups, Options, Stage};
use meshstep_tensor::DType::F32;

fn model(count: usize) -> Model {
    let add = |b: meshstep_parallel3d::ModelBuilder, i| {
        b.unit(format!("h{i}")).param(format!("w{i}"), &[20, 36], F32, Placement::whole())
    };
    (0..count).fold(Model::builder(), add).build().unwrap()
}

#[test]
fn matrices_are_exchanged_where_chunks_cut_them_and_the_plan_says_why() {
    let muon = || Groups::new(Muon::default());
    for (stage, count, says) in [
        (Stage::Zero1, 8, " whole"),
        (Stage::Zero1, 5, "exchanged: whole ones would pad more than 1/4"),
        (Stage::Zero2, 5, "exchanged: whole ones would pad more than 1/4"),
        (Stage::Zero3, 8, "exchanged: chunks cut them"),
    ] {
        let options = Options { stage, ..Options::default() };
        for mesh in ["dp=4", "cp=2,dp=2"] {
            let plan = Plan::new(&mesh.parse().unwrap(), &model(count), muon(), &options).unwrap();
            let text = plan.to_string();
            assert!(text.contains(says), "{stage:?}, {count} matrices: {text}");
            let sends = plan.rank(1).unwrap().sends().unwrap();
            let exchanged = sends.iter().any(|sends| sends.purpose == Purpose::Matrices && sends.bytes > 0);
            assert_eq!(exchanged, says.contains("exchanged"), "{text}");
            measure_model(mesh, (&model(count), F32), &muon(), &options);
        }
    }
}
