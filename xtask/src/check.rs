//! `check`: fast checks for the edit-test loop. Formats and lints the changed packages, and tests these packages and their
//! dependents with a tenth of the random cases. `ci` runs everything.

use crate::ci::steps;
use crate::ci::task::{self, FEATURES, ON_GPU, Setting, Step, Task};
use crate::ci::{report, run_steps, verdict};
use crate::cli::{CheckArgs, StepName};
use crate::cmd::Cmd;
use crate::workspace::{Member, Workspace};
use anyhow::Context;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::find()?;
    let files = changed_files(&workspace.root, &args.since)?;
    let changed = changed(&files, &workspace.members);
    let affected = with_dependents(&changed, &workspace.members);
    println!("{} files differ from {}; {}", files.len(), args.since, told(&changed, &affected));
    let setting = steps::setting(&workspace, false);
    let chosen = steps(&affected, &setting);
    if args.list {
        print!("{}", report::list(&chosen));
        return Ok(ExitCode::SUCCESS);
    }
    let (report, failure) = run_steps(&chosen, &workspace);
    Ok(verdict(&report, failure, |_| "cargo xtask check".to_owned()))
}

fn told(changed: &BTreeSet<&str>, affected: &BTreeSet<&str>) -> String {
    if affected.is_empty() {
        return "no package changed".to_owned();
    }
    let names = |set: &BTreeSet<&str>| set.iter().copied().collect::<Vec<_>>().join(", ");
    let dependents: BTreeSet<&str> = affected.difference(changed).copied().collect();
    let dependents = if dependents.is_empty() { "none".to_owned() } else { names(&dependents) };
    format!("changed: {}; dependents: {dependents}", names(changed))
}

/// Returns the files that differ from `since`, staged files, and untracked files; paths are relative to the root.
fn changed_files(root: &Path, since: &str) -> anyhow::Result<BTreeSet<String>> {
    let git = |line: &str| Cmd::built("git", line).dir(root);
    let differ = git("diff --name-only --no-renames").arg(since).arg("--").captured();
    let differ = differ.with_context(|| format!("cannot find the files that changed since {since:?}"))?;
    let new = git("ls-files --others --exclude-standard").captured()?;
    Ok(differ.lines().chain(new.lines()).map(str::to_owned).collect())
}

/// Returns the packages of these files. A file of the whole workspace, such as `Cargo.lock`, changes all packages.
fn changed<'a>(files: &BTreeSet<String>, members: &'a [Member]) -> BTreeSet<&'a str> {
    const OF_ALL: [&str; 5] =
        ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml", ".cargo/config.toml", "clippy.toml"];
    if files.iter().any(|file| OF_ALL.contains(&file.as_str())) {
        return members.iter().map(|member| member.name.as_str()).collect();
    }
    files.iter().filter_map(|file| owner(file, members)).collect()
}

/// Returns the innermost package with the file in its folder, because packages can be nested.
fn owner<'a>(file: &str, members: &'a [Member]) -> Option<&'a str> {
    let holds =
        |member: &&Member| file.strip_prefix(&member.folder).is_some_and(|rest| rest.starts_with('/'));
    let owner = members.iter().filter(holds).max_by_key(|member| member.folder.len())?;
    Some(&owner.name)
}

/// Returns these packages and all their direct and indirect dependents.
fn with_dependents<'a>(changed: &BTreeSet<&'a str>, members: &'a [Member]) -> BTreeSet<&'a str> {
    let mut affected = changed.clone();
    loop {
        let uses = |member: &&Member| member.dependencies.iter().any(|used| affected.contains(used.as_str()));
        let more: Vec<&str> = members.iter().filter(uses).map(|member| member.name.as_str()).collect();
        let before = affected.len();
        affected.extend(more);
        if affected.len() == before {
            return affected;
        }
    }
}

fn steps(affected: &BTreeSet<&str>, setting: &Setting) -> Vec<Step> {
    let mut chosen = steps::chosen(&[StepName::Fmt, StepName::Tidy], setting);
    if affected.is_empty() {
        return chosen;
    }
    let mut packages: String = affected.iter().map(|name| format!("-p {name} ")).collect();
    for (package, feature) in FEATURES.iter().filter(|(package, _)| affected.contains(package)) {
        packages += &format!("--features {package}/{feature} ");
    }
    let packages = packages.trim_end();
    // Clippy is `cargo check` with lints, so one run does both.
    let clippy = Cmd::cargo(&format!("clippy {packages} --all-targets -- -D warnings")).dir(&setting.root);
    let test = task::test(packages, &format!("not ({ON_GPU})"), setting);
    let test = [("MESHSTEP_CASES", "tenth"), ("REQUIRE_SIMT", "1")]
        .into_iter()
        .fold(test, |test, (name, value)| task::with(test, name, value));
    chosen.push(Step { name: StepName::Clippy, tasks: vec![Task::Run(clippy)] });
    chosen.push(Step { name: StepName::Tests, tasks: vec![Task::Nextest, test] });
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: &str = "meshstep-bench";

    fn members() -> Vec<Member> {
        let member = |(name, folder, uses): (&str, &str, &[&str])| Member {
            name: name.to_owned(),
            folder: folder.to_owned(),
            dependencies: uses.iter().map(|used| (*used).to_owned()).collect(),
        };
        let table: [(&str, &str, &[&str]); 5] = [
            ("tensor", "tensor", &[]),
            ("comm", "comm", &["tensor"]),
            ("shard", "shard", &["comm", "cases"]),
            ("cases", "shard/tests/cases", &["shard"]),
            (TOP, "bench", &["shard"]),
        ];
        table.map(member).into()
    }

    fn affected(files: &[&str]) -> Vec<String> {
        let members = members();
        let files = files.iter().map(|file| (*file).to_owned()).collect();
        with_dependents(&changed(&files, &members), &members).into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn what_depends_on_a_change_is_tested_and_nothing_else() {
        assert_eq!(affected(&["comm/src/lib.rs"]), ["cases", "comm", TOP, "shard"]);
        assert_eq!(affected(&["bench/src/main.rs", "README.md"]), [TOP]);
        assert_eq!(affected(&["README.md", "benches/x.rs"]), [] as [&str; 0]);
        // The innermost package owns the file, although the outer package has a folder `tests` too.
        let members = members();
        assert_eq!(owner("shard/tests/cases/lib.rs", &members), Some("cases"));
        assert_eq!(owner("shard/tests/suite/main.rs", &members), Some("shard"));
    }

    #[test]
    fn a_file_of_the_workspace_changes_every_package() {
        assert_eq!(affected(&["Cargo.lock"]).len(), 5);
        assert_eq!(affected(&["bench/Cargo.toml"]), [TOP]);
    }

    #[test]
    fn changed_packages_are_linted_and_tested_with_a_tenth_of_the_cases() {
        let setting =
            Setting { root: "/w".into(), target: "/w/target".into(), long: false, on_ci: false, cases: None };
        let shown = |affected: &[&str]| report::list(&steps(&affected.iter().copied().collect(), &setting));
        let all = shown(&["comm", TOP]);
        assert!(
            all.contains(
                "cargo clippy -p comm -p meshstep-bench --features meshstep-bench/cuda --all-targets"
            ),
            "{all}"
        );
        assert!(all.contains("MESHSTEP_CASES=tenth") && all.contains("nextest run"), "{all}");
        assert!(shown(&["xtask"]).contains("cargo clippy -p xtask --all-targets -- "));
        let burn = shown(&["meshstep-burn"]);
        assert!(
            burn.contains("-p meshstep-burn --features meshstep-burn/checkpoint --all-targets"),
            "{burn}"
        );
        assert_eq!(
            shown(&[]).lines().filter(|line| !line.starts_with(' ')).collect::<Vec<_>>(),
            ["fmt", "tidy"]
        );
    }

    #[test]
    fn what_git_cannot_compare_with_is_named() {
        let root = Workspace::find().unwrap().root;
        let error = changed_files(&root, "no-such-revision").unwrap_err().to_string();
        assert!(error.contains("no-such-revision"), "{error}");
    }
}
