//! Programs of the workspace, built and run with the caller's arguments: `meshstep-bench` and `meshstep`.

mod driver;
mod gpu_train;

use crate::cmd::Cmd;
use crate::workspace::Workspace;
use anyhow::ensure;
use std::path::PathBuf;
use std::process::ExitCode;

/// Trains on the device that the arguments ask for.
pub(crate) fn train(args: &[String]) -> anyhow::Result<ExitCode> {
    match gpu_train::Training::of(args)? {
        gpu_train::Training::Cpu(args) => bench("train", &args),
        gpu_train::Training::Gpu(args) => gpu_train::run(&args),
    }
}

/// Returns the arguments of `train` that the trainer on CPUs gets: none of a training on a GPU. The error is the reason why the training
/// on the device is refused.
pub(crate) fn cpu_arguments(args: &[String]) -> Result<Vec<String>, String> {
    match gpu_train::Training::of(args).map_err(|refused| refused.to_string())? {
        gpu_train::Training::Cpu(rest) => Ok(rest),
        gpu_train::Training::Gpu(rest) => gpu_train::check(&rest).map(|()| Vec::new()),
    }
}

/// Runs a subcommand of `meshstep-bench`.
pub(crate) fn bench(subcommand: &str, args: &[String]) -> anyhow::Result<ExitCode> {
    bench_command(subcommand, args).become_it()
}

/// Runs a subcommand of `meshstep`.
pub(crate) fn meshstep(subcommand: &str, args: &[String]) -> anyhow::Result<ExitCode> {
    meshstep_command(subcommand, args).become_it()
}

/// Runs `meshstep launch` with the bench program in front of the arguments after `--`.
pub(crate) fn launch(args: &[String]) -> anyhow::Result<ExitCode> {
    let mpi = args.windows(2).any(|pair| pair == ["--backend", "mpi"])
        || args.iter().any(|arg| arg == "--backend=mpi");
    let bench = built("meshstep-bench", if mpi { " --features mpi" } else { "" })?;
    let program = built("meshstep", "")?;
    launch_command(program, &bench.display().to_string(), args).become_it()
}

fn launch_command(program: PathBuf, bench: &str, args: &[String]) -> Cmd {
    args.iter().fold(Cmd::built(program, "launch"), |cmd, arg| {
        let cmd = cmd.arg(arg);
        if arg == "--" { cmd.arg(bench) } else { cmd }
    })
}

/// Builds a program with the profile `train`, and returns its path.
fn built(package: &str, features: &str) -> anyhow::Result<PathBuf> {
    let workspace = Workspace::find()?;
    let build = Cmd::cargo(&format!("build --profile train -p {package}{features} --bins"));
    let status = build.dir(&workspace.root).run_unattended()?;
    ensure!(status.success(), "the program {package} was not built ({status}); no rank was started");
    Ok(workspace.target.join("train").join(format!("{package}{}", std::env::consts::EXE_SUFFIX)))
}

fn meshstep_command(subcommand: &str, args: &[String]) -> Cmd {
    let start = Cmd::cargo("run --profile train -p meshstep --").arg(subcommand);
    args.iter().fold(start, |cmd, arg| cmd.arg(arg))
}

/// Returns the command that runs the bench program in the caller's folder, so that relative paths work as typed.
fn bench_command(subcommand: &str, args: &[String]) -> Cmd {
    let features = if on_gpu(args) { " --features cuda" } else { "" };
    // Benchmarks need every crate fully optimised; the profile `train` optimises only the crates that compute.
    let profile = if subcommand == "bench" { "release" } else { "train" };
    let start =
        Cmd::cargo(&format!("run --profile {profile} -p meshstep-bench{features} --")).arg(subcommand);
    args.iter().fold(start, |cmd, arg| cmd.arg(arg))
}

/// Returns true if the arguments ask for a GPU, which needs the `cuda` build.
fn on_gpu(args: &[String]) -> bool {
    let pairs = args.windows(2).any(|pair| pair[0] == "--device" && pair[1] == "cuda");
    pairs || args.iter().any(|arg| arg == "--device=cuda")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn arguments_follow_the_subcommand() {
        let cmd = bench_command("train", &words("--steps 3"));
        assert_eq!(cmd.to_string(), "cargo run --profile train -p meshstep-bench -- train --steps 3");
        for asked in ["--device cuda", "--device=cuda"] {
            let cmd = bench_command("bench", &words(asked));
            let begin = "cargo run --profile release -p meshstep-bench --features cuda -- bench --device";
            assert!(cmd.to_string().starts_with(begin), "{cmd}");
        }
        let cmd = meshstep_command("parity", &["a b".to_owned()]);
        assert!(cmd.to_string().starts_with("cargo run --profile train -p meshstep -- parity "));
    }

    #[test]
    fn launch_starts_the_bench_program() {
        let cmd = launch_command("/t/meshstep".into(), "/t/bench", &words("-n 4 -- train --stage 2"));
        assert_eq!(cmd.to_string(), "/t/meshstep launch -n 4 -- /t/bench train --stage 2");
    }
}
