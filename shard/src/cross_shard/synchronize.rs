//! Drift of replicas, and their synchronization to the mean.

use super::CrossShard;
use super::room::{Room, Spread};
use crate::optimizer::Optimizer;
use crate::plan::bucket::BucketPlan;
use crate::ranks::{agree, host_words};
use crate::reduce::together::objection;
use crate::{Error, Options};
use meshstep_comm::{Error as CommError, Reduction, name_calls};
use meshstep_tensor::{Buffer, Slice};
use std::ops::Range;
use std::sync::Arc;

/// Elements compared or averaged at a time.
const BLOCK: usize = 1 << 20;

/// Distance between ranks, the same on every rank.
///
/// ```
/// use meshstep_shard::prelude::*;
/// use meshstep_shard::{Drift, SlotDrift};
///
/// let ranks = loopback::spawn(2, |world| -> Result<(), meshstep_shard::Error> {
///     let rank = world.rank() as f32;
///     let layout = Layout::builder().param("w", &[2], DType::F32).build()?;
///     let alone = [vec![0], vec![1]]; // two groups of one rank, which step apart
///     let mut opt = CrossShard::new(world, Some(&alone), layout, Sgd::default(), |_, _| Ok(()), Options::default())?;
///     let mb = opt.micro_batch(1)?;
///     mb.grad("w", &[0.0, rank])?;
///     mb.finish()?;
///     opt.step(StepArgs { lr: 1.0, ..StepArgs::default() })?.outcome()?;
///     let drift: Drift = opt.synchronize_state()?; // the distance before; then every rank has the mean
///     let SlotDrift { slot, max_abs, differing, .. } = drift.slots[0];
///     assert_eq!((slot, max_abs, differing), ("param", 1.0, 1));
///     assert!(opt.compare_state()?.is_none());
///     Ok(())
/// })?;
/// ranks.into_iter().collect::<Result<(), _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Drift {
    /// One entry for the parameters, one for f32 masters if there are any, one for each of the rule's state vectors.
    pub slots: Vec<SlotDrift>,
    /// Largest difference between two ranks' step counts of one parameter, and that parameter.
    pub t: Option<(u64, String)>,
}

/// Distance between ranks in one kind of vector.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotDrift {
    /// `param`, `master`, or the state's name.
    pub slot: &'static str,
    /// Largest difference between any two ranks' values of one element.
    pub max_abs: f64,
    /// Parameter of that element, and its row-major index; `None` without a difference.
    pub at: Option<(String, usize)>,
    /// Number of elements that differed.
    pub differing: u64,
}

impl Drift {
    /// Returns true if all ranks hold the same values.
    pub fn is_none(&self) -> bool {
        self.t.is_none() && self.slots.iter().all(|slot| slot.differing == 0)
    }
}

impl CrossShard {
    /// Compares parameters and state over all ranks, between two steps. Collective over the world; changes nothing.
    ///
    /// On a GPU the host waits for the steps so far and for each block of 2^20 elements, and compares the blocks itself.
    pub fn compare_state(&mut self) -> Result<Drift, Error> {
        let _name = name_calls("CrossShard::compare_state");
        self.check_idle_everywhere()?;
        let compared = self.compare();
        self.end_if_alone(compared)
    }

    fn compare(&self) -> Result<Drift, Error> {
        let mut room = self.room()?;
        let mut drift = Drift { slots: Vec::new(), t: None };
        for b in 0..self.optimizer.params.buckets.len() {
            for (slot, vector) in vectors(&self.optimizer, b)? {
                let plan = &self.optimizer.reducer.config.buckets[b].plan;
                for block in blocks(vector.len()) {
                    let spread = room.spread(vector.slice(block.clone())?)?;
                    let found = drift.slot(slot);
                    found.take_in(spread, block.start, |i| place(&self.optimizer, plan, i))?;
                }
            }
        }
        drift.t = self.drift_of_t()?.first().cloned();
        Ok(drift)
    }

    /// Compares parameters and state over all ranks, between two steps, and replaces elements that differ by their mean, taken in
    /// f64; returns the drift before. Collective over the world.
    ///
    /// Elements that are equal everywhere keep their bits. Step counts that differ become the largest. Parameters with a master
    /// follow it. An element that differs and is not finite on some rank is an error, and nothing changes, because its mean would
    /// spoil every rank. Skip counts and loss scales stay each group's own.
    pub fn synchronize_state(&mut self) -> Result<Drift, Error> {
        let _name = name_calls("CrossShard::synchronize_state");
        let drift = self.compare_state()?;
        if drift.is_none() {
            return Ok(drift);
        }
        let averaged = self.average();
        let averaged = self.end_if_alone(averaged);
        if let Err(Error::Comm(failure)) = &averaged {
            // Some ranks may have averaged already.
            self.optimizer.reducer.poison(failure.clone());
        }
        averaged.map(|()| drift)
    }

    fn average(&mut self) -> Result<(), Error> {
        let mut room = self.room()?;
        for bucket in &mut self.optimizer.params.buckets {
            for mut vector in bucket.vectors_mut() {
                for block in blocks(vector.len()) {
                    room.average(vector.reborrow().slice(block)?)?;
                }
            }
            bucket.follow_master()?;
        }
        for (largest, entry) in self.largest_t()?.into_iter().zip(&mut self.optimizer.params.entries) {
            entry.t = largest;
        }
        self.optimizer.publish_counters()
    }

    /// Aborts the run if this rank alone cannot continue, so that the other ranks do not wait.
    pub(super) fn end_if_alone<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        let alone = match &result {
            Err(Error::Comm(failure)) => matches!(failure, meshstep_comm::Error::Buffer(_)),
            Ok(_) | Err(Error::DriftNotFinite { .. } | Error::Disagree { .. }) => false,
            Err(_) => true,
        };
        if alone {
            // Abort the group first, so that a rank that sees the world's abort finds the group aborted too.
            self.optimizer.reducer.abort();
            self.world.abort();
        }
        result
    }

    /// Checks that no rank is in the middle of a step, has failed, or has an unread error of a step.
    pub(super) fn check_idle_everywhere(&mut self) -> Result<(), Error> {
        let healthy = self.optimizer.reducer.healthy();
        let heard = healthy.and_then(|()| self.optimizer.check_outcomes());
        let idle = heard.and_then(|()| self.optimizer.reducer.check_idle());
        let idle = self.meet_group().and(idle);
        let text = objection(idle.as_ref().err());
        let same = agree::same_everywhere(&*self.world, &self.optimizer.params.options, &text);
        idle.and(self.end_if_alone(same))
    }

    /// Runs a barrier in the group before the words of the world. A rank that steps meanwhile then causes a mismatch instead of a
    /// deadlock; the world is aborted, since that rank does not come. A group that has failed otherwise continues with an
    /// objection.
    fn meet_group(&mut self) -> Result<(), Error> {
        if self.optimizer.reducer.healthy().is_err() {
            return Ok(());
        }
        let group = vec![Arc::clone(self.optimizer.comm())];
        let met = self.optimizer.apart_from_steps(|optimizer| optimizer.reducer.barrier_on(group));
        met.map(drop).inspect_err(|error| {
            if matches!(error, Error::Comm(CommError::Mismatch { .. })) {
                self.world.abort();
            }
        })
    }

    fn room(&self) -> Result<Room, Error> {
        let longest = self.optimizer.params.buckets.iter().map(|b| b.params.len()).max().unwrap_or(0);
        Room::new(Arc::clone(&self.world), &self.optimizer.params.options, longest.min(BLOCK))
    }

    fn largest_t(&self) -> Result<Vec<u64>, Error> {
        self.reduced_t(Reduction::Max)
    }

    fn reduced_t(&self, reduction: Reduction) -> Result<Vec<u64>, Error> {
        let Options { queue, meter, .. } = &self.optimizer.params.options;
        let mut words: Vec<u64> = self.optimizer.params.entries.iter().map(|e| e.t).collect();
        host_words::all_reduce(&*self.world, queue, meter, &mut words, reduction)?;
        Ok(words)
    }

    /// Returns the parameters with different step counts, the largest difference first.
    fn drift_of_t(&self) -> Result<Vec<(u64, String)>, Error> {
        let (largest, smallest) = (self.largest_t()?, self.reduced_t(Reduction::Min)?);
        let apart = largest.iter().zip(smallest).map(|(largest, smallest)| largest - smallest);
        let named = apart.zip(&self.optimizer.params.entries).filter(|(apart, _)| *apart > 0);
        let mut apart: Vec<_> = named.map(|(apart, e)| (apart, e.param.name().to_owned())).collect();
        apart.sort_by_key(|(apart, _)| std::cmp::Reverse(*apart));
        Ok(apart)
    }
}

impl Drift {
    fn slot(&mut self, slot: &'static str) -> &mut SlotDrift {
        let i = self.slots.iter().position(|s| s.slot == slot).unwrap_or_else(|| {
            self.slots.push(SlotDrift { slot, max_abs: 0.0, at: None, differing: 0 });
            self.slots.len() - 1
        });
        &mut self.slots[i]
    }
}

impl SlotDrift {
    fn take_in(
        &mut self,
        found: Spread,
        first: usize,
        place: impl Fn(usize) -> (String, usize),
    ) -> Result<(), Error> {
        if let Some(i) = found.not_finite {
            let (name, index) = place(first + i);
            return Err(Error::DriftNotFinite { slot: self.slot, name, index });
        }
        self.differing += found.differing;
        if let Some((i, apart)) =
            found.furthest.filter(|(_, apart)| self.at.is_none() || *apart > self.max_abs)
        {
            (self.max_abs, self.at) = (apart, Some(place(first + i)));
        }
        Ok(())
    }
}

fn blocks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(BLOCK).map(move |start| start..len.min(start + BLOCK))
}

/// Returns a replica's vectors of bucket `b`, by name.
fn vectors(optimizer: &Optimizer, b: usize) -> Result<Vec<(&'static str, Slice<'_>)>, Error> {
    let owned = &optimizer.params.buckets[b];
    let params = &optimizer.reducer.config.buckets[b].plan.params;
    let rule = params.first().map(|p| &optimizer.params.groups[optimizer.params.entries[p.param].group].rule);
    let names = rule.map_or(&[] as &[_], |rule| rule.state());
    let state = names.iter().copied().zip(owned.state().iter().map(Buffer::as_slice));
    let masters = owned.master().map(|master| ("master", master.as_slice()));
    Ok([("param", owned.params()?)].into_iter().chain(masters).chain(state).collect())
}

/// Returns the parameter at element `i` of a bucket, and the element's index in it.
fn place(optimizer: &Optimizer, plan: &BucketPlan, i: usize) -> (String, usize) {
    let before = plan.params.partition_point(|p| p.start <= i);
    let param = &plan.params[before.saturating_sub(1)];
    (optimizer.params.entries[param.param].param.name().to_owned(), i - param.start)
}
