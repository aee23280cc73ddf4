//! Reductions of one exchange: the agreement before them, lanes that are packed and lanes in place, the vote after them.

use crate::exchange::engine::{Engine, Point};
use crate::exchange::finite::all_finite;
use crate::exchange::in_flight::{Bringing, Flight, Landed};
use crate::exchange::in_place::{InPlace, InPlaceSeen};
use crate::exchange::owned_spans::on_gpu;
use crate::exchange::votes::{Agreed, Brought, Seen, Veto, vote};
use crate::{Placement, Workers};
use meshstep_shard::Error;
use meshstep_shard::extend::Params;
use std::collections::BTreeSet;
use twox_hash::XxHash3_64;

/// Flights that arrive later, and the results that have arrived.
type Reduced = (Vec<Flight>, Vec<Landed>);

impl Engine {
    /// Starts and lands flights; returns the flights that arrive later and the landed results, if no rank vetoes.
    pub(super) fn reduce(
        &mut self,
        params: &mut Params,
        point: &mut Point,
        (placement, fault): (Placement, bool),
        in_place: &mut InPlace,
    ) -> Result<Result<Reduced, Veto>, Error> {
        let agreed = self.agree(params, point, placement, fault);
        let agreed = match self.heard(params, agreed)? {
            Ok(agreed) => agreed,
            Err(veto) => return Ok(Err(veto)),
        };
        let own = self.workers.across.rank();
        if let Err(veto) = point.sent.iter().try_for_each(|&f| self.plan.share(f, own, &agreed).map(drop)) {
            return Ok(Err(veto));
        }
        let mut later = self.launch(params, &point.sent, placement, (&agreed, in_place))?;
        let refused = later.iter().try_for_each(Flight::refused);
        let at_once = |flight: &mut Flight| flight.arrives == (self.step, placement);
        point.arriving.extend(later.extract_if(.., at_once));
        let replaced = match refused {
            Ok(()) => in_place.reduce(&self.plan, params, &*self.workers.across)?,
            Err(error) => InPlaceSeen { result: Err(error), non_finite: 0 },
        };
        let (landed, seen) = self.land(params, &mut point.arriving, (in_place, &replaced))?;
        let counted = vote(&*self.workers.world, seen, params.options());
        let counted = self.heard(params, counted)?;
        if counted.is_err() {
            in_place.put_back(params)?;
        }
        Ok(counted.map(|()| (later, landed)))
    }

    /// Waits for the arriving flights and checks their results.
    fn land(
        &self,
        params: &Params,
        arriving: &mut [Flight],
        (in_place, replaced): (&mut InPlace, &InPlaceSeen),
    ) -> Result<(Vec<Landed>, Seen), Error> {
        let (mut all, mut failed) = (Vec::new(), replaced.result.is_err());
        for flight in arriving {
            let (landed, arrived) = flight.land(params.options());
            failed |= arrived.is_err();
            all.push(landed);
        }
        // Lanes in place are those of the last flight, which was sent at this exchange.
        all.last_mut().into_iter().for_each(|landed| in_place.land(landed));
        if failed {
            return Ok((all, Seen::Failed));
        }
        let finite = all_finite(all.iter().flat_map(Landed::vectors), params.options())?;
        let finite = finite && replaced.non_finite == 0;
        // An aborted collective lets a GPU's queue continue with values that are not the mean of all workers.
        let seen = match self.workers.across.sound() {
            Err(_) => Seen::Failed,
            Ok(()) if finite => Seen::Good,
            Ok(()) => Seen::NotFinite,
        };
        Ok((all, seen))
    }

    /// Returns true if this rank's own values for this exchange are finite, or do not count.
    pub(super) fn brings_finite(&self, params: &Params, point: &Point) -> Result<bool, Error> {
        let fragments = point.arriving.iter().flat_map(|flight| &flight.fragments).chain(&point.sent);
        let mut values = Vec::new();
        for &f in fragments.filter(|_| self.active) {
            values.extend(self.parts.values(params, &self.plan.fragments[f], f)?);
        }
        all_finite(values.iter().map(|value| value.values), params.options())
    }

    /// Turns the failure of a collective of all workers into a veto: it ends all exchanges, but is not an error of this rank.
    fn heard<T>(
        &mut self,
        params: &Params,
        result: Result<Result<T, Veto>, Error>,
    ) -> Result<Result<T, Veto>, Error> {
        match result {
            Err(error @ Error::Comm(_)) => {
                if on_gpu(params.options()) {
                    // A rank that runs out of memory fails alone, and the others wait for it.
                    [&self.workers.world, &self.workers.across].into_iter().for_each(|comm| comm.abort());
                }
                self.failure = Some(error);
                Ok(Err(Veto::Failed { rank: self.workers.world.rank() }))
            }
            other => other,
        }
    }

    fn agree(
        &self,
        params: &Params,
        point: &Point,
        placement: Placement,
        fault: bool,
    ) -> Result<Result<Agreed, Veto>, Error> {
        let Point { sent, reset, arriving } = point;
        let arriving: Vec<&Vec<usize>> = arriving.iter().map(|flight| &flight.fragments).collect();
        let (hash, step) = (self.plan.hash(), self.step);
        let text = format!("{hash:x} {step} {placement:?} {sent:?} {reset:?} {arriving:?}");
        let weighed = (0..self.plan.fragments.len()).filter(|&f| self.plan.weighed(f).is_some());
        // Before the first step no worker has seen tokens, and all count equally.
        let none_yet = self.step == 0 && placement == Placement::Before;
        let brought = Brought {
            digest: XxHash3_64::oneshot(text.as_bytes()),
            fault,
            worker: self.workers.across.rank(),
            active: self.active,
            tokens: weighed.map(|f| if none_yet { 1 } else { self.parts.of(f).tokens }).collect(),
        };
        let Workers { world, across } = &self.workers;
        self.plan.agree(&**world, across.world_size(), &brought, params.options())
    }

    /// Sends the fragments due, those with the same delay in one flight.
    fn launch(
        &mut self,
        params: &Params,
        sent: &[usize],
        placement: Placement,
        (agreed, in_place): (&Agreed, &mut InPlace),
    ) -> Result<Vec<Flight>, Error> {
        let delay_of = |f: usize| self.plan.fragments[f].timing.delay;
        let delays: BTreeSet<u64> = sent.iter().map(|&f| delay_of(f)).collect();
        let mut flights = Vec::new();
        for delay in delays {
            let together = || sent.iter().copied().filter(|&f| delay_of(f) == delay);
            let mut bringing = Vec::new();
            for fragment in together() {
                let share = self.plan.share(fragment, self.workers.across.rank(), agreed);
                let Ok(share) = share else { continue }; // all shares were checked before
                let values = self.parts.values(params, &self.plan.fragments[fragment], fragment)?;
                bringing.push(Bringing { fragment, share, tokens: self.parts.of(fragment).tokens, values });
            }
            let lanes = self.plan.lanes(together(), &self.loads);
            let to = (&*self.workers.across, params.options());
            let arrives = (self.step.saturating_add(delay), placement);
            let memory = (&mut self.staging, &mut *in_place);
            let mut flight = Flight::launch(&self.plan, &lanes, &bringing, to, (arrives, memory))?;
            for (sent, bringing) in flight.sent.iter_mut().zip(&bringing) {
                if self.plan.fragments[bringing.fragment].keeps_sent() {
                    sent.snapshots = bringing.snapshots(params, &mut self.staging)?;
                }
            }
            flights.push(flight);
        }
        Ok(flights)
    }
}
