//! State of a rank for a plan, and one exchange: an agreement, the reductions of all fragments due, a vote, the merges.

use crate::exchange::elastic_round::Following;
use crate::exchange::fragment_state::{Arrived, Parts};
use crate::exchange::in_flight::{Flight, Landed, Sent};
use crate::exchange::in_place::InPlace;
use crate::exchange::staging::Staging;
use crate::exchange::votes::Veto;
use crate::plan::packing::Loads;
use crate::{LocalError, LocalPlan, Merge, OnFailure, Placement, What, Workers};
use meshstep_shard::extend::Params;
use meshstep_shard::{Error, Optimizer};
use std::collections::BTreeSet;

/// Outcome of one step's exchanges, as indices of fragments.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exchanged {
    /// Sent, with a result that arrives later.
    pub sent: Vec<usize>,
    /// Merged or reset.
    pub merged: Vec<usize>,
    /// Not applied, with the reason; the fragments follow their failure policy.
    pub failed: Vec<(usize, Veto)>,
    /// In flight when workers came or went before the step, and given up; the fragments follow their failure policy.
    pub given_up: Vec<usize>,
}

/// Fragments and flights that one exchange handles.
#[derive(Debug, Default)]
pub(super) struct Point {
    pub(super) sent: Vec<usize>,
    pub(super) reset: Vec<usize>,
    pub(super) arriving: Vec<Flight>,
}

/// State of a rank for a plan.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) plan: LocalPlan,
    pub(crate) workers: Workers,
    pub(crate) parts: Parts,
    pub(super) loads: Vec<Loads>,
    pub(super) staging: Staging,
    pub(crate) flights: Vec<Flight>,
    /// Fragments to send again.
    pub(crate) again: BTreeSet<usize>,
    /// The next or current step, from 0.
    pub(crate) step: u64,
    /// True if this worker's values count.
    pub(crate) active: bool,
    /// True if parameters have changed since the step began.
    pub(crate) changed: bool,
    pub(crate) report: Exchanged,
    /// Error after which workers can no longer exchange.
    pub(crate) failure: Option<Error>,
    /// State in an elastic run, one that workers join and leave.
    pub(crate) following: Option<Following>,
}

impl Engine {
    /// Allocates the memory that the plan needs beside the optimizer; the current values count as the last exchange's results.
    pub(crate) fn new(plan: LocalPlan, workers: Workers, optimizer: &Optimizer) -> Result<Self, LocalError> {
        let parts = Parts::new(&plan, optimizer)?;
        let loads = parts.loads();
        Ok(Engine {
            plan,
            workers,
            parts,
            loads,
            staging: Staging::default(),
            flights: Vec::new(),
            again: BTreeSet::new(),
            step: 0,
            active: true,
            changed: false,
            report: Exchanged::default(),
            failure: None,
            following: None,
        })
    }

    /// Returns true if this step has something to do on this side of its update.
    pub(crate) fn is_due(&self, placement: Placement) -> bool {
        self.plan.due(self.step, placement).next().is_some()
            || self.again.iter().any(|&f| self.is_retried(f, placement))
            || self.flights.iter().any(|flight| flight.arrives == (self.step, placement))
    }

    /// Returns true if fragment `f`, which is to be sent again, is sent on this side.
    fn is_retried(&self, f: usize, placement: Placement) -> bool {
        self.plan.fragments[f].timing.placement == placement && !self.waits(f, placement)
    }

    /// Runs one exchange if anything is due; `fault`: this worker could not take its step. Collective over all workers. Vetoes go
    /// to `report`, errors that end all exchanges to `failure`; a returned error is this rank's alone.
    pub(crate) fn meet(
        &mut self,
        params: &mut Params,
        placement: Placement,
        fault: bool,
    ) -> Result<(), Error> {
        if !self.is_due(placement) {
            return Ok(());
        }
        params.wait()?;
        let mut point = self.point(placement);
        let met = match point.sent.is_empty() && point.arriving.is_empty() {
            true => Ok(()), // no other worker takes part
            false => self.exchange(params, &mut point, placement, fault)?,
        };
        match met {
            Ok(()) => self.reset(params, &point.reset),
            Err(veto) => self.leave(params, point, veto),
        }
    }

    /// Gives up all flights; their fragments follow their failure policy.
    pub(crate) fn give_up(&mut self, params: &mut Params, veto: Veto) -> Result<(), Error> {
        let arriving = std::mem::take(&mut self.flights);
        self.report.given_up.extend(arriving.iter().flat_map(|flight| &flight.fragments));
        let failed = std::mem::take(&mut self.report.failed);
        params.wait()?;
        let left = self.leave(params, Point { arriving, ..Point::default() }, veto);
        self.report.failed = failed;
        left
    }

    /// Prepares the next step, and returns the report of this one.
    #[cfg(feature = "checkpoint")]
    pub(crate) fn forget(&mut self) -> Exchanged {
        (self.changed, self.failure) = (false, None);
        std::mem::take(&mut self.report)
    }

    fn point(&mut self, placement: Placement) -> Point {
        let mut point = Point::default();
        let mut due: BTreeSet<usize> = self.plan.due(self.step, placement).collect();
        due.extend(self.again.iter().filter(|&&f| self.is_retried(f, placement)));
        self.again.retain(|f| !due.contains(f));
        let away = |f: usize| self.flights.iter().any(|flight| flight.fragments.contains(&f));
        for f in due {
            match self.plan.fragments[f].merge {
                Merge::Reset => point.reset.push(f),
                // A fragment that failed and was sent again is still in flight.
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
        params: &mut Params,
        point: &mut Point,
        placement: Placement,
        fault: bool,
    ) -> Result<Result<(), Veto>, Error> {
        if !self.may_exchange(placement) {
            return Ok(Err(Veto::Failed { rank: self.workers.world.rank() }));
        }
        let mut in_place = InPlace::default();
        let exchanged = self.reduce_and_merge(params, point, (placement, fault), &mut in_place);
        // Nothing is left to put back after an exchange that counts.
        let put_back = in_place.put_back(params);
        in_place.give_memory(&mut self.staging);
        put_back?;
        exchanged
    }

    fn reduce_and_merge(
        &mut self,
        params: &mut Params,
        point: &mut Point,
        (placement, fault): (Placement, bool),
        in_place: &mut InPlace,
    ) -> Result<Result<(), Veto>, Error> {
        let reduced = self.reduce(params, point, (placement, fault), in_place)?;
        let counted = match &reduced {
            Ok(_) => self.confirm(Ok(()), false)?,
            Err(veto) => {
                let broken = matches!(veto, Veto::NotFinite { .. }) && !self.brings_finite(params, point)?;
                self.confirm(Err(*veto), fault || broken)?
            }
        };
        let (later, landed) = match (reduced, counted) {
            (Ok(reduced), Ok(())) => reduced,
            (_, Err(veto)) | (Err(veto), _) => return Ok(Err(veto)),
        };
        in_place.commit();
        self.report.sent.extend(later.iter().flat_map(|flight| &flight.fragments));
        self.flights.extend(later);
        let arrived: Vec<_> = std::mem::take(&mut point.arriving).into_iter().zip(landed).collect();
        self.take_in(params, &arrived)?;
        let used = arrived.into_iter().flat_map(|(mut flight, landed)| flight.take_memory(landed));
        self.staging.give(used.collect::<Vec<_>>());
        self.active = true;
        Ok(Ok(()))
    }

    /// Merges what has arrived, outer momentum before the outer steps that use it.
    fn take_in(&mut self, params: &mut Params, arrived: &[(Flight, Landed)]) -> Result<(), Error> {
        let all = || {
            arrived.iter().flat_map(|(flight, landed)| {
                flight.fragments.iter().zip(&flight.sent).map(move |(&f, sent)| (f, sent, landed))
            })
        };
        let first = |plan: &LocalPlan, f: usize| matches!(plan.fragments[f].what, What::OuterMomentum(_));
        let (momenta, others): (Vec<_>, Vec<_>) = all().partition(|(f, ..)| first(&self.plan, *f));
        for (f, sent, landed) in momenta.into_iter().chain(others) {
            self.take_in_one(params, f, sent, landed)?;
        }
        Ok(())
    }

    fn take_in_one(
        &mut self,
        params: &mut Params,
        f: usize,
        sent: &Sent,
        landed: &Landed,
    ) -> Result<(), Error> {
        let fragment = &self.plan.fragments[f];
        for i in 0..self.parts.of(f).spots.len() {
            let spot = &self.parts.of(f).spots[i];
            let reduced = landed.has(sent, i).then(|| landed.of(sent, i, spot.range.len())).transpose()?;
            let snapshot = sent.snapshots.get(i);
            self.parts.merge(params, fragment, (f, i), Arrived { reduced, snapshot })?;
        }
        let part = self.parts.of_mut(f);
        part.outer_t += u64::from(fragment.outer().is_some());
        part.tokens -= sent.tokens;
        self.report.merged.push(f);
        self.follow_up(params, f)
    }

    /// Updates dependent state after fragment `f` has changed, on all ranks of the worker, even those without a part of it.
    fn follow_up(&mut self, params: &mut Params, f: usize) -> Result<(), Error> {
        self.changed |= self.plan.fragments[f].what == What::Params;
        self.parts.follow_masters(params, f)
    }

    fn reset(&mut self, params: &mut Params, fragments: &[usize]) -> Result<(), Error> {
        for &f in fragments {
            self.parts.reset(params, &self.plan.fragments[f], f)?;
            self.report.merged.push(f);
        }
        Ok(())
    }

    /// Discards the exchange; its fragments follow their failure policy.
    fn leave(&mut self, params: &mut Params, point: Point, veto: Veto) -> Result<(), Error> {
        let Point { sent, reset, mut arriving } = point;
        let mut failed: BTreeSet<usize> = sent.into_iter().chain(reset).collect();
        for flight in &mut arriving {
            // A started operation is waited for, whatever its result.
            let (landed, _) = flight.land(params.options());
            failed.extend(&flight.fragments);
            self.staging.give(flight.take_memory(landed));
        }
        for f in failed {
            match self.plan.fragments[f].on_failure {
                OnFailure::KeepLocal => {}
                OnFailure::Retry => drop(self.again.insert(f)),
                OnFailure::RollBack => {
                    self.parts.roll_back(params, f)?;
                    self.follow_up(params, f)?;
                }
            }
            self.report.failed.push((f, veto));
        }
        Ok(())
    }
}
