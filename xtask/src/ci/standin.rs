//! What takes a GPU's place where there is none: libraries built from xtask/standin, and the tests that run on them.

use super::steps::{Setting, Task, test};
use crate::cmd::Cmd;
use crate::kernels::sources::{self, Module};
use anyhow::{Context, ensure};
use std::fs;
use std::path::Path;

/// How every stand-in is compiled.
const FLAGS: &str = "-std=c++17 -O1 -shared -fPIC -ffp-contract=off -fno-strict-aliasing";
/// A stand-in's sources, and the library whose place it takes.
const LIBRARIES: [(&[&str], &str); 3] = [
    (
        &[
            "xtask/standin/cuda/libcuda.cpp",
            "xtask/standin/cuda/kernels.cpp",
            "xtask/standin/cuda/graphs.cpp",
        ],
        "libcuda.so.1",
    ),
    (&["xtask/standin/nccl/libnccl.cpp"], "libnccl.so.2"),
    // One as old as is supported.
    (&["-DMESHSTEP_OLD", "xtask/standin/nccl/libnccl.cpp"], "old/libnccl.so.2"),
];
/// The packages whose tests need a GPU.
const FEATURES: &str = "meshstep-tensor/cuda,meshstep-optim/cuda,meshstep-shard/cuda,meshstep-shard/checkpoint,meshstep-bench/cuda";

/// The GPU's tests, on libraries that take its place for these commands alone.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let folder = setting.target.join("standin");
    let kernels = folder.join("kernels");
    let mut tasks = vec![Task::Empty(folder.clone()), Task::Empty(folder.join("old"))];
    tasks.extend(LIBRARIES.map(|(sources, name)| Task::Run(library(setting, sources, &folder.join(name)))));
    tasks.push(Task::KernelsForCpu { root: setting.root.clone(), into: kernels.clone() });
    let tests = test(&format!("--workspace --features {FEATURES} --test cuda"), setting);
    let cargo = |line| Task::Run(Cmd::cargo(line).dir(&setting.root));
    let example = cargo("test --doc -p meshstep-tensor --features cuda");
    // What measures compares every case with the CPU first.
    let measures = Cmd::cargo(&format!("test --workspace --features {FEATURES} --bench gpu"));
    let trial = [("GPU_BENCH_STANDIN", "1"), ("GPU_BENCH_LOG2", "17"), ("GPU_BENCH_ROUNDS", "1")];
    let measures = trial.iter().fold(measures.dir(&setting.root), |cmd, (name, value)| cmd.env(name, value));
    let nccl = "-p meshstep-comm --features nccl --lib --test nccl";
    let old = format!("{}:{}", folder.join("old").display(), folder.display());
    let on_them = |task| on(&folder.to_string_lossy(), &kernels, task);
    tasks.extend(
        [
            tests,
            example,
            Task::Run(measures),
            test(nccl, setting),
            cargo("test --doc -p meshstep-comm --features nccl"),
            cargo("test --doc -p meshstep-shard --features cuda"),
        ]
        .map(on_them),
    );
    tasks.push(on(&old, &kernels, test(&format!("{nccl} collectives graphs misuse"), setting)));
    tasks
}

/// The task, on the libraries in these folders.
fn on(folders: &str, kernels: &Path, task: Task) -> Task {
    match task {
        Task::Run(cmd) => Task::Run(
            cmd.env("LD_LIBRARY_PATH", folders)
                .env("MESHSTEP_STANDIN", "1")
                .env("MESHSTEP_STANDIN_KERNELS", &kernels.to_string_lossy())
                .env("REQUIRE_GPU", "1"),
        ),
        other => other,
    }
}

fn library(setting: &Setting, sources: &[&str], into: &Path) -> Cmd {
    let build = Cmd::built("c++", &format!("{FLAGS} -Wall -Wextra -Werror {}", sources.join(" ")));
    build.arg("-o").arg(&into.to_string_lossy()).dir(&setting.root)
}

/// Compiles every committed kernel for the CPU: its text, unmodified, behind the stand-in for a device's threads.
pub(super) fn kernels(root: &Path, into: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(into)?;
    let header = root.join("xtask/standin/simt/simt.h");
    let files = sources::read(root)?;
    for Module { name, path, text } in sources::modules(&files)? {
        let ptx = files.iter().find(|file| file.path == sources::ptx_path(&path));
        let ptx = ptx.with_context(|| format!("{path} has no PTX; run `cargo xtask kernels`"))?;
        let register: String = entries(&ptx.text).map(|name| format!("SIMT_KERNEL({name})\n")).collect();
        let unit = into.join(format!("{name}.cpp"));
        fs::write(&unit, format!("#include \"{}\"\n{text}\n{register}", header.display()))?;
        let built = into.join(format!("{name}.so"));
        let cmd =
            Cmd::built("c++", FLAGS).arg("-o").arg(&built.to_string_lossy()).arg(&unit.to_string_lossy());
        let status = cmd.run_unattended()?;
        ensure!(status.success(), "{status}\ncommand:      {cmd}");
    }
    Ok(())
}

/// The names of the kernels in a PTX text.
fn entries(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.split(".entry ")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_in_their_ptx() {
        let ptx = ".version 7.0\n.visible .entry adam_f32(\n.param .b64 x\n)\n{}\n.entry sgd_f64 ()";
        assert_eq!(entries(ptx).collect::<Vec<_>>(), ["adam_f32", "sgd_f64"]);
        assert_eq!(entries("").count(), 0);
    }
}
