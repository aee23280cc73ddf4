//! Signals of a scheduler and of a terminal, as a request to end the run at a step boundary.

use std::fmt;
use std::path::PathBuf;

use anyhow::Result;
use meshstep_shard::Preemption;

#[cfg(unix)]
use std::sync::Arc;
#[cfg(unix)]
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Exit code of a run that was asked to end: that of SIGTERM, also after SIGUSR1 and if only another process got the signal.
const TERMINATED: u8 = 128 + 15;

/// Exit code of a run that was asked to end by Ctrl-C alone.
#[cfg(unix)]
const INTERRUPTED: u8 = 128 + 2;

/// Signals of the process so far.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    preemption: Preemption,
    #[cfg(unix)]
    terminated: Arc<AtomicBool>,
    #[cfg(unix)]
    interrupted: Arc<AtomicBool>,
}

impl Signals {
    /// Handles SIGTERM, SIGUSR1 and the first Ctrl-C as requests from here on; the second Ctrl-C ends the process at once.
    #[cfg(unix)]
    pub(crate) fn listen() -> Result<Self> {
        use anyhow::Context as _;
        use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
        use signal_hook::flag::{register, register_conditional_shutdown};

        let [asked, terminated, interrupted] = std::array::from_fn(|_| Arc::new(AtomicBool::new(false)));
        // The actions of a signal run in this order: the second Ctrl-C finds the flag of the first. A signal is a request from its first
        // action on, so none is lost between two registrations.
        register_conditional_shutdown(SIGINT, i32::from(INTERRUPTED), Arc::clone(&interrupted))
            .and_then(|_| register(SIGINT, Arc::clone(&asked)))
            .and_then(|_| register(SIGINT, Arc::clone(&interrupted)))
            .and_then(|_| register(SIGTERM, Arc::clone(&asked)))
            .and_then(|_| register(SIGTERM, Arc::clone(&terminated)))
            .and_then(|_| register(SIGUSR1, Arc::clone(&asked)))
            .and_then(|_| register(SIGUSR1, Arc::clone(&terminated)))
            .context("cannot handle signals")?;
        Ok(Self { preemption: asked.into(), terminated, interrupted })
    }

    /// Returns a request that no signal makes, on systems without these signals.
    #[cfg(not(unix))]
    pub(crate) fn listen() -> Result<Self> {
        Ok(Self::default())
    }

    /// Returns the request that the signals make.
    pub(crate) fn preemption(&self) -> &Preemption {
        &self.preemption
    }

    /// Returns the exit code of a run that ended early on request.
    pub(crate) fn code(&self) -> u8 {
        #[cfg(unix)]
        if self.interrupted.load(SeqCst) && !self.terminated.load(SeqCst) {
            return INTERRUPTED;
        }
        TERMINATED
    }
}

/// End of a run before its last step, on request of a signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stopped {
    /// Steps that were taken.
    pub(crate) steps: usize,
    /// Folder of the checkpoints, if the steps are saved there.
    pub(crate) saved: Option<PathBuf>,
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a signal ended the run after step {}", self.steps)?;
        match &self.saved {
            Some(dir) => write!(f, ", which is saved in {}; --resume continues there", dir.display()),
            None => f.write_str("; nothing is saved without --save-every"),
        }
    }
}

impl std::error::Error for Stopped {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_stopped_says_where_it_continues() {
        let saved = Stopped { steps: 7, saved: Some("a/b".into()) }.to_string();
        assert_eq!(
            saved,
            "a signal ended the run after step 7, which is saved in a/b; --resume continues there"
        );
        let lost = Stopped { steps: 7, saved: None }.to_string();
        assert_eq!(lost, "a signal ended the run after step 7; nothing is saved without --save-every");
    }
}
