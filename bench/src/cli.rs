//! Command line: the subcommands.

use clap::{Parser, Subcommand};

use crate::args::bench::Bench;
use crate::args::train::Train;
use crate::measure::rank::Rank;
use crate::network::worker::Worker;

/// Benchmark and demonstration of Meshstep: trains a small GPT with the optimizer step on several ranks.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Subcommands of the program.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train the same network under ZeRO stages 0, 1 and 2, on meshes 0 to 3, compare the results bit for bit, and report
    /// the cost of each stage; or, with --local, train workers that exchange parameters only every few steps. With --local,
    /// exits with 0 if every bar holds, 1 if one is missed, 2 if nothing was trained or the training failed. Without --local,
    /// SIGTERM and SIGUSR1 end the run after the current step with exit code 143, the first Ctrl-C with 130.
    /// RUST_LOG=meshstep=debug shows the spans of a step.
    Train(Train),
    /// Measure the cost and the savings of sharding in turns with a copy of the same bytes, and write a report. Exits with
    /// 0 if every bar holds, 1 if one is missed, 2 if something could not be measured.
    Bench(Bench),
    /// Be one rank of a measured group of processes; `bench --peers` starts these.
    #[command(hide = true)]
    Rank(Rank),
    /// Be one worker process of `bench network`.
    #[command(hide = true)]
    Worker(Worker),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use meshstep_parallel3d::Mesh;

    use super::*;

    fn train(args: &str) -> Result<Train, String> {
        let words = ["meshstep-bench", "train"].into_iter().chain(args.split_whitespace());
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Train(train) => Ok(train),
            _ => panic!("not train"),
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn all_suites_run_unless_some_are_named() {
        let bench = |args: &str| match Cli::try_parse_from(
            ["meshstep-bench", "bench"].into_iter().chain(args.split_whitespace()),
        ) {
            Ok(Cli { command: Command::Bench(bench) }) => Ok(bench),
            Ok(_) => panic!("not bench"),
            Err(error) => Err(error.to_string()),
        };
        assert_eq!(bench("").unwrap().suites().unwrap().len(), 6);
        let names: Vec<String> = bench("scaling network memory memory")
            .unwrap()
            .suites()
            .unwrap()
            .iter()
            .map(|s| s.name())
            .collect();
        assert_eq!(names, ["memory", "scaling", "network"]);
        let error = bench("memroy").unwrap_err();
        assert!(error.contains("memory") && error.contains("scaling"), "{error}");
    }

    #[test]
    fn all_stages_run_unless_one_is_named() {
        assert_eq!(train("").unwrap().stages(), [0, 1, 2]);
        assert_eq!(train("--stage 1").unwrap().stages(), [1]);
        assert_eq!(train("--mesh dp=2").unwrap().stages(), [0, 1, 2, 3]);
    }

    #[test]
    fn meshes_come_in_the_order_they_are_typed_behind_those_that_are_always_compared() {
        assert_eq!((train("").unwrap().meshes(), train("").unwrap().steps), (Vec::new(), 400));
        let two = train("--mesh dp=2 --mesh tp=2,cp=2,dp=2").unwrap();
        let names: Vec<String> = two.meshes().iter().map(Mesh::to_string).collect();
        assert_eq!(
            (names, two.steps, two.most_ranks()),
            (vec!["dp=2".into(), "dp=2,cp=2,tp=2".into()], 50, 8)
        );
        let compared = train("--compare --mesh tp=2 --steps 3").unwrap();
        assert_eq!((compared.meshes().len(), compared.meshes()[0].world_size(), compared.steps), (7, 1, 3));
        assert_eq!(train("--compare").unwrap().steps, 50);
    }

    #[test]
    fn bad_values_are_refused_with_what_would_work() {
        for (args, hint) in [
            ("--ranks 0", "from 1 to 64"),
            ("--ranks 65", "from 1 to 64"),
            ("--steps 0", "from 1 to 1000000"),
            ("--steps many", "from 1 to 1000000"),
            ("--batch -1", "from 1 to 1024"),
            ("--bucket 0", "from 1 to"),
            ("--threads 0", "from 1 to 1024"),
            ("--save-every 0", "from 1 to 1000000"),
            ("--until 3", "--save-every"),
            ("--stage 4", "0..=3"),
            ("--optimizer adam", "adamw, muon, sgd"),
            ("--seed -1", "--seed"),
            ("--mesh tp=2,xp=2", "no axis is called \"xp\""),
            ("--mesh tp=0", "leave it out"),
            ("--mesh tp=2 --ranks 4", "cannot be used with"),
            ("--compare --batch 4", "cannot be used with"),
        ] {
            let error = train(args).unwrap_err();
            assert!(error.contains(hint), "{args}: {error}");
        }
    }
}
