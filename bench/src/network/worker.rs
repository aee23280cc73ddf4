//! One worker process: joins the others by a launcher's variables, and executes the commands on its standard input.
//!
//! Each command and each answer is a line of JSON, so that measurements do not travel over the measured link.

use std::fs;
use std::io::{self, BufRead as _, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use meshstep_bench_cases::collectives::{Only, operations};
use meshstep_bench_cases::ranks::{OURS, Player as _};
use meshstep_comm::Communicator;
use meshstep_tensor::DType;
use serde::{Deserialize, Serialize};

use crate::local::timed::{Case, Timed};
use crate::ranks::{Launch, world};

/// Time after the last byte of a command, in which its acknowledgements cross the link.
const REST: Duration = Duration::from_millis(100);

/// Options of the hidden subcommand `worker`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Worker {
    /// Text to train on
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
}

/// Settings that all workers get.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Train.
    Train(Case),
    /// Run a collective on a vector of so many bytes, so many times.
    Collective { operation: String, bytes: usize, times: usize },
}

/// Answer to a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The worker has joined the others.
    Ready,
    Trained(Timed),
    /// Seconds of one collective.
    Seconds(f64),
    Failed(String),
}

/// Serves commands until the end of the input.
pub(crate) fn run(asked: &Worker) -> Result<()> {
    let joined = join(asked);
    let answer = joined.as_ref().map_or_else(failed, |_| Answer::Ready);
    say(&answer)?;
    let (text, world) = joined?;
    for line in io::stdin().lock().lines() {
        let answer = execute(&line?, &text, &world).unwrap_or_else(|error| failed(&error));
        say(&answer)?;
    }
    Ok(())
}

fn join(asked: &Worker) -> Result<(Vec<u8>, Arc<dyn Communicator>)> {
    let text = fs::read(&asked.text).with_context(|| format!("reading {}", asked.text.display()))?;
    Ok((text, world::communicator(&Launch::from_env()?)?))
}

fn failed(error: &anyhow::Error) -> Answer {
    Answer::Failed(format!("{error:#}"))
}

fn say(answer: &Answer) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(answer)?)?;
    Ok(out.flush()?)
}

fn execute(line: &str, text: &[u8], world: &Arc<dyn Communicator>) -> Result<Answer> {
    let command = serde_json::from_str(line).with_context(|| format!("{line} is no command"))?;
    let answer = match command {
        Command::Train(case) => Answer::Trained(case.train(text, Arc::clone(world))?),
        Command::Collective { operation, bytes, times } => {
            Answer::Seconds(collective(world, &operation, bytes, times)?)
        }
    };
    std::thread::sleep(REST);
    Ok(answer)
}

/// Runs a collective, and returns the seconds of one.
fn collective(world: &Arc<dyn Communicator>, name: &str, bytes: usize, times: usize) -> Result<f64> {
    let named = operations(world.world_size()).into_iter().position(|(own, ..)| own == name);
    let operation = named.with_context(|| format!("no operation {name}"))?;
    let mut player = Only::new(Arc::clone(world), bytes / DType::F32.size(), operation)?;
    world.barrier()?;
    let start = Instant::now();
    (0..times).try_for_each(|_| player.play(OURS))?;
    world.barrier()?;
    Ok(start.elapsed().as_secs_f64() / times as f64)
}

#[cfg(test)]
mod tests {
    use meshstep_comm::loopback;

    use super::*;

    #[test]
    fn commands_are_lines_and_a_bad_one_is_answered() {
        let command = Command::Collective { operation: "all_gather".to_owned(), bytes: 1 << 10, times: 2 };
        let line = serde_json::to_string(&command).unwrap();
        assert!(!line.contains('\n'));
        let answers = loopback::spawn(2, |world| execute(&line, b"", &world).unwrap()).unwrap();
        assert!(answers.iter().all(|answer| matches!(answer, Answer::Seconds(seconds) if *seconds > 0.0)));
        let refused = |line: &str| {
            let line = line.to_owned();
            loopback::spawn(1, |world| execute(&line, b"", &world).unwrap_err().to_string())
                .unwrap()
                .remove(0)
        };
        assert!(refused("{").contains("is no command"));
        assert!(refused(&line.replace("gather", "gossip")).contains("all_gossip"));
    }
}
