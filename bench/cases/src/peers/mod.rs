//! Programs that execute commands line by line: other systems, and ranks as processes (`processes`).

mod torch;

pub use torch::{Torch, TorchTurn};

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

/// Default time limit of a program for preparing a case or for one round.
const PATIENCE: Duration = Duration::from_secs(300);

/// A program that answers each line with a line.
#[derive(Debug)]
pub struct Program {
    child: Child,
    asked: ChildStdin,
    answers: Receiver<String>,
    name: String,
    pub patience: Duration,
}

impl Program {
    /// Starts the program; its standard error goes where the command directs it.
    pub fn start(name: &str, command: &mut Command) -> Result<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {name}"))?;
        let (Some(asked), Some(out)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("{name} was started without pipes");
        };
        let (lines, answers) = channel();
        std::thread::spawn(move || {
            // The thread ends when the program does, or when the receiver is dropped.
            BufReader::new(out).lines().map_while(Result::ok).all(|line| lines.send(line).is_ok())
        });
        Ok(Program { child, asked, answers, name: name.to_owned(), patience: PATIENCE })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends a line and returns the answer.
    pub fn ask(&mut self, line: &str) -> Result<String> {
        self.tell(line)?;
        self.answer(line)
    }

    /// Sends a line, whose answer must be read before the next one is sent.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let Program { name, .. } = self;
        writeln!(self.asked, "{line}").with_context(|| format!("{name} ended before it received: {line}"))
    }

    /// Waits for the answer to `line`.
    pub fn answer(&mut self, line: &str) -> Result<String> {
        let Program { name, patience, .. } = self;
        let answer = self.answers.recv_timeout(*patience);
        answer.with_context(|| format!("{name} ended, or took more than {patience:?}, with: {line}"))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The program may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_answers_or_its_end_is_an_error() {
        let mut cat = Program::start("cat", &mut Command::new("cat")).unwrap();
        assert_eq!((cat.ask("a").unwrap(), cat.ask("b").unwrap()), ("a".into(), "b".into()));
        let mut ends = Program::start("true", &mut Command::new("true")).unwrap();
        assert!(ends.ask("a").is_err());
        let error = Program::start("nobody", &mut Command::new("/no/such/program")).unwrap_err().to_string();
        assert!(error.contains("nobody"), "{error}");
        let mut mute = Program::start("mute", Command::new("sleep").arg("60")).unwrap();
        mute.patience = Duration::from_millis(10);
        let error = mute.ask("a").unwrap_err().to_string();
        assert!(error.contains("mute ended, or took more than 10ms"), "{error}");
    }
}
