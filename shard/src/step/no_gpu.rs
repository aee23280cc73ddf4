//! Stand-ins for the types of `gpu.rs` in builds without GPUs: every step is decided when it returns.
#![expect(
    clippy::unnecessary_wraps,
    clippy::unused_self,
    reason = "the calls of gpu.rs can fail and have state"
)]

use crate::config::options::Options;
use crate::error::Error;
use crate::reduce::reducer::GradReducer;
use crate::step::decider::Decider;
use crate::step::outcome::Outcome;
use crate::update::owned_bucket::Owned;
use crate::update::params::Params;
use meshstep_optim::LossScaleState;
use meshstep_tensor::Queue;

/// Steps launched on a GPU: none.
#[derive(Debug, Default)]
pub(crate) struct Launched {}

/// A step launched on a GPU: there is none.
#[derive(Debug)]
pub(crate) enum StepTicket {}

/// Use of the exchange's vectors by another stream: none.
#[derive(Debug, Default)]
pub(crate) struct LentWords {}

impl StepTicket {
    /// Is never called.
    pub(crate) fn outcome(&self) -> Result<Outcome, Error> {
        match *self {}
    }
}

impl LentWords {
    /// Returns at once.
    pub(super) fn take_back(&mut self, _: &Queue) -> Result<(), meshstep_tensor::Error> {
        Ok(())
    }
}

impl Launched {
    /// Returns 0.
    pub(crate) fn len(&self) -> u64 {
        0
    }

    /// Returns the state as it is.
    pub(super) fn follow(&self, _: &Options, state: LossScaleState) -> LossScaleState {
        state
    }

    /// Returns 0.
    pub(crate) fn updates_of(&self, _: usize) -> Result<u64, Error> {
        Ok(0)
    }

    /// Does nothing.
    pub(crate) fn reset(&mut self) {}
}

impl Decider {
    /// Does nothing.
    pub(crate) fn poll_outcomes(&mut self, _: &mut Params, _: &GradReducer, _: bool) -> Result<(), Error> {
        Ok(())
    }

    /// Does nothing.
    pub(crate) fn take_notes(&mut self, _: &mut Params, _: &GradReducer, _: bool) -> Result<(), Error> {
        Ok(())
    }

    /// Does nothing.
    pub(crate) fn publish(&mut self, _: &Params) -> Result<(), Error> {
        Ok(())
    }

    /// Drops what updates keep of each parameter's `t`: nothing.
    pub(crate) fn recount(&mut self, params: &mut Params) {
        params.buckets.iter_mut().for_each(Owned::recount);
    }
}
