//! Timeouts of the rendezvous.

use std::time::Duration;

/// Timeouts of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Time for all ranks to join; ten minutes.
    pub deadline: Duration,
    /// Time for a connection to prove that it knows the token; five seconds. Its first message must arrive within 250 ms.
    pub handshake: Duration,
    /// Time without a sign of life after which a rank is lost; 30 seconds. The end of a process is detected at once; this is for
    /// a process that hangs, or a machine that is unreachable. Rank 0's value is that of the store, which sends a beat and
    /// expects an answer six times as often; the others' must not be shorter than that interval.
    pub silence: Duration,
    /// Further names of rank 0's store, `host:port`, for ranks behind a forwarded port; none. The store refuses a rank that has
    /// called any other name than these, the environment's host and port, and the store's own address.
    pub names: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            deadline: Duration::from_secs(600),
            handshake: Duration::from_secs(5),
            silence: Duration::from_secs(30),
            names: Vec::new(),
        }
    }
}

impl Options {
    pub(super) fn beat(&self) -> Duration {
        self.silence / 6
    }
}
