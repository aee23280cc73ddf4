//! Arbiter with its log: every state is on the disk before a message about it is sent.

use crate::arbiter::{Arbiter, Output};
use crate::log::Log;
use crate::message::{FromArbiter, ToArbiter, Worker};
use crate::{Config, Error, State};
use std::time::Duration;

/// After an error it sends nothing any more: its memory may be ahead of its log.
#[derive(Debug)]
pub(super) struct DurableArbiter {
    arbiter: Arbiter,
    log: Option<Log>,
    failed: Option<Error>,
    /// Number of states that this start has logged.
    logged: u64,
}

impl DurableArbiter {
    /// Opens the successor of the arbiter that wrote the log at `path`; without a log the state is lost with the process.
    pub(super) fn open(config: Config, path: Option<&std::path::Path>, now: Duration) -> Result<Self, Error> {
        config.check()?;
        let (log, last) = match path.map(Log::open).transpose()? {
            Some((log, last)) => (Some(log), last),
            None => (None, None),
        };
        let (arbiter, output) = Arbiter::new(config, last, now)?;
        let mut durable = DurableArbiter { arbiter, log, failed: None, logged: 0 };
        durable.settle(output);
        match durable.failed.take() {
            Some(error) => Err(error),
            None => Ok(durable),
        }
    }

    /// Restarts the arbiter as if its process had ended and begun again.
    pub(super) fn restart(&mut self, now: Duration) {
        let (arbiter, output) = self.arbiter.successor(now);
        self.arbiter = arbiter;
        self.settle(output);
    }

    pub(super) fn failed(&self) -> Option<&Error> {
        self.failed.as_ref().or(self.arbiter.superseded())
    }

    pub(super) fn state(&self) -> &State {
        self.arbiter.state()
    }

    /// Returns the number of states that this start has logged.
    pub(super) fn logged(&self) -> u64 {
        self.logged
    }

    /// Stops the arbiter if another one of a later term exists.
    pub(super) fn meet(&mut self, term: u64) {
        self.arbiter.meet(term);
    }

    pub(super) fn waiting(&self) -> impl Iterator<Item = u64> + '_ {
        self.arbiter.waiting()
    }

    pub(super) fn wake_at(&self) -> Option<Duration> {
        self.arbiter.wake_at()
    }

    pub(super) fn excuse(&mut self, gap: Duration) {
        self.arbiter.excuse(gap);
    }

    pub(super) fn close(&mut self, worker: Worker, lost_at: Duration) {
        self.arbiter.close(worker, lost_at);
    }

    pub(super) fn hear(&mut self, message: ToArbiter, now: Duration) -> Vec<FromArbiter> {
        let output = self.arbiter.hear(message, now);
        self.settle(output)
    }

    pub(super) fn tick(&mut self, now: Duration) -> Vec<FromArbiter> {
        let output = self.arbiter.tick(now);
        self.settle(output)
    }

    pub(super) fn lose(&mut self, worker: Worker) -> Vec<FromArbiter> {
        let output = self.arbiter.lose(worker);
        self.settle(output)
    }

    fn settle(&mut self, output: Output) -> Vec<FromArbiter> {
        if self.failed.is_some() {
            return Vec::new();
        }
        let logged = match (&mut self.log, &output.log) {
            (Some(log), Some(state)) => log.append(state),
            _ => Ok(()),
        };
        match logged {
            Ok(()) => {
                self.logged += u64::from(output.log.is_some());
                output.send
            }
            Err(error) => {
                self.failed = Some(error.into());
                Vec::new()
            }
        }
    }
}
