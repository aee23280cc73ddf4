//! What this rank keeps of a plan, and one exchange by it: one agreement, what is due on its way together, one vote.

use super::agreement::{Agreed, Brought, Seen, Veto, vote};
use super::flight::{Bringing, Flight, Landed};
use super::merge::{Merging, finite, power, reset};
use super::packing::Loads;
use super::spots::{Spot, Vector};
use super::{Fragment, LocalError, LocalPlan, Merge, OnFailure, Placement, What};
use crate::{Error, Optimizer};
use meshstep_comm::Communicator;
use meshstep_tensor::{Buffer, Category, DType, Slice, SliceMut};
use std::collections::BTreeSet;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Who exchanges with whom.
#[derive(Clone, Debug)]
pub struct Workers {
    /// All ranks of all workers: they decide together.
    pub world: Arc<dyn Communicator>,
    /// The ranks that have the same shard, one of each worker, in the workers' order: they exchange.
    pub across: Arc<dyn Communicator>,
}

/// What has happened to fragments in one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exchanged {
    /// Sent off, to arrive later.
    pub sent: Vec<usize>,
    /// Merged or reset.
    pub merged: Vec<usize>,
    /// Left as they were, by their policy, and why.
    pub failed: Vec<(usize, Veto)>,
}

/// A fragment on this rank.
#[derive(Debug)]
struct Part {
    spots: Vec<Spot>,
    /// Of each spot what its last exchange came to, where that is needed.
    anchors: Vec<Buffer>,
    /// Of each spot the outer optimizer's state.
    outer: Vec<Vec<Buffer>>,
    /// Steps the outer optimizer has taken.
    outer_t: u64,
    /// Tokens since it was last merged.
    tokens: u64,
}

/// What is at hand at an exchange.
#[derive(Debug, Default)]
struct Point {
    sent: Vec<usize>,
    reset: Vec<usize>,
    arriving: Vec<Flight>,
}

/// Everything that a rank keeps for a plan.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) plan: LocalPlan,
    pub(crate) workers: Workers,
    parts: Vec<Part>,
    loads: Vec<Loads>,
    flights: Vec<Flight>,
    /// Fragments to be sent again.
    again: BTreeSet<usize>,
    /// The step that is next or under way, from 0.
    pub(crate) step: u64,
    /// Whether this worker's values count.
    pub(crate) active: bool,
    /// Whether parameters have changed since the step began.
    pub(crate) changed: bool,
    pub(crate) report: Exchanged,
    /// Why workers can no longer exchange.
    pub(crate) failure: Option<Error>,
}

impl Engine {
    /// Room for what the plan needs beside the optimizer; values as they are count as the last exchange's.
    pub(crate) fn new(plan: LocalPlan, workers: Workers, optimizer: &Optimizer) -> Result<Self, LocalError> {
        let spots = plan.spots(optimizer)?;
        let loads = spots.iter().map(|spots| loads(spots)).collect();
        let mut parts = Vec::new();
        for (fragment, spots) in plan.fragments.iter().zip(spots) {
            parts.push(Part::new(fragment, spots, optimizer)?);
        }
        Ok(Engine {
            plan,
            workers,
            parts,
            loads,
            flights: Vec::new(),
            again: BTreeSet::new(),
            step: 0,
            active: true,
            changed: false,
            report: Exchanged::default(),
            failure: None,
        })
    }

    /// Whether there is something to do after this step's update.
    pub(crate) fn is_due(&self, placement: Placement) -> bool {
        let retried = |&f: &usize| self.plan.fragments[f].timing.placement == placement;
        self.plan.due(self.step, placement).next().is_some()
            || self.again.iter().any(retried)
            || self.flights.iter().any(|flight| flight.arrives == (self.step, placement))
    }

    /// Counts what this worker has seen.
    pub(crate) fn count(&mut self, tokens: u64) {
        self.parts.iter_mut().for_each(|part| part.tokens = part.tokens.saturating_add(tokens));
    }

    /// One exchange, if anything is due; `fault`: this worker could not take its step. Collective over all workers. An error is
    /// this rank's alone; what all have alike, or what ends their exchanging, is in the report.
    pub(crate) fn meet(
        &mut self,
        optimizer: &mut Optimizer,
        placement: Placement,
        fault: bool,
    ) -> Result<(), Error> {
        if !self.is_due(placement) {
            return Ok(());
        }
        let mut point = self.point(placement);
        let met = match point.sent.is_empty() && point.arriving.is_empty() {
            true => Ok(()), // nobody else is concerned
            false => self.exchange(optimizer, &mut point, placement, fault)?,
        };
        match met {
            Ok(()) => self.take_in_resets(optimizer, &point.reset),
            Err(veto) => self.leave(optimizer, point, veto),
        }
    }

    fn point(&mut self, placement: Placement) -> Point {
        let mut point = Point::default();
        let here = |&f: &usize| self.plan.fragments[f].timing.placement == placement;
        let mut due: BTreeSet<usize> = self.plan.due(self.step, placement).collect();
        due.extend(self.again.iter().filter(|f| here(f)));
        self.again.retain(|f| !due.contains(f));
        let away = |f: usize| self.flights.iter().any(|flight| flight.fragments.contains(&f));
        for f in due {
            match self.plan.fragments[f].merge {
                Merge::Reset => point.reset.push(f),
                // One that failed and was sent again is still on its way.
                _ if away(f) => {}
                _ => point.sent.push(f),
            }
        }
        let arrives = |flight: &mut Flight| flight.arrives == (self.step, placement);
        point.arriving = self.flights.extract_if(.., arrives).collect();
        point
    }

    fn exchange(
        &mut self,
        optimizer: &mut Optimizer,
        point: &mut Point,
        placement: Placement,
        fault: bool,
    ) -> Result<Result<(), Veto>, Error> {
        let agreed = self.agree(optimizer, point, placement, fault);
        let agreed = match self.heard(agreed)? {
            Ok(agreed) => agreed,
            Err(veto) => return Ok(Err(veto)),
        };
        let own = self.workers.across.rank();
        for &f in &point.sent {
            if let Err(veto) = self.plan.share(f, own, &agreed) {
                return Ok(Err(veto));
            }
        }
        let launched = self.launch(optimizer, &point.sent, placement, &agreed)?;
        let (now, later) =
            launched.into_iter().partition(|flight: &Flight| flight.arrives == (self.step, placement));
        point.arriving.extend::<Vec<Flight>>(now);
        let mut seen = Seen::Good;
        let mut landed: Vec<Landed> = Vec::new();
        for flight in &mut point.arriving {
            let (vectors, arrived) = flight.land(optimizer.options());
            let mut good = true;
            for vector in vectors.vectors() {
                good &= finite(vector)?;
            }
            seen = match arrived {
                Err(_) => Seen::Failed,
                Ok(()) if !good && seen == Seen::Good => Seen::NotFinite,
                Ok(()) => seen,
            };
            landed.push(vectors);
        }
        let counted = vote(&*self.workers.world, seen, optimizer.options());
        if let Err(veto) = self.heard(counted)? {
            return Ok(Err(veto));
        }
        let later: Vec<Flight> = later;
        self.report.sent.extend(later.iter().flat_map(|flight| &flight.fragments));
        self.flights.extend(later);
        for (flight, landed) in std::mem::take(&mut point.arriving).into_iter().zip(landed) {
            self.take_in(optimizer, &flight, landed)?;
        }
        self.active = true;
        Ok(Ok(()))
    }

    /// What became of a collective of all workers: its failure ends their exchanging, and is no error of this rank.
    fn heard<T>(&mut self, result: Result<Result<T, Veto>, Error>) -> Result<Result<T, Veto>, Error> {
        match result {
            Err(error @ Error::Comm(_)) => {
                self.failure = Some(error);
                Ok(Err(Veto::Failed { rank: self.workers.world.rank() }))
            }
            other => other,
        }
    }

    fn agree(
        &self,
        optimizer: &Optimizer,
        point: &Point,
        placement: Placement,
        fault: bool,
    ) -> Result<Result<Agreed, Veto>, Error> {
        let arriving: Vec<&Vec<usize>> = point.arriving.iter().map(|flight| &flight.fragments).collect();
        let text = format!(
            "{:x} {} {placement:?} {:?} {:?} {arriving:?}",
            self.plan.hash(),
            self.step,
            point.sent,
            point.reset
        );
        let tokens = (0..self.parts.len()).filter(|&f| self.plan.weighed(f).is_some());
        let brought = Brought {
            digest: xxh3_64(text.as_bytes()),
            fault,
            worker: self.workers.across.rank(),
            active: self.active,
            tokens: tokens.map(|f| self.parts[f].tokens).collect(),
        };
        let Workers { world, across } = &self.workers;
        self.plan.agree(&**world, across.world_size(), &brought, optimizer.options())
    }

    /// Sends what is due, what arrives together in one flight.
    fn launch(
        &self,
        optimizer: &Optimizer,
        sent: &[usize],
        placement: Placement,
        agreed: &Agreed,
    ) -> Result<Vec<Flight>, Error> {
        let delay = |f: &usize| self.plan.fragments[*f].timing.delay;
        let delays: BTreeSet<u64> = sent.iter().map(delay).collect();
        let mut flights = Vec::new();
        for after in delays {
            let together: Vec<usize> = sent.iter().copied().filter(|f| delay(f) == after).collect();
            let mut bringing = Vec::new();
            for &fragment in &together {
                let own = self.workers.across.rank();
                let share = self.plan.share(fragment, own, agreed);
                let Ok(share) = share else { continue }; // all were looked at before
                let values = self.values(optimizer, fragment)?;
                bringing.push(Bringing { fragment, share, values });
            }
            let lanes = self.plan.lanes(together.iter().copied(), &self.loads);
            let to = (&*self.workers.across, optimizer.options());
            let mut flight = Flight::launch(
                &self.plan,
                lanes,
                &bringing,
                to,
                (self.step.saturating_add(after), placement),
            )?;
            for (sent, bringing) in flight.sent.iter_mut().zip(&bringing) {
                sent.tokens = self.parts[bringing.fragment].tokens;
                if after > 0 && matches!(self.plan.fragments[bringing.fragment].merge, Merge::Mean { .. }) {
                    sent.snapshots = snapshots(optimizer, &bringing.values)?;
                }
            }
            flights.push(flight);
        }
        Ok(flights)
    }

    /// What a fragment has here, and from where on that is counted where differences travel.
    fn values<'a>(
        &'a self,
        optimizer: &'a Optimizer,
        f: usize,
    ) -> Result<Vec<(&'a Spot, Slice<'a>, Option<&'a Buffer>)>, Error> {
        let (part, fragment) = (&self.parts[f], &self.plan.fragments[f]);
        let mut values = Vec::new();
        for (i, spot) in part.spots.iter().enumerate() {
            let anchor = part.anchors.get(i).filter(|_| fragment.sends_differences(spot));
            values.push((spot, self.look(optimizer, spot)?, anchor));
        }
        Ok(values)
    }

    fn look<'a>(&'a self, optimizer: &'a Optimizer, spot: &Spot) -> Result<Slice<'a>, Error> {
        let vector = match spot.vector {
            Vector::Outer { fragment, spot, slot } => self.parts[fragment].outer[spot][slot].as_slice(),
            other => match optimizer.vector(other) {
                Some(vector) => vector,
                None => unreachable!("a spot is of a vector that there is"),
            },
        };
        Ok(vector.slice(spot.range.clone())?)
    }

    /// Merges what has arrived.
    fn take_in(
        &mut self,
        optimizer: &mut Optimizer,
        flight: &Flight,
        mut landed: Landed,
    ) -> Result<(), Error> {
        for (&f, sent) in flight.fragments.iter().zip(&flight.sent) {
            let spots = self.parts[f].spots.clone();
            for (i, spot) in spots.iter().enumerate() {
                let reduced = landed.next(&self.plan.fragments[f], spot)?;
                let t = optimizer.entries[spot.entry].t;
                let snapshot = sent.snapshots.get(i).map(|(values, then)| (values, t - then));
                self.merge(optimizer, f, i, reduced, snapshot)?;
            }
            let part = &mut self.parts[f];
            part.outer_t += u64::from(matches!(self.plan.fragments[f].merge, Merge::Outer(_)));
            part.tokens -= sent.tokens;
            self.report.merged.push(f);
            self.follow(optimizer, f)?;
        }
        Ok(())
    }

    fn merge(
        &mut self,
        optimizer: &mut Optimizer,
        f: usize,
        i: usize,
        reduced: Slice<'_>,
        snapshot: Option<(&Buffer, u64)>,
    ) -> Result<(), Error> {
        let fragment = &self.plan.fragments[f];
        let part = &mut self.parts[f];
        let spot = part.spots[i].clone();
        let differences = fragment.sends_differences(&spot);
        let mut anchor = part.anchors.get_mut(i).map(Buffer::take);
        let mut outer = part.outer.get_mut(i).map(std::mem::take).unwrap_or_default();
        let t = part.outer_t + 1;
        let left = |n| if let Merge::Mean { beta } = fragment.merge { power(beta, n) } else { 1.0 };
        let merging = Merging {
            reduced,
            differences,
            anchor: anchor.as_mut(),
            snapshot: snapshot.map(|(sent, n)| (sent, left(n))),
            alpha: fragment.alpha,
        };
        let rule = fragment.outer().cloned();
        let values = write(&mut self.parts, optimizer, &spot)?;
        let merged = match rule {
            Some(rule) => merging.outer(values, &rule, &mut outer, t).map_err(Error::from),
            None => merging.mean(values).map_err(Error::from),
        };
        let part = &mut self.parts[f];
        if let (Some(place), Some(anchor)) = (part.anchors.get_mut(i), anchor) {
            *place = anchor;
        }
        if let Some(place) = part.outer.get_mut(i) {
            *place = outer;
        }
        merged
    }

    fn take_in_resets(&mut self, optimizer: &mut Optimizer, fragments: &[usize]) -> Result<(), Error> {
        for &f in fragments {
            let alpha = self.plan.fragments[f].alpha;
            for spot in self.parts[f].spots.clone() {
                reset(write(&mut self.parts, optimizer, &spot)?, alpha)?;
            }
            if let (What::OuterMomentum(of), true) = (&self.plan.fragments[f].what, alpha == 1.0) {
                self.parts[*of].outer_t = 0;
            }
            self.report.merged.push(f);
        }
        Ok(())
    }

    /// Nothing is applied; every fragment goes on by its policy.
    fn leave(&mut self, optimizer: &mut Optimizer, point: Point, veto: Veto) -> Result<(), Error> {
        let Point { sent, reset, mut arriving } = point;
        let mut failed: BTreeSet<usize> = sent.into_iter().chain(reset).collect();
        for flight in &mut arriving {
            // What was started is waited for, whatever it brings.
            let _ = flight.land(optimizer.options());
            failed.extend(&flight.fragments);
        }
        for f in failed {
            match self.plan.fragments[f].on_failure {
                OnFailure::KeepLocal => {}
                OnFailure::Retry => drop(self.again.insert(f)),
                OnFailure::RollBack => self.roll_back(optimizer, f)?,
            }
            self.report.failed.push((f, veto));
        }
        Ok(())
    }

    fn roll_back(&mut self, optimizer: &mut Optimizer, f: usize) -> Result<(), Error> {
        for (i, spot) in self.parts[f].spots.clone().iter().enumerate() {
            let Some(mut anchor) = self.parts[f].anchors.get_mut(i).map(Buffer::take) else { continue };
            let copied = write(&mut self.parts, optimizer, spot)?.copy_from(anchor.as_slice());
            std::mem::swap(&mut self.parts[f].anchors[i], &mut anchor);
            copied?;
        }
        self.follow(optimizer, f)
    }

    /// Parameters follow their masters, and are to go to the other ranks.
    fn follow(&mut self, optimizer: &mut Optimizer, f: usize) -> Result<(), Error> {
        let mut buckets = BTreeSet::new();
        for spot in &self.parts[f].spots {
            match spot.vector {
                Vector::Params { .. } => self.changed = true,
                Vector::Master { bucket } => drop(buckets.insert(bucket)),
                Vector::State { .. } | Vector::Outer { .. } => {}
            }
        }
        self.changed |= !buckets.is_empty();
        buckets.into_iter().try_for_each(|bucket| optimizer.buckets[bucket].follow_master())
    }
}

impl Part {
    fn new(fragment: &Fragment, spots: Vec<Spot>, optimizer: &Optimizer) -> Result<Self, Error> {
        let meter = &optimizer.options().meter;
        let zeroed = |len, dtype| Buffer::zeroed(len, dtype, meter, Category::State);
        let (mut anchors, mut outer) = (Vec::new(), Vec::new());
        for spot in &spots {
            if fragment.has_anchor(spot) {
                let mut anchor = zeroed(spot.range.len(), spot.own)?;
                // Outer state begins as zeros.
                if let Some(values) = optimizer.vector(spot.vector) {
                    anchor.as_mut().copy_from(values.slice(spot.range.clone())?)?;
                }
                anchors.push(anchor);
            }
            if let Some(rule) = fragment.outer() {
                let state = rule.rule.state().iter().map(|_| zeroed(spot.range.len(), DType::F64));
                outer.push(state.collect::<Result<Vec<Buffer>, _>>()?);
            }
        }
        Ok(Part { spots, anchors, outer, outer_t: 0, tokens: 0 })
    }
}

impl Fragment {
    /// Whether differences from the last exchange travel: of parameters in a narrower type.
    fn sends_differences(&self, spot: &Spot) -> bool {
        self.what == What::Params && spot.wire.size() < spot.own.size()
    }

    /// Whether what the last exchange came to is kept.
    fn has_anchor(&self, spot: &Spot) -> bool {
        let travels = self.travels();
        travels
            && (self.outer().is_some()
                || self.on_failure == OnFailure::RollBack
                || self.sends_differences(spot))
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

fn write<'a>(
    parts: &'a mut [Part],
    optimizer: &'a mut Optimizer,
    spot: &Spot,
) -> Result<SliceMut<'a>, Error> {
    let vector = match spot.vector {
        Vector::Outer { fragment, spot, slot } => parts[fragment].outer[spot][slot].as_mut(),
        other => match optimizer.vector_mut(other) {
            Some(vector) => vector,
            None => unreachable!("a spot is of a vector that there is"),
        },
    };
    Ok(vector.slice(spot.range.clone())?)
}

fn snapshots(
    optimizer: &Optimizer,
    values: &[(&Spot, Slice<'_>, Option<&Buffer>)],
) -> Result<Vec<(Buffer, u64)>, Error> {
    let meter = &optimizer.options().meter;
    let mut all = Vec::new();
    for (spot, values, _) in values {
        let mut snapshot = Buffer::zeroed(values.len(), spot.own, meter, Category::Staging)?;
        snapshot.as_mut().copy_from(*values)?;
        all.push((snapshot, optimizer.entries[spot.entry].t));
    }
    Ok(all)
}
