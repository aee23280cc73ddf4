//! `gpu-bundle`: a folder of programs that test and measure the GPU code on a machine without cargo and without network.

mod needs;
mod programs;

use crate::workspace::Workspace;
use anyhow::{Context, ensure};
use programs::PROGRAMS;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Size limit of the folder in MiB.
const MOST: u64 = 44;

/// Script that starts the runner.
const RUN: &str = include_str!("../../gpu_runner/run.sh");

/// Scripts that measure PyTorch for comparison, on a GPU and on the CPU, if python3 has it.
const TORCH: [&str; 2] = ["bench/python/gpu_torch.py", "bench/python/peers.py"];

/// Archive of the programs. Several programs contain the PTX of all kernels, which compresses well.
const ARCHIVE: &str = "programs.tar.gz";

/// Builds every program, checks its requirements, and puts the programs into `gpu-bundle` in the target folder.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    let folder = workspace.target.join("gpu-bundle");
    let unpacked = workspace.target.join("gpu-programs");
    for folder in [&folder, &unpacked] {
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| format!("cannot empty {}", folder.display()))?;
        }
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    for program in PROGRAMS {
        let built = program.executable(&program.build(&workspace.root).captured()?)?;
        let glibc = needs::check(&built)?;
        let size = mib(copy(&built, &unpacked.join(program.place()))?);
        println!("{}: {size:.1} MiB, glibc {glibc} or newer", program.place().display());
    }
    let places: Vec<PathBuf> = PROGRAMS.iter().map(programs::Program::place).collect();
    let mut bytes = pack(&unpacked, &places, &folder.join(ARCHIVE))?;
    write(&folder.join("commit"), &format!("{}\n", commit(&workspace.root)))?;
    for script in TORCH.map(Path::new) {
        let name = script.file_name().context("the script's path has no file name")?;
        bytes += copy(&workspace.root.join(script), &folder.join(name))?;
    }
    let script = write(&folder.join("run.sh"), RUN)?;
    executable(&script)?;
    check_size(bytes)?;
    println!(
        "{}: {} programs, {:.1} MiB packed; copy the folder to the GPU machine and start run.sh with a mode",
        folder.display(),
        PROGRAMS.len(),
        mib(bytes)
    );
    Ok(())
}

/// Packs these files of a folder in the given order. Returns the size of the archive in bytes.
fn pack(folder: &Path, files: &[PathBuf], archive: &Path) -> anyhow::Result<u64> {
    let mut tar = Command::new("tar");
    tar.arg("-czf").arg(archive).arg("-C").arg(folder).args(files).stdin(Stdio::null());
    let status = tar.status().context("cannot start tar; install it")?;
    ensure!(status.success(), "tar cannot write {}: {status}", archive.display());
    Ok(fs::metadata(archive).with_context(|| format!("cannot read {}", archive.display()))?.len())
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<u64> {
    let parent = to.parent().context("the program's path has no parent folder")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

fn write(path: &Path, text: &str) -> anyhow::Result<PathBuf> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path.to_owned())
}

#[cfg(unix)]
fn executable(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).with_context(|| path.display().to_string())
}

#[cfg(not(unix))]
fn executable(_: &Path) -> anyhow::Result<()> {
    anyhow::bail!("the bundle is for Linux; build it there")
}

fn check_size(bytes: u64) -> anyhow::Result<()> {
    ensure!(
        bytes < MOST << 20,
        "the bundle has {:.1} MiB, which is not below {MOST}; make its programs smaller",
        mib(bytes)
    );
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Returns the commit that the programs are built from, for the records.
fn commit(root: &Path) -> String {
    let git = |line: &str| -> Option<String> {
        let output =
            Command::new("git").args(line.split(' ')).current_dir(root).stdin(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    match (git("rev-parse HEAD"), git("status --porcelain")) {
        (Some(commit), Some(changes)) if changes.is_empty() => commit,
        (Some(commit), _) => format!("{commit}, changed"),
        (None, _) => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests;
