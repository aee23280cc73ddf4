//! Parameters, state and counters of an optimizer on this rank, for crates that save or move them.

use crate::update::owned_bucket::Owned;
use crate::update::params::{ParamEntry, ParamPlace};
use crate::update::values::VectorKind;
use crate::{Error, Optimizer};
use meshstep_optim::{LossScaleState, Rule};
use meshstep_tensor::{Buffer, DType, Param, Slice, SliceMut};
use std::fmt;
use std::ops::Range;

/// A parameter on this rank: its rule, its vectors, and the elements of them that the rank owns.
pub struct ParamShard<'a> {
    /// The parameter.
    pub param: &'a Param,
    /// Number of the parameter's updates.
    pub t: u64,
    /// Rule that updates the parameter; `None` if its layout has frozen it.
    pub rule: Option<&'a dyn Rule>,
    /// Factor of the learning rate in the parameter's group.
    pub lr_scale: f64,
    /// Elements of the parameter that this rank updates: all elements of a frozen one.
    pub owned: Range<usize>,
    /// Type of the master or of the remainders, if there are any.
    pub master: Option<DType>,
    /// State vectors of the rule by name, in the order of [`VectorKind::State`].
    pub state: Vec<(&'static str, DType)>,
}

/// Counters of a run and its loss scale between two steps, the same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunProgress {
    /// Number of steps taken or skipped.
    pub steps: u64,
    /// Number of steps skipped in a row.
    pub skips: u32,
    /// Number of skips in a row since the loss scale could last fall.
    pub skips_at_min_scale: u32,
    /// State of the loss scale, if there is one.
    pub loss_scale: Option<LossScaleState>,
}

/// Parameters, state and counters of an optimizer on this rank, and calls that all ranks make together.
pub trait OptimizerShard {
    /// Describes parameter `param`, an index in registration order.
    ///
    /// # Panics
    /// If there is no such parameter.
    fn param_shard(&self, param: usize) -> ParamShard<'_>;

    /// Returns this rank's part of a vector, and the index in the parameter of its first element. The part is empty if the
    /// parameter has no such vector, or none of its elements here.
    ///
    /// # Panics
    /// If there is no such parameter.
    fn shard_vector(&self, param: usize, kind: VectorKind) -> Result<(usize, Slice<'_>), Error>;

    /// Returns the memory of [`shard_vector`](Self::shard_vector) for writing. The caller makes every rank write the same values to elements
    /// that several ranks hold.
    ///
    /// # Panics
    /// If there is no such parameter.
    fn shard_vector_mut(&mut self, param: usize, kind: VectorKind) -> Result<SliceMut<'_>, Error>;

    /// Sets the number of updates of each parameter; `None` leaves it as it is. [`resume_from`](Self::resume_from) makes the change visible
    /// to a GPU.
    fn set_t(&mut self, t: &[Option<u64>]);

    /// Returns the counters of the run. On a GPU it waits for the steps launched so far.
    fn progress(&self) -> RunProgress;

    /// Sets the counters of the run, after its vectors and numbers of updates were written. A loss scale that the rule refuses,
    /// and `None`, leave the loss scale as it is.
    fn resume_from(&mut self, progress: RunProgress) -> Result<(), Error>;

    /// Returns all facts besides parameters and state that must agree on all ranks, one `key = value` line each.
    fn describe_counters(&mut self) -> Result<String, Error>;

    /// Checks that communication has not failed.
    fn healthy(&self) -> Result<(), Error>;

    /// Checks that there are parameters, that no step is in progress on this rank, and that the outcome of every step is known.
    fn between_two_steps(&mut self) -> Result<(), Error>;

    /// Begins a call that all ranks make together; `ready` is this rank's error, if it has one. If a rank is in the middle of a
    /// step, or makes another call, all ranks that still communicate get an error. Collective.
    fn call_together(&mut self, call: &str, ready: Result<(), Error>) -> Result<(), Error>;

    /// Aborts all communicators if this rank alone cannot continue after `error`.
    fn end_if_alone(&self, error: &Error);

    /// Returns the bytes sent so far by the optimizer's communicators.
    fn bytes_sent(&self) -> u64;

    /// Excludes the bytes sent since `before` from the next step's count.
    fn exclude_sent_since(&mut self, before: u64);
}

impl OptimizerShard for Optimizer {
    fn param_shard(&self, param: usize) -> ParamShard<'_> {
        let entry = &self.params.entries[param];
        let group = self.params.group_of(param);
        let rule = (!entry.param.frozen()).then_some(&*group.rule);
        let ParamEntry { param, t, .. } = entry;
        let shard = ParamShard {
            param,
            t: *t,
            rule,
            lr_scale: group.lr_scale,
            owned: 0..param.len(),
            master: None,
            state: Vec::new(),
        };
        let ParamPlace::Bucket { bucket, range, .. } = &entry.place else { return shard };
        shard.in_bucket(&self.params.buckets[*bucket], range, group.rule.state())
    }

    fn shard_vector(&self, param: usize, kind: VectorKind) -> Result<(usize, Slice<'_>), Error> {
        self.params.vector(param, kind)
    }

    fn shard_vector_mut(&mut self, param: usize, kind: VectorKind) -> Result<SliceMut<'_>, Error> {
        self.params.vector_mut(param, kind)
    }

    fn set_t(&mut self, t: &[Option<u64>]) {
        for (entry, t) in self.params.entries.iter_mut().zip(t) {
            entry.t = t.unwrap_or(entry.t);
        }
    }

    fn progress(&self) -> RunProgress {
        let progress = &self.decider.progress;
        RunProgress {
            steps: self.steps(),
            skips: progress.skips,
            skips_at_min_scale: progress.skips_at_min_scale,
            loss_scale: self.loss_scale_state(),
        }
    }

    fn resume_from(&mut self, saved: RunProgress) -> Result<(), Error> {
        let progress = &mut self.decider.progress;
        progress.steps = saved.steps;
        (progress.skips, progress.skips_at_min_scale) = (saved.skips, saved.skips_at_min_scale);
        if let (Some(rule), Some(state)) = (&self.params.options.loss_scale, saved.loss_scale) {
            // The state may be of another rule; then the loss scale stays as it is.
            progress.loss_scale = rule.check_state(&state).map(|()| state).ok().or(progress.loss_scale);
        }
        self.publish_counters()?;
        self.verifier.last = None;
        self.keep_if_due()
    }

    fn describe_counters(&mut self) -> Result<String, Error> {
        self.describe_counters()
    }

    fn healthy(&self) -> Result<(), Error> {
        self.reducer.healthy()
    }

    fn between_two_steps(&mut self) -> Result<(), Error> {
        self.reducer.finish_dropped()?;
        self.check_outcomes()?;
        self.params.check_some()?;
        self.reducer.check_idle()
    }

    fn call_together(&mut self, call: &str, ready: Result<(), Error>) -> Result<(), Error> {
        self.reducer.call_together(call, ready).map(drop)
    }

    fn end_if_alone(&self, error: &Error) {
        let _ = self.reducer.end_if_alone::<()>(Err(error.clone()));
    }

    fn bytes_sent(&self) -> u64 {
        self.reducer.sent()
    }

    fn exclude_sent_since(&mut self, before: u64) {
        self.reducer.exclude_from_step(before);
    }
}

impl ParamShard<'_> {
    /// Adds what a bucket has of a trainable parameter in its range `place`; `names` are those of the rule's state.
    fn in_bucket(self, owned: &Owned, place: &Range<usize>, names: &[&'static str]) -> Self {
        let state = names.iter().zip(owned.state()).map(|(name, vector)| (*name, vector.dtype()));
        ParamShard {
            owned: owned.part_of(place).map_or(0..0, |(within, ..)| within),
            master: owned.master().map(Buffer::dtype),
            state: state.collect(),
            ..self
        }
    }
}

impl fmt::Debug for ParamShard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.param.name();
        f.debug_struct("ParamShard").field("name", &name).field("owned", &self.owned).finish_non_exhaustive()
    }
}
