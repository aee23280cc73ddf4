//! What can be typed after `cargo xtask`. The tidy rule for README commands parses with this very definition.

use crate::kernels::CHIPS;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Looks after the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) task: Task,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Train a GPT on real text with the optimizer sharded over loopback ranks.
    #[command(disable_help_flag = true)]
    Train {
        /// Handed to `meshstep-bench train` as they are; `--help` shows them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Measure what sharding costs and saves, and write a report.
    #[command(disable_help_flag = true)]
    Bench {
        /// Handed to `meshstep-bench bench` as they are; `--help` shows them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Replay training steps that another program recorded, and tell how far apart the results are.
    #[command(disable_help_flag = true)]
    Parity {
        /// Handed to `meshstep-bench parity` as they are; `--help` shows them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Show what a checkpoint holds, verify every byte of it, or export its parameters to one file.
    #[command(disable_help_flag = true)]
    Ckpt {
        /// Handed to `meshstep-bench ckpt` as they are; `--help` shows them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Check what changed and what depends on it, in minutes: format, lints, and tests with a tenth of the random cases.
    Check(CheckArgs),
    /// Run every check, cheap ones first, and stop at the first that fails.
    Ci(CiArgs),
    /// Put thirty faults, one at a time, into a copy of the tree, and tell whether the tests notice them.
    Mutants(MutantsArgs),
    /// Check what a compiler does not see: crate edges, file headers, README commands, import knots, prose.
    Tidy(TidyArgs),
    /// Compile the CUDA kernels to the PTX that is committed beside them. Needs no GPU; fetches NVRTC into the target folder.
    Kernels(KernelsArgs),
    /// Build the GPU tests into a folder that runs where there is a GPU but no cargo and no network.
    GpuBundle,
}

#[derive(Debug, Default, Args)]
pub(crate) struct KernelsArgs {
    /// Write nothing: an error if the committed PTX is not what the sources give.
    #[arg(long)]
    pub(crate) check: bool,
    /// Write the budget of registers and shared memory anew, too.
    #[arg(long, conflicts_with = "check")]
    pub(crate) budget: bool,
    /// Measure on this chip alone [default: on each].
    #[arg(long, value_parser = CHIPS, requires = "check")]
    pub(crate) chip: Option<String>,
    /// Assemble the committed PTX for each chip into this folder, for builds with optim's feature `cubins`, and do nothing else.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["check", "budget"])]
    pub(crate) cubins: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The revision that files are compared with; by default the last commit, so that uncommitted changes are checked.
    #[arg(long, value_name = "REVISION", default_value = "HEAD")]
    pub(crate) since: String,
    /// Print the steps and their commands, and run nothing.
    #[arg(long)]
    pub(crate) list: bool,
}

#[derive(Debug, Default, Args)]
pub(crate) struct TidyArgs {
    /// Print the measured figures of each crate first, with their bounds and goals.
    #[arg(long)]
    pub(crate) measures: bool,
    /// Hold the figures to their goals instead of the bounds of today, and so print every line to change.
    #[arg(long)]
    pub(crate) goals: bool,
}

#[derive(Debug, Default, Args)]
pub(crate) struct MutantsArgs {
    /// Try these alone, by name.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
}

#[derive(Debug, Default, Args)]
pub(crate) struct CiArgs {
    /// Run the full case counts instead of the reduced ones.
    #[arg(long)]
    pub(crate) long: bool,
    /// Run these steps alone, in the usual order.
    #[arg(long, value_name = "STEP", value_delimiter = ',')]
    pub(crate) only: Vec<StepName>,
    /// Print the steps and their commands, and run nothing.
    #[arg(long)]
    pub(crate) list: bool,
}

/// The steps of `ci`, in the order in which they run: what fails fast and builds little comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StepName {
    /// rustfmt agrees with every file.
    Fmt,
    /// The tree keeps its own rules.
    Tidy,
    /// No warning from rustc or clippy, with all features.
    Clippy,
    /// The committed PTX is what the CUDA kernels give, and keeps to its budget of registers.
    Kernels,
    /// The documentation builds without a warning.
    Rustdoc,
    /// Unit, property and integration tests of the whole workspace.
    Tests,
    /// The GPU tests on a stand-in for the driver.
    Standin,
    /// comm's table of NCCL's functions agrees with the headers and libraries of several releases.
    NcclAbi,
    /// The fault tests of comm under a deterministic scheduler.
    Shuttle,
    /// The examples in the documentation.
    Doctests,
    /// The main job, a few steps long.
    TrainSmoke,
    /// Every library packages, and serves a crate outside the workspace alone.
    Package,
    /// Variables of candle in a flat buffer have the types that tensor's README says; with `--long` only, or by name.
    Candle,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn train_passes_everything_on() {
        let typed = ["xtask", "train", "--help", "--steps", "3", "--", "-x"];
        let Task::Train { args } = Cli::try_parse_from(typed).unwrap().task else { panic!("not train") };
        assert_eq!(args, ["--help", "--steps", "3", "--", "-x"]);
    }

    #[test]
    fn bench_passes_everything_on() {
        let Task::Bench { args } = Cli::try_parse_from(["xtask", "bench", "memory", "--quick"]).unwrap().task
        else {
            panic!("not bench")
        };
        assert_eq!(args, ["memory", "--quick"]);
    }

    #[test]
    fn parity_passes_everything_on() {
        let typed = ["xtask", "parity", "a.safetensors", "--ranks", "4", "--help"];
        let Task::Parity { args } = Cli::try_parse_from(typed).unwrap().task else { panic!("not parity") };
        assert_eq!(args, ["a.safetensors", "--ranks", "4", "--help"]);
    }

    #[test]
    fn ckpt_passes_everything_on() {
        let typed = ["xtask", "ckpt", "export", "runs", "--to", "w.safetensors", "--force"];
        let Task::Ckpt { args } = Cli::try_parse_from(typed).unwrap().task else { panic!("not ckpt") };
        assert_eq!(args, typed[2..]);
    }

    #[test]
    fn what_is_checked_is_not_written() {
        let Task::Kernels(args) = Cli::try_parse_from(["xtask", "kernels", "--check"]).unwrap().task else {
            panic!("not kernels")
        };
        assert!(args.check && !args.budget);
        assert!(Cli::try_parse_from(["xtask", "kernels", "--check", "--budget"]).is_err());
    }

    #[test]
    fn only_takes_names_of_steps() {
        let Task::Ci(args) = Cli::try_parse_from(["xtask", "ci", "--only", "fmt,train-smoke"]).unwrap().task
        else {
            panic!("not ci")
        };
        assert_eq!(args.only, [StepName::Fmt, StepName::TrainSmoke]);
        assert!(Cli::try_parse_from(["xtask", "ci", "--only", "everything"]).is_err());
    }
}
