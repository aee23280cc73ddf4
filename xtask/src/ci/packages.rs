//! The unpacked packages as a workspace of their own, in which each is built as a user builds it: without this repository.

use super::task::{Setting, Task};
use crate::cmd::Cmd;
use crate::workspace::{LIBRARIES, Workspace, published};
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// Largest size of a package on the registry, in bytes.
const LARGEST: u64 = 10 << 20;

/// Packs every published package, unpacks them into a workspace, and builds each alone; a long run also runs the examples in their
/// documentation.
///
/// Skips cargo's own verification. It keeps unpacked packages in the user's cargo home by name, version and path, so a
/// second run on the same machine would verify against the libraries of the first.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    // One invocation packs all packages, so that cargo resolves the unpublished ones among them.
    let mut pack = Cmd::cargo("package --no-verify").dir(&setting.root);
    for package in published() {
        pack = pack.arg("-p").arg(package);
    }
    if !setting.on_ci {
        pack = pack.arg("--allow-dirty");
    }
    let unpacked = folder(&setting.target);
    let unpack = published().map(|package| {
        let archive = archive(&setting.target, package);
        let unpack = Cmd::built("tar", "-xmzf").arg(&archive.to_string_lossy());
        Task::Run(unpack.arg("-C").arg(&unpacked.to_string_lossy()))
    });
    // One target folder for all packages, so that shared dependencies are built once. `-p` selects the features of one package
    // alone.
    let target = setting.target.join("packages-target");
    let cargo = |line: &str| {
        Task::Run(Cmd::cargo(line).arg("--target-dir").arg(&target.to_string_lossy()).dir(&unpacked))
    };
    let verb = if setting.long { "build" } else { "check" };
    let build = published().map(|package| cargo(&format!("{verb} -p {package}")));
    let prepare = [Task::Run(pack), Task::PackageSizes, Task::Empty(unpacked.clone())];
    // The step `doctests` runs them in the tree, with the builds of the tests.
    let doctests = setting.long.then(|| cargo("test --doc --workspace"));
    prepare.into_iter().chain(unpack).chain([Task::PackagesWorkspace]).chain(build).chain(doctests).collect()
}

/// Returns the folder of the unpacked packages.
pub(crate) fn folder(target: &Path) -> PathBuf {
    target.join("packages")
}

/// Returns the name and version of a package; the whole workspace has one version.
pub(crate) fn name_and_version(package: &str) -> String {
    format!("{package}-{}", env!("CARGO_PKG_VERSION"))
}

/// Returns the packed file of a package.
pub(crate) fn archive(target: &Path, package: &str) -> PathBuf {
    target.join("package").join(name_and_version(package) + ".crate")
}

/// Prints the size of each packed file, and fails if the registry would refuse one.
pub(crate) fn print_sizes(target: &Path) -> anyhow::Result<()> {
    for package in published() {
        let path = archive(target, package);
        let bytes = fs::metadata(&path).with_context(|| format!("{}", path.display()))?.len();
        println!("{:>7.1} KiB  {}", bytes as f64 / 1024.0, name_and_version(package));
        anyhow::ensure!(
            bytes <= LARGEST,
            "{package} is larger than {LARGEST} bytes; exclude files in its Cargo.toml"
        );
    }
    Ok(())
}

/// Makes the folder a workspace, with the dependency versions of this workspace's lock file.
pub(crate) fn write_workspace(workspace: &Workspace) -> anyhow::Result<()> {
    let folder = folder(&workspace.target);
    fs::write(folder.join("Cargo.toml"), manifest())?;
    // Cargo drops the lock entries that the packages do not need.
    let lock = workspace.root.join("Cargo.lock");
    fs::copy(lock, folder.join("Cargo.lock")).context("the workspace has no Cargo.lock")?;
    for package in published() {
        // The packed lock file would be ignored with a warning.
        let own = folder.join(name_and_version(package)).join("Cargo.lock");
        fs::remove_file(own).ok();
    }
    Ok(())
}

/// A package names the others by version, so `[patch]` points these versions to their folders.
fn manifest() -> String {
    let lines = |text: &dyn Fn(&str) -> String, packages: &[&str]| {
        packages.iter().map(|package| text(package) + "\n").collect::<String>()
    };
    let member = |package: &str| format!("    \"{}\",", name_and_version(package));
    let patch = |library: &str| format!("{library} = {{ path = \"{}\" }}", name_and_version(library));
    format!(
        "[workspace]\nresolver = \"3\"\nmembers = [\n{}]\n\n[patch.crates-io]\n{}",
        lines(&member, &published().collect::<Vec<_>>()),
        lines(&patch, &LIBRARIES),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_is_a_member_and_libraries_are_patched() {
        let manifest = manifest();
        let (members, patches) = manifest.split_once("[patch.crates-io]\n").unwrap();
        for package in published() {
            assert!(members.contains(&format!("    \"{}\",\n", name_and_version(package))), "{manifest}");
        }
        assert_eq!(patches.lines().count(), LIBRARIES.len());
        let comm = name_and_version("meshstep-comm");
        assert!(patches.contains(&format!("meshstep-comm = {{ path = \"{comm}\" }}\n")), "{manifest}");
    }
}
