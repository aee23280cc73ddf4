//! `release`: everything before the upload of the packages. Checks the tree and its documents, packs and builds the packages, and prints
//! the commands that publish them.

use crate::ci;
use crate::cli::{CiArgs, StepName};
use crate::cmd::Cmd;
use crate::workspace::{Workspace, published};
use anyhow::{Context, bail, ensure};
use std::fs;
use std::process::ExitCode;

/// Version of all packages.
const VERSION: &str = env!("CARGO_PKG_VERSION");

pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<ExitCode> {
    let git = |line: &str| -> anyhow::Result<String> {
        let output = Cmd::built("git", line).dir(&workspace.root).output()?;
        output.map(|text| text.trim().to_owned()).with_context(|| format!("git {line} failed"))
    };
    let dirty = git("status --porcelain")?;
    ensure!(dirty.is_empty(), "commit or remove these files first:\n{dirty}");
    let changelog = fs::read_to_string(workspace.root.join("CHANGELOG.md")).context("CHANGELOG.md")?;
    check_changelog(&changelog)?;
    let tag = format!("v{VERSION}");
    ensure!(
        git(&format!("tag --list {tag}"))?.is_empty(),
        "the tag {tag} exists; raise the version in Cargo.toml"
    );
    let only = vec![StepName::Fmt, StepName::Tidy, StepName::Deny, StepName::Package];
    if ci::run(&CiArgs { only, long: true, ..CiArgs::default() })? != ExitCode::SUCCESS {
        bail!("a step failed; its output is above");
    }
    println!(
        "\nNothing was uploaded. After `.ci/run` has passed on this commit ({}):\n",
        git("rev-parse HEAD")?
    );
    commands(&tag, earlier(&git("tag --list v* --sort=-v:refname")?))
        .iter()
        .for_each(|line| println!("    {line}"));
    Ok(ExitCode::SUCCESS)
}

/// Checks that the first section of the changelog is that of the version, with a date.
fn check_changelog(changelog: &str) -> anyhow::Result<()> {
    let section = changelog.lines().find_map(|line| line.strip_prefix("## ")).unwrap_or("none");
    let dated = section.strip_prefix(VERSION).and_then(|rest| rest.strip_prefix(" - "));
    let is_date =
        |text: &str| text.len() == 10 && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
    ensure!(
        dated.is_some_and(is_date),
        "the first section of CHANGELOG.md is {section:?}; name it \"{VERSION} - YEAR-MONTH-DAY\""
    );
    Ok(())
}

/// Returns the newest of git's tags, which lie in falling order.
fn earlier(tags: &str) -> Option<&str> {
    tags.lines().next()
}

/// Returns the commands that compare the interfaces with those of an earlier release, and that publish the packages, lowest first.
fn commands(tag: &str, earlier: Option<&str>) -> Vec<String> {
    let compared = earlier
        .map(|earlier| format!("cargo semver-checks --workspace --baseline-rev {earlier} # decision 103"));
    let tagged = format!("git tag -a {tag} -m {tag} && git push origin {tag}");
    let publish = published().map(|package| format!("cargo publish -p {package}"));
    compared.into_iter().chain([tagged]).chain(publish).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_changelog_begins_with_the_version_and_a_date() {
        assert!(check_changelog(&format!("# Changelog\n\n## {VERSION} - 2026-12-01\n\n- a\n")).is_ok());
        for section in ["Unreleased", VERSION, &format!("{VERSION} - soon"), "9.9.9 - 2026-12-01"] {
            let error = check_changelog(&format!("# Changelog\n\n## {section}\n")).unwrap_err().to_string();
            assert!(error.contains(section) && error.contains("YEAR-MONTH-DAY"), "{error}");
        }
    }

    #[test]
    fn lower_packages_are_published_first() {
        let commands = commands("v1", None);
        let place = |package: &str| commands.iter().position(|line| line.ends_with(&format!("-p {package}")));
        assert_eq!(place("meshstep-tensor"), Some(1));
        assert!(
            place("meshstep-comm") < place("meshstep-shard") && place("meshstep-shard") < place("meshstep")
        );
    }

    #[test]
    fn interfaces_are_compared_with_the_newest_release() {
        assert_eq!(earlier(""), None);
        let commands = commands("v0.3.0", earlier("v0.2.0\nv0.1.0"));
        assert!(
            commands[0].starts_with("cargo semver-checks --workspace --baseline-rev v0.2.0 "),
            "{commands:?}"
        );
        assert!(commands[1].starts_with("git tag -a v0.3.0"), "{commands:?}");
    }
}
