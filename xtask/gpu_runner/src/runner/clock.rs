//! The run's deadline, and the signals that end the run early.

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A reason to end the whole run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Deadline,
    Signal,
}

#[derive(Clone, Debug)]
pub(crate) struct Clock {
    deadline: Instant,
    signalled: Arc<AtomicBool>,
}

impl Clock {
    /// A clock that starts now and notes SIGTERM, SIGINT and SIGHUP.
    pub(crate) fn start(deadline: Duration) -> anyhow::Result<Clock> {
        Ok(Clock { deadline: Instant::now() + deadline, signalled: noted_signals()? })
    }

    pub(crate) fn stop(&self) -> Option<Stop> {
        if self.signalled.load(Ordering::Relaxed) {
            return Some(Stop::Signal);
        }
        (Instant::now() >= self.deadline).then_some(Stop::Deadline)
    }

    /// Time until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

/// A flag that SIGTERM, SIGINT and SIGHUP set.
pub(crate) fn noted_signals() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&flag))
            .with_context(|| format!("cannot handle signal {signal}"))?;
    }
    Ok(flag)
}
