//! Step `book`: builds `docs/book` with mdBook, which is installed into the target folder on first use. `tidy` checks the links of its
//! sources.

use crate::cmd::Cmd;
use anyhow::ensure;
use std::fmt;
use std::path::Path;

/// Version of mdBook to install: the newest that was tried.
const VERSION: &str = "0.5.4";

/// One task of the step.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// Install mdBook unless `program` is the wanted version. Without its server and search: 80 s on two cores.
    Install { program: Cmd, install: Cmd },
    /// Build the book.
    Build(Cmd),
}

/// Returns the tasks.
pub(super) fn tasks(root: &Path, target: &Path) -> [Task; 2] {
    let (tools, built) = (target.join("tools"), target.join("book"));
    let program = tools.join("bin").join("mdbook").with_extension(std::env::consts::EXE_EXTENSION);
    let install = Cmd::cargo(&format!(
        "install mdbook --version ={VERSION} --locked --no-default-features --force --root"
    ));
    let install = install.arg(&tools.to_string_lossy());
    let build = Cmd::built(&program, "build docs/book --dest-dir").arg(&built.to_string_lossy());
    [Task::Install { program: Cmd::built(&program, "--version"), install }, Task::Build(build.dir(root))]
}

impl Task {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        match self {
            Task::Install { program, install } => {
                // The program does not start where it is missing.
                if is_wanted(program.output().ok().flatten().as_deref()) {
                    return Ok(());
                }
                let status = install.run_unattended()?;
                ensure!(status.success(), "{status}\ncommand:      {install}");
            }
            Task::Build(build) => {
                let (status, said) = build.status_and_stderr()?;
                ensure!(status.success(), "{status}\ncommand:      {build}");
                // mdBook reports a file that it cannot include, and goes on.
                ensure!(!complains(&said), "mdBook has complaints, printed above\ncommand:      {build}");
            }
        }
        Ok(())
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Task::Install { install, .. } => write!(f, "{install} (unless it is there)"),
            Task::Build(build) => build.fmt(f),
        }
    }
}

fn is_wanted(printed: Option<&str>) -> bool {
    printed.is_some_and(|line| line.trim().trim_start_matches("mdbook v") == VERSION)
}

fn complains(said: &str) -> bool {
    said.lines().any(|line| matches!(line.split_whitespace().next(), Some("WARN" | "ERROR")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_book_is_built_with_the_installed_program() {
        let [install, build] = tasks(Path::new("/w"), Path::new("/w/target")).map(|task| task.to_string());
        assert!(install.contains("--root /w/target/tools"), "{install}");
        assert!(install.contains(&format!("mdbook --version ={VERSION} --locked")), "{install}");
        assert_eq!(build, "cd /w && /w/target/tools/bin/mdbook build docs/book --dest-dir /w/target/book");
    }

    #[test]
    fn another_version_is_replaced() {
        assert!(is_wanted(Some(&format!("mdbook v{VERSION}\n"))));
        assert!(!is_wanted(Some("mdbook v0.4.52\n")) && !is_wanted(None));
    }

    #[test]
    fn a_complaint_of_mdbook_is_a_failure() {
        assert!(complains(" INFO Book building has started\nERROR Error updating \"{{#include x}}\"\n"));
        assert!(complains(" INFO Running the html backend\n WARN a table is ignored\n"));
        assert!(!complains(" INFO Book building has started\n INFO no WARN or ERROR\n"));
    }
}
