//! Stochastic rounding on meshes: random bits depend on the element of the whole parameter, not on the cuts.

use crate::common::{MESHES, arrangements, run};
use meshstep_cases::long;
use meshstep_optim::Rounding;
use meshstep_parallel3d::{Axis, Gradient, Model, Placement};
use meshstep_shard::{Combine, Moments, Options, Precision, Stage};
use meshstep_tensor::DType::{self, BF16, F32};

/// Cuts by rows, by columns in runs longer and shorter than a row of counters, in blocks of either, in a middle dimension, and none.
fn model(dtype: DType) -> Model {
    let whole = Placement::whole();
    let cut = |dim| whole.clone().cut(Axis::Tp, dim);
    Model::builder()
        .param("up", &[16, 9], dtype, cut(0))
        .param("down", &[3, 1200], dtype, cut(1))
        .param("out", &[40, 16], dtype, cut(1))
        .param("qkv", &[32, 5], dtype, whole.clone().cut_in_blocks(Axis::Tp, 0, [16, 8, 8]))
        .param("conv1d", &[7, 64], dtype, whole.clone().cut_in_blocks(Axis::Tp, 1, [32, 16, 16]))
        .param("heads", &[3, 16, 5], dtype, cut(1))
        .param("pos", &[50, 3], dtype, whole.clone())
        .param("ln", &[7], dtype, whole.gradient(Gradient::PartialSum))
        .build()
        .unwrap()
}

#[test]
fn every_mesh_and_stage_draws_the_same_bits() {
    let recipes = [(F32, Moments::BF16), (BF16, Moments::Full), (BF16, Moments::BF16)];
    for (r, (dtype, moments)) in recipes.into_iter().enumerate() {
        let model = model(dtype);
        let options = |stage, seed| {
            let precision =
                Precision { moments, rounding: Rounding::Stochastic, seed, ..Precision::default() };
            let (combine, grads, bucket_len) = (Combine::Weighted, Some(F32), Some(1000));
            Options { stage, combine, grads, precision, bucket_len, ..Options::default() }
        };
        let expected = run(&model, "tp=1", &options(Stage::Replicated, 1));
        assert_ne!(run(&model, "tp=1", &options(Stage::Replicated, 2)), expected, "the seed shows");
        // Short runs try each mesh and stage with one recipe, long runs with all.
        for (_, mesh, stage) in arrangements().filter(|(i, ..)| long() || i / MESHES.len() % 3 == r) {
            assert_eq!(run(&model, mesh, &options(stage, 1)), expected, "{mesh} {stage:?} {dtype}");
        }
    }
}
