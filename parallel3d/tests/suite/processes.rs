//! Meshes of ranks that are processes: every rank ends with the bits of its rank on loopback.

use crate::common::{STAGES, model, on_rank};
use meshstep_comm::Communicator;
use meshstep_parallel3d::Mesh;
use meshstep_shard::{Combine, Options, Stage};
use meshstep_shard_cases::processes::{WAYS, compare, digest, role, serve};
use meshstep_tensor::DType;
use std::sync::Arc;

const MESHES: [&str; 2] = ["tp=2,cp=2,dp=2", "dp_replicate=2,dp_shard=2,tp=2"];

/// Cases: each mesh with each stage.
fn table() -> Vec<(Mesh, Stage)> {
    let row = |mesh: &str| STAGES.map(|stage| (mesh.parse::<Mesh>().unwrap(), stage));
    MESHES.into_iter().flat_map(row).collect()
}

fn results(world: Arc<dyn Communicator>) -> Vec<String> {
    let run = |(mesh, stage)| {
        let options =
            Options { stage, combine: Combine::Weighted, bucket_len: Some(100), ..Options::default() };
        digest(&on_rank(Arc::clone(&world), &model(DType::F32), &mesh, &options))
    };
    table().into_iter().map(run).collect()
}

/// A rank of the test below. The test does nothing in the parent process.
#[test]
fn rank() {
    if let Some(role) = role() {
        serve(&role, results);
    }
}

#[test]
fn meshes_of_processes_have_the_bits_of_loopback() {
    for way in WAYS {
        compare("processes::rank", way, 8, results, |row| format!("{:?}", table()[row]));
    }
}
