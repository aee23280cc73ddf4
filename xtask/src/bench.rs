//! `train`, `bench`, `parity` and `ckpt`: build and run the bench binary with the caller's arguments.

use crate::cmd::{Cmd, exit_code};
use std::process::ExitCode;

pub(crate) fn run(subcommand: &str, args: &[String]) -> anyhow::Result<ExitCode> {
    Ok(exit_code(command(subcommand, args).run_attached()?))
}

/// Returns the command that runs the bench binary in the caller's folder, so that relative paths work as typed.
fn command(subcommand: &str, args: &[String]) -> Cmd {
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

    #[test]
    fn arguments_follow_the_subcommand() {
        let cmd = command("train", &["--steps".to_owned(), "3".to_owned()]);
        assert_eq!(cmd.to_string(), "cargo run --profile train -p meshstep-bench -- train --steps 3");
        for asked in [&["--device", "cuda"][..], &["--device=cuda"]] {
            let cmd = command("bench", &asked.iter().map(|&arg| arg.to_owned()).collect::<Vec<_>>());
            let begin = "cargo run --profile release -p meshstep-bench --features cuda -- bench --device";
            assert!(cmd.to_string().starts_with(begin), "{cmd}");
        }
        let cmd = command("parity", &["a b".to_owned()]);
        assert!(cmd.to_string().starts_with("cargo run --profile train -p meshstep-bench -- parity "));
    }
}
