//! Fragments on their way: packed, sent to the other workers, landed.

use super::agreement::Share;
use super::merge::bring;
use super::packing::Lane;
use super::spots::Spot;
use super::{Fragment, LocalPlan, Placement};
use crate::{Error, Options, wire};
use meshstep_comm::{Communicator, InFlight, Op, Reduction};
use meshstep_tensor::{Buffer, Category, Slice};

type Started = Result<InFlight, (Buffer, meshstep_comm::Error)>;

/// What was sent together and arrives together.
#[derive(Debug)]
pub(crate) struct Flight {
    /// Its fragments, in the order they were packed.
    pub(crate) fragments: Vec<usize>,
    /// The step, and the side of it, at whose exchange it arrives.
    pub(crate) arrives: (u64, Placement),
    /// Of each fragment its tokens, and what was sent and at which `t` of each spot where it is merged later.
    pub(crate) sent: Vec<Sent>,
    lanes: Vec<(Lane, Vec<Started>)>,
}

/// What a worker sent of a fragment.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    pub(crate) tokens: u64,
    pub(crate) snapshots: Vec<(Buffer, u64)>,
}

/// What has landed: a vector for each lane.
#[derive(Debug)]
pub(crate) struct Landed {
    lanes: Vec<(Lane, Buffer, usize)>,
}

/// What a fragment brings.
pub(crate) struct Bringing<'a> {
    pub(crate) fragment: usize,
    pub(crate) share: Share,
    /// Each spot's values, and from where on they are counted.
    pub(crate) values: Vec<(&'a Spot, Slice<'a>, Option<&'a Buffer>)>,
}

impl Flight {
    /// Packs what `bringing` brings into `lanes` and sends it off. An error of memory is this rank's alone; one of the
    /// communicator comes back with the landing.
    pub(crate) fn launch(
        plan: &LocalPlan,
        lanes: Vec<Lane>,
        bringing: &[Bringing<'_>],
        (across, options): (&dyn Communicator, &Options),
        arrives: (u64, Placement),
    ) -> Result<Flight, Error> {
        let mut flight = Flight {
            fragments: bringing.iter().map(|b| b.fragment).collect(),
            arrives,
            sent: bringing.iter().map(|_| Sent::default()).collect(),
            lanes: Vec::new(),
        };
        let mut failed = None;
        for lane in lanes {
            let of = |b: &&Bringing<'_>| lane.of(&plan.fragments[b.fragment]);
            let alike = bringing.iter().filter(of).all(|b| b.share == Share::Alike);
            let packed = pack(plan, lane, bringing, (across.world_size(), alike), options)?;
            let op = Op::all_reduce(if alike { Reduction::Mean } else { Reduction::Sum });
            let mut rest = packed;
            let mut started = Vec::new();
            for bucket in lane.buckets(plan.bucket_len) {
                let after = rest.split_off(bucket.len())?;
                let part = std::mem::replace(&mut rest, after);
                let start = match &failed {
                    None => across.start(op, part, &options.queue),
                    // The other ranks' call is not to meet this one's next.
                    Some(error) => Err((part, meshstep_comm::Error::clone(error))),
                };
                failed = start.as_ref().err().map(|(_, error)| error.clone());
                started.push(start);
            }
            flight.lanes.push((lane, started));
        }
        Ok(flight)
    }

    /// Waits for everything, and gives it with the first failure.
    pub(crate) fn land(&mut self, options: &Options) -> (Landed, Result<(), meshstep_comm::Error>) {
        let (mut landed, mut arrived) = (Landed { lanes: Vec::new() }, Ok(()));
        for (lane, started) in self.lanes.drain(..) {
            let mut whole: Option<Buffer> = None;
            for start in started {
                let (part, result) = wire::land(start, &options.queue);
                arrived = arrived.and(result);
                whole = Some(match whole {
                    None => part,
                    Some(so_far) => so_far
                        .join(part)
                        .unwrap_or_else(|_| unreachable!("parts land in the order they were cut")),
                });
            }
            landed.lanes.extend(whole.map(|whole| (lane, whole, 0)));
        }
        (landed, arrived)
    }
}

impl Lane {
    /// Whether `fragment` may go here, whatever the type.
    fn of(&self, fragment: &Fragment) -> bool {
        self.takes(fragment, self.wire)
    }
}

fn pack(
    plan: &LocalPlan,
    lane: Lane,
    bringing: &[Bringing<'_>],
    (workers, alike): (usize, bool),
    options: &Options,
) -> Result<Buffer, Error> {
    let mut packed = Buffer::zeroed(lane.len, lane.wire, &options.meter, Category::Staging)?;
    let mut next = 0;
    for Bringing { fragment, share, values } in bringing {
        let scale = match share {
            _ if alike => None,
            Share::Alike => Some(1.0 / workers as f64),
            Share::Of(scale) => Some(*scale),
        };
        let here = |spot: &Spot| lane.takes(&plan.fragments[*fragment], spot.wire);
        for (_, values, anchor) in values.iter().filter(|(spot, ..)| here(spot)) {
            let place = packed.as_mut().slice(next..next + values.len())?;
            next += values.len();
            bring(*values, *anchor, scale, place)?;
        }
    }
    assert!(next == lane.len, "a lane has room for {} elements and takes {next}", lane.len);
    Ok(packed)
}

impl Landed {
    /// Every vector, whole.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = Slice<'_>> {
        self.lanes.iter().map(|(_, whole, _)| whole.as_slice())
    }

    /// What has arrived of the next spot of `fragment`: spots are asked for in the order they were packed.
    pub(crate) fn next(
        &mut self,
        fragment: &Fragment,
        spot: &Spot,
    ) -> Result<Slice<'_>, meshstep_tensor::Error> {
        let lane = self.lanes.iter_mut().find(|(lane, ..)| lane.takes(fragment, spot.wire));
        let Some((_, whole, next)) = lane else { unreachable!("what was packed has landed") };
        let from = *next;
        *next += spot.range.len();
        whole.as_slice().slice(from..*next)
    }
}
