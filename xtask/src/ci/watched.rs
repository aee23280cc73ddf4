//! Steps `tsan`, `asan`, `miri` and `msrv`: tests under tools that watch accesses to memory, and builds with the oldest compiler. They
//! need toolchains that a machine may lack; then the step says so and is skipped.

use super::task::{Setting, Task};
use crate::cmd::Cmd;
use crate::workspace::published;
use std::fmt;

/// Command of a toolchain that may be missing.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    toolchain: &'static str,
    components: &'static [&'static str],
    cmd: Cmd,
    on_ci: bool,
}

/// Oldest compiler that the packages promise, as the workspace's manifest names it.
const OLDEST: &str = env!("CARGO_PKG_RUST_VERSION");

/// Target of the instrumented builds: named, so that build scripts and macros are built without instrumentation.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Tests under sanitizers: of the libraries whose threads share memory, or that have unsafe code. A sanitizer makes them up to ten times
/// slower, so tests that compare times are left out.
const SANITIZED: &str = "not test(/flood_of_a_thousand|rendezvous::many::/)";

/// Tests under Miri.
const IN_MIRI: &str = "package(meshstep-tensor) | (package(meshstep-comm) & test(/^(reduce|op|error|group::(fold|segments|split_groups|verdict)|loopback::(cut|non_temporal))::/))";

/// ThreadSanitizer over the tests of the libraries with threads. The standard library is instrumented too: its locks are atomics that
/// the tool must see.
pub(super) fn tsan(setting: &Setting) -> Vec<Task> {
    let suppressions = format!("suppressions={}", setting.root.join("xtask/tsan.supp").display());
    sanitized("thread", setting, ("TSAN_OPTIONS", &suppressions))
}

/// AddressSanitizer and LeakSanitizer over the same tests.
pub(super) fn asan(setting: &Setting) -> Vec<Task> {
    sanitized("address", setting, ("ASAN_OPTIONS", "detect_leaks=1"))
}

fn sanitized(sanitizer: &str, setting: &Setting, (name, options): (&str, &str)) -> Vec<Task> {
    let line = format!(
        "nextest run --config-file xtask/nextest.toml --no-fail-fast -Zbuild-std --target {TARGET} -p meshstep-tensor -p meshstep-comm -p \
         meshstep-optim -E"
    );
    let folder = setting.target.join("sanitizers").join(sanitizer);
    let cmd = on("nightly", &line, setting).arg(SANITIZED);
    let cmd = cmd.env("CARGO_TARGET_DIR", &folder.to_string_lossy());
    let cmd = cmd.env("RUSTFLAGS", &format!("-Zsanitizer={sanitizer}")).env(name, options);
    vec![Task::Nextest, task("nightly", &["rust-src"], cmd, setting)]
}

/// Miri over tensor's memory and casts and the arithmetic of comm: no models, which Miri would run within Miri, and few random cases.
pub(super) fn miri(setting: &Setting) -> Vec<Task> {
    let line = "miri nextest run --config-file xtask/nextest.toml --no-fail-fast -p meshstep-tensor -p meshstep-comm --lib -E";
    let cmd = on("nightly", line, setting).arg(IN_MIRI);
    let cmd = cmd.env("CARGO_TARGET_DIR", &setting.target.join("miri").to_string_lossy());
    // Proptest reads the folder of its regressions and the clock.
    let cmd = cmd.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", "4");
    vec![Task::Nextest, task("nightly", &["rust-src", "miri"], cmd, setting)]
}

/// Builds all published packages with the oldest compiler.
pub(super) fn msrv(setting: &Setting) -> Vec<Task> {
    let mut cmd = on(OLDEST, "check --locked", setting);
    for package in published() {
        cmd = cmd.arg("-p").arg(package);
    }
    let cmd = cmd.env("CARGO_TARGET_DIR", &setting.target.join("msrv").to_string_lossy());
    vec![task(OLDEST, &[], cmd, setting)]
}

/// Returns a cargo command of a toolchain.
fn on(toolchain: &str, line: &str, setting: &Setting) -> Cmd {
    Cmd::built("rustup", &format!("run {toolchain} cargo {line}")).dir(&setting.root)
}

fn task(toolchain: &'static str, components: &'static [&'static str], cmd: Cmd, setting: &Setting) -> Task {
    Task::Watched(Watched { toolchain, components, cmd, on_ci: setting.on_ci })
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
        let there = |line: &str| Cmd::built("rustup", line).silent().is_ok_and(|status| status.success());
        let Watched { toolchain, components, .. } = self;
        if !there(&format!("run {toolchain} rustc --version")) {
            return Some(format!("there is no toolchain {toolchain}: rustup toolchain install {toolchain}"));
        }
        let add = |component: &&&str| !there(&format!("component add --toolchain {toolchain} {component}"));
        let component = components.iter().find(add)?;
        Some(format!("{toolchain} has no component {component}, and rustup cannot add it"))
    }
}
