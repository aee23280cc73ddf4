//! Detects from the environment whether a launcher started this process as one rank of several.

use anyhow::{Context as _, Result, ensure};
use meshstep_comm::rendezvous::Environment;

use crate::args::train::Train;

/// Way in which this process was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Launch {
    /// Alone: the ranks are threads.
    Alone,
    /// By `cargo xtask launch`, torchrun or srun: the ranks meet at a store.
    Rendezvous {
        environment: Environment,
        /// Ranks on this machine.
        local_ranks: usize,
    },
    /// By mpirun.
    Mpi {
        rank: usize,
        world_size: usize,
        /// Ranks on this machine.
        local_ranks: usize,
    },
}

impl Launch {
    /// Reads this process's environment.
    pub(crate) fn from_env() -> Result<Self> {
        Self::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Reads the variables of `lookup`. RANK and WORLD_SIZE come first, then mpirun's, because mpirun inherits SLURM's, then those
    /// of an srun step: a batch script outside of a step is no rank.
    fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let given = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        let any = |names: [&str; 2]| names.into_iter().any(|name| given(name).is_some());
        if !any(["RANK", "WORLD_SIZE"]) {
            if let Some(mpi) = mpi(&given)? {
                return Ok(mpi);
            }
            if given("SLURM_PROCID").is_none() || given("SLURM_STEP_ID").is_none() {
                return Ok(Launch::Alone);
            }
        }
        let environment = Environment::read(&lookup).context("cannot join the other ranks")?;
        let local_ranks = local_ranks(&given, environment.world_size)?;
        Ok(Launch::Rendezvous { environment, local_ranks })
    }

    /// Returns the number of ranks of this program that share this machine's cores, for the settings of `asked`.
    pub(crate) fn ranks_here(&self, asked: &Train) -> usize {
        match self {
            Launch::Alone => asked.most_ranks(),
            Launch::Rendezvous { local_ranks, .. } | Launch::Mpi { local_ranks, .. } => *local_ranks,
        }
    }

    /// Returns the number of processes; `None` if this one was started alone.
    pub(crate) fn world_size(&self) -> Option<usize> {
        match self {
            Launch::Alone => None,
            Launch::Rendezvous { environment, .. } => Some(environment.world_size),
            Launch::Mpi { world_size, .. } => Some(*world_size),
        }
    }

    /// Sets the number of ranks to that of the processes; refuses a `--ranks` on the command line (`given`) or a mesh that
    /// contradicts it. Needs no other rank, so that every rank gets the error.
    pub(crate) fn settle(&self, asked: &mut Train, given: bool) -> Result<()> {
        let Some(processes) = self.world_size() else { return Ok(()) };
        if !asked.meshes().is_empty() {
            let largest = asked.most_ranks();
            ensure!(
                largest == processes,
                "{processes} processes were started, but the largest mesh has {largest} ranks; start {largest} processes"
            );
            return Ok(());
        }
        ensure!(
            !given || asked.ranks == [processes],
            "{processes} processes were started, but --ranks is {}; start {} processes or leave --ranks out",
            asked.ranks(),
            asked.ranks()
        );
        asked.ranks = vec![processes];
        Ok(())
    }
}

/// Reads the variables of Open MPI's mpirun, or of MPICH's.
fn mpi(given: &impl Fn(&str) -> Option<String>) -> Result<Option<Launch>> {
    let names = [
        ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
        ["PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"],
    ];
    // srun sets PMI's variables too, for programs of MPI; there SLURM's own are used.
    let in_step = given("SLURM_STEP_ID").is_some();
    let found =
        names.into_iter().find(|[size, ..]| given(size).is_some() && !(in_step && size.starts_with("PMI")));
    let Some([size, rank, local]) = found else { return Ok(None) };
    let (Some(world_size), Some(rank)) = (number(given, size)?, number(given, rank)?) else {
        anyhow::bail!("{size} is set, but {rank} is not; start the ranks with mpirun");
    };
    let local_ranks = number(given, local)?.unwrap_or(world_size).max(1);
    Ok(Some(Launch::Mpi { rank, world_size, local_ranks }))
}

/// Returns the ranks on this machine: torchrun's number, or SLURM's for its first node; all ranks if neither is known.
fn local_ranks(given: &impl Fn(&str) -> Option<String>, world_size: usize) -> Result<usize> {
    if let Some(ranks) = number(given, "LOCAL_WORLD_SIZE")? {
        return Ok(ranks.max(1));
    }
    // SLURM writes 4(x2),3 for two nodes of four tasks and one of three.
    let tasks = given("SLURM_STEP_TASKS_PER_NODE");
    let first = tasks.as_deref().and_then(|tasks| tasks.split(['(', ',']).next()?.parse().ok());
    Ok(first.unwrap_or(world_size).max(1))
}

fn number(given: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<usize>> {
    let Some(text) = given(name) else { return Ok(None) };
    let number = text.trim().parse();
    Ok(Some(number.with_context(|| format!("{name} is {text:?}; it must be a whole number"))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &str) -> Result<Launch> {
        let pairs: Vec<(&str, &str)> =
            variables.split_whitespace().filter_map(|pair| pair.split_once('=')).collect();
        Launch::read(|name| {
            pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    const TORCHRUN: &str =
        "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=20000";
    const SRUN: &str = "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_STEP_NODELIST=a,b SLURM_JOB_ID=7 \
                        SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE=2(x2)";
    const MPIRUN: &str = "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=2";

    /// Returns the number of processes and that on this machine.
    fn sizes(variables: &str) -> (Option<usize>, Option<usize>) {
        match read(variables).unwrap() {
            Launch::Alone => (None, None),
            launch @ (Launch::Rendezvous { local_ranks, .. } | Launch::Mpi { local_ranks, .. }) => {
                (launch.world_size(), Some(local_ranks))
            }
        }
    }

    #[test]
    fn every_launcher_is_recognized() {
        assert_eq!(sizes(""), (None, None));
        for variables in [TORCHRUN, SRUN, MPIRUN] {
            assert_eq!(sizes(variables), (Some(4), Some(2)), "{variables}");
        }
        assert_eq!(sizes("PMI_SIZE=3 PMI_RANK=0"), (Some(3), Some(3)));
        // A batch script has SLURM's variables of its job, and is no step.
        assert_eq!(sizes("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=7"), (None, None));
    }

    #[test]
    fn one_launcher_within_another_wins() {
        let mpi = |variables: &str| matches!(read(variables).unwrap(), Launch::Mpi { .. });
        assert!(mpi(&format!("{SRUN} {MPIRUN}")) && !mpi(&format!("{TORCHRUN} {MPIRUN}")));
        assert!(!mpi(&format!("{SRUN} PMI_SIZE=4 PMI_RANK=1")));
    }

    #[test]
    fn half_a_launcher_is_an_error() {
        for (variables, hint) in [
            ("RANK=1", "WORLD_SIZE"),
            ("WORLD_SIZE=2", "RANK"),
            ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK"),
            ("PMI_SIZE=two PMI_RANK=0", "PMI_SIZE is \"two\""),
        ] {
            let error = format!("{:#}", read(variables).unwrap_err());
            assert!(error.contains(hint), "{variables}: {error}");
        }
    }

    #[test]
    fn contradictions_between_options_and_processes_are_refused() {
        use clap::Parser as _;

        use crate::cli::{Cli, Command};

        let settle = |options: &str, given: bool| {
            let words = ["meshstep-bench", "train"].into_iter().chain(options.split_whitespace());
            let Command::Train(mut asked) = Cli::parse_from(words).command else { panic!("not train") };
            let settled = read(TORCHRUN).unwrap().settle(&mut asked, given);
            settled.map(|()| asked.ranks()).map_err(|error| error.to_string())
        };
        assert_eq!((settle("", false), settle("--ranks 4", true)), (Ok(4), Ok(4)));
        assert!(
            settle("--ranks 3", true).unwrap_err().contains("4 processes were started, but --ranks is 3")
        );
        assert!(settle("--mesh tp=2,dp=2 --mesh tp=1", false).is_ok());
        assert!(settle("--mesh tp=2", false).unwrap_err().contains("start 2 processes"));
        let mut asked = {
            let Command::Train(asked) = Cli::parse_from(["meshstep-bench", "train"]).command else {
                panic!()
            };
            asked
        };
        asked.ranks = vec![9];
        assert_eq!((Launch::Alone.settle(&mut asked, true).is_ok(), asked.ranks()), (true, 9));
    }
}
