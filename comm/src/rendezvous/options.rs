//! Timeouts of the rendezvous.

use std::time::Duration;

/// Timeouts of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Time for all ranks to join; ten minutes.
    pub deadline: Duration,
    /// Time for a connection to prove that it knows the token; five seconds.
    pub handshake: Duration,
    /// Time without a sign of life after which a rank is lost; 30 seconds. The end of a process is detected at once; this is for
    /// a process that hangs, or a machine that is unreachable. Rank 0's value is that of the store, which sends a beat and
    /// expects an answer six times as often; the others' must not be shorter than that interval.
    pub silence: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            deadline: Duration::from_secs(600),
            handshake: Duration::from_secs(5),
            silence: Duration::from_secs(30),
        }
    }
}

impl Options {
    pub(super) fn beat(&self) -> Duration {
        self.silence / 6
    }
}
