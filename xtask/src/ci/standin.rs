//! Stand-ins for a GPU: libraries built from xtask/standin, and the tests that run on them.

use super::task::{ALL, ON_GPU, Setting, Task, counted, test, with};
use crate::cmd::Cmd;
use crate::kernels::ptx::fingerprint;
use crate::kernels::sources::{self, Module};
use crate::parallel::in_parallel;
use anyhow::{Context, ensure};
use std::fs;
use std::path::{Path, PathBuf};

/// Compiler flags of every stand-in.
const FLAGS: &str = "-std=c++17 -O1 -shared -fPIC -ffp-contract=off -fno-strict-aliasing";
/// Headers of the stand-ins for the driver and for NCCL.
const HEADERS: [&str; 3] =
    ["xtask/standin/cuda/driver.h", "xtask/standin/cuda/memory.h", "xtask/standin/nccl/state.h"];
/// Sources of the stand-in for NCCL.
const NCCL: &[&str] = &[
    "xtask/standin/nccl/libnccl.cpp",
    "xtask/standin/nccl/communicators.cpp",
    "xtask/standin/nccl/operations.cpp",
    "xtask/standin/nccl/arithmetic.cpp",
    "xtask/standin/nccl/streams.cpp",
    "xtask/standin/nccl/state.cpp",
];
/// Header that is included before every kernel, and the header that it includes.
const SIMT: [&str; 2] = ["xtask/standin/simt/simt.h", "xtask/standin/simt/scheduler.h"];
/// Compiler options and sources of each stand-in, and the library that it replaces.
const LIBRARIES: [(&[&str], &[&str], &str); 4] = [
    (
        &[],
        &[
            "xtask/standin/cuda/libcuda.cpp",
            "xtask/standin/cuda/memory.cpp",
            "xtask/standin/cuda/kernels.cpp",
            "xtask/standin/cuda/graphs.cpp",
        ],
        "libcuda.so.1",
    ),
    // Used by tests in which the loader's path leads to the toolkit's stub library.
    (&[], &["xtask/standin/cuda/stub.cpp"], "stub/libcuda.so"),
    (&[], NCCL, "libnccl.so.2"),
    // The oldest supported version of NCCL.
    (&["-DMESHSTEP_OLD"], NCCL, "old/libnccl.so.2"),
];
/// Returns the GPU tests, run on the stand-ins. The stand-ins are on the library path of these commands only.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let mut tasks = vec![built(setting)];
    // comm's unit tests also run on the stand-ins.
    let tests = test(ALL, &format!("({ON_GPU}) | (package(meshstep-comm) & kind(lib))"), setting);
    // Each benchmark compares every case with the CPU before measuring.
    let trial = [
        ("GPU_BENCH_STANDIN", "1"),
        ("GPU_BENCH_LOG2", "17"),
        ("GPU_BENCH_ROUNDS", "1"),
        ("GPU_BENCH_MODEL", "tiny"),
    ];
    let measures = |bench: &str| {
        let cmd = Cmd::cargo(&format!("test {ALL} --bench {bench}")).dir(&setting.root);
        Task::Run(trial.iter().fold(cmd, |cmd, (name, value)| cmd.env(name, value)))
    };
    let on_old = "package(meshstep-comm) & kind(test) & test(/^nccl::(collectives|graphs|misuse)::/)";
    tasks.push(Task::Nextest);
    tasks.push(on(setting, &[""], tests));
    tasks.push(on(setting, &[""], measures("gpu -- --smoke")));
    tasks.push(on(setting, &[""], measures("gpu")));
    tasks.push(on(setting, &[""], measures("stages")));
    tasks.push(on(setting, &["old", ""], test(ALL, on_old, setting)));
    tasks
}

/// Returns the run of all doctests, on the stand-ins. Only the doctests of CUDA and NCCL need them.
pub(super) fn doctests(setting: &Setting) -> Vec<Task> {
    let mut tasks = vec![built(setting)];
    let all = Cmd::cargo(&format!("test --doc {ALL},meshstep-book/cuda")).dir(&setting.root);
    tasks.push(on(setting, &[""], Task::Run(counted(all, setting))));
    tasks
}

fn built(setting: &Setting) -> Task {
    Task::Standins { root: setting.root.clone(), into: setting.target.join("standin") }
}

/// Returns the task with these folders of the stand-ins on its library path.
fn on(setting: &Setting, folders: &[&str], task: Task) -> Task {
    let standin = setting.target.join("standin");
    let folders: Vec<String> = folders
        .iter()
        .map(|folder| standin.join(folder).to_string_lossy().trim_end_matches('/').to_owned())
        .collect();
    let kernels = standin.join("kernels").to_string_lossy().into_owned();
    let variables = [
        ("LD_LIBRARY_PATH", folders.join(":")),
        ("MESHSTEP_STANDIN", "1".to_owned()),
        ("MESHSTEP_STANDIN_KERNELS", kernels),
        ("REQUIRE_GPU", "1".to_owned()),
    ];
    variables.iter().fold(task, |task, (name, value)| with(task, name, value))
}

/// Shared library to build.
struct Unit {
    built: PathBuf,
    /// Compiler arguments, without the output.
    args: Vec<String>,
    /// All inputs of the compiler. A change of these or of the arguments triggers a rebuild.
    inputs: Vec<String>,
}

/// Builds the stand-ins for the driver, for NCCL and for a GPU's threads into `folder`. Skips up-to-date libraries.
pub(super) fn build(root: &Path, folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder.join("old"))?;
    fs::create_dir_all(folder.join("stub"))?;
    fs::create_dir_all(folder.join("kernels"))?;
    let mut units = libraries(root, folder)?;
    units.extend(kernels(root, &folder.join("kernels"))?);
    let built = in_parallel(&units, Unit::build)?;
    let new = built.iter().filter(|&&new| new).count();
    println!("stand-ins: {new} built, {} as they were", built.len() - new);
    Ok(())
}

impl Unit {
    /// Builds the library unless it is up to date. Returns true if it was built.
    fn build(&self) -> anyhow::Result<bool> {
        let parts = self.args.iter().chain(&self.inputs).map(String::as_str);
        let fresh = fingerprint(&parts.collect::<Vec<_>>());
        let stamp = self.built.with_added_extension("of");
        if self.built.exists() && fs::read_to_string(&stamp).is_ok_and(|old| old == fresh) {
            return Ok(false);
        }
        // The stamp is removed first, so that an unfinished library has none.
        let _ = fs::remove_file(&stamp);
        let compiler = self.args.iter().fold(Cmd::built("c++", FLAGS), |cmd, arg| cmd.arg(arg));
        let cmd = compiler.arg("-o").arg(&self.built.to_string_lossy());
        let status = cmd.run_unattended()?;
        ensure!(status.success(), "{status}\ncommand:      {cmd}");
        fs::write(&stamp, fresh).with_context(|| format!("cannot write {}", stamp.display()))?;
        Ok(true)
    }
}

/// Returns the stand-ins for the driver and for NCCL.
fn libraries(root: &Path, folder: &Path) -> anyhow::Result<Vec<Unit>> {
    let headers =
        HEADERS.iter().map(|header| read(&root.join(header))).collect::<anyhow::Result<Vec<_>>>()?;
    let unit = |(options, sources, name): &(&[&str], &[&str], &str)| -> anyhow::Result<Unit> {
        let paths: Vec<PathBuf> = sources.iter().map(|source| root.join(source)).collect();
        let mut inputs = paths.iter().map(|path| read(path)).collect::<anyhow::Result<Vec<_>>>()?;
        inputs.extend(headers.iter().cloned());
        let strict = ["-Wall", "-Wextra", "-Werror"].iter().chain(*options).map(|&option| option.to_owned());
        let args = strict.chain(paths.iter().map(|path| path.to_string_lossy().into_owned())).collect();
        Ok(Unit { built: folder.join(name), args, inputs })
    };
    LIBRARIES.iter().map(unit).collect()
}

/// Returns every committed kernel for the CPU: its unmodified source after the header with the stand-in for a device's
/// threads.
fn kernels(root: &Path, into: &Path) -> anyhow::Result<Vec<Unit>> {
    let [header, scheduler] = SIMT.map(|header| root.join(header));
    let files = sources::read(root)?;
    let unit = |Module { name, path, text }: Module| -> anyhow::Result<Unit> {
        let ptx = files.iter().find(|file| file.path == sources::ptx_path(&path));
        let ptx = ptx.with_context(|| format!("{path} has no PTX; run `cargo xtask kernels`"))?;
        let register: String = entries(&ptx.text).map(|name| format!("SIMT_KERNEL({name})\n")).collect();
        let source = into.join(format!("{name}.cpp"));
        let text = format!("#include \"{}\"\n{text}\n{register}", header.display());
        fs::write(&source, &text).with_context(|| format!("cannot write {}", source.display()))?;
        let args = vec![source.to_string_lossy().into_owned()];
        let inputs = vec![text, read(&header)?, read(&scheduler)?];
        Ok(Unit { built: into.join(format!("{name}.so")), args, inputs })
    };
    sources::modules(&files)?.into_iter().map(unit).collect()
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the names of the kernels in a PTX text.
fn entries(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.split(".entry ")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_built_again_when_what_it_reads_changes() {
        let folder = crate::workspace::Workspace::find().unwrap().target.join("xtask-tests/standin");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let build = |text: &str| {
            let source = folder.join("a.cpp");
            fs::write(&source, text).unwrap();
            let args = vec![source.to_string_lossy().into_owned()];
            Unit { built: folder.join("a.so"), args, inputs: vec![text.to_owned()] }.build()
        };
        assert_eq!(
            [build("int a() { return 1; }").unwrap(), build("int a() { return 1; }").unwrap()],
            [true, false]
        );
        assert!(build("int a() { return 2; }").unwrap());
        // A failed build leaves no stamp, so the next call builds again.
        assert!(build("int a() { return }").is_err());
        assert!(build("int a() { return 2; }").unwrap());
    }

    #[test]
    fn kernels_are_found_in_their_ptx() {
        let ptx = ".version 7.0\n.visible .entry adam_f32(\n.param .b64 x\n)\n{}\n.entry sgd_f64 ()";
        assert_eq!(entries(ptx).collect::<Vec<_>>(), ["adam_f32", "sgd_f64"]);
        assert_eq!(entries("").count(), 0);
    }
}
