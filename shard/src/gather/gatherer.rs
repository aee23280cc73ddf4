//! Parameters out: updated buckets travel to all ranks, and units of sharded parameters are gathered in memory kept for them.

use crate::config::digest::digest;
use crate::config::options::Options;
use crate::error::Error;
use crate::gather::param_gather::Gathering;
use crate::gather::unit_memory::GatherRoom;
use crate::plan::bucket::BucketPlan;
use crate::plan::units::Units;
use crate::reduce::reducer::GradReducer;
use crate::update::params::Params;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Gathers of one optimizer.
#[derive(Debug)]
pub(crate) struct Gatherer {
    pub(crate) in_flight: Gathering,
    room: Mutex<GatherRoom>,
}

impl Gatherer {
    /// Makes a gatherer without memory for units.
    pub(crate) fn new(options: &Options) -> Self {
        Gatherer { in_flight: Gathering::default(), room: Mutex::new(GatherRoom::new(options)) }
    }

    /// Reserves memory for gathering these units of all buckets, if parameters are sharded.
    pub(crate) fn reserve(
        &self,
        params: &Params,
        units: &Units,
        buckets: &[&BucketPlan],
    ) -> Result<(), Error> {
        if params.options.stage.cuts_params() {
            params.check_units(units)?;
            self.room().reserve(units.names().count(), &units.room(|b| buckets[b]))?;
        }
        Ok(())
    }

    /// Returns the memory for units. It is lent also after a panic (decision 119): bookkeeping does not unwind.
    pub(crate) fn room(&self) -> MutexGuard<'_, GatherRoom> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a digest of the operations sent so far that must be the same on all ranks.
    pub(crate) fn operations(&mut self, reducer: &mut GradReducer) -> u64 {
        let launches = reducer.launches();
        match self.room.get_mut().unwrap_or_else(PoisonError::into_inner).gathers() {
            0 => launches,
            gathers => digest(launches, gathers, 0),
        }
    }

    /// Sends bucket `b` to every rank, after its update.
    pub(crate) fn send(&mut self, b: usize, params: &mut Params, reducer: &GradReducer) -> Result<(), Error> {
        let config = &reducer.config;
        let bucket = (b, &config.buckets[b]);
        self.in_flight.send(&config.queue, config.options.stage, bucket, &mut params.buckets[b].params)
    }

    /// Sends every bucket to every rank; an error aborts the run.
    pub(crate) fn send_all(&mut self, params: &mut Params, reducer: &GradReducer) -> Result<(), Error> {
        let sent = (0..params.buckets.len()).try_for_each(|b| self.send(b, params, reducer));
        sent.map_err(|error| reducer.abort_with(error))
    }

    /// Waits for the buckets that were sent.
    pub(crate) fn land(&mut self, params: &mut Params) -> Result<(), Error> {
        self.in_flight.land(&params.options.queue, &mut params.buckets)
    }

    /// Gathers all updated parameters on every rank.
    pub(crate) fn gather_all(&mut self, params: &mut Params, reducer: &GradReducer) -> Result<(), Error> {
        let sent = self.send_all(params, reducer);
        let landed = self.land(params);
        sent.and(landed)
    }
}
