//! Steps `tsan`, `asan`, `miri` and `msrv`: tests under tools that watch accesses to memory, and builds with the oldest compiler. They
//! need toolchains that a machine may lack; then the step says so and is skipped.

use super::task::{Setting, Task};
use crate::cmd::Cmd;
use crate::workspace::published;
use std::fmt;

/// Command of a toolchain that may be missing.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    toolchain: String,
    components: &'static [&'static str],
    cmd: Cmd,
    on_ci: bool,
}

/// Oldest compiler of the workspace, as its manifest names it.
const OLDEST: &str = env!("CARGO_PKG_RUST_VERSION");

/// Packages with dependencies that need a newer compiler; their manifests name it.
const NEWER: [&str; 2] = ["meshstep-candle", "meshstep-burn"];

/// Target of the instrumented builds: named, so that build scripts and macros are built without instrumentation.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Tests that run under sanitizers. Instrumented code is up to ten times slower, so it is optimized, random cases are few, and the filter
/// excludes tests with bounds of wall time, and those that count allocations.
const SANITIZED: &str = "not (test(/flood_of_a_thousand|rendezvous::many::|allocations::|p2p::system::/) | \
                         test(/trickle|faults::part_0|a_stopped_process/))";

/// Tests under Miri: memory and threads of tensor, arithmetic of comm. Miri is a thousand times slower, so tests of every number or
/// length are left to other steps; so are stores that bypass the cache, which it does not have.
const IN_MIRI: &str = "(package(meshstep-tensor) - test(/^cast::|^non_temporal::|both_ends_give/)) | \
                       test(/^(reduce|op|error|group::(segments|split_groups|verdict))::/)";

const MIRI_FLAGS: &str = "-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-tree-borrows";

/// ThreadSanitizer. The standard library is instrumented too: its locks are atomics that the tool must see. It learns of memory that
/// is unmapped from calls of the C library, which rustix would not make.
pub(super) fn tsan(setting: &Setting) -> Vec<Task> {
    sanitized("thread", "--cfg=rustix_use_libc", setting)
}

/// AddressSanitizer with LeakSanitizer.
pub(super) fn asan(setting: &Setting) -> Vec<Task> {
    sanitized("address", "--cfg=rustix_use_libc", setting)
}

fn sanitized(sanitizer: &str, flags: &str, setting: &Setting) -> Vec<Task> {
    let line = format!(
        "nextest run --config-file xtask/nextest.toml --no-fail-fast -Zbuild-std --target {TARGET} -p meshstep-tensor -p meshstep-comm -p \
         meshstep-optim -E"
    );
    let cmd = on("nightly", &line, setting).arg(SANITIZED);
    let cmd = cmd.env("RUSTFLAGS", &format!("-Zsanitizer={sanitizer} {flags}"));
    let cmd =
        cmd.env("CARGO_PROFILE_DEV_OPT_LEVEL", "1").env("MESHSTEP_CASES", "tenth").env("PROPTEST_CASES", "8");
    vec![Task::Nextest, task("nightly", &["rust-src"], (cmd, sanitizer), setting)]
}

/// Miri, with few random cases. Tests read the clock, and proptest the folder of its regressions; the threads of a process outlive its
/// main thread. Trees of borrows, because the stacks refuse crossbeam-epoch, which rayon's pool in the tests uses.
pub(super) fn miri(setting: &Setting) -> Vec<Task> {
    let line = "miri nextest run --config-file xtask/nextest.toml --no-fail-fast -p meshstep-tensor -p meshstep-comm --lib -E";
    let cmd = on("nightly", line, setting).arg(IN_MIRI).env("MIRIFLAGS", MIRI_FLAGS);
    // Miri would take minutes to look up the lines of a backtrace, for each panic that a test asks for.
    let cmd = cmd.env("PROPTEST_CASES", "4").env("RUST_BACKTRACE", "0");
    vec![Task::Nextest, task("nightly", &["rust-src", "miri"], (cmd, "miri"), setting)]
}

/// Builds published packages with the oldest compiler.
pub(super) fn msrv(setting: &Setting) -> Vec<Task> {
    let toolchain = format!("{OLDEST}.0");
    let mut cmd = on(&toolchain, "check --locked", setting);
    for package in published().filter(|package| !NEWER.contains(package)) {
        cmd = cmd.arg("-p").arg(package);
    }
    vec![task(&toolchain, &[], (cmd, "msrv"), setting)]
}

/// Returns a cargo command of a toolchain.
fn on(toolchain: &str, line: &str, setting: &Setting) -> Cmd {
    Cmd::built("rustup", &format!("run {toolchain} cargo {line}")).dir(&setting.root)
}

/// Returns the task of a command, which builds into a folder of its own: flags and compilers differ.
fn task(
    toolchain: &str,
    components: &'static [&'static str],
    (cmd, folder): (Cmd, &str),
    setting: &Setting,
) -> Task {
    let target = setting.target.join("watched").join(folder);
    let cmd = cmd.env("CARGO_TARGET_DIR", &target.to_string_lossy());
    Task::Watched(Watched { toolchain: toolchain.to_owned(), components, cmd, on_ci: setting.on_ci })
}

impl fmt::Display for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cmd.fmt(f)
    }
}

impl Watched {
    /// Runs the command, or prints why it is skipped; in a CI job also as a warning of the run.
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let Some(missing) = self.missing() else { return self.cmd.succeed() };
        println!("skipped: {missing}");
        if self.on_ci {
            println!("::warning title=ci::SKIPPED {}: {missing}", self.cmd);
        }
        Ok(())
    }

    /// Returns a sentence about the toolchain or the component that is missing and cannot be added.
    fn missing(&self) -> Option<String> {
        let works = |line: &str| Cmd::built("rustup", line).silent().is_ok_and(|status| status.success());
        let toolchain = &self.toolchain;
        if !works(&format!("run {toolchain} rustc --version")) {
            return Some(format!("there is no toolchain {toolchain}: rustup toolchain install {toolchain}"));
        }
        let lacks = |name: &&&str| !works(&format!("component add --toolchain {toolchain} {name}"));
        let component = self.components.iter().find(lacks)?;
        Some(format!("{toolchain} has no component {component}, and rustup cannot add it"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn setting() -> Setting {
        let (root, target) = (PathBuf::from("/w"), PathBuf::from("/w/target"));
        Setting { root, target, long: true, on_ci: false, cases: None }
    }

    #[test]
    fn sanitizers_instrument_the_standard_library_and_build_apart() {
        for (tasks, name) in [(tsan(&setting()), "thread"), (asan(&setting()), "address")] {
            let shown = tasks[1].to_string();
            assert!(shown.contains(&format!("RUSTFLAGS='-Zsanitizer={name} ")), "{shown}");
            assert!(shown.contains(&format!("CARGO_TARGET_DIR=/w/target/watched/{name} ")), "{shown}");
            assert!(shown.contains("rustup run nightly cargo nextest run") && shown.contains("-Zbuild-std"));
        }
    }

    #[test]
    fn the_oldest_compiler_builds_all_packages_but_those_that_name_another() {
        let shown = msrv(&setting())[0].to_string();
        assert!(shown.contains(&format!("rustup run {OLDEST}.0 cargo check --locked")), "{shown}");
        for package in published() {
            assert_ne!(shown.contains(package), NEWER.contains(&package), "{shown}");
        }
    }

    #[test]
    fn a_missing_toolchain_skips_the_step() {
        let Task::Watched(mut watched) = msrv(&setting()).remove(0) else { unreachable!() };
        watched.toolchain = "0.1.0".to_owned();
        let missing = watched.missing().unwrap();
        assert!(missing.contains("rustup toolchain install 0.1.0"), "{missing}");
        watched.run().unwrap();
    }
}
