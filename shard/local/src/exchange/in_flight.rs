//! Flights of fragments: packed, sent to the other workers, landed.

use crate::exchange::in_place::{InPlace, InPlaceLane, spans_in_place};
use crate::exchange::owned_spans::Spot;
use crate::exchange::staging::Staging;
use crate::exchange::votes::VoteShare;
use crate::plan::packing::Lane;
use crate::{LocalPlan, Placement};
use meshstep_comm::{Communicator, InFlight, Op};
use meshstep_optim::pack;
use meshstep_shard::extend::{Params, host_words};
use meshstep_shard::{Error, Options};
use meshstep_tensor::{Buffer, Slice};

pub(crate) type Started = Result<InFlight, (Buffer, meshstep_comm::Error)>;

/// Fragments that are sent together and arrive together.
#[derive(Debug)]
pub(crate) struct Flight {
    /// Indices of the fragments.
    pub(crate) fragments: Vec<usize>,
    /// Step and side of the exchange at which the flight arrives.
    pub(crate) arrives: (u64, Placement),
    /// Indexed by fragment.
    pub(crate) sent: Vec<Sent>,
    /// Started buckets of each lane; none of a lane that is reduced in place.
    pub(crate) lanes: Vec<Vec<Started>>,
    /// The result, if it was waited for before the flight arrives.
    pub(crate) early: Option<Arrival>,
}

/// Landed results, and the first error.
pub(crate) type Arrival = (Landed, Result<(), meshstep_comm::Error>);

/// Record of what a worker sent of a fragment.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    /// Tokens of its weight.
    pub(crate) tokens: u64,
    /// For each spot, if the merge is delayed: the values sent, and their `t`.
    pub(crate) snapshots: Vec<(Buffer, u64)>,
    /// Indexed by spot: the lane, and the first element in that lane.
    pub(crate) places: Vec<(usize, usize)>,
}

/// Landed results: one vector for each lane, none for a lane whose values have been replaced by the result.
#[derive(Debug)]
pub(crate) struct Landed(pub(crate) Vec<Option<Buffer>>);

/// Contribution of a worker to a fragment.
pub(crate) struct Bringing<'a> {
    pub(crate) fragment: usize,
    pub(crate) share: VoteShare,
    pub(crate) tokens: u64,
    /// Indexed by spot.
    pub(crate) values: Vec<Value<'a>>,
}

/// Values of a spot, and the anchor to subtract if differences are sent.
pub(crate) struct Value<'a> {
    pub(crate) spot: &'a Spot,
    pub(crate) values: Slice<'a>,
    pub(crate) from: Option<&'a Buffer>,
}

impl Flight {
    /// Packs `bringing` into `lanes` and starts the reductions; prepares those `in_place`. An error of memory is this rank's alone; an
    /// error of the communicator is returned when the flight lands.
    pub(crate) fn launch(
        plan: &LocalPlan,
        lanes: &[Lane],
        bringing: &[Bringing<'_>],
        (across, options): (&dyn Communicator, &Options),
        (arrives, (staging, in_place)): ((u64, Placement), (&mut Staging, &mut InPlace)),
    ) -> Result<Flight, Error> {
        let (sent, mut failed, mut started) = (places(plan, lanes, bringing), None, Vec::new());
        let taken = lanes.iter().map(|lane| staging.take(lane.len, lane.wire, options));
        let taken = taken.collect::<Result<Vec<_>, _>>()?;
        let mut packed = Vec::new();
        for ((index, &lane), mut memory) in lanes.iter().enumerate().zip(taken) {
            let share = share_of(lane, plan, bringing);
            let spans = spans_in_place(plan, &lane, bringing);
            if spans.is_none() || share == VoteShare::Of(0.0) {
                pack_lane(index, bringing, &sent, &mut memory, options)?;
            }
            match spans {
                Some(spans) => {
                    packed.push(None);
                    in_place.push(InPlaceLane { index, lane, share, spans, memory, replaced: 0 });
                }
                None => packed.push(Some((memory, share))),
            }
        }
        for (lane, packed) in lanes.iter().zip(packed) {
            started.push(match packed {
                Some((memory, share)) => {
                    let op = Op::all_reduce(share.reduction());
                    start(plan, lane, memory, (across, options), op, &mut failed)?
                }
                None => Vec::new(),
            });
        }
        let fragments = bringing.iter().map(|brings| brings.fragment).collect();
        Ok(Flight { fragments, arrives, sent, lanes: started, early: None })
    }

    /// Returns the first error of a reduction that could not start.
    pub(crate) fn refused(&self) -> Result<(), meshstep_comm::Error> {
        let mut all = self.lanes.iter().flatten();
        all.find_map(|start| start.as_ref().err()).map_or(Ok(()), |(_, error)| Err(error.clone()))
    }

    /// Waits for all buckets, and returns the results with the first error.
    pub(crate) fn land(&mut self, options: &Options) -> Arrival {
        if let Some(early) = self.early.take() {
            return early;
        }
        let (mut landed, mut arrived) = (Landed(Vec::new()), Ok(()));
        for started in self.lanes.drain(..) {
            let mut whole: Option<Buffer> = None;
            for start in started {
                let (part, result) = host_words::land(start, &options.queue);
                arrived = arrived.and(result);
                let joined = match whole {
                    None => Ok(part),
                    Some(so_far) => so_far.join(part),
                };
                whole =
                    Some(joined.unwrap_or_else(|_| unreachable!("parts land in the order they were cut")));
            }
            landed.0.push(whole);
        }
        (landed, arrived)
    }
}

impl Flight {
    /// Returns the memory of the lanes and snapshots, for the next flight.
    pub(crate) fn take_memory(&mut self, landed: Landed) -> Vec<Buffer> {
        let kept = self.sent.iter_mut().flat_map(|sent| sent.snapshots.drain(..).map(|(values, _)| values));
        landed.0.into_iter().flatten().chain(kept).collect()
    }
}

/// Returns this worker's share in a lane.
fn share_of(lane: Lane, plan: &LocalPlan, bringing: &[Bringing<'_>]) -> VoteShare {
    let in_lane = |brings: &&Bringing<'_>| {
        brings.values.iter().any(|value| lane.takes(plan, brings.fragment, value.spot.wire))
    };
    bringing.iter().rfind(in_lane).map_or(VoteShare::Unsharded, |brings| brings.share)
}

/// Packs the values of lane `index` into `memory`.
fn pack_lane(
    index: usize,
    bringing: &[Bringing<'_>],
    sent: &[Sent],
    memory: &mut Buffer,
    options: &Options,
) -> Result<(), Error> {
    for (brings, sent) in bringing.iter().zip(sent) {
        for (Value { values, from, .. }, &(_, start)) in
            brings.values.iter().zip(&sent.places).filter(|(_, place)| place.0 == index)
        {
            let place = memory.as_mut().slice(start..start + values.len())?;
            // Values with share 0 may be NaN, and 0 times NaN is NaN: zeros are sent instead.
            match brings.share == VoteShare::Of(0.0) {
                true => options.queue.zero(place)?,
                false => pack(*values, from.map(Buffer::as_slice), place, &options.queue)?,
            }
        }
    }
    Ok(())
}

/// Places the spots one after another in their lanes.
fn places(plan: &LocalPlan, lanes: &[Lane], bringing: &[Bringing<'_>]) -> Vec<Sent> {
    let mut next = vec![0; lanes.len()];
    let mut sent = Vec::new();
    for Bringing { fragment, tokens, values, .. } in bringing {
        let place = |Value { spot, values, .. }: &Value<'_>| {
            let lane = lanes.iter().position(|lane| lane.takes(plan, *fragment, spot.wire));
            let lane = lane.unwrap_or_else(|| unreachable!("lanes are those of what is brought"));
            let start = next[lane];
            next[lane] += values.len();
            (lane, start)
        };
        let places = values.iter().map(place).collect();
        sent.push(Sent { tokens: *tokens, snapshots: Vec::new(), places });
    }
    sent
}

/// Starts the reduction of a lane, bucket by bucket.
fn start(
    plan: &LocalPlan,
    lane: &Lane,
    packed: Buffer,
    (across, options): (&dyn Communicator, &Options),
    op: Op,
    failed: &mut Option<meshstep_comm::Error>,
) -> Result<Vec<Started>, Error> {
    let (mut rest, mut started) = (packed, Vec::new());
    for bucket in lane.buckets(plan.bucket_len) {
        let after = rest.split_off(bucket.len())?;
        let part = std::mem::replace(&mut rest, after);
        let start = match failed.clone() {
            None => across.start(op, part, &options.queue),
            // The other ranks' call for this bucket must not match a later call of this rank.
            Some(error) => Err((part, error)),
        };
        *failed = start.as_ref().err().map(|(_, error)| error.clone());
        started.push(start);
    }
    Ok(started)
}

impl Bringing<'_> {
    /// Copies the values, each with its `t`.
    pub(crate) fn snapshots(
        &self,
        params: &Params,
        staging: &mut Staging,
    ) -> Result<Vec<(Buffer, u64)>, Error> {
        let snapshot = |Value { spot, values, .. }: &Value<'_>| {
            let options = params.options();
            let mut copy = staging.take(values.len(), spot.own, options)?;
            options.queue.copy(*values, copy.as_mut())?;
            Ok((copy, params.t(spot.entry)))
        };
        self.values.iter().map(snapshot).collect()
    }
}

impl Landed {
    /// Iterates over the landed vectors, one for each lane.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = Slice<'_>> {
        self.0.iter().flatten().map(Buffer::as_slice)
    }

    /// Returns true if spot `i` has a landed result; otherwise its values have been replaced by the result.
    pub(crate) fn has(&self, sent: &Sent, i: usize) -> bool {
        self.0[sent.places[i].0].is_some()
    }

    /// Returns the landed result for spot `i`, of `len` elements, from the places in `sent`.
    pub(crate) fn of(&self, sent: &Sent, i: usize, len: usize) -> Result<Slice<'_>, meshstep_tensor::Error> {
        let (lane, start) = sent.places[i];
        let Some(whole) = &self.0[lane] else { unreachable!("what was packed has landed") };
        whole.as_slice().slice(start..start + len)
    }
}
