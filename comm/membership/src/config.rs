//! What an arbiter goes by.

use crate::ConfigError;
use crate::message::Digest;
use std::time::Duration;

/// As many workers as a run takes, so that a round fits one message.
pub(super) const MAX_WORKERS: usize = 256;
/// The longest contact, in bytes.
pub(super) const MAX_CONTACT: usize = 64;
/// The longest silence or patience: thirty days.
const MAX_TIME: Duration = Duration::from_secs(30 * 24 * 3600);
/// As many exchanges in a row as a worker may not veto.
pub(super) const MAX_VETOES: usize = 3;

/// Who makes up a run, and how long they wait for each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// What every worker must have alike.
    pub digest: Digest,
    /// How many the first epoch waits for.
    pub workers: usize,
    /// With how many the run goes on, and begins once the first have waited for `patience`.
    pub min_workers: usize,
    /// After how long without a sign a worker is none any more; 30 seconds. For as long from its last sign that was heard a
    /// worker believes what it was told.
    pub silence: Duration,
    /// How long a worker whose connection has closed may take to call again before it is none any more. `None`: a second from the
    /// arbiter's own host, where a closed connection is a process that ended, and ten seconds from elsewhere. A connection that
    /// stays open and says nothing is `silence`'s.
    pub grace: Option<Duration>,
    /// How long members wait at a boundary, or with their votes, for the others, from the first that does; a minute. It
    /// covers the differences in how long they take for the steps between two exchanges.
    pub patience: Duration,
}

impl Config {
    /// A run of `workers` that goes on with one.
    pub fn new(digest: Digest, workers: usize) -> Self {
        let (silence, patience) = (Duration::from_secs(30), Duration::from_secs(60));
        Config { digest, workers, min_workers: 1, silence, grace: None, patience }
    }

    /// # Errors
    /// What no run could begin or go on with.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let Config { workers, min_workers, silence, grace, patience, .. } = *self;
        if min_workers == 0 || workers < min_workers || workers > MAX_WORKERS {
            return Err(ConfigError::Workers { workers, min_workers, max: MAX_WORKERS });
        }
        let sensible = Duration::from_millis(1)..=MAX_TIME;
        if let Some(grace) = grace.filter(|grace| *grace > MAX_TIME) {
            return Err(ConfigError::Grace { grace, max: MAX_TIME });
        }
        if !sensible.contains(&silence) || !sensible.contains(&patience) {
            return Err(ConfigError::Time { silence, patience, max: MAX_TIME });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{FromArbiter, Word, Worker};
    use crate::round::{Departure, Gone, Round, Seat};
    use meshstep_comm::rendezvous::Outgoing;

    #[test]
    fn the_largest_round_fits_one_message() {
        let seat = Seat { id: 1, counts: true, contact: "c".repeat(MAX_CONTACT) };
        let gone = Gone { id: 1, why: Departure::Late };
        let members = vec![seat; MAX_WORKERS];
        let round = Round { number: 1, epoch: 1, step: 1, rank: 0, members, gone: vec![gone; MAX_WORKERS] };
        let (to, word) = (Worker { id: 1, life: 1 }, Word::Granted { round });
        let len = FromArbiter { to, term: 1, word }.encode().len();
        assert!(len <= Outgoing::MAX, "{len}");
    }
}
