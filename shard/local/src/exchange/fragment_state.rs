//! Fragment state held by one rank, and its operations: send, merge, reset, roll back.

use crate::exchange::in_flight::Value;
use crate::exchange::owned_spans::{Spot, Vector, slot_of, vector_of, vector_of_mut};
use crate::plan::packing::Loads;
use crate::{Fragment, LocalError, LocalPlan, OnFailure, What};
use meshstep_optim::{self as optim, OuterStep, mix_zeros};
use meshstep_shard::extend::{OptimizerExchange, Params};
use meshstep_shard::{Error, Optimizer, Options};
use meshstep_tensor::{Buffer, Category, DType, Slice, SliceMut};
use std::collections::BTreeSet;

/// State of the fragments on this rank.
#[derive(Debug)]
pub(crate) struct Parts(Vec<FragmentPart>);

/// State of one fragment on this rank.
#[derive(Debug)]
pub(crate) struct FragmentPart {
    pub(crate) spots: Vec<Spot>,
    /// Indexed by spot.
    pub(crate) kept: Vec<Kept>,
    /// Number of steps of the outer params.
    pub(crate) outer_t: u64,
    /// Tokens since the last merge.
    pub(crate) tokens: u64,
}

/// Memory kept beside a spot.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// Result of the spot's last exchange, if the plan needs it.
    pub(crate) anchor: Option<Buffer>,
    /// State of the outer params.
    pub(crate) outer: Vec<Buffer>,
}

/// Result that has arrived for a spot: the mean, unless it has replaced the values already, and, with a delay, the snapshot that was sent and the `t` of that time.
pub(crate) struct Arrived<'a> {
    pub(crate) reduced: Option<Slice<'a>>,
    pub(crate) snapshot: Option<&'a (Buffer, u64)>,
}

impl Parts {
    /// Allocates the memory that the plan needs beside the optimizer; the current values count as the last exchange's results.
    pub(crate) fn new(plan: &LocalPlan, optimizer: &Optimizer) -> Result<Self, LocalError> {
        let mut parts = Vec::new();
        for (fragment, spots) in plan.fragments.iter().zip(plan.spots(optimizer)?) {
            let kept = spots.iter().map(|spot| Kept::new(fragment, spot, optimizer.own_params()));
            let kept = kept.collect::<Result<Vec<_>, _>>()?;
            parts.push(FragmentPart { spots, kept, outer_t: 0, tokens: 0 });
        }
        Ok(Parts(parts))
    }

    /// Returns fragment `f`.
    pub(crate) fn of(&self, f: usize) -> &FragmentPart {
        &self.0[f]
    }

    /// Returns fragment `f` for changes.
    pub(crate) fn of_mut(&mut self, f: usize) -> &mut FragmentPart {
        &mut self.0[f]
    }

    /// Adds tokens that this worker has seen.
    pub(crate) fn count(&mut self, tokens: u64) {
        self.0.iter_mut().for_each(|part| part.tokens = part.tokens.saturating_add(tokens));
    }

    /// Iterates over the buffers kept beside the params, in a fixed order.
    pub(crate) fn buffers(&mut self) -> impl Iterator<Item = &mut Buffer> {
        let kept = self.0.iter_mut().flat_map(|part| &mut part.kept);
        kept.flat_map(|kept| kept.anchor.iter_mut().chain(&mut kept.outer))
    }

    /// Resets to the initial state: the current values count as the last exchange's results.
    #[cfg(feature = "checkpoint")]
    pub(crate) fn restart(&mut self, params: &Params) -> Result<(), Error> {
        let queue = &params.options().queue;
        for part in &mut self.0 {
            (part.outer_t, part.tokens) = (0, 0);
            for (spot, kept) in part.spots.iter().zip(&mut part.kept) {
                kept.outer.iter_mut().try_for_each(|slot| queue.zero(slot.as_mut()))?;
                let Some(anchor) = &mut kept.anchor else { continue };
                match vector_of(params, spot.vector) {
                    Some(values) => queue.copy(values.slice(spot.range.clone())?, anchor.as_mut())?,
                    None => queue.zero(anchor.as_mut())?,
                }
            }
        }
        Ok(())
    }

    /// Iterates over the step counts of the outer optimizers, for changes.
    pub(crate) fn outer_steps(&mut self) -> impl Iterator<Item = &mut u64> {
        self.0.iter_mut().map(|part| &mut part.outer_t)
    }

    /// Iterates over the step counts of the outer optimizers.
    #[cfg(feature = "checkpoint")]
    pub(crate) fn outer_t(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(|part| part.outer_t)
    }

    /// Returns the elements that each fragment sends, by wire type.
    pub(crate) fn loads(&self) -> Vec<Loads> {
        self.0.iter().map(|part| loads(&part.spots)).collect()
    }

    /// Returns the values of fragment `f` on this rank, with the anchors if differences from these are sent.
    pub(crate) fn values<'a>(
        &'a self,
        params: &'a Params,
        fragment: &Fragment,
        f: usize,
    ) -> Result<Vec<Value<'a>>, Error> {
        let FragmentPart { spots, kept, .. } = &self.0[f];
        let value = |(spot, kept): (&'a Spot, &'a Kept)| {
            let from = kept.anchor.as_ref().filter(|_| fragment.sends_differences(spot.wire, spot.own));
            Ok(Value { spot, values: self.read(params, spot)?, from })
        };
        spots.iter().zip(kept).map(value).collect()
    }

    fn read<'a>(&'a self, params: &'a Params, spot: &Spot) -> Result<Slice<'a>, Error> {
        let vector = match spot.vector {
            Vector::Outer { fragment, spot, slot } => self.0[fragment].kept[spot].outer[slot].as_slice(),
            other => match vector_of(params, other) {
                Some(vector) => vector,
                None => unreachable!("a spot is of a vector that there is"),
            },
        };
        Ok(vector.slice(spot.range.clone())?)
    }

    fn write<'a>(&'a mut self, params: &'a mut Params, spot: &Spot) -> Result<SliceMut<'a>, Error> {
        let vector = match spot.vector {
            Vector::Outer { fragment, spot, slot } => self.0[fragment].kept[spot].outer[slot].as_mut(),
            other => match vector_of_mut(params, other) {
                Some(vector) => vector,
                None => unreachable!("a spot is of a vector that there is"),
            },
        };
        Ok(vector.slice(spot.range.clone())?)
    }

    /// Merges the result for spot `i` of fragment `f`.
    pub(crate) fn merge(
        &mut self,
        params: &mut Params,
        fragment: &Fragment,
        (f, i): (usize, usize),
        arrived: Arrived<'_>,
    ) -> Result<(), Error> {
        let Some(mean) = arrived.reduced else { return self.follow_values(params, (f, i)) };
        let (spot, t) = (self.0[f].spots[i].clone(), self.0[f].outer_t + 1);
        let mut kept = std::mem::take(&mut self.0[f].kept[i]);
        let slot = slot_of(params, &spot);
        let now = params.t(spot.entry);
        // The plan's check has refused state without such a share.
        let left = |then| slot.and_then(|slot| slot.left(then, now)).unwrap_or(1.0);
        let (queue, meter) = (&params.options().queue.clone(), &params.options().meter.clone());
        let merge = optim::Merge {
            mean,
            differences: fragment.sends_differences(spot.wire, spot.own),
            anchor: kept.anchor.as_mut().map(Buffer::as_mut),
            sent: arrived.snapshot.map(|(sent, then)| (sent.as_slice(), left(*then))),
            taken: fragment.taken,
            squares: slot.is_some_and(|slot| slot.squares),
        };
        let merged = self.write(params, &spot).and_then(|values| match fragment.outer() {
            Some(outer) => {
                let step = OuterStep { rule: &*outer.rule, lr: outer.lr, state: &mut kept.outer, t };
                Ok(merge.outer(values, step, queue, meter)?)
            }
            None => Ok(merge.mean(values, queue)?),
        });
        self.0[f].kept[i] = kept;
        merged
    }

    /// Sets the anchor of spot `i` of fragment `f`, if there is one, to the values, which are the exchange's result.
    fn follow_values(&mut self, params: &Params, (f, i): (usize, usize)) -> Result<(), Error> {
        let Some(mut anchor) = self.0[f].kept[i].anchor.take() else { return Ok(()) };
        let values = self.read(params, &self.0[f].spots[i]);
        let copied = values.and_then(|values| Ok(params.options().queue.copy(values, anchor.as_mut())?));
        self.0[f].kept[i].anchor = Some(anchor);
        copied
    }

    /// Sets fragment `f` to zero, or mixes zeros in.
    pub(crate) fn reset(&mut self, params: &mut Params, fragment: &Fragment, f: usize) -> Result<(), Error> {
        for i in 0..self.0[f].spots.len() {
            let (spot, queue) = (self.0[f].spots[i].clone(), &params.options().queue.clone());
            mix_zeros(self.write(params, &spot)?, fragment.taken, queue)?;
        }
        if let (What::OuterMomentum(of), true) = (&fragment.what, fragment.taken == 1.0) {
            self.0[*of].outer_t = 0;
        }
        Ok(())
    }

    /// Sets fragment `f` back to the result of its last exchange.
    pub(crate) fn roll_back(&mut self, params: &mut Params, f: usize) -> Result<(), Error> {
        for i in 0..self.0[f].spots.len() {
            let (spot, queue) = (self.0[f].spots[i].clone(), &params.options().queue.clone());
            let Some(anchor) = self.0[f].kept[i].anchor.take() else { continue };
            let copied =
                self.write(params, &spot).and_then(|values| Ok(queue.copy(anchor.as_slice(), values)?));
            self.0[f].kept[i].anchor = Some(anchor);
            copied?;
        }
        Ok(())
    }

    /// Updates the parameters from their masters, for the masters that fragment `f` has on this rank.
    pub(crate) fn follow_masters(&self, params: &mut Params, f: usize) -> Result<(), Error> {
        let masters = self.0[f].spots.iter().filter_map(|spot| match spot.vector {
            Vector::Master { bucket } => Some(bucket),
            Vector::Params { .. } | Vector::State { .. } | Vector::Outer { .. } => None,
        });
        let masters: BTreeSet<usize> = masters.collect();
        masters.into_iter().try_for_each(|bucket| params.follow_master(bucket))
    }
}

impl Kept {
    fn new(fragment: &Fragment, spot: &Spot, params: &Params) -> Result<Self, Error> {
        let (Options { queue, meter, .. }, len) = (params.options(), spot.range.len());
        let zeroed = |dtype| Buffer::zeroed_on(queue, len, dtype, meter, Category::State);
        let mut kept = Kept::default();
        if fragment.has_anchor(spot.wire, spot.own) {
            let mut anchor = zeroed(spot.own)?;
            // Outer state begins as zeros.
            if let Some(values) = vector_of(params, spot.vector) {
                queue.copy(values.slice(spot.range.clone())?, anchor.as_mut())?;
            }
            kept.anchor = Some(anchor);
        }
        if let Some(outer) = fragment.outer() {
            let state = outer.rule.state().iter().map(|_| zeroed(DType::F64));
            kept.outer = state.collect::<Result<_, _>>()?;
        }
        Ok(kept)
    }
}

impl Fragment {
    /// Returns true if differences from the last exchange are sent: for parameters in a narrower wire type.
    fn sends_differences(&self, wire: DType, own: DType) -> bool {
        self.what == What::Params && wire.size() < own.size()
    }

    /// Returns true if the last exchange's result is kept, for values of type `own` that are sent as `wire`.
    pub(crate) fn has_anchor(&self, wire: DType, own: DType) -> bool {
        let rolls_back = self.on_failure == OnFailure::RollBack;
        self.travels() && (self.outer().is_some() || rolls_back || self.sends_differences(wire, own))
    }
}

fn loads(spots: &[Spot]) -> Loads {
    let mut loads = Loads::new();
    for spot in spots {
        match loads.iter_mut().find(|(wire, _)| *wire == spot.wire) {
            Some((_, len)) => *len += spot.range.len(),
            None => loads.push((spot.wire, spot.range.len())),
        }
    }
    loads
}
