//! Rank of this process and address of rank 0, from launchers' variables.

use super::{EnvironmentError, Token};
use std::net::{IpAddr, SocketAddr};

/// Largest number of ranks of one store that was tried.
const MAX_WORLD_SIZE: usize = 1024;
/// Longest run id, in bytes.
const MAX_RUN_ID: usize = 256;

/// Settings that a process needs to join the others. All ranks of a job must have the same values, except for `rank` and
/// `local_rank`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// Rank of this process in the world.
    pub rank: usize,
    /// Ranks in the world.
    pub world_size: usize,
    /// Index of this process on its machine: usually the ordinal of its GPU.
    pub local_rank: usize,
    /// Host of rank 0, by name or address; its store listens on that address and no other.
    pub host: String,
    /// Port of the store.
    pub port: u16,
    /// Name of the run, which keeps jobs apart.
    pub run_id: String,
    /// Number of restarts of the run's processes, which excludes processes left over from an earlier start.
    pub restart: u64,
    /// Secret of the job; needed unless `host` is a loopback address.
    pub token: Option<Token>,
}

impl Environment {
    /// Reads this process's environment.
    ///
    /// | field | variable | fallback |
    /// |---|---|---|
    /// | `rank`, `world_size`, `local_rank` | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID` |
    /// | `host` | `MASTER_ADDR` | the first of `SLURM_STEP_NODELIST`, or `SLURM_LAUNCH_NODE_IPADDR` |
    /// | `port` | `MESHSTEP_PORT`, or `MASTER_PORT` + 1 (torchrun may hold MASTER_PORT) | from the SLURM job's number, 20000 to 29999 |
    /// | `run_id` | `TORCHELASTIC_RUN_ID` | `SLURM_JOB_ID` and `SLURM_STEP_ID` |
    /// | `restart` | `TORCHELASTIC_RESTART_COUNT` | `SLURM_RESTART_COUNT` |
    /// | `token` | `MESHSTEP_TOKEN`, or the file `MESHSTEP_TOKEN_FILE` of mode 0600 | none |
    ///
    /// Under `TORCHELASTIC_RUN_ID` SLURM's variables are ignored: `srun torchrun` starts one task per machine. Each of torchrun's
    /// agents counts the restarts that its own workers caused, so with several agents (`GROUP_WORLD_SIZE`) ranks have no common
    /// count and `restart` is 0. An empty variable counts as unset.
    ///
    /// # Errors
    /// An [`EnvironmentError`] with the variable and a remedy.
    pub fn from_env() -> Result<Self, EnvironmentError> {
        Self::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Like [`from_env`](Environment::from_env), with the variables of `lookup`.
    ///
    /// # Errors
    /// As for [`from_env`](Environment::from_env).
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, EnvironmentError> {
        let variables = Variables::new(&lookup);
        let (rank, world_size) = variables.place()?;
        let environment = Environment {
            rank,
            world_size,
            local_rank: variables.local_rank()?,
            host: variables.host()?,
            port: variables.port()?,
            run_id: variables.run_id()?,
            restart: variables.restart()?,
            token: variables.token()?,
        };
        environment.check()?;
        Ok(environment)
    }

    /// Returns the name of the store, which all ranks call alike: host and port.
    pub(super) fn endpoint(&self) -> String {
        match self.host.parse::<IpAddr>() {
            Ok(ip) => SocketAddr::new(ip, self.port).to_string(),
            Err(_) => format!("{}:{}", self.host.to_lowercase(), self.port),
        }
    }

    /// Checks that the fields are consistent.
    pub(super) fn check(&self) -> Result<(), EnvironmentError> {
        let world_size = self.world_size;
        if world_size == 0 || world_size > MAX_WORLD_SIZE {
            return Err(EnvironmentError::WorldSize { world_size, max: MAX_WORLD_SIZE });
        }
        let ranks = [("RANK", self.rank), ("LOCAL_RANK", self.local_rank)];
        if let Some(&(variable, rank)) = ranks.iter().find(|(_, rank)| *rank >= world_size) {
            return Err(EnvironmentError::NoSuchRank { variable, rank, world_size });
        }
        match self.run_id.len() {
            len if len > MAX_RUN_ID => Err(EnvironmentError::RunIdTooLong { len, max: MAX_RUN_ID }),
            _ => Ok(()),
        }
    }
}

struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
    torchrun: bool,
}

impl<'a> Variables<'a> {
    fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        let mut variables = Variables { lookup, torchrun: false };
        variables.torchrun = variables.text("TORCHELASTIC_RUN_ID").is_some();
        variables
    }

    fn place(&self) -> Result<(usize, usize), EnvironmentError> {
        let names = ["RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"];
        if !self.torchrun && names.iter().all(|name| self.text(name).is_none()) {
            return Err(EnvironmentError::NoLauncher);
        }
        let rank = self.agreed("RANK", "SLURM_PROCID", "start with torchrun or srun")?;
        let world_size = self.agreed("WORLD_SIZE", "SLURM_NTASKS", "start with torchrun or srun")?;
        Ok((rank, world_size))
    }

    fn local_rank(&self) -> Result<usize, EnvironmentError> {
        let slurm = || self.slurm("SLURM_LOCALID");
        let given =
            self.number("LOCAL_RANK", 0, u32::MAX.into())?.map_or_else(slurm, |rank| Ok(Some(rank)))?;
        let instead = "start with torchrun or srun";
        given.map(|rank| rank as usize).ok_or(EnvironmentError::Missing { variable: "LOCAL_RANK", instead })
    }

    fn host(&self) -> Result<String, EnvironmentError> {
        if let Some(host) = self.text("MASTER_ADDR") {
            return Ok(host);
        }
        let slurm = |name| self.text(name).filter(|_| !self.torchrun);
        if let Some(list) = slurm("SLURM_STEP_NODELIST") {
            return first_host(&list).ok_or(EnvironmentError::NoHost { list });
        }
        let instead = "start with torchrun or srun";
        slurm("SLURM_LAUNCH_NODE_IPADDR")
            .ok_or(EnvironmentError::Missing { variable: "MASTER_ADDR", instead })
    }

    fn port(&self) -> Result<u16, EnvironmentError> {
        let port = |name| Ok(self.number(name, 1, u16::MAX.into())?.map(|port| port as u16));
        if let Some(port) = port("MESHSTEP_PORT")? {
            return Ok(port);
        }
        if let Some(port) = port("MASTER_PORT")? {
            return port.checked_add(1).ok_or(EnvironmentError::NoNextPort);
        }
        // Below the system's ephemeral ports, and the same on every rank.
        let from_job = |(job, step): (u64, u64)| 20_000 + (job.wrapping_add(step) % 10_000) as u16;
        let instead = "set MASTER_PORT, the same on every rank: the store takes the port after it";
        self.step()?.map(from_job).ok_or(EnvironmentError::Missing { variable: "MESHSTEP_PORT", instead })
    }

    fn run_id(&self) -> Result<String, EnvironmentError> {
        if let Some(run) = self.text("TORCHELASTIC_RUN_ID") {
            return Ok(run);
        }
        Ok(self.step()?.map_or("none".to_owned(), |(job, step)| format!("slurm-{job}.{step}")))
    }

    fn restart(&self) -> Result<u64, EnvironmentError> {
        let restarts = self.number("TORCHELASTIC_RESTART_COUNT", 0, u32::MAX.into())?;
        let agents = self.number("GROUP_WORLD_SIZE", 1, u32::MAX.into())?.unwrap_or(1);
        match restarts {
            Some(_) if agents > 1 => Ok(0),
            Some(restarts) => Ok(restarts),
            None => Ok(self.slurm("SLURM_RESTART_COUNT")?.unwrap_or(0)),
        }
    }

    fn token(&self) -> Result<Option<Token>, EnvironmentError> {
        Token::read(|name| self.text(name))
    }

    /// SLURM's numbers of the job and of its step.
    fn step(&self) -> Result<Option<(u64, u64)>, EnvironmentError> {
        let Some(job) = self.slurm("SLURM_JOB_ID")? else { return Ok(None) };
        Ok(Some((job, self.slurm("SLURM_STEP_ID")?.unwrap_or(0))))
    }

    /// Reads torchrun's variable or SLURM's, which must not contradict each other.
    fn agreed(
        &self,
        variable: &'static str,
        other: &'static str,
        instead: &'static str,
    ) -> Result<usize, EnvironmentError> {
        let number = match (self.number(variable, 0, u32::MAX.into())?, self.slurm(other)?) {
            (Some(value), Some(other_value)) if value != other_value => {
                return Err(EnvironmentError::Contradiction { variable, value, other, other_value });
            }
            (given, slurm) => given.or(slurm),
        };
        number.map(|number| number as usize).ok_or(EnvironmentError::Missing { variable, instead })
    }

    /// Reads a number of SLURM's; `None` if torchrun started this process.
    fn slurm(&self, variable: &'static str) -> Result<Option<u64>, EnvironmentError> {
        if self.torchrun { Ok(None) } else { self.number(variable, 0, u32::MAX.into()) }
    }

    fn number(&self, variable: &'static str, min: u64, max: u64) -> Result<Option<u64>, EnvironmentError> {
        let Some(value) = self.text(variable) else { return Ok(None) };
        let number = value.parse().ok().filter(|number| (min..=max).contains(number));
        number.map(Some).ok_or(EnvironmentError::NotANumber { variable, value, min, max })
    }

    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }
}

/// Returns the first host of a list in SLURM's notation: `gpu[07-09,12],login` begins with `gpu07`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    while let Some(at) = rest.find(['[', ',']) {
        host.push_str(&rest[..at]);
        if rest[at..].starts_with(',') {
            return Some(host).filter(|host| !host.is_empty());
        }
        let (inside, after) = rest[at + 1..].split_once(']')?;
        let first = inside.split([',', '-']).next().filter(|first| !first.is_empty())?;
        host.push_str(first);
        rest = after;
    }
    host.push_str(rest);
    Some(host).filter(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::first_host;

    #[test]
    fn the_first_host_of_a_list() {
        let table = [
            ("login", Some("login")),
            ("a1,a2", Some("a1")),
            ("gpu[07-09,12],login", Some("gpu07")),
            ("gpu[3,5]", Some("gpu3")),
            ("rack[1-2]n[03-04]-ib,x", Some("rack1n03-ib")),
            ("10.0.0.[4-5]", Some("10.0.0.4")),
            ("", None),
            (",a", None),
            ("gpu[", None),
            ("gpu[]", None),
            ("gpu[-3]", None),
        ];
        for (list, host) in table {
            assert_eq!(first_host(list).as_deref(), host, "{list:?}");
        }
    }
}
