//! Ranks as processes that run one turn per command, so that other systems can take turns with them.
//!
//! A rank is a program that reads a JSON object per line. To `{"case": ..}` it prepares a case and answers `{"ready": true}`; to
//! `{"run": true}` it runs the case once and answers `{"seconds": S}`; to anything that fails it answers `{"error": TEXT}`. The end of
//! the input ends it.

mod serve;
mod sockets;

pub use serve::{Work, serve};
pub use sockets::{ReferenceWork, Sockets};

use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::peers::Program;

/// All ranks of a group, each a process that waits for commands.
#[derive(Debug)]
pub struct Processes {
    ranks: Vec<Program>,
}

impl Processes {
    /// Starts rank `r` with `command(r)`, for all `r` below `ranks`.
    pub fn start(name: &str, ranks: usize, mut command: impl FnMut(usize) -> Command) -> Result<Self> {
        let start = |rank| Program::start(&format!("{name}, rank {rank}"), &mut command(rank));
        Ok(Processes { ranks: (0..ranks).map(start).collect::<Result<_>>()? })
    }

    /// Prepares a case on all ranks.
    pub fn case(&mut self, case: Value) -> Result<()> {
        self.ask(&json!({ "case": case })).map(drop)
    }

    /// Runs the case once and returns its seconds, the maximum over the ranks.
    pub fn run(&mut self) -> Result<f64> {
        let answers = self.ask(&json!({ "run": true }))?;
        let mut seconds = answers.iter().map(|answer| answer["seconds"].as_f64().context("no seconds"));
        seconds.try_fold(0.0, |longest, seconds| Ok(f64::max(longest, seconds?)))
    }

    /// Gives all ranks a command and returns their answers.
    fn ask(&mut self, command: &Value) -> Result<Vec<Value>> {
        let line = command.to_string();
        self.ranks.iter_mut().try_for_each(|rank| rank.tell(&line))?;
        // Every answer is read, also after an error, so that the next command gets its own answers.
        let answers: Vec<Result<Value>> = self.ranks.iter_mut().map(|rank| answer(rank, &line)).collect();
        answers.into_iter().collect()
    }
}

fn answer(rank: &mut Program, line: &str) -> Result<Value> {
    let answer = rank.answer(line)?;
    let answer: Value = serde_json::from_str(&answer).with_context(|| format!("{answer} is not JSON"))?;
    match answer.get("error") {
        Some(error) => bail!("{}: {}", rank.name(), error.as_str().unwrap_or("no text")),
        None => Ok(answer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that answers two lines.
    fn shell(answers: [&str; 2]) -> Command {
        let mut command = Command::new("sh");
        let [first, second] = answers;
        command.args(["-c", &format!("read x; echo '{first}'; read x; echo '{second}'; read x")]);
        command
    }

    #[test]
    fn a_turn_takes_as_long_as_its_slowest_rank() {
        let seconds = ["{\"seconds\": 0.5}", "{\"seconds\": 2}"];
        let mut ranks =
            Processes::start("sh", 2, |rank| shell(["{\"ready\": true}", seconds[rank]])).unwrap();
        ranks.case(json!("x")).unwrap();
        assert_eq!(ranks.run().unwrap(), 2.0);
    }

    #[test]
    fn an_error_names_the_rank_and_leaves_the_others_in_step() {
        let first = ["{\"ready\": true}", "{\"error\": \"no memory\"}"];
        let mut ranks = Processes::start("sh", 2, |rank| shell([first[rank], "{\"seconds\": 1}"])).unwrap();
        let error = ranks.case(json!("x")).unwrap_err().to_string();
        assert_eq!(error, "sh, rank 1: no memory");
        assert_eq!(ranks.run().unwrap(), 1.0);
    }
}
