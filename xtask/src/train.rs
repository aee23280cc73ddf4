//! `train`: starts the release build of the bench binary and steps aside.

use crate::cmd::{Cmd, exit_code};
use std::process::ExitCode;

pub(crate) fn run(args: &[String]) -> anyhow::Result<ExitCode> {
    Ok(exit_code(command(args).run_attached()?))
}

/// In the caller's folder, so that a relative `--corpus` means what was typed.
fn command(args: &[String]) -> Cmd {
    let start = Cmd::cargo("run --release -p meshstep-bench -- train");
    args.iter().fold(start, |cmd, arg| cmd.arg(arg))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_follow_the_subcommand() {
        let cmd = command(&["--steps".to_owned(), "3".to_owned()]);
        assert_eq!(cmd.to_string(), "cargo run --release -p meshstep-bench -- train --steps 3");
    }
}
