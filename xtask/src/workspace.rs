//! The workspace as cargo describes it: root, target folder, test programs, and members with their dependencies.

use anyhow::Context;
use cargo_metadata::camino::Utf8Path;
use cargo_metadata::{Metadata, MetadataCommand, Package};
use std::path::PathBuf;

/// Published libraries, lowest first. `ci` packages them, and they keep to the strict dependency rules.
pub(crate) const LIBRARIES: [&str; 10] = [
    "meshstep-tensor",
    "meshstep-comm",
    "meshstep-optim",
    "meshstep-membership",
    "meshstep-shard",
    "meshstep-checkpoint",
    "meshstep-local",
    "meshstep-parallel3d",
    "meshstep-candle",
    "meshstep-burn",
];

/// The published program.
pub(crate) const PROGRAM: &str = "meshstep";

/// Returns all published packages, lowest first.
pub(crate) fn published() -> impl Iterator<Item = &'static str> {
    LIBRARIES.into_iter().chain([PROGRAM])
}

#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) members: Vec<Member>,
    /// Main files of the integration tests, relative to the root, with `/` on every platform.
    pub(crate) test_programs: Vec<String>,
}

/// A package of the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// Path relative to the root, with `/` on every platform.
    pub(crate) folder: String,
    /// Normal, build and development dependencies, by package name (not by a rename).
    pub(crate) dependencies: Vec<String>,
}

impl Workspace {
    /// Finds the workspace around the current folder.
    pub(crate) fn find() -> anyhow::Result<Self> {
        let metadata = MetadataCommand::new()
            .no_deps()
            .exec()
            .context("cargo metadata did not describe the workspace")?;
        Ok(Self::from_metadata(&metadata))
    }

    fn from_metadata(metadata: &Metadata) -> Self {
        Self {
            root: metadata.workspace_root.clone().into(),
            target: metadata.target_directory.clone().into(),
            members: metadata
                .workspace_packages()
                .into_iter()
                .map(|package| member(package, metadata))
                .collect(),
            test_programs: metadata
                .workspace_packages()
                .into_iter()
                .flat_map(|package| &package.targets)
                .filter(|target| target.is_test())
                .map(|target| below_root(&target.src_path, metadata))
                .collect(),
        }
    }
}

fn member(package: &Package, metadata: &Metadata) -> Member {
    let folder = package.manifest_path.parent().unwrap_or(&package.manifest_path);
    Member {
        name: package.name.to_string(),
        folder: below_root(folder, metadata),
        dependencies: package.dependencies.iter().map(|dependency| dependency.name.clone()).collect(),
    }
}

fn below_root(path: &Utf8Path, metadata: &Metadata) -> String {
    let path = path.strip_prefix(&metadata.workspace_root).unwrap_or(path);
    path.components().map(|part| part.as_str()).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_every_library_and_its_own_dependencies() {
        let workspace = Workspace::find().unwrap();
        for library in LIBRARIES {
            assert!(
                workspace.members.iter().any(|member| member.name == library),
                "{library} is not a member"
            );
        }
        let xtask = workspace.members.iter().find(|member| member.name == "xtask").unwrap();
        assert!(xtask.dependencies.iter().any(|name| name == "clap"));
        assert!(workspace.root.join("xtask").is_dir());
        assert!(workspace.test_programs.iter().any(|path| path == "comm/tests/suite/main.rs"));
    }
}
