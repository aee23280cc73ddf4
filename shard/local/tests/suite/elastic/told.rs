//! Lines that a worker process writes into its file, with the time; the test reads them while the worker runs.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What a worker reports.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Line {
    /// It is a member from this step on.
    Joined(u64),
    /// A committed exchange, with the digest of the state and the loss after it.
    Exchanged { step: u64, epoch: u64, members: Vec<u64>, hash: u64, loss: f64 },
    /// An exchange was due and did not take place.
    Alone(u64),
    /// Its membership has ended, and it joins again.
    Again(String),
    /// It has ended with an error.
    Ended(String),
    /// The run is over.
    Done,
}

/// File of a worker.
pub(super) struct Told {
    file: File,
    /// Step of the last exchange that was reported.
    pub(super) exchanged: Option<u64>,
}

/// Time on the clock that all processes of the machine share.
pub(super) fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}

impl Told {
    pub(super) fn create(path: &Path) -> Self {
        Told { file: File::create(path).unwrap(), exchanged: None }
    }

    pub(super) fn say(&mut self, line: &Line) {
        let micros = now().as_micros();
        let text = match line {
            Line::Joined(step) => format!("joined|{step}"),
            Line::Exchanged { step, epoch, members, hash, loss } => {
                self.exchanged = Some(*step);
                let members: Vec<String> = members.iter().map(u64::to_string).collect();
                format!("exchanged|{step}|{epoch}|{}|{hash}|{loss}", members.join(","))
            }
            Line::Alone(step) => format!("alone|{step}"),
            Line::Again(why) => format!("again|{}", one_line(why)),
            Line::Ended(why) => format!("ended|{}", one_line(why)),
            Line::Done => "done".to_owned(),
        };
        self.file.write_all(format!("{micros}|{text}\n").as_bytes()).unwrap();
    }
}

fn one_line(text: &str) -> String {
    text.replace(['|', '\n'], " ")
}

/// Reads what a worker has reported so far, with the times.
pub(super) fn read(path: &Path) -> Vec<(Duration, Line)> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // The last line may be half written.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(parse).collect()
}

fn parse(line: &str) -> (Duration, Line) {
    let words: Vec<&str> = line.split('|').collect();
    let at = Duration::from_micros(words[0].parse().unwrap());
    let line = match words[1..] {
        ["joined", step] => Line::Joined(step.parse().unwrap()),
        ["exchanged", step, epoch, members, hash, loss] => Line::Exchanged {
            step: step.parse().unwrap(),
            epoch: epoch.parse().unwrap(),
            members: members.split(',').map(|id| id.parse().unwrap()).collect(),
            hash: hash.parse().unwrap(),
            loss: loss.parse().unwrap(),
        },
        ["alone", step] => Line::Alone(step.parse().unwrap()),
        ["again", why] => Line::Again(why.to_owned()),
        ["ended", why] => Line::Ended(why.to_owned()),
        ["done"] => Line::Done,
        _ => panic!("{line}"),
    };
    (at, line)
}
