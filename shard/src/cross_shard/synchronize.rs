//! How far replicas have drifted apart, and their mean.

use super::CrossShard;
use crate::bucket_plan::BucketPlan;
use crate::optimizer::Optimizer;
use crate::{Error, agree, family};
use meshstep_comm::{Communicator, Reduction};
use meshstep_optim::{ordered, unordered};
use meshstep_tensor::{Buffer, Category, DType, Slice, SliceMut};
use std::ops::Range;
use std::sync::Arc;

/// Elements that are compared or averaged at a time.
const BLOCK: usize = 1 << 20;

/// How far ranks were apart, the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Drift {
    /// One for the parameters, one for f32 masters where there are any, one for each of the rule's state vectors.
    pub slots: Vec<SlotDrift>,
    /// The largest difference between two ranks' step counts of one parameter, and the parameter.
    pub t: Option<(u64, String)>,
}

/// How far one kind of vector was apart.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotDrift {
    /// `params`, `master`, or the state's name.
    pub slot: &'static str,
    /// The largest difference between any two ranks' values of one element.
    pub max_abs: f64,
    /// Where: the parameter, and the element in row-major order. `None` where nothing differed.
    pub at: Option<(String, usize)>,
    /// Elements that differed.
    pub differing: u64,
}

impl Drift {
    /// Whether every rank had the same of everything.
    pub fn is_none(&self) -> bool {
        self.t.is_none() && self.slots.iter().all(|slot| slot.differing == 0)
    }
}

/// Room for a block's reductions.
struct Room {
    world: Arc<dyn Communicator>,
    values: Buffer,
    /// Words that are ordered as the values are, so that the two zeros differ and NaN equals NaN.
    high: Buffer,
    low: Buffer,
}

impl CrossShard {
    /// Compares parameters and state over all ranks, between two steps. Collective over the world; changes nothing.
    pub fn compare_state(&mut self) -> Result<Drift, Error> {
        self.check_idle_everywhere()?;
        let mut room = self.room()?;
        let mut drift = Drift { slots: Vec::new(), t: None };
        for b in 0..self.optimizer.buckets.len() {
            for (slot, vector) in vectors(&self.optimizer, b) {
                let plan = &self.optimizer.handover.fixed.buckets[b].plan;
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

    /// Compares parameters and state over all ranks, between two steps, and replaces what differs by its mean, taken in
    /// f64; tells how far ranks had been apart. Collective over the world.
    ///
    /// Elements that are equal everywhere keep their bits. Where step counts differ the largest stays. Parameters with a
    /// master follow it. An element that differs and is not finite somewhere is an error, and nothing changes: its mean would
    /// spoil every rank. Skip counts and loss scales stay each group's own.
    pub fn synchronize_state(&mut self) -> Result<Drift, Error> {
        let drift = self.compare_state()?;
        if drift.is_none() {
            return Ok(drift);
        }
        let averaged = self.average();
        if let Err(Error::Comm(failure)) = &averaged {
            // Ranks may have parted in the middle of it.
            self.optimizer.handover.poison(failure.clone());
        }
        averaged.map(|()| drift)
    }

    fn average(&mut self) -> Result<(), Error> {
        let mut room = self.room()?;
        for bucket in &mut self.optimizer.buckets {
            for mut vector in bucket.vectors_mut() {
                for block in blocks(vector.len()) {
                    room.average(vector.reborrow().slice(block)?)?;
                }
            }
            bucket.follow_master()?;
        }
        for (largest, entry) in self.largest_t()?.into_iter().zip(&mut self.optimizer.entries) {
            entry.t = largest;
        }
        Ok(())
    }

    /// No rank is in the middle of a step, and none has failed.
    fn check_idle_everywhere(&mut self) -> Result<(), Error> {
        let idle = self.optimizer.handover.healthy().and_then(|()| self.optimizer.check_idle());
        let text = family::objection(idle.as_ref().err());
        let same = agree::same_everywhere(&*self.world, &self.optimizer.options, &text);
        idle.and(same)
    }

    fn room(&self) -> Result<Room, Error> {
        let longest = self.optimizer.buckets.iter().map(|b| b.params.len()).max().unwrap_or(0);
        let meter = &self.optimizer.options.meter;
        let block = |dtype| Buffer::zeroed(longest.min(BLOCK), dtype, meter, Category::Staging);
        let (values, high, low) = (block(DType::F64)?, block(DType::U64)?, block(DType::U64)?);
        Ok(Room { world: Arc::clone(&self.world), values, high, low })
    }

    fn largest_t(&self) -> Result<Vec<u64>, Error> {
        self.reduced_t(Reduction::Max)
    }

    fn reduced_t(&self, reduction: Reduction) -> Result<Vec<u64>, Error> {
        let mine: Vec<u64> = self.optimizer.entries.iter().map(|e| e.t).collect();
        let mut words = Buffer::from_slice(&mine, &self.optimizer.options.meter, Category::Staging)?;
        self.world.all_reduce(&mut words, reduction)?;
        Ok(words.typed::<u64>()?.to_vec())
    }

    /// Parameters whose step counts differ, the furthest apart first.
    fn drift_of_t(&self) -> Result<Vec<(u64, String)>, Error> {
        let (largest, smallest) = (self.largest_t()?, self.reduced_t(Reduction::Min)?);
        let apart = largest.iter().zip(smallest).map(|(largest, smallest)| largest - smallest);
        let named = apart.zip(&self.optimizer.entries).filter(|(apart, _)| *apart > 0);
        let mut apart: Vec<_> = named.map(|(apart, e)| (apart, e.param.name().to_owned())).collect();
        apart.sort_by_key(|(apart, _)| std::cmp::Reverse(*apart));
        Ok(apart)
    }
}

/// What a block's comparison found: elements that differ, and the one that differs most.
struct Spread {
    differing: u64,
    furthest: Option<(usize, f64)>,
    not_finite: Option<usize>,
}

impl Room {
    /// The largest and the smallest of each element over all ranks.
    fn bounds(&mut self, values: Slice<'_>) -> Result<(&[u64], &[u64]), Error> {
        let len = values.len();
        self.values.as_mut().slice(0..len)?.cast_from(values)?;
        let values = &self.values.typed::<f64>()?[..len];
        for (room, reduction) in [(&mut self.high, Reduction::Max), (&mut self.low, Reduction::Min)] {
            for (word, value) in room.typed_mut::<u64>()?.iter_mut().zip(values) {
                *word = ordered(*value);
            }
            reduce(&*self.world, room, len, reduction)?;
        }
        Ok((&self.high.typed::<u64>()?[..len], &self.low.typed::<u64>()?[..len]))
    }

    fn spread(&mut self, values: Slice<'_>) -> Result<Spread, Error> {
        let (high, low) = self.bounds(values)?;
        let mut spread = Spread { differing: 0, furthest: None, not_finite: None };
        for (i, (high, low)) in high.iter().zip(low).enumerate().filter(|(_, (high, low))| high != low) {
            let apart = unordered(*high) - unordered(*low);
            spread.differing += 1;
            if !apart.is_finite() {
                spread.not_finite = spread.not_finite.or(Some(i));
            } else if spread.furthest.is_none_or(|(_, most)| apart > most) {
                spread.furthest = Some((i, apart));
            }
        }
        Ok(spread)
    }

    /// Replaces what differs by its mean.
    fn average(&mut self, mut values: SliceMut<'_>) -> Result<(), Error> {
        let len = values.len();
        let (high, low) = self.bounds(values.as_slice())?;
        let differs: Vec<bool> = high.iter().zip(low).map(|(high, low)| high != low).collect();
        if !differs.contains(&true) {
            return Ok(());
        }
        // What is equal everywhere keeps its bits: a mean of more ranks than two may round.
        let kept = self.values.typed::<f64>()?[..len].to_vec();
        let mut means = self.means(&kept, 1.0)?;
        if means.iter().any(|mean| !mean.is_finite()) {
            // A sum left f64's range, the same on every rank. Parts of 1 / ranks or less cannot.
            let part = 1.0 / self.world.world_size().next_power_of_two() as f64;
            let small = self.means(&kept, part)?;
            let overflowed = means.iter_mut().zip(small).filter(|(mean, _)| !mean.is_finite());
            overflowed.for_each(|(mean, small)| *mean = small / part);
        }
        for ((mean, kept), differs) in means.iter_mut().zip(kept).zip(differs) {
            *mean = if differs { *mean } else { kept };
        }
        values.cast_from(Slice::from(&means[..]))?;
        Ok(())
    }

    /// The means over all ranks of `values` times `part`.
    fn means(&mut self, values: &[f64], part: f64) -> Result<Vec<f64>, Error> {
        let room = self.values.typed_mut::<f64>()?.iter_mut().zip(values);
        room.for_each(|(room, value)| *room = value * part);
        reduce(&*self.world, &mut self.values, values.len(), Reduction::Mean)?;
        Ok(self.values.typed::<f64>()?[..values.len()].to_vec())
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

/// Reduces the first `len` elements of `room` over all ranks.
fn reduce(
    world: &dyn Communicator,
    room: &mut Buffer,
    len: usize,
    reduction: Reduction,
) -> Result<(), Error> {
    let mut block = room.take();
    let rest = block.split_off(len)?;
    let reduced = world.all_reduce(&mut block, reduction).map_err(Error::from);
    *room = block.join(rest).unwrap_or_else(|_| unreachable!("a block joins the rest it was cut from"));
    reduced
}

fn blocks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(BLOCK).map(move |start| start..len.min(start + BLOCK))
}

/// What a replica holds of bucket `b`, by name.
fn vectors(optimizer: &Optimizer, b: usize) -> Vec<(&'static str, Slice<'_>)> {
    let owned = &optimizer.buckets[b];
    let params = &optimizer.handover.fixed.buckets[b].plan.params;
    let rule = params.first().map(|p| &optimizer.groups[optimizer.entries[p.param].group].rule);
    let names = rule.map_or(&[] as &[_], |rule| rule.state());
    let state = names.iter().copied().zip(owned.state().iter().map(Buffer::as_slice));
    let masters = owned.master().map(|master| ("master", master.as_slice()));
    [("params", owned.params.as_slice())].into_iter().chain(masters).chain(state).collect()
}

/// The parameter at element `i` of a bucket, and the element's index in it.
fn place(optimizer: &Optimizer, plan: &BucketPlan, i: usize) -> (String, usize) {
    let before = plan.params.partition_point(|p| p.start <= i);
    let param = &plan.params[before.saturating_sub(1)];
    (optimizer.entries[param.param].param.name().to_owned(), i - param.start)
}
