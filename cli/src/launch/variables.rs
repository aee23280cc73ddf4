//! Variables of the ranks: torchrun's, and those of Meshstep's rendezvous.

use anyhow::{Context, anyhow};
use std::net::{Ipv4Addr, TcpListener};

/// Bytes of a job's token.
const TOKEN: usize = 32;

/// Variables of other launchers and of an earlier job, which would contradict those that are set here.
pub(super) const REMOVED: [&str; 2] = ["MESHSTEP_TOKEN_FILE", "GROUP_WORLD_SIZE"];

/// Values that all ranks of a job share.
#[derive(Debug)]
pub(super) struct Job {
    ranks: usize,
    token: String,
    run: String,
    /// Ports for MASTER_PORT and for the store.
    ports: [u16; 2],
}

impl Job {
    /// Draws a token and a name, and finds free ports on 127.0.0.1.
    pub(super) fn draw(ranks: usize) -> anyhow::Result<Self> {
        let (token, run) = (random_hex::<TOKEN>()?, random_hex::<8>()?);
        Ok(Job { ranks, token, run: format!("launch-{run}"), ports: free_ports()? })
    }

    /// Returns the variables of a rank. On a terminal rank 0 shows its progress as a status line.
    pub(super) fn of_rank(&self, rank: usize, terminal: bool) -> Vec<(String, String)> {
        let Job { ranks, token, run, ports: [master, store] } = self;
        let mut all = vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", ranks.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("LOCAL_WORLD_SIZE", ranks.to_string()),
            ("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string()),
            ("MASTER_PORT", master.to_string()),
            ("MESHSTEP_PORT", store.to_string()),
            ("MESHSTEP_TOKEN", token.clone()),
            // SLURM's variables do not count beside this one.
            ("TORCHELASTIC_RUN_ID", run.clone()),
            ("TORCHELASTIC_RESTART_COUNT", 0.to_string()),
        ];
        if terminal && rank == 0 {
            all.push(("MESHSTEP_PROGRESS", "status".to_owned()));
        }
        all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// Returns the variables of mpirun. Open MPI refuses root, and more ranks than cores, without them; MPICH ignores them.
pub(super) fn of_mpirun() -> Vec<(String, String)> {
    let mut all = vec![("OMPI_MCA_rmaps_base_oversubscribe", "1")];
    if rustix::process::geteuid().is_root() {
        all.extend([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    }
    all.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn random_hex<const BYTES: usize>() -> anyhow::Result<String> {
    let mut bytes = [0u8; BYTES];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("the system gave no random bytes: {error}"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn free_ports() -> anyhow::Result<[u16; 2]> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port on 127.0.0.1");
    // Both are held until both are known.
    let listeners = [bind()?, bind()?];
    let [first, second] = listeners.each_ref().map(TcpListener::local_addr);
    Ok([first?.port(), second?.port()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_job_and_differ_in_their_rank() {
        let (job, other) = (Job::draw(3).unwrap(), Job::draw(3).unwrap());
        let [zero, two] = [0, 2].map(|rank| job.of_rank(rank, false));
        let differing: Vec<&str> =
            zero.iter().zip(&two).filter(|(a, b)| a != b).map(|((name, _), _)| name.as_str()).collect();
        assert_eq!(differing, ["RANK", "LOCAL_RANK"]);
        let value = |all: &[(String, String)], name: &str| {
            all.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()).unwrap()
        };
        assert_eq!((value(&two, "RANK").as_str(), value(&two, "WORLD_SIZE").as_str()), ("2", "3"));
        assert_ne!(value(&zero, "MASTER_PORT"), value(&zero, "MESHSTEP_PORT"));
        assert_eq!(value(&zero, "MESHSTEP_TOKEN").len(), 2 * TOKEN);
        for secret in ["MESHSTEP_TOKEN", "TORCHELASTIC_RUN_ID"] {
            assert_ne!(value(&zero, secret), value(&other.of_rank(0, false), secret));
        }
    }

    #[test]
    fn rank_0_alone_shows_a_status_and_only_on_a_terminal() {
        let job = Job::draw(2).unwrap();
        let shows =
            |rank, terminal| job.of_rank(rank, terminal).iter().any(|(name, _)| name == "MESHSTEP_PROGRESS");
        assert_eq!([shows(0, true), shows(1, true), shows(0, false)], [true, false, false]);
    }
}
