//! Step `train-smoke`: a few steps of the training job, with the program that was built together with the tests.

use super::task::{ALL, Setting, Task};
use crate::cmd::Cmd;

/// Returns the commands. The program is built together with the tests, because `cargo run -p meshstep-bench` would select
/// fewer features for shared dependencies, and compile candle and about sixty other crates a second time.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let build = Cmd::cargo(&format!("build {ALL} --bins --tests")).dir(&setting.root);
    let program = format!("meshstep-bench{}", std::env::consts::EXE_SUFFIX);
    let program = setting.target.join("debug").join(program);
    let bench = |line: &str| Cmd::built(&program, line).dir(&setting.root);
    // One rank, and eight ranks that split tensors, sequences and batches in two each.
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
