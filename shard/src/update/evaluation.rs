//! Evaluation at a rule's own point: this rank's parameters leave where they are trained, and come back with the same bits.

use crate::config::param_groups::RuleGroup;
use crate::error::Error;
use crate::plan::bytes::VectorSpec;
#[cfg(feature = "cuda")]
use crate::update::gpu::GpuUpdate;
use crate::update::owned_bucket::{Owned, ParamUpdate};
use crate::update::params::{ParamPlace, Params};
use crate::update::vector_memory::zeroed;
#[cfg(feature = "cuda")]
use meshstep_optim::cuda::{StepBlock, StepScalars};
use meshstep_optim::{Rule, Scalars};
use meshstep_tensor::{Buffer, Category};
use std::sync::Arc;

/// This rank's trained parameters, while their memory holds those to evaluate. `None` for a bucket that stays as it is.
#[derive(Debug)]
pub(crate) struct TrainedValues(Vec<Option<TrainedBucket>>);

/// The owned ranges of a bucket, end to end, and their master.
#[derive(Debug)]
struct TrainedBucket {
    params: Buffer,
    master: Option<Buffer>,
}

impl TrainedValues {
    /// Writes the values to evaluate over this rank's parameters.
    pub(crate) fn leave(&mut self, params: &mut Params) -> Result<(), Error> {
        let groups = evaluations(&params.groups);
        let own = self.0.iter_mut().enumerate();
        own.filter_map(|(b, trained)| Some((b, trained.as_mut()?)))
            .try_for_each(|(b, trained)| convert(params, b, &mut trained.params, &groups))
    }

    /// Writes the trained values over this rank's parameters.
    pub(crate) fn come_back(&self, params: &mut Params) -> Result<(), Error> {
        for (owned, trained) in params.buckets.iter_mut().zip(&self.0) {
            let Some(trained) = trained else { continue };
            owned.wait_for_params()?;
            owned.set_params(trained.params.as_slice())?;
            if let (Some(to), Some(from)) = (owned.master_mut(), &trained.master) {
                params.options.queue.copy(from.as_slice(), to.as_mut())?;
            }
        }
        Ok(())
    }

    /// Copies this rank's trained parameters, if their rule evaluates elsewhere.
    pub(crate) fn copied(params: &Params) -> Result<Self, Error> {
        let mut moves = vec![false; params.buckets.len()];
        for entry in &params.entries {
            if let ParamPlace::Bucket { bucket, .. } = entry.place {
                moves[bucket] = params.groups[entry.group].rule.evaluation().is_some();
            }
        }
        let copied = |(owned, moves): (&Owned, bool)| moves.then(|| copy_of(owned, params)).transpose();
        Ok(TrainedValues(params.buckets.iter().zip(moves).map(copied).collect::<Result<_, Error>>()?))
    }
}

/// Copies the owned parameters and masters of a bucket.
fn copy_of(owned: &Owned, Params { options, .. }: &Params) -> Result<TrainedBucket, Error> {
    let len = owned.ranges().map(|(range, _)| range.len()).sum();
    let from = owned.params()?;
    let spec = VectorSpec { dtype: from.dtype(), category: Category::Params, len };
    let mut params = zeroed(spec, options, &[])?;
    owned.collect(from, params.as_mut())?;
    let master = owned.master().map(|master| {
        let spec = VectorSpec { dtype: master.dtype(), category: Category::Master, len };
        let mut copy = zeroed(spec, options, &[])?;
        options.queue.copy(master.as_slice(), copy.as_mut())?;
        Ok::<_, Error>(copy)
    });
    Ok(TrainedBucket { params, master: master.transpose()? })
}

/// Returns the groups with each rule's way to the point of evaluation. A rule without one is in no bucket that is converted.
fn evaluations(groups: &[RuleGroup]) -> Vec<RuleGroup> {
    let way = |group: &RuleGroup| match group.rule.evaluation() {
        Some(rule) => group.with_rule(Arc::<dyn Rule>::from(rule)),
        None => group.clone(),
    };
    groups.iter().map(way).collect()
}

/// Converts this rank's parameters of bucket `b` by the rules of `groups`; `grads`, as long as them, are read and not used.
fn convert(params: &mut Params, b: usize, grads: &mut Buffer, groups: &[RuleGroup]) -> Result<(), Error> {
    #[cfg(feature = "cuda")]
    if params.options.queue.stream().is_some() {
        return convert_on_gpu(params, b, grads, groups);
    }
    let Params { buckets, entries, .. } = params;
    let due = |p: usize| Some(ParamUpdate { t: entries[p].t + 1, ratio: 1.0, matrix: None });
    buckets[b].update(grads, groups, due, &Scalars { lr: 0.0, ..Scalars::default() })
}

#[cfg(feature = "cuda")]
fn convert_on_gpu(
    params: &mut Params,
    b: usize,
    grads: &mut Buffer,
    groups: &[RuleGroup],
) -> Result<(), Error> {
    let Params { buckets, entries, options, .. } = params;
    let mut step = StepBlock::new(&options.queue, &options.meter)?;
    step.set(&StepScalars { lr: 0.0, grad_scale: 1.0, skip: 0, zero_grads: 0 }, &options.queue)?;
    let next = |p: usize| ParamUpdate { t: entries[p].t + 1, ratio: 1.0, matrix: None };
    let at = GpuUpdate { step: &step, prepared: None, matrices: None, meter: &options.meter };
    buckets[b].update_on_gpu(grads, groups, next, at)
}
