//! `arbiter`: the arbiter of elastic workers as a command, which serves until it is ended and continues from its log.

use std::fmt;
use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use meshstep_membership::{Config, Log, Service, Standby, StandbyCopy};

use super::{Run, elastic};
use crate::args::arbiter::Arbiter;

/// Interval between two looks at the service.
const LOOK: Duration = Duration::from_millis(200);

/// Serves, or follows the active arbiter, until the process is ended; returns only with the error that stopped it.
pub(crate) fn run(asked: &Arbiter, manifest: &Path, out: &mut impl Write) -> Result<()> {
    if !asked.follow.is_empty() {
        return follow(asked, out);
    }
    let run = Run::prepare(&asked.train, manifest)?;
    if asked.promote {
        Log::promote(&asked.log).context("--promote")?;
    }
    let service = serve(asked, &run)?;
    let (name, workers) = (asked.train.local.run(), asked.train.ranks);
    writeln!(
        out,
        "arbiter of run {name:?} on {}, which begins with {workers} workers; log {}, term {}",
        service.addr(),
        asked.log.display(),
        Term(service.term())
    )?;
    out.flush()?;
    let mut has_standby = false;
    loop {
        if let Some(error) = service.failed() {
            return Err(error).context("the arbiter has stopped");
        }
        let has = service.has_standby();
        if std::mem::replace(&mut has_standby, has) != has {
            tell(out, if has { "a standby has the log" } else { "no standby has the log" });
        }
        thread::sleep(LOOK);
    }
}

/// Keeps a copy of the active arbiter's log.
fn follow(asked: &Arbiter, out: &mut impl Write) -> Result<()> {
    let (run, token) = (asked.train.local.run(), elastic::token()?);
    let standby = Standby::start(&asked.follow, token.as_ref(), run, &asked.log)?;
    let addrs: Vec<String> = asked.follow.iter().map(ToString::to_string).collect();
    writeln!(out, "standby of run {run:?} at {}; log {}", addrs.join(", "), asked.log.display())?;
    out.flush()?;
    let mut told = StandbyCopy::default();
    loop {
        if let Some(error) = standby.failed() {
            return Err(error).context("the standby has stopped");
        }
        let kept = standby.kept();
        if (kept.follows, kept.term) != (told.follows, told.term) {
            let how = if kept.follows { "has the log" } else { "cannot reach the arbiter" };
            tell(
                out,
                &format!("the standby {how}, term {}, after {} records", Term(kept.term), kept.records),
            );
        }
        told = kept;
        thread::sleep(LOOK);
    }
}

/// Prints a line. A closed stdout ends neither an arbiter nor a standby.
fn tell(out: &mut impl Write, line: &str) {
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// A term as the number of promotions and of starts.
struct Term(u64);

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 >> 32, self.0 & u64::from(u32::MAX))
    }
}

/// Starts the service for the workers of a run.
pub(super) fn serve(asked: &Arbiter, run: &Run) -> Result<Service> {
    let seconds = |seconds: usize| Duration::from_secs(seconds as u64);
    let config = Config {
        min_workers: asked.min_workers,
        silence: seconds(asked.silence),
        patience: seconds(asked.patience),
        ..Config::new(elastic::digest(run)?, asked.train.ranks)
    };
    let token = elastic::token()?;
    Ok(Service::start(asked.addr, token.as_ref(), asked.train.local.run(), config, &asked.log)?)
}
