//! `cold-build`: what the candle adapter adds to a user's build. Builds a project with candle-core and candle-nn, and one with candle-core
//! and `meshstep-candle`, from empty target folders and without a network, and compares crates and seconds of the processor.

use crate::cmd::Cmd;
use crate::workspace::Workspace;
use anyhow::{Context, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

/// Largest number of crates that the adapter adds to candle-core's.
const MOST_CRATES: usize = 60;
/// Largest ratio of the two projects' seconds. Measured on two cores: 105.4 s and 81.2 s, of which candle-core takes 80.
const MOST_RATIO: f64 = 1.5;
/// Clock ticks of a second in `/proc`.
const TICKS: f64 = 100.0;

/// A user's project.
struct Project {
    dir: PathBuf,
}

/// Cost of a project's build.
struct Cost {
    /// Crates beyond candle-core's.
    crates: usize,
    /// Seconds of the processor in user mode: all crates, and those beyond candle-core's.
    all: f64,
    beyond: f64,
}

pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<ExitCode> {
    let adapter = workspace.root.join("parallel3d/candle");
    // The version and features that the adapter itself asks for.
    let candle = "candle-core = { version = \"0.11\", default-features = false }\n";
    let adapter =
        format!("meshstep-candle = {{ path = '{}', default-features = false }}\n", adapter.display());
    let nn = "candle-nn = { version = \"0.11\", default-features = false }\n";
    let alone = Project::write(workspace, "core", candle)?.crates()?;
    let [theirs, ours] = [("nn", nn), ("meshstep", &*adapter)].map(|(name, dependency)| {
        Project::write(workspace, name, &format!("{candle}{dependency}"))?.build(&alone)
    });
    let (theirs, ours) = (theirs?, ours?);
    println!("\nproject                         crates beyond candle-core's   user s of all   of those");
    for (name, Cost { crates, all, beyond }) in
        [("candle-core, candle-nn", &theirs), ("candle-core, meshstep-candle", &ours)]
    {
        println!("{name:<30}  {crates:>27}  {all:>14.1}  {beyond:>9.1}");
    }
    verdict(&theirs, &ours)?;
    Ok(ExitCode::SUCCESS)
}

fn verdict(theirs: &Cost, ours: &Cost) -> anyhow::Result<()> {
    ensure!(ours.crates <= MOST_CRATES, "the adapter adds {} crates, above {MOST_CRATES}", ours.crates);
    let ratio = ours.all / theirs.all;
    println!("the adapter's project takes {ratio:.2} of candle-nn's time");
    ensure!(ratio <= MOST_RATIO, "{ratio:.2} of candle-nn's time, above {MOST_RATIO}");
    Ok(())
}

impl Project {
    /// Writes a project into an empty folder, with the versions of the workspace's lock file.
    fn write(workspace: &Workspace, name: &str, dependencies: &str) -> anyhow::Result<Self> {
        let dir = workspace.target.join("cold").join(name);
        if dir.exists() {
            fs::remove_dir_all(&dir).with_context(|| format!("cannot empty {}", dir.display()))?;
        }
        fs::create_dir_all(dir.join("src"))?;
        let manifest = format!(
            "[workspace]\n\n[package]\nname = \"cold-{name}\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
             [dependencies]\n{dependencies}"
        );
        fs::write(dir.join("Cargo.toml"), manifest)?;
        fs::write(dir.join("src/main.rs"), "//! Nothing: the dependencies are built.\n\nfn main() {}\n")?;
        fs::copy(workspace.root.join("Cargo.lock"), dir.join("Cargo.lock"))?;
        Ok(Project { dir })
    }

    fn cargo(&self, line: &str) -> Cmd {
        Cmd::cargo(line).arg("--offline").dir(&self.dir)
    }

    /// Returns the crates that the project builds.
    fn crates(&self) -> anyhow::Result<BTreeSet<String>> {
        let tree =
            self.cargo("tree --prefix none --no-dedupe --edges normal,build --format {p}").captured()?;
        Ok(crates(&tree))
    }

    fn build(&self, alone: &BTreeSet<String>) -> anyhow::Result<Cost> {
        let crates = self.crates()?.difference(alone).count();
        let target = self.dir.join("target");
        let build = |line: &str| -> anyhow::Result<f64> {
            let before = children()?;
            self.cargo(line).arg("--target-dir").arg(&target.to_string_lossy()).succeed()?;
            Ok(children()? - before)
        };
        let core = build("build --quiet -p candle-core")?;
        let beyond = build("build --quiet")?;
        Ok(Cost { crates, all: core + beyond, beyond })
    }
}

/// Returns the packages of `cargo tree`'s lines; the project is no dependency.
fn crates(tree: &str) -> BTreeSet<String> {
    let package = |line: &str| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
    let lines = tree.lines().filter(|line| !line.trim().is_empty() && !line.starts_with("cold-"));
    lines.map(package).collect()
}

/// Returns the seconds in user mode of all children that have ended, and of theirs.
fn children() -> anyhow::Result<f64> {
    let stat = fs::read_to_string("/proc/self/stat").context("user seconds are read on Linux")?;
    user_seconds(&stat).context("/proc/self/stat has no times")
}

/// Reads field 16 of `/proc/PID/stat`; the name, the second field, may contain spaces and ends with the last parenthesis.
fn user_seconds(stat: &str) -> Option<f64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks: f64 = fields.split_whitespace().nth(13)?.parse().ok()?;
    Some(ticks / TICKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_count_once_and_without_the_project() {
        let tree =
            "cold-nn v0.0.0 (/t)\nlibc v0.2.1\n\nlibc v0.2.1 (*)\nserde v1.0.0 (proc-macro)\nlibc v0.3.0\n";
        let expected = ["libc v0.2.1", "libc v0.3.0", "serde v1.0.0"].map(str::to_owned);
        assert_eq!(crates(tree), BTreeSet::from(expected));
    }

    #[test]
    fn user_seconds_of_children_are_read() {
        let stat = "77 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 11 12 1234 14 15\n";
        assert_eq!(user_seconds(stat), Some(12.34));
        assert_eq!(user_seconds("77"), None);
    }

    #[test]
    fn more_crates_or_seconds_are_a_failure() {
        let cost = |crates, all| Cost { crates, all, beyond: 1.0 };
        let theirs = cost(9, 100.0);
        assert!(verdict(&theirs, &cost(MOST_CRATES, 149.0)).is_ok());
        assert!(
            verdict(&theirs, &cost(MOST_CRATES + 1, 90.0)).unwrap_err().to_string().contains("61 crates")
        );
        assert!(verdict(&theirs, &cost(9, 151.0)).unwrap_err().to_string().contains("1.51 of"));
    }
}
