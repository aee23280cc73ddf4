//! `mutants`: puts one fault at a time into a copy of the tree, and checks that the tests detect it.
//!
//! A test suite that is made faster must detect the same faults. Each row of `list.rs` is a fault with the test that must
//! fail; the command fails if no test detects a fault or the faulty tree does not compile.

mod list;

use crate::ci::report::seconds;
use crate::ci::task::ON_GPU;
use crate::cli::MutantsArgs;
use crate::cmd::Cmd;
use crate::workspace::Workspace;
use anyhow::{Context, bail, ensure};
use list::MUTANTS;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// A fault, and the tests that must detect it.
#[derive(Clone, Copy, Debug)]
struct Mutant {
    name: &'static str,
    /// Path relative to the root.
    file: &'static str,
    /// Code to replace; occurs exactly once in the file.
    from: &'static str,
    to: &'static str,
    /// Package with the tests to run.
    package: &'static str,
    /// Substring of the names of the tests to run.
    test: &'static str,
}

/// Result of running the tests on a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Noticed,
    Missed,
    /// The tests could not be built, or no test has a matching name.
    NoRun,
}

pub(crate) fn run(args: &MutantsArgs) -> anyhow::Result<ExitCode> {
    let chosen = chosen(&args.only)?;
    let workspace = Workspace::find()?;
    let copy = Copy::new(&workspace)?;
    let mut bad = 0;
    for mutant in &chosen {
        let start = Instant::now();
        let verdict = copy.verdict(mutant)?;
        bad += usize::from(verdict != Verdict::Noticed);
        println!("{:<44} {verdict:<12} {:>16}   {}", mutant.name, seconds(start.elapsed()), mutant.test);
    }
    println!("{} of {} mutants noticed", chosen.len() - bad, chosen.len());
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn chosen(only: &[String]) -> anyhow::Result<Vec<Mutant>> {
    if let Some(unknown) = only.iter().find(|name| MUTANTS.iter().all(|mutant| mutant.name != **name)) {
        let names: Vec<&str> = MUTANTS.iter().map(|mutant| mutant.name).collect();
        bail!("no mutant is called {unknown:?}; choose from {}", names.join(", "));
    }
    let wanted = |mutant: &&Mutant| only.is_empty() || only.iter().any(|name| name == mutant.name);
    Ok(MUTANTS.iter().filter(wanted).copied().collect())
}

/// Copy of the tree that receives the faults, so that the working tree stays unchanged.
struct Copy {
    root: PathBuf,
    /// Target folder of the copy, kept between calls.
    target: PathBuf,
}

impl Copy {
    fn new(workspace: &Workspace) -> anyhow::Result<Self> {
        let folder = workspace.target.join("mutants");
        let copy = Copy { root: folder.join("tree"), target: folder.join("target") };
        let files = Cmd::built("git", "ls-files --cached --others --exclude-standard").dir(&workspace.root);
        for file in files.captured()?.lines() {
            copy.take(&workspace.root, file)?;
        }
        Ok(copy)
    }

    /// Copies a file unless the copy is equal; an unchanged file keeps its modification time, so that cargo does not
    /// rebuild it.
    fn take(&self, root: &Path, file: &str) -> anyhow::Result<()> {
        let (from, to) = (root.join(file), self.root.join(file));
        let Ok(bytes) = fs::read(&from) else {
            // git lists a deleted file until its removal is staged.
            let _ = fs::remove_file(&to);
            return Ok(());
        };
        if fs::read(&to).is_ok_and(|old| old == bytes) {
            return Ok(());
        }
        let parent = to.parent().context("the file's path has no parent folder")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        fs::write(&to, bytes).with_context(|| format!("cannot write {}", to.display()))
    }

    /// Runs the mutant's tests with the fault in place, and restores the file.
    fn verdict(&self, mutant: &Mutant) -> anyhow::Result<Verdict> {
        let path = self.root.join(mutant.file);
        let whole = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        fs::write(&path, mutated(mutant, &whole)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        let ran = mutant.tests().dir(&self.root).env("CARGO_TARGET_DIR", &self.target.to_string_lossy());
        let ran = ran.env("REQUIRE_SIMT", "1").silent();
        fs::write(&path, whole).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(match ran?.code() {
            Some(0) => Verdict::Missed,
            Some(NEXTEST_FAILED) => Verdict::Noticed,
            _ => Verdict::NoRun,
        })
    }
}

/// nextest's exit code for a failed test. Failed builds and filters without matches have other codes.
const NEXTEST_FAILED: i32 = 100;

impl Mutant {
    /// Returns the test command. It builds only the package with all its features, not its dependents.
    fn tests(&self) -> Cmd {
        let features = match self.package {
            "meshstep-comm" => "--features nccl",
            "meshstep-parallel3d" => "--features checkpoint,cuda",
            "meshstep-local" => "--features checkpoint,cuda",
            "meshstep-membership" | "xtask" => "",
            _ => "--features cuda",
        };
        let filter = format!("test({}) & not ({ON_GPU})", self.test);
        let line = format!("nextest run --config-file xtask/nextest.toml -p {} {features} -E", self.package);
        Cmd::cargo(&line).arg(&filter)
    }
}

/// Returns the file's text with the fault in it.
fn mutated(mutant: &Mutant, whole: &str) -> anyhow::Result<String> {
    let found = whole.matches(mutant.from).count();
    ensure!(
        found == 1,
        "mutant {}: {:?} occurs {found} times in {}, but must occur once; update list.rs to the current code",
        mutant.name,
        mutant.from,
        mutant.file
    );
    Ok(whole.replacen(mutant.from, mutant.to, 1))
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Noticed => "noticed",
            Self::Missed => "NOT NOTICED",
            Self::NoRun => "DID NOT RUN",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_fault_can_be_put_into_the_tree() {
        let workspace = Workspace::find().unwrap();
        let mut names = HashSet::new();
        for mutant in &MUTANTS {
            let whole = fs::read_to_string(workspace.root.join(mutant.file)).unwrap();
            assert_ne!(mutated(mutant, &whole).unwrap(), whole, "{}", mutant.name);
            assert!(names.insert(mutant.name), "{} is there twice", mutant.name);
            assert!(workspace.members.iter().any(|member| member.name == mutant.package), "{}", mutant.name);
        }
    }

    #[test]
    fn a_fault_that_no_longer_fits_is_named() {
        let mutant = Mutant { name: "a", file: "f", from: "x + 1", to: "x", package: "p", test: "t" };
        assert_eq!(mutated(&mutant, "y = x + 1;").unwrap(), "y = x;");
        for whole in ["y = x;", "y = x + 1 + x + 1;"] {
            assert!(mutated(&mutant, whole).unwrap_err().to_string().contains("mutant a"));
        }
        assert!(chosen(&["no-such-mutant".to_owned()]).unwrap_err().to_string().contains("no-such-mutant"));
        assert_eq!(chosen(&[]).unwrap().len(), MUTANTS.len());
    }
}
