//! Lanes that are reduced where their values lie: nothing is packed or merged, and the former values are kept until the exchange
//! counts.

use crate::exchange::in_flight::{Bringing, Landed, Value};
use crate::exchange::owned_spans::{Span, Spot, Vector, spans_mut};
use crate::exchange::staging::Staging;
use crate::exchange::votes::VoteShare;
use crate::plan::packing::Lane;
use crate::{Fragment, LocalPlan, Merge};
use meshstep_comm::{Communicator, Op, Reduction};
use meshstep_shard::Error;
use meshstep_shard::extend::Params;
use meshstep_tensor::{Buffer, SliceMut};

/// The lanes of the flight that arrives at the exchange that sends it.
#[derive(Debug, Default)]
pub(crate) struct InPlace(Vec<InPlaceLane>);

/// A lane to reduce after all packed lanes have started.
#[derive(Debug)]
pub(crate) struct InPlaceLane {
    /// Index in the flight.
    pub(crate) index: usize,
    pub(crate) lane: Lane,
    pub(crate) share: VoteShare,
    /// The lane's values, laid end to end.
    pub(crate) spans: Vec<Span>,
    /// As long as the lane. It gets the former values; it holds zeros if this worker's values do not count, and gets the mean.
    pub(crate) memory: Buffer,
    /// Number of values from the first on that have been replaced by the mean.
    pub(crate) replaced: usize,
}

/// Outcome of the reductions of one rank.
pub(crate) struct InPlaceSeen {
    /// First error; after it nothing was reduced.
    pub(crate) result: Result<(), meshstep_comm::Error>,
    /// Infinite and NaN elements of the means.
    pub(crate) non_finite: u64,
}

impl InPlace {
    pub(crate) fn push(&mut self, lane: InPlaceLane) {
        self.0.push(lane);
    }

    /// Reduces all lanes. Collective over the workers.
    pub(crate) fn reduce(
        &mut self,
        plan: &LocalPlan,
        params: &mut Params,
        across: &dyn Communicator,
    ) -> Result<InPlaceSeen, Error> {
        let mut seen = InPlaceSeen { result: Ok(()), non_finite: 0 };
        for lane in &mut self.0 {
            if lane.counts() {
                let slices = spans_mut(params, &lane.spans)?;
                lane.reduce_values(plan, slices, across, &mut seen)?;
            } else {
                lane.reduce_zeros(plan, across, &mut seen)?;
            }
        }
        Ok(seen)
    }

    /// Moves the means of lanes in which this worker's values did not count to the other landed vectors: they are merged.
    pub(crate) fn land(&mut self, landed: &mut Landed) {
        for lane in self.0.iter_mut().filter(|lane| !lane.counts()) {
            landed.0[lane.index] = Some(lane.memory.take());
        }
    }

    /// The exchange counts: the former values are not needed any more.
    pub(crate) fn commit(&mut self) {
        self.0.iter_mut().for_each(|lane| lane.replaced = 0);
    }

    /// Restores the former values wherever they have been replaced.
    pub(crate) fn put_back(&mut self, params: &mut Params) -> Result<(), Error> {
        for InPlaceLane { spans, memory, replaced, .. } in &mut self.0 {
            let (mut start, end) = (0, std::mem::take(replaced));
            for mut slice in spans_mut(params, spans)? {
                let range = start..end.min(start + slice.len());
                start += slice.len();
                if !range.is_empty() {
                    let len = range.len();
                    slice.reborrow().slice(0..len)?.copy_from(memory.as_slice().slice(range)?)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the lanes' memory for the next exchange.
    pub(crate) fn give_memory(self, staging: &mut Staging) {
        staging.give(self.0.into_iter().map(|lane| lane.memory));
    }
}

impl InPlaceLane {
    /// Returns true if this worker's values count.
    fn counts(&self) -> bool {
        self.share != VoteShare::Of(0.0)
    }

    fn reduce_values(
        &mut self,
        plan: &LocalPlan,
        slices: Vec<SliceMut<'_>>,
        across: &dyn Communicator,
        seen: &mut InPlaceSeen,
    ) -> Result<(), Error> {
        let mut slices = slices.into_iter();
        let (mut begun, mut lent) = (None, Vec::new());
        self.each_bucket(plan, |part, reduction| {
            if seen.result.is_err() {
                return Ok((part, 0));
            }
            lend(&mut slices, &mut begun, part.len(), &mut lent)?;
            let len = part.len();
            let (part, result) = across.all_reduce_keeping(reduction, None, &mut lent, part);
            lent.clear();
            match result {
                Ok(non_finite) => seen.non_finite += non_finite,
                Err(error) => seen.result = Err(error),
            }
            let replaced = if seen.result.is_ok() { len } else { 0 };
            Ok((part, replaced))
        })
    }

    fn reduce_zeros(
        &mut self,
        plan: &LocalPlan,
        across: &dyn Communicator,
        seen: &mut InPlaceSeen,
    ) -> Result<(), Error> {
        self.each_bucket(plan, |part, reduction| {
            if seen.result.is_err() {
                return Ok((part, 0));
            }
            let (part, result) = across.complete(Op::all_reduce(reduction), part);
            seen.result = result;
            Ok((part, 0))
        })
    }

    /// Calls `reduce` with the memory of each bucket; it returns the memory and the number of values that it has replaced.
    fn each_bucket(
        &mut self,
        plan: &LocalPlan,
        mut reduce: impl FnMut(Buffer, Reduction) -> Result<(Buffer, usize), Error>,
    ) -> Result<(), Error> {
        let reduction = self.share.reduction();
        let mut whole = self.memory.take();
        let mut rest = whole.split_off(0)?;
        for bucket in self.lane.buckets(plan.bucket_len) {
            let after = rest.split_off(bucket.len())?;
            let (part, replaced) = reduce(std::mem::replace(&mut rest, after), reduction)?;
            self.replaced += replaced;
            whole =
                whole.join(part).unwrap_or_else(|_| unreachable!("parts come back in the order of the cut"));
        }
        self.memory = whole;
        Ok(())
    }
}

/// Moves the next `len` elements of `slices` to `lent`; `begun` is what is left of the slice that the last call has cut.
fn lend<'a>(
    slices: &mut impl Iterator<Item = SliceMut<'a>>,
    begun: &mut Option<SliceMut<'a>>,
    mut len: usize,
    lent: &mut Vec<SliceMut<'a>>,
) -> Result<(), Error> {
    while len > 0 {
        let Some(slice) = begun.take().or_else(|| slices.next()) else { break };
        let (now, later) = {
            let at = len.min(slice.len());
            slice.split_at(at)?
        };
        len -= now.len();
        lent.push(now);
        *begun = Some(later).filter(|later| !later.is_empty());
    }
    Ok(())
}

/// Returns the spans of lane `lane` if it is reduced in place: without delay, on the CPU, and if all that it holds is sent in its own
/// type and replaced by the mean. Every worker decides alike, whatever its share.
pub(crate) fn spans_in_place(plan: &LocalPlan, lane: &Lane, bringing: &[Bringing<'_>]) -> Option<Vec<Span>> {
    let mut spans = Vec::new();
    for Bringing { fragment, values, .. } in bringing {
        for Value { spot, from, values } in values.iter().filter(|v| lane.takes(plan, *fragment, v.spot.wire))
        {
            let alike = from.is_none() && values.place() == meshstep_tensor::Place::Cpu;
            if !(alike && plan.fragments[*fragment].is_replaced_by_mean(spot)) {
                return None;
            }
            spans.push((spot.vector, spot.range.clone()));
        }
    }
    apart(&spans).then_some(spans)
}

/// Returns true if no element is in two spans: two fragments may have the same elements at different times, and one of them may be
/// sent again at the other's time.
fn apart(spans: &[Span]) -> bool {
    let mut sorted: Vec<_> =
        spans.iter().map(|(vector, range)| (vector.key(), range.start, range.end)).collect();
    sorted.sort_unstable();
    sorted.windows(2).all(|two| two[0].0 != two[1].0 || two[0].2 <= two[1].1)
}

impl Fragment {
    /// Returns true if an exchange without delay replaces the values of `spot` by their mean in the type that is sent.
    fn is_replaced_by_mean(&self, spot: &Spot) -> bool {
        let whole = matches!(self.merge, Merge::Mean) && self.taken == 1.0 && self.timing.delay == 0;
        whole && spot.own == spot.wire && !matches!(spot.vector, Vector::Outer { .. })
    }
}
