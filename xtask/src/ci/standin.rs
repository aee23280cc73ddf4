//! What takes a GPU's place where there is none: libraries built from xtask/standin, and the tests that run on them.

use super::steps::{Setting, Task, test};
use crate::cmd::Cmd;
use anyhow::{Context, ensure};
use std::fs;
use std::path::{Path, PathBuf};

/// How every stand-in is compiled.
const FLAGS: &str = "-std=c++17 -O1 -shared -fPIC -ffp-contract=off -fno-strict-aliasing";
/// A stand-in's sources, and the library whose place it takes.
const LIBRARIES: [(&[&str], &str); 3] = [
    (&["xtask/standin/cuda/libcuda.cpp", "xtask/standin/cuda/kernels.cpp"], "libcuda.so.1"),
    (&["xtask/standin/nccl/libnccl.cpp"], "libnccl.so.2"),
    // One as old as is supported.
    (&["-DMESHSTEP_OLD", "xtask/standin/nccl/libnccl.cpp"], "old/libnccl.so.2"),
];
/// The packages whose tests need a GPU.
const FEATURES: &str = "meshstep-tensor/cuda";

/// The GPU's tests, on libraries that take its place for these commands alone.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let folder = setting.target.join("standin");
    let kernels = folder.join("kernels");
    let mut tasks = vec![Task::Empty(folder.clone()), Task::Empty(folder.join("old"))];
    tasks.extend(LIBRARIES.map(|(sources, name)| Task::Run(library(setting, sources, &folder.join(name)))));
    tasks.push(Task::Kernels { root: setting.root.clone(), into: kernels.clone() });
    let tests = test(&format!("--workspace --features {FEATURES} --test cuda"), setting);
    let cargo = |line| Task::Run(Cmd::cargo(line).dir(&setting.root));
    let example = cargo("test --doc -p meshstep-tensor --features cuda");
    let nccl = "-p meshstep-comm --features nccl --lib --test nccl";
    let old = format!("{}:{}", folder.join("old").display(), folder.display());
    let on_them = |task| on(&folder.to_string_lossy(), &kernels, task);
    tasks.extend(
        [tests, example, test(nccl, setting), cargo("test --doc -p meshstep-comm --features nccl")]
            .map(on_them),
    );
    tasks.push(on(&old, &kernels, test(&format!("{nccl} collectives"), setting)));
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
    for kernel in committed(root)? {
        let ptx = fs::read_to_string(kernel.with_extension("ptx"))?;
        let register: String =
            entries(&ptx).map(|name| format!("SIMT_KERNEL({name})\n")).collect::<Vec<_>>().concat();
        let text = text_of(root, &kernel)?;
        let stem = kernel.file_stem().and_then(|stem| stem.to_str()).context("a kernel without a name")?;
        let unit = into.join(format!("{stem}.cpp"));
        fs::write(&unit, format!("#include \"{}\"\n{text}\n{register}", header.display()))?;
        let built = into.join(format!("{stem}.so"));
        let cmd =
            Cmd::built("c++", FLAGS).arg("-o").arg(&built.to_string_lossy()).arg(&unit.to_string_lossy());
        let status = cmd.run_unattended()?;
        ensure!(status.success(), "{status}\ncommand:      {cmd}");
    }
    Ok(())
}

/// Every `.cu` of optim that has its PTX beside it.
fn committed(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut kernels = Vec::new();
    for folder in fs::read_dir(root.join("optim/src"))? {
        let folder = folder?.path();
        if folder.is_dir() {
            kernels.extend(files(&folder, "ptx")?.into_iter().map(|ptx| ptx.with_extension("cu")));
        }
    }
    kernels.sort();
    Ok(kernels)
}

/// A kernel's text behind all that kernels share.
fn text_of(root: &Path, kernel: &Path) -> anyhow::Result<String> {
    let numbered = |path: &PathBuf| {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with(|c: char| c.is_ascii_digit()))
    };
    let shared = files(&root.join("optim/src/cuda"), "cu")?.into_iter().filter(numbered);
    let texts = shared
        .chain([kernel.to_owned()])
        .map(|path| fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display())));
    Ok(texts.collect::<anyhow::Result<Vec<_>>>()?.concat())
}

/// The files of a folder that end so, in the order of their names.
fn files(folder: &Path, extension: &str) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|found| found == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
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
