//! A release of NCCL in the target folder: its header and its library, from a wheel that is pinned by hash.

use crate::kernels::ptx::fingerprint;
use crate::wheels::install;
use anyhow::{Context, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// Pinned releases, each with its hash.
const PINNED: &str = include_str!("releases.txt");
/// Files that are kept from a wheel.
const KEPT: [&str; 2] = ["include/nccl.h", "lib/libnccl.so.2"];

/// A pinned wheel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release {
    pub(super) version: &'static str,
    /// The wheel's requirement line for pip.
    line: &'static str,
}

/// Result of an attempt to fetch a release.
#[derive(Debug)]
pub(super) enum Fetched {
    /// The folder with `include` and `lib`.
    At(PathBuf),
    /// pip did not reach the index; holds pip's message.
    Unreachable(String),
}

pub(super) fn pinned() -> impl Iterator<Item = Release> {
    let lines = PINNED.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| {
        let (_, version) = line.split_once("==")?;
        Some(Release { version: version.split(' ').next()?, line })
    })
}

impl Release {
    /// Fetches the release into its own folder below `into`, unless the folder exists.
    pub(super) fn fetch(&self, into: &Path) -> anyhow::Result<Fetched> {
        let folder = into.join(format!("{}-{}", self.version, fingerprint(&[self.line])));
        if folder.exists() {
            return Ok(Fetched::At(folder));
        }
        let (list, part) = (folder.with_added_extension("txt"), folder.with_added_extension("part"));
        fs::write(&list, self.line).with_context(|| format!("cannot write {}", list.display()))?;
        // An interrupted attempt may have left files.
        let _ = fs::remove_dir_all(&part);
        // A wheel has hundreds of megabytes; without pip's cache it is stored only once, unpacked.
        let install = install(&list, &part).arg("--no-cache-dir").arg("--retries").arg("2");
        println!("fetching NCCL {}: {install}", self.version);
        let (status, said) = install.status_and_stderr()?;
        if status.success() {
            keep(&part, &folder)?;
            return Ok(Fetched::At(folder));
        }
        let _ = fs::remove_dir_all(&part);
        match unreachable(&said) {
            Some(reason) => Ok(Fetched::Unreachable(reason.to_owned())),
            None => bail!("NCCL {} could not be fetched\n{said}command:      {install}", self.version),
        }
    }
}

/// Moves the header and the library out of the unpacked wheel, and deletes the rest.
fn keep(part: &Path, folder: &Path) -> anyhow::Result<()> {
    let kept = part.join("kept");
    for file in KEPT {
        let (from, to) = (part.join("nvidia/nccl").join(file), kept.join(file));
        to.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::rename(&from, &to).with_context(|| format!("the wheel has no {}", from.display()))?;
    }
    fs::rename(&kept, folder).with_context(|| format!("cannot move {} into place", kept.display()))?;
    fs::remove_dir_all(part).with_context(|| format!("cannot remove {}", part.display()))
}

/// pip's messages for an unreachable index or a broken connection.
const UNREACHED: [&str; 3] = ["Retrying (Retry(", "Could not fetch URL", "ReadTimeoutError"];

/// Returns pip's first line about a network failure. A hash mismatch means that the index was reached.
fn unreachable(said: &str) -> Option<&str> {
    if said.contains("DO NOT MATCH THE HASHES") {
        return None;
    }
    said.lines().find(|line| UNREACHED.iter().any(|words| line.contains(words)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;

    #[test]
    fn every_release_is_pinned_by_version_and_hash() {
        let releases: Vec<Release> = pinned().collect();
        assert_eq!(releases.len(), PINNED.lines().filter(|line| line.starts_with("nvidia-nccl-")).count());
        for release in releases {
            let (_, hash) = release.line.split_once(" --hash=sha256:").unwrap();
            assert!(hash.len() == 64 && hash.chars().all(|c| c.is_ascii_hexdigit()), "{release:?}");
        }
    }

    #[test]
    fn only_an_index_that_is_not_reached_is_no_failure() {
        let offline = "WARNING: Retrying (Retry(total=1, connect=None)) after connection broken by 'NewConnectionError'\n\
                       ERROR: No matching distribution found for nvidia-nccl-cu12==2.18.3\n";
        assert!(unreachable(offline).unwrap().contains("NewConnectionError"));
        assert_eq!(unreachable("ERROR: No matching distribution found for nvidia-nccl-cu12==2.18.3\n"), None);
        let altered =
            format!("{offline}ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE\n");
        assert_eq!(unreachable(&altered), None);
    }

    #[test]
    fn header_and_library_are_kept_and_the_rest_is_dropped() {
        let dir = Workspace::find().unwrap().target.join("xtask-tests/nccl-abi");
        let _ = fs::remove_dir_all(&dir);
        let (part, folder) = (dir.join("x.part"), dir.join("x"));
        for file in ["include/nccl.h", "include/nccl_net.h"] {
            let path = part.join("nvidia/nccl").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        let error = keep(&part, &folder).unwrap_err().to_string();
        assert!(error.ends_with("lib/libnccl.so.2") && !folder.exists(), "{error}");
        fs::rename(part.join("kept/include/nccl.h"), part.join("nvidia/nccl/include/nccl.h")).unwrap();
        fs::create_dir_all(part.join("nvidia/nccl/lib")).unwrap();
        fs::write(part.join("nvidia/nccl/lib/libnccl.so.2"), "").unwrap();
        keep(&part, &folder).unwrap();
        assert!(!part.exists() && !folder.join("include/nccl_net.h").exists());
        assert!(KEPT.iter().all(|file| folder.join(file).exists()));
    }
}
