//! Checkpoints from one mesh to another: training goes on with the bits of one rank.

use super::{model, options, rules, train};
use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
use meshstep_parallel3d::Optimizer;
use meshstep_shard::Stage;
use meshstep_tensor::DType::F32;

#[test]
fn a_checkpoint_resumes_on_other_ranks_and_meshes_with_the_same_bits() {
    let (model, rules, nothing) = (model(F32), rules(), &|_: &mut Optimizer| ());
    let one = options(Stage::Replicated);
    let expected = train((&model, "dp=1"), (&rules, &one), (0..4, 1), [nothing, nothing]);
    let stages = [Stage::Zero3, Stage::Zero1, Stage::Zero2, Stage::Replicated];
    for (i, saving) in ["dp=4", "tp=2,dp=2", "dp_replicate=2,dp_shard=2", "tp=4"].into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let save = |opt: &mut Optimizer| _ = checkpoint::save(opt, &store, Save::default()).unwrap();
        let before = options(stages[i]);
        train((&model, saving), (&rules, &before), (0..2, 1), [nothing, &save]);
        for (j, mesh) in
            ["dp=3", "tp=2,cp=1,dp=2", "tp=4,dp=2", "dp_replicate=2,dp_shard=2,tp=2"].iter().enumerate()
        {
            let load = |opt: &mut Optimizer| _ = checkpoint::load(opt, &store, Load::default()).unwrap();
            let after = options(stages[(i + j) % 4]);
            let end = train((&model, mesh), (&rules, &after), (2..4, 1), [&load, nothing]);
            assert!(end.0 == expected.0, "from {saving} {:?} to {mesh} {:?}", before.stage, after.stage);
            assert_eq!(end.1, expected.1[2..], "from {saving} to {mesh}");
        }
    }
}
