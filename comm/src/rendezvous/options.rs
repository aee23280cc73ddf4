//! How long ranks wait for each other.

use std::time::Duration;

/// How patient a rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long all may take to come; ten minutes.
    pub deadline: Duration,
    /// How long a connection may take to prove that it knows the token; five seconds.
    pub handshake: Duration,
    /// After how long without a sign a rank is lost; 30 seconds. A process that ends is noticed at once; this is for one that
    /// stands still, or whose machine is gone. Rank 0's is that of the store, which gives a sign and
    /// asks for one six times as often; the others' must not be shorter than that.
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
