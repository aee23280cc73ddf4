//! `tidy`: what a compiler does not see. Every rule is a function from data to complaints, in a file beside this one.

mod docs;
mod edges;
mod files;
mod sources;

use crate::workspace::Workspace;
use anyhow::bail;
use std::fmt;

/// Checks the tree and prints every complaint; an error if there is one.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<()> {
    let files = files::read(&workspace.root)?;
    verdict(&complaints(workspace, &files))?;
    println!("tidy: {} members and {} files are as they should be", workspace.members.len(), files.len());
    Ok(())
}

/// Checks that the flags of `cargo xtask train` in the documents are in `help`, which only the built program knows.
pub(crate) fn check_flags(workspace: &Workspace, help: &str) -> anyhow::Result<()> {
    verdict(&docs::train_flags(&files::read(&workspace.root)?, help))
}

fn verdict(complaints: &[Complaint]) -> anyhow::Result<()> {
    for complaint in complaints {
        println!("{complaint}");
    }
    match complaints.len() {
        0 => Ok(()),
        n => bail!("tidy has {n} complaint(s), printed above"),
    }
}

fn complaints(workspace: &Workspace, files: &[File]) -> Vec<Complaint> {
    let rules = [
        sources::headers,
        sources::lengths,
        sources::test_programs,
        sources::forbidden,
        docs::required,
        docs::commands,
    ];
    let about_files = rules.iter().flat_map(|rule| rule(files));
    edges::check(&workspace.members).into_iter().chain(about_files).collect()
}

/// A text file of the repository; `path` is relative to the root, with `/` on every platform.
#[derive(Clone, Debug, PartialEq, Eq)]
struct File {
    path: String,
    text: String,
}

/// What breaks a rule, where, and what would keep it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Complaint {
    /// A file, with a line where one is to blame.
    at: String,
    what: String,
}

impl Complaint {
    fn file(path: &str, what: impl Into<String>) -> Self {
        Self { at: path.to_owned(), what: what.into() }
    }

    /// `line` counts from 1.
    fn line(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self { at: format!("{path}:{line}"), what: what.into() }
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file for the tests of the rules.
    pub(super) fn file(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn every_rule_is_asked() {
        let workspace = Workspace { root: ".".into(), target: "target".into(), members: Vec::new() };
        let long = "\n".repeat(500);
        let files = [
            file("a/src/lib.rs", &long),
            file("a/src/b.rs", concat!("//! B.\nfn b() { to", "do!() }")),
            file("README.md", "```sh\ncargo xtask fly\n```\n"),
        ];
        let all: Vec<String> = complaints(&workspace, &files).iter().map(Complaint::to_string).collect();
        let expected = [
            "is no member",
            "a/src/lib.rs:1: ",
            "a/src/lib.rs: 500 lines",
            "a/src/b.rs:2: ",
            "README.md:2: ",
            "LICENSE-MIT: ",
        ];
        for part in expected {
            assert!(all.iter().any(|line| line.contains(part)), "no complaint has {part:?}: {all:#?}");
        }
    }
}
