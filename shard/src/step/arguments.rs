//! Faults of a step on this rank: its arguments, and gradients that have not come.

use crate::config::options::{Clip, NonFinite, Options, StepArgs};
use crate::config::stage::Stage;
use crate::error::Error;
use crate::reduce::reducer::GradReducer;
use crate::step::decider::Decider;
use crate::step::exchange::FaultCode;
use crate::update::params::{ParamEntry, Params};
use meshstep_optim::Sees;
use meshstep_tensor::Place;

/// Gradient factors that stay within f32 with any number of ranks.
const GRAD_SCALES: std::ops::RangeInclusive<f64> = 1e-30..=1e30;

impl Decider {
    /// Sends everything that the exchange needs, even if gradients are missing, and returns this rank's fault.
    pub(crate) fn arrive(
        &self,
        params: &Params,
        reducer: &mut GradReducer,
        at: &StepArgs,
    ) -> Result<Option<FaultCode>, Error> {
        reducer.finish_dropped()?;
        let (due, missing) = (reducer.progress.is_due(), reducer.progress.missing());
        let fault = self.argument_fault(params, at);
        let held = reducer.holds();
        reducer.progress.local_clip = None;
        if held && fault.is_none() {
            reducer.clip_held(at, self.unscale(&params.options, at))?;
        }
        if !due || held {
            // The other ranks' reductions wait for this rank's buckets.
            reducer.begin(true, false);
            // Rules with sums over tensors need all gradients before the first update. All ranks decide this alike, before they have
            // compared their arguments.
            if held
                && may_go_ahead(reducer)
                && params.groups.iter().all(|group| group.rule.sees() == Sees::Elements)
            {
                reducer.keep_back();
            }
            reducer.complete(|_| {})?;
        }
        if !(may_go_ahead(reducer) && limit(&reducer.config.options, at).is_none()) {
            reducer.settle()?;
            reducer.second_reduce()?;
        }
        Ok(match missing {
            _ if reducer.progress.dropped => Some(FaultCode::Unfinished),
            _ if !due => Some(FaultCode::NoMicroBatch),
            Some(param) => Some(FaultCode::Missing(param)),
            None => fault,
        })
    }

    fn argument_fault(&self, params: &Params, at: &StepArgs) -> Option<FaultCode> {
        let options = &params.options;
        // After a larger step the squares of parameters are not finite in f32.
        let fits = |lr: f64| lr >= 0.0 && ((lr * lr) as f32).is_finite();
        let reaches = |e: &ParamEntry| fits(params.groups[e.group].reach(at.lr, e.matrix));
        match () {
            () if !fits(at.lr) => Some(FaultCode::Lr),
            () if !params.entries.iter().all(reaches) => Some(FaultCode::Lr),
            () if self.scheduled_lr(options).is_some_and(|lr| lr.to_bits() != at.lr.to_bits()) => {
                Some(FaultCode::Schedule)
            }
            () if !at.max_norm.is_none_or(|x| x.is_finite() && x > 0.0) => Some(FaultCode::MaxNorm),
            // On a GPU the device holds the scale and makes this check.
            () if options.queue.place() == Place::Cpu
                && !GRAD_SCALES.contains(&self.unscale(options, at)) =>
            {
                Some(FaultCode::GradScale)
            }
            () => None,
        }
    }
}

/// Returns true if gradients do not influence the decision of an unclipped step and no bucket is reduced a second time, so that one
/// bucket can be updated while others are still in flight.
fn may_go_ahead(reducer: &GradReducer) -> bool {
    let extra_reductions = reducer.config.buckets.iter().any(|b| !b.among.extra_reductions.is_empty());
    // Unsharded sums over slots are gathered together.
    let gathers = reducer.config.adds_up() && reducer.config.options.stage == Stage::Replicated;
    reducer.config.options.non_finite == NonFinite::Propagate && !extra_reductions && !gathers
}

/// Returns the bound on the norm of the combined gradient.
pub(crate) fn limit(options: &Options, at: &StepArgs) -> Option<f64> {
    at.max_norm.filter(|_| options.clip == Clip::AfterReduce)
}
