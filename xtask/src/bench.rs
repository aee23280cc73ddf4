//! `train`, `bench`, `parity` and `ckpt`: start the release build of the bench binary and step aside.

use crate::cmd::{Cmd, exit_code};
use std::process::ExitCode;

pub(crate) fn run(subcommand: &str, args: &[String]) -> anyhow::Result<ExitCode> {
    Ok(exit_code(command(subcommand, args).run_attached()?))
}

/// In the caller's folder, so that a relative path means what was typed.
fn command(subcommand: &str, args: &[String]) -> Cmd {
    let start = Cmd::cargo("run --release -p meshstep-bench --").arg(subcommand);
    args.iter().fold(start, |cmd, arg| cmd.arg(arg))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_follow_the_subcommand() {
        let cmd = command("train", &["--steps".to_owned(), "3".to_owned()]);
        assert_eq!(cmd.to_string(), "cargo run --release -p meshstep-bench -- train --steps 3");
        let cmd = command("parity", &["a b".to_owned()]);
        assert!(cmd.to_string().starts_with("cargo run --release -p meshstep-bench -- parity "));
    }
}
