//! The group of this rank's replica, and calls of all groups, for crates that save or move replicas.

use super::CrossShard;
use crate::ranks::{agree, host_words};
use crate::reduce::together::objection;
use crate::update::params::Params;
use crate::{Error, Optimizer};
use meshstep_tensor::{Buffer, Slice};
use twox_hash::XxHash3_64;

/// The group of this rank's replica, and calls that all groups make together.
pub trait GroupShard {
    /// Returns the optimizer of this rank's group.
    fn optimizer_mut(&mut self) -> &mut Optimizer;

    /// Returns the number of this rank's group.
    fn number(&self) -> usize;

    /// Returns the number of groups.
    fn groups(&self) -> usize;

    /// Returns a digest of all values and state on this rank.
    fn digest(&self) -> Result<u64, Error>;

    /// Checks that no rank is in the middle of a step, has failed, or has an unread error of a step. Collective over all groups.
    fn check_idle_everywhere(&mut self) -> Result<(), Error>;

    /// Compares a call among all ranks, all of which are idle; `ready` is this rank's error, if it has one. Collective over all
    /// groups.
    fn call_together(&mut self, call: &str, ready: Result<(), Error>) -> Result<(), Error>;

    /// Aborts all groups if this rank alone cannot continue after `error`.
    fn end_if_alone(&self, error: &Error);
}

impl GroupShard for CrossShard {
    fn optimizer_mut(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    fn number(&self) -> usize {
        self.number
    }

    fn groups(&self) -> usize {
        self.world.world_size() / self.group.len()
    }

    fn digest(&self) -> Result<u64, Error> {
        let Params { buckets, frozen, options, .. } = &self.optimizer.params;
        let mut digests = Vec::new();
        let mut add = |values: Slice<'_>| {
            let digest = host_words::digest(&options.queue, &options.meter, values)?;
            digests.extend(digest.to_le_bytes());
            Ok::<(), Error>(())
        };
        for bucket in buckets {
            let vectors = bucket.master().into_iter().chain(bucket.state());
            add(bucket.params()?)?;
            vectors.map(Buffer::as_slice).try_for_each(&mut add)?;
        }
        frozen.iter().map(Buffer::as_slice).try_for_each(&mut add)?;
        Ok(XxHash3_64::oneshot(&digests))
    }

    fn check_idle_everywhere(&mut self) -> Result<(), Error> {
        self.check_idle_everywhere()
    }

    fn call_together(&mut self, call: &str, ready: Result<(), Error>) -> Result<(), Error> {
        let text = match &ready {
            Ok(()) => format!("this call = {call}\n"),
            Err(error) => objection(Some(error)),
        };
        let same = agree::same_everywhere(&*self.world, &self.optimizer.params.options, &text);
        ready.and(self.end_if_alone(same))
    }

    fn end_if_alone(&self, error: &Error) {
        let _ = self.end_if_alone::<()>(Err(error.clone()));
    }
}
