//! Step `book`: builds `docs/book` with mdBook, which is installed into the target folder on first use.

use super::steps::{Setting, Task};
use crate::cmd::Cmd;
use anyhow::ensure;
use std::path::{Path, PathBuf};

/// Version of mdBook to install: the newest that was tried.
const VERSION: &str = "0.5.4";

/// Returns the tasks: mdBook, then the book. `tidy` checks the links of its sources.
pub(super) fn tasks(setting: &Setting) -> Vec<Task> {
    let tools = setting.target.join("tools");
    let built = setting.target.join("book");
    let build = Cmd::built(program(&tools), "build docs/book --dest-dir").arg(&built.to_string_lossy());
    vec![Task::MdBook { tools }, Task::Book(build.dir(&setting.root))]
}

/// Returns the path of mdBook in the folder of tools.
fn program(tools: &Path) -> PathBuf {
    tools.join("bin").join("mdbook").with_extension(std::env::consts::EXE_EXTENSION)
}

/// Installs mdBook into `tools` unless this version is there. Without its server and search: about 80 s of two cores.
pub(super) fn install(tools: &Path) -> anyhow::Result<()> {
    let program = program(tools);
    if program.is_file() && is_wanted(Cmd::built(&program, "--version").output()?.as_deref()) {
        return Ok(());
    }
    let install = Cmd::cargo("install mdbook --locked --no-default-features --force --root")
        .arg(&tools.to_string_lossy())
        .arg("--version")
        .arg(&format!("={VERSION}"));
    let status = install.run_unattended()?;
    ensure!(status.success(), "{status}\ncommand:      {install}");
    Ok(())
}

fn is_wanted(printed: Option<&str>) -> bool {
    printed.is_some_and(|line| line.trim().trim_start_matches("mdbook v") == VERSION)
}

/// Builds the book. mdBook reports what it cannot include, and goes on; here that is an error.
pub(super) fn build(cmd: &Cmd) -> anyhow::Result<()> {
    let (status, said) = cmd.status_and_stderr()?;
    ensure!(status.success(), "{status}\ncommand:      {cmd}");
    ensure!(!complains(&said), "mdBook has complaints, printed above\ncommand:      {cmd}");
    Ok(())
}

fn complains(said: &str) -> bool {
    said.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.any(|word| matches!(word.trim_matches(['[', ']']), "WARN" | "ERROR"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_replaced() {
        assert!(is_wanted(Some(&format!("mdbook v{VERSION}\n"))));
        assert!(!is_wanted(Some("mdbook v0.4.52\n")) && !is_wanted(None));
    }

    #[test]
    fn a_warning_of_mdbook_is_a_failure() {
        assert!(complains(" INFO Book building has started\n ERROR Error updating \"{{#include x}}\"\n"));
        assert!(complains("2026-01-01 [WARN] (mdbook): a chapter is missing"));
        assert!(!complains(" INFO Running the html backend\n INFO WARNING is no level\n"));
    }
}
