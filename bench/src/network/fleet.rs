//! The workers of one measurement, and the links between them.

use std::env;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command as Process, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use meshstep_bench_cases::peers::Program;

use super::namespaces::Namespaces;
use super::worker::{Answer, Command};

/// Longest time for one command.
const PATIENCE: Duration = Duration::from_secs(900);
/// Port of the ranks' store, which is free in a new namespace.
const PORT: u16 = 29_500;

/// Numbers of namespaces and of workers in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) namespaces: usize,
    pub(crate) each: usize,
}

/// Worker processes in namespaces; their ends are the end of both.
#[derive(Debug)]
pub(crate) struct Fleet {
    // Before the namespaces, so that the processes end first.
    workers: Vec<Program>,
    namespaces: Namespaces,
}

/// Answers of all workers, and what the command sent.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) answers: Vec<Answer>,
    /// Bytes that each namespace has sent over its link, with the headers of all protocols.
    pub(crate) crossed: Vec<u64>,
}

impl Fleet {
    /// Starts the workers behind links of `bits` bits per second, and waits until they have joined.
    pub(crate) fn start(places: Places, bits: u64, text: &Path) -> Result<Self> {
        let namespaces = Namespaces::new(places.namespaces, bits)?;
        let program = env::current_exe().context("finding this program's file")?;
        let job = Job { places, token: random_hex()?, run: random_hex()? };
        let mut workers = Vec::new();
        for rank in 0..places.ranks() {
            let mut command = namespaces.command(rank / places.each, &program);
            command.arg("worker").arg("--text").arg(text).stderr(Stdio::inherit());
            job.describe(rank, &namespaces, &mut command);
            let mut worker = Program::start(&format!("worker {rank}"), &mut command)?;
            worker.patience = PATIENCE;
            workers.push(worker);
        }
        let mut fleet = Fleet { workers, namespaces };
        fleet.answers("joining the others")?;
        Ok(fleet)
    }

    /// Gives all workers a command, and waits for their answers.
    pub(crate) fn run(&mut self, command: &Command) -> Result<Done> {
        let (line, before) = (serde_json::to_string(command)?, self.sent()?);
        self.workers.iter_mut().try_for_each(|worker| worker.tell(&line))?;
        let answers = self.answers(&line)?;
        let crossed = self.sent()?.iter().zip(before).map(|(after, before)| after - before).collect();
        Ok(Done { answers, crossed })
    }

    /// Returns the answers of all workers; an error if one failed.
    fn answers(&mut self, asked: &str) -> Result<Vec<Answer>> {
        let answers = self.workers.iter_mut().map(|worker| answer(worker, asked));
        // Every answer is read, also after an error: the first error may be another worker's consequence.
        let answers: Vec<Result<Answer>> = answers.collect();
        answers.into_iter().collect()
    }

    fn sent(&self) -> Result<Vec<u64>> {
        (0..self.namespaces.len()).map(|i| self.namespaces.sent(i)).collect()
    }
}

fn answer(worker: &mut Program, asked: &str) -> Result<Answer> {
    let line = worker.answer(asked)?;
    match serde_json::from_str(&line).with_context(|| format!("{line} is no answer"))? {
        Answer::Failed(error) => bail!("{}: {error}", worker.name()),
        answer => Ok(answer),
    }
}

impl Places {
    /// Returns the number of workers.
    pub(crate) fn ranks(self) -> usize {
        self.namespaces * self.each
    }
}

/// Variables with equal values for all workers.
struct Job {
    places: Places,
    token: String,
    run: String,
}

impl Job {
    /// Sets the variables of a worker: torchrun's, and the address of its link.
    fn describe(&self, rank: usize, namespaces: &Namespaces, command: &mut Process) {
        let Job { places, token, run } = self;
        let each = places.each;
        for name in INHERITED {
            command.env_remove(name);
        }
        command.envs([
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", places.ranks().to_string()),
            ("LOCAL_RANK", (rank % each).to_string()),
            ("LOCAL_WORLD_SIZE", each.to_string()),
            ("MASTER_ADDR", namespaces.address(0).to_string()),
            ("MESHSTEP_PORT", PORT.to_string()),
            ("MESHSTEP_IFACE", namespaces.address(rank / each).to_string()),
            ("MESHSTEP_TOKEN", token.clone()),
            ("TORCHELASTIC_RUN_ID", format!("network-{run}")),
            ("TORCHELASTIC_RESTART_COUNT", "0".to_owned()),
            // All workers share this machine's cores.
            ("RAYON_NUM_THREADS", "1".to_owned()),
        ]);
    }
}

/// Variables of a launcher that started this program, which do not count for the workers.
const INHERITED: [&str; 3] = ["MESHSTEP_TOKEN_FILE", "GROUP_WORLD_SIZE", "MASTER_PORT"];

/// Returns 32 random bytes in hexadecimal. Namespaces are Linux's, and so is this file.
fn random_hex() -> Result<String> {
    let mut bytes = [0u8; 32];
    let source = "/dev/urandom";
    File::open(source).and_then(|mut file| file.read_exact(&mut bytes)).context(source)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
