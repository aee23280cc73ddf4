//! Command line: the subcommands.

use clap::{Parser, Subcommand};
use clap_complete::Shell;

use crate::arbiter::Arbiter;
use crate::ckpt::Ckpt;
#[cfg(target_os = "linux")]
use crate::launch::{Launch, LaunchedRank};
use crate::parity::Parity;
use crate::plan::Plan;

/// Commands for jobs that train with Meshstep. Exit code 2: the work could not be done.
#[derive(Debug, Parser)]
#[command(name = "meshstep", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Subcommands of the program.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a program as several processes of this machine, one for each rank: `meshstep launch -n 4 -- target/release/train`.
    /// Each line of output gets its rank in front. The first rank that fails ends all, and its exit code is the command's.
    #[cfg(target_os = "linux")]
    Launch(Launch),
    /// Becomes a rank of `launch`.
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    LaunchedRank(LaunchedRank),
    /// Serve elastic workers, which join the run, leave it and may be lost, until Ctrl-C.
    Arbiter(Arbiter),
    /// Compute what each rank holds and sends at each ZeRO stage, before a job starts. Allocates nothing.
    Plan(Plan),
    /// Inspect a checkpoint, verify it, or export its parameters.
    #[command(subcommand)]
    Ckpt(Ckpt),
    /// Replay training steps that another program recorded, and report how far the results differ. Exits with 0 if all
    /// files agree, 1 if one is outside its tolerance, 2 if one cannot be replayed.
    Parity(Parity),
    /// Print completions for a shell, for example `meshstep completions bash > /etc/bash_completion.d/meshstep`.
    Completions {
        /// Shell that completes.
        shell: Shell,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
