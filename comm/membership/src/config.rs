//! Settings of an arbiter.

use crate::ConfigError;
use crate::message::Digest;
use std::time::Duration;

/// Upper limit of the number of workers of a run, so that a round fits one message.
pub(super) const MAX_WORKERS: usize = 256;
/// The longest contact, in bytes.
pub(super) const MAX_CONTACT: usize = 64;
/// The longest silence or patience: thirty days.
const MAX_TIME: Duration = Duration::from_secs(30 * 24 * 3600);
/// Exchanges vetoed in a row at which a worker is dropped.
pub(super) const MAX_VETOES: usize = 3;

/// Workers of a run, and how long they wait for each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Digest of plan and rule that every worker must have. `None`: the first worker that joins decides; its
    /// digest is that of the run once the first epoch has begun, or as long as workers wait for it.
    pub digest: Option<Digest>,
    /// Number of workers that the first epoch waits for.
    pub workers: usize,
    /// Smallest number of workers with which the run continues, and begins once the first ones have waited for `patience`.
    pub min_workers: usize,
    /// Time without a message after which a worker stops being a member; 30 seconds by default. It is also the worker's lease: for
    /// this long after its last acknowledged beat the worker trusts the arbiter's answers.
    pub silence: Duration,
    /// Time that a worker with a closed connection has to call again before it stops being a member. `None`: one second on the
    /// arbiter's own host, where a closed connection is a process that ended, and ten seconds from elsewhere. An open connection
    /// without messages is subject to `silence`.
    pub grace: Option<Duration>,
    /// Longest time that members wait at a boundary, or with their votes, for the others, counted from the first that waits; a
    /// minute by default. It covers the differences in how long workers take for the steps between two exchanges.
    pub patience: Duration,
}

impl Config {
    /// Creates the settings of a run of `workers` that continues with one. A digest of `None` is that of the first worker that joins.
    pub fn new(digest: impl Into<Option<Digest>>, workers: usize) -> Self {
        let (silence, patience) = (Duration::from_secs(30), Duration::from_secs(60));
        Config { digest: digest.into(), workers, min_workers: 1, silence, grace: None, patience }
    }

    /// # Errors
    /// Workers or times with which no run could begin or continue.
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
