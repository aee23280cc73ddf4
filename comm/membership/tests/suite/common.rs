//! Small runs that a reader can follow by hand.

use meshstep_membership::{Config, Digest};
use std::time::Duration;

pub(crate) const DIGEST: Digest = Digest { plan: 3, rule: 5 };
/// Longer than any call should take.
pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Settings of a run of `workers` that continues with `min`; silence is one second and patience three.
pub(crate) fn config(workers: usize, min: usize) -> Config {
    Config { min_workers: min, silence: secs(1), patience: secs(3), ..Config::new(DIGEST, workers) }
}
