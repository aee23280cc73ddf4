//! Compilers, unpacked in the target folder: from wheels pinned by hash, downloaded once.

use super::ptx::fingerprint;
use crate::wheels::{install, pip};
use anyhow::{Context, bail, ensure};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Wheels to download, each with its hash.
pub(crate) const PINNED: &str = include_str!("requirements.txt");

/// Delay before each download attempt; a network can be down for a moment.
const TRIES: [Duration; 3] = [Duration::ZERO, Duration::from_secs(5), Duration::from_secs(20)];

/// Paths of the compilers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tools {
    pub(crate) nvrtc: PathBuf,
    pub(crate) builtins: PathBuf,
    pub(crate) ptxas: PathBuf,
    pub(crate) nvdisasm: PathBuf,
}

impl Tools {
    /// Returns the compilers; downloads the missing ones.
    pub(crate) fn get(target: &Path) -> anyhow::Result<Self> {
        ensure!(
            cfg!(all(target_os = "linux", target_arch = "x86_64")),
            "the kernels' compilers are pinned for Linux on x86_64; run this there"
        );
        let folder = target.join("kernels");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        // Only one process downloads at a time; closing the file releases the lock.
        let lock = File::create(folder.join("lock")).context("cannot make a lock in the target folder")?;
        lock.lock().context("cannot lock the target folder")?;
        let unpacked = folder.join(fingerprint(&[PINNED]));
        if !unpacked.exists() {
            fetch(&folder, &unpacked)?;
        }
        Ok(Self::below(&unpacked))
    }

    fn below(unpacked: &Path) -> Self {
        let cu13 = unpacked.join("nvidia/cu13");
        Self {
            nvrtc: cu13.join("lib/libnvrtc.so.13"),
            builtins: cu13.join("lib/libnvrtc-builtins.so.13.0"),
            ptxas: cu13.join("bin/ptxas"),
            nvdisasm: cu13.join("bin/nvdisasm"),
        }
    }
}

/// Unpacks the wheels beside `unpacked`, and renames the folder when all are complete.
fn fetch(folder: &Path, unpacked: &Path) -> anyhow::Result<()> {
    let has_pip = matches!(pip("--version").output(), Ok(Some(_)));
    ensure!(has_pip, "python3 with pip is needed to fetch NVRTC; on Debian: apt-get install python3-pip");
    let (list, part) = (folder.join("requirements.txt"), unpacked.with_extension("part"));
    fs::write(&list, PINNED).with_context(|| format!("cannot write {}", list.display()))?;
    let install = install(&list, &part);
    for (idx, pause) in TRIES.into_iter().enumerate() {
        thread::sleep(pause);
        // Remove the files of a failed attempt.
        let _ = fs::remove_dir_all(&part);
        println!("fetching NVRTC and ptxas, attempt {} of {}: {install}", idx + 1, TRIES.len());
        if install.run_unattended()?.success() {
            return fs::rename(&part, unpacked)
                .with_context(|| format!("cannot move {} into place", part.display()));
        }
    }
    bail!("NVRTC and ptxas could not be fetched; pip's messages are above\ncommand:      {install}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_is_pinned_by_version_and_hash() {
        let wheels: Vec<&str> = PINNED.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(wheels.len(), 3);
        for wheel in wheels {
            let (name, hash) = wheel.split_once(" --hash=sha256:").unwrap();
            let version = if name.starts_with("nvidia-cuda-nvdisasm") { "==13.2.51" } else { "==13.0.88" };
            assert!(name.ends_with(version), "{wheel}");
            assert!(hash.len() == 64 && hash.chars().all(|c| c.is_ascii_hexdigit()), "{wheel}");
        }
    }
}
