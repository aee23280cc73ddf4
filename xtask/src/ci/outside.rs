//! Writes a crate outside the workspace that depends on one packaged library, like a user's first crate.

use crate::workspace::{LIBRARIES, Workspace};
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the folder of the unpacked libraries, which has one subfolder for each.
pub(crate) fn packages(target: &Path) -> PathBuf {
    target.join("outside").join("packages")
}

/// Returns the name and version of a library's package; the whole workspace has one version.
pub(crate) fn package(library: &str) -> String {
    format!("{library}-{}", env!("CARGO_PKG_VERSION"))
}

/// Writes the crate for `library` into `dir`, with the dependency versions of the workspace's lock file.
pub(crate) fn write(dir: &Path, library: &str, workspace: &Workspace) -> anyhow::Result<()> {
    fs::create_dir_all(dir.join("src"))?;
    fs::write(dir.join("Cargo.toml"), manifest(library, &packages(&workspace.target)))?;
    fs::write(dir.join("src/main.rs"), program(library))?;
    // Cargo drops the lock entries that this crate does not need.
    let lock = workspace.root.join("Cargo.lock");
    fs::copy(lock, dir.join("Cargo.lock")).context("the workspace has no Cargo.lock")?;
    Ok(())
}

fn manifest(library: &str, packages: &Path) -> String {
    // A TOML literal string needs no escapes on any platform.
    let path = |library| format!("{library} = {{ path = '{}' }}", packages.join(package(library)).display());
    // A package names the lower libraries by version, so `[patch]` points these versions to the local packages.
    let others = LIBRARIES.into_iter().take_while(|other| *other != library).map(path);
    // An own `[workspace]` keeps cargo from searching the parent folders for one.
    format!(
        "[workspace]\n\n\
         [package]\n\
         name = \"outside-{library}\"\n\
         version = \"0.0.0\"\n\
         edition = \"2024\"\n\n\
         [dependencies]\n\
         {}\n\n\
         [patch.crates-io]\n\
         {}\n",
        path(library),
        others.collect::<Vec<_>>().join("\n")
    )
}

fn program(library: &str) -> String {
    format!("//! Links only `{library}`.\n\nuse {} as _;\n\nfn main() {{}}\n", library.replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crate_has_its_own_workspace_and_one_dependency() {
        let manifest = manifest("meshstep-comm", Path::new("/p"));
        assert!(manifest.starts_with("[workspace]\n"));
        let (_, dependencies) = manifest.split_once("[dependencies]\n").unwrap();
        let path = |library| format!("{library} = {{ path = '/p/{}' }}\n", package(library));
        let (comm, tensor) = (path("meshstep-comm"), path("meshstep-tensor"));
        assert_eq!(dependencies, format!("{comm}\n[patch.crates-io]\n{tensor}"));
    }

    #[test]
    fn the_program_links_the_library() {
        assert!(program("meshstep-tensor").contains("use meshstep_tensor as _;"));
    }
}
