//! The step `train-smoke`: the main job, a few steps long, by the program that the tests were built with.

use super::steps::{ALL, Setting, Task};
use crate::cmd::Cmd;

/// Built together with the tests: `cargo run -p meshstep-bench` would choose fewer features for what they share, and
/// compile candle and sixty others a second time.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let build = Cmd::cargo(&format!("build {ALL} --bins --tests")).dir(&setting.root);
    let program = format!("meshstep-bench{}", std::env::consts::EXE_SUFFIX);
    let program = setting.target.join("debug").join(program);
    let bench = |line: &str| Cmd::built(&program, line).dir(&setting.root);
    // On one rank, and on eight: tensors, sequences and batches cut in two each.
    let [stages, meshes] = match setting.long {
        true => ["train --steps 12", "train --compare"],
        false => ["train --steps 6 --held-out 16", "train --mesh tp=1 --mesh tp=2,cp=2,dp=2 --steps 3"],
    };
    vec![
        Task::Run(build),
        Task::ShownFlags(bench("train --help")),
        Task::Run(bench(stages)),
        Task::Run(bench(meshes)),
    ]
}
