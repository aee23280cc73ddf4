//! `arbiter`: the arbiter of elastic workers as a command, which serves until it is ended and continues from its log.

use std::fmt;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use meshstep_comm::rendezvous::Token;
use meshstep_membership::{Config, Digest, Log, Service, Standby, StandbyCopy};

use crate::number::within;

/// Port on which the arbiter listens by default.
const PORT: u16 = 29_400;

/// Interval between two looks at the service.
const LOOK: Duration = Duration::from_millis(200);

/// Options of `arbiter`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arbiter {
    /// File that keeps the arbiter's state; an arbiter that is started again with the same file continues
    #[arg(long, value_name = "FILE")]
    log: PathBuf,
    /// Name of the run, the same as the workers'
    #[arg(long, value_name = "NAME", default_value = "train")]
    run: String,
    /// Number of workers with which the run begins
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = within::<1, 256>)]
    workers: usize,
    /// Smallest number of workers with which the run continues
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within::<1, 256>)]
    min_workers: usize,
    /// Digest of the workers' plan and rule (`LocalPlan::digest`), as two hexadecimal numbers; workers of another one are refused
    /// [default: that of the first worker that joins]
    #[arg(long, value_name = "PLAN:RULE", value_parser = digest)]
    digest: Option<Digest>,
    /// Keep a copy of the log of the arbiter at this address, and serve nobody: a standby. After that arbiter has ended, end this
    /// command, and start it again with --promote in place of --follow
    #[arg(long, value_name = "ADDR", value_delimiter = ',', conflicts_with = "promote")]
    follow: Vec<SocketAddr>,
    /// Serve in place of the arbiter of which the log is a copy: workers refuse that one from now on
    #[arg(long)]
    promote: bool,
    /// Address on which the arbiter listens; beyond loopback it needs the token of MESHSTEP_TOKEN or MESHSTEP_TOKEN_FILE
    #[arg(long, value_name = "ADDR", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)))]
    addr: SocketAddr,
    /// Seconds without a message after which a worker is no member any more
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = within::<1, 86_400>)]
    silence: usize,
    /// Longest time in seconds that workers wait for each other at an exchange
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = within::<1, 86_400>)]
    patience: usize,
}

/// Serves, or follows the active arbiter, until the process is ended; returns only with the error that stopped it.
pub(crate) fn run(asked: &Arbiter, out: &mut impl Write) -> Result<()> {
    if !asked.follow.is_empty() {
        return follow(asked, out);
    }
    if asked.promote {
        Log::promote(&asked.log).context("--promote")?;
    }
    let token = Token::from_env()?;
    let service = Service::start(asked.addr, token.as_ref(), &asked.run, asked.config(), &asked.log)?;
    writeln!(
        out,
        "arbiter of run {:?} on {}, which begins with {} workers; log {}, term {}",
        asked.run,
        service.addr(),
        asked.workers,
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

impl Arbiter {
    fn config(&self) -> Config {
        let seconds = |seconds: usize| Duration::from_secs(seconds as u64);
        Config {
            min_workers: self.min_workers,
            silence: seconds(self.silence),
            patience: seconds(self.patience),
            ..Config::new(self.digest, self.workers)
        }
    }
}

/// Keeps a copy of the active arbiter's log.
fn follow(asked: &Arbiter, out: &mut impl Write) -> Result<()> {
    let token = Token::from_env()?;
    let standby = Standby::start(&asked.follow, token.as_ref(), &asked.run, &asked.log)?;
    let addrs: Vec<String> = asked.follow.iter().map(ToString::to_string).collect();
    writeln!(out, "standby of run {:?} at {}; log {}", asked.run, addrs.join(", "), asked.log.display())?;
    out.flush()?;
    let mut told = StandbyCopy::default();
    loop {
        if let Some(error) = standby.failed() {
            return Err(error).context("the standby has stopped");
        }
        let kept = standby.kept();
        if (kept.follows, kept.term) != (told.follows, told.term) {
            let how = if kept.follows { "has the log" } else { "cannot reach the arbiter" };
            let line = format!("the standby {how}, term {}, after {} records", Term(kept.term), kept.records);
            tell(out, &line);
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

/// Parses a digest as `plan:rule` in hexadecimal.
fn digest(text: &str) -> Result<Digest, String> {
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let parts = text.split_once(':').and_then(|(plan, rule)| Some((number(plan)?, number(rule)?)));
    let (plan, rule) = parts.ok_or("give two hexadecimal numbers of at most 16 digits, as 1f2e:3d4c")?;
    Ok(Digest { plan, rule })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_two_numbers() {
        assert_eq!(digest("1f:a"), Ok(Digest { plan: 31, rule: 10 }));
        assert_eq!(digest("ffffffffffffffff:0"), Ok(Digest { plan: u64::MAX, rule: 0 }));
        for wrong in ["", "1", ":", "1:", "x:1", "1:2:3", "10000000000000000:1"] {
            assert!(digest(wrong).is_err(), "{wrong}");
        }
    }
}
