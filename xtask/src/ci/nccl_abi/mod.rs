//! Step `nccl-abi`: compares comm's table of NCCL functions with the headers and libraries of pinned releases, without a
//! GPU.

mod release;

use super::task::{ALL, Setting, Task};
use crate::cmd::Cmd;
use crate::parallel::in_parallel;
use anyhow::Context;
use release::{Fetched, Release};
use std::fmt;
use std::fs::{self, File};
use std::path::PathBuf;

/// Comparison of every release with comm's table.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    /// Folder of the unpacked releases.
    into: PathBuf,
    /// Command that runs comm's ABI tests.
    test: Cmd,
    on_ci: bool,
}

pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let filter = "package(meshstep-comm) & kind(lib) & test(/^nccl::table::abi::/)";
    let line = format!("nextest run --config-file xtask/nextest.toml --no-fail-fast {ALL} -E");
    let test = Cmd::cargo(&line).arg(filter).dir(&setting.root);
    let check = Check { into: setting.target.join("nccl-abi"), test, on_ci: setting.on_ci };
    vec![Task::Nextest, Task::NcclAbi(check)]
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let releases = release::pinned().map(|release| release.version).collect::<Vec<_>>().join(", ");
        write!(f, "for each of NCCL {releases} in {}: {}", self.into.display(), self.test)
    }
}

impl Check {
    /// Fetches missing releases, and runs comm's tests on each release.
    pub(super) fn run(&self) -> anyhow::Result<()> {
        if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            self.skip("the releases are libraries for Linux on x86_64");
            return Ok(());
        }
        fs::create_dir_all(&self.into).with_context(|| format!("cannot make {}", self.into.display()))?;
        // Only one process fetches at a time; closing the file releases the lock.
        let lock = File::create(self.into.join("lock")).context("cannot make a lock in the target folder")?;
        lock.lock().context("cannot lock the target folder")?;
        let releases: Vec<Release> = release::pinned().collect();
        let fetched = in_parallel(&releases, |release| release.fetch(&self.into))?;
        drop(lock);
        releases.iter().zip(fetched).try_for_each(|(release, fetched)| self.compare(release, fetched))
    }

    fn compare(&self, release: &Release, fetched: Fetched) -> anyhow::Result<()> {
        let folder = match fetched {
            Fetched::At(folder) => folder,
            Fetched::Unreachable(reason) => {
                self.skip(&format!("NCCL {} could not be fetched: {reason}", release.version));
                return Ok(());
            }
        };
        println!("NCCL {}", release.version);
        let test = self.test.clone().env("MESHSTEP_NCCL_ABI", &folder.to_string_lossy());
        let test = test.env("LD_LIBRARY_PATH", &folder.join("lib").to_string_lossy());
        // NCCL searches the machine's networks for an address to put into the id of a communicator.
        test.env("NCCL_SOCKET_IFNAME", "lo").succeed()
    }

    /// Prints that a comparison was skipped; in a CI job also as a warning of the run.
    fn skip(&self, reason: &str) {
        println!("skipped: {reason}");
        if self.on_ci {
            println!("::warning title=nccl-abi::NCCL ABI NOT COMPARED with comm's table: {reason}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_task_names_its_releases_and_its_tests() {
        let setting = Setting {
            root: PathBuf::from("/w"),
            target: PathBuf::from("/w/target"),
            long: false,
            on_ci: true,
            cases: None,
        };
        let shown = tasks(&setting)[1].to_string();
        assert!(
            shown.starts_with("for each of NCCL 2.18.3, 2.27.7, 2.28.9 in /w/target/nccl-abi: "),
            "{shown}"
        );
        assert!(shown.contains("test(/^nccl::table::abi::/)"), "{shown}");
    }
}
