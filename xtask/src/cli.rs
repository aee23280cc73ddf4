//! Command line of `cargo xtask`. The tidy rule for README commands parses with this definition.

use crate::kernels::CHIPS;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Checks, tests and measures the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) task: Task,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Train a GPT on real text with the optimizer sharded over loopback ranks; with `--device cuda`, a burn transformer on one
    /// GPU, which has not been run on a GPU yet.
    #[command(disable_help_flag = true)]
    Train {
        /// Passed on to `meshstep-bench train`; `--help` lists them, and `--device cuda --help` those of the training on a GPU.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Measure the cost and the savings of sharding, and write a report.
    #[command(disable_help_flag = true)]
    Bench {
        /// Passed on to `meshstep-bench bench`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Replay training steps that another program recorded, and report how far the results differ.
    #[command(disable_help_flag = true)]
    Parity {
        /// Passed on to `meshstep parity`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Show the content of a checkpoint, verify every byte of it, or export its parameters to one file.
    #[command(disable_help_flag = true)]
    Ckpt {
        /// Passed on to `meshstep ckpt`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Start the bench program as several processes of this machine, one for each rank, for example `launch -n 4 -- train`;
    /// with `--backend mpi` under mpirun.
    #[command(disable_help_flag = true)]
    Launch {
        /// Passed on to `meshstep launch`, with the bench program in front of what follows `--`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run the arbiter of elastic workers (`train --local METHOD --arbiter ADDR --worker ID`) until Ctrl-C.
    #[command(disable_help_flag = true)]
    Arbiter {
        /// Passed on to `meshstep arbiter`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Compute what each rank holds and sends at each ZeRO stage, before a job starts.
    #[command(disable_help_flag = true)]
    Plan {
        /// Passed on to `meshstep plan`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Check the changed packages and their dependents in minutes: format, lints, and tests with a tenth of the random
    /// cases.
    Check(CheckArgs),
    /// Run every check, cheap ones first, and stop at the first failure.
    Ci(CiArgs),
    /// Put thirty faults, one at a time, into a copy of the tree, and check that the tests detect them.
    Mutants(MutantsArgs),
    /// Do everything before the upload of a release, and print the commands that publish it.
    Release,
    /// Build a user's project with the candle adapter and one with candle-nn, from nothing, and compare crates and seconds.
    ColdBuild,
    /// Run the tests that answer public reports about other systems, and print a line for each.
    Complaints,
    /// Check rules that the compiler does not check: crate edges, file headers, README commands, import knots, prose.
    Tidy(TidyArgs),
    /// Compile the CUDA kernels to the committed PTX files. Needs no GPU; downloads NVRTC into the target folder.
    Kernels(KernelsArgs),
    /// Build the GPU tests into a folder that runs on a GPU machine without cargo and without network.
    GpuBundle,
}

#[derive(Debug, Default, Args)]
pub(crate) struct KernelsArgs {
    /// Write nothing; fail if the committed PTX differs from the PTX of the sources.
    #[arg(long)]
    pub(crate) check: bool,
    /// Also rewrite the budget of registers and shared memory.
    #[arg(long, conflicts_with = "check")]
    pub(crate) budget: bool,
    /// Measure on this chip only [default: on every chip].
    #[arg(long, value_parser = CHIPS, requires = "check")]
    pub(crate) chip: Option<String>,
    /// Assemble the committed PTX for each chip into this folder, for builds with optim's feature `cubins`, and do nothing
    /// else.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["check", "budget"])]
    pub(crate) cubins: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Revision to compare files with; the default is the last commit, so that uncommitted changes are checked.
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
    /// Run only these mutants, by name.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
}

#[derive(Debug, Default, Args)]
pub(crate) struct CiArgs {
    /// Run the full case counts instead of the reduced ones.
    #[arg(long)]
    pub(crate) long: bool,
    /// Run only these steps, in the usual order.
    #[arg(long, value_name = "STEP", value_delimiter = ',')]
    pub(crate) only: Vec<StepName>,
    /// Print the steps and their commands, and run nothing.
    #[arg(long)]
    pub(crate) list: bool,
}

/// Steps of `ci`, in the order in which they run: fast and cheap ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StepName {
    /// Checks the format of every file with rustfmt.
    Fmt,
    /// Checks the tree's own rules.
    Tidy,
    /// Checks that rustc and clippy report no warning with all features.
    Clippy,
    /// Checks that the committed PTX matches the CUDA sources, and that the kernels keep within the register budget.
    Kernels,
    /// Builds the documentation without warnings.
    Rustdoc,
    /// Runs unit, property and integration tests of the whole workspace.
    Tests,
    /// Runs the GPU tests on a stand-in for the driver.
    Standin,
    /// Checks comm's table of NCCL functions against the headers and libraries of several releases.
    NcclAbi,
    /// Builds comm and shard with the system's MPI library and runs their tests under mpirun; with `--long` also with MPICH.
    Mpi,
    /// Runs comm's fault tests under a deterministic scheduler.
    Shuttle,
    /// Runs the examples in the documentation and in the book.
    Doctests,
    /// Builds the book with mdBook, which it installs into the target folder.
    Book,
    /// Runs a few steps of the training job.
    TrainSmoke,
    /// Packages every library, and builds a crate outside the workspace on each.
    Package,
    /// Checks licences, sources and duplicates of the dependencies with cargo-deny; only with `--long` or by name.
    Deny,
    /// Type-checks tensor's README recipe for candle variables; only with `--long` or by name.
    Candle,
    /// Runs the tests of tensor, comm and optim under ThreadSanitizer, with a nightly compiler; only with `--long` or by name.
    Tsan,
    /// Runs the same tests under AddressSanitizer and LeakSanitizer; only with `--long` or by name.
    Asan,
    /// Runs tests of tensor's memory and of comm's arithmetic under Miri; only with `--long` or by name.
    Miri,
    /// Builds every package with the oldest compiler that it names; only with `--long` or by name.
    Msrv,
    /// Takes screenshots of small reports with headless Chromium, and checks them for overflow and empty axes; only with `--long` or by
    /// name.
    Reports,
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
