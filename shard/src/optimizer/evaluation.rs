//! Evaluation at a rule's own point: parameters leave where they are trained, and come back with the same bits.

use crate::config::param_groups::RuleGroup;
use crate::error::Error;
use crate::optimizer::Optimizer;
use crate::plan::bytes::VectorSpec;
use crate::update::owned_bucket::{Owned, ParamUpdate};
use crate::update::params::{ParamPlace, Params};
use crate::update::vector_memory::zeroed;
use meshstep_comm::name_calls;
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

impl Optimizer {
    /// Takes the parameters to where the model is evaluated, until [`end_evaluation`](Self::end_evaluation). Collective, between two
    /// steps; does nothing if they are there.
    ///
    /// A rule such as [`ScheduleFreeAdamW`](meshstep_optim::ScheduleFreeAdamW) trains parameters at another point than it evaluates
    /// ([`Rule::evaluation`]). Each rank converts what it owns, and the parameters are gathered; at stage 3 units are gathered as
    /// before, with the values to evaluate. With other rules the values stay.
    ///
    /// Meanwhile [`param`](Self::param), [`read`](Self::read) and [`gather`](Self::gather) return the values to evaluate, and every
    /// call that would change, save or compare values is [`Error::Evaluating`]: a checkpoint holds the trained parameters. Each rank
    /// keeps a copy of its own trained parameters and masters, which returns with its bits: at stage 0 the bytes of
    /// all parameters and masters, else this rank's share of them.
    ///
    /// ```
    /// use meshstep_shard::prelude::*;
    ///
    /// let ranks = loopback::spawn(2, |comm| -> Result<[f32; 3], meshstep_shard::Error> {
    ///     let layout = Layout::builder().param("w", &[64], DType::F32).build()?;
    ///     let options = Options { stage: Stage::Zero2, ..Options::default() };
    ///     let mut opt = Optimizer::new(comm, layout, ScheduleFreeAdamW::default(), |_, _| Ok(()), options)?;
    ///     for _ in 0..3 {
    ///         let mb = opt.micro_batch(1)?;
    ///         mb.grad("w", &[1f32; 64])?;
    ///         mb.finish()?;
    ///         opt.step(StepArgs { lr: 0.1, ..StepArgs::default() })?.outcome()?;
    ///     }
    ///     let first = |opt: &Optimizer| Ok::<_, meshstep_shard::Error>(opt.param("w")?.typed::<f32>()?[0]);
    ///     let trained = first(&opt)?;
    ///     opt.begin_evaluation()?;
    ///     let average = first(&opt)?; // run the model on held-out data here
    ///     assert!(matches!(opt.micro_batch(1), Err(meshstep_shard::Error::Evaluating)));
    ///     opt.end_evaluation()?;
    ///     Ok([trained, average, first(&opt)?])
    /// })?;
    /// for rank in ranks {
    ///     let [trained, average, back] = rank?;
    ///     assert!((average + 0.2).abs() < 1e-6 && trained < average && trained == back);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn begin_evaluation(&mut self) -> Result<(), Error> {
        let _name = name_calls("Optimizer::begin_evaluation");
        self.reducer.healthy()?;
        if self.is_evaluating() {
            return Ok(());
        }
        // Memory is allocated before the ranks agree, so that a rank without memory is an error on all of them.
        let ready = self.check_between_steps().and_then(|()| TrainedValues::copied(&self.params));
        let told = ready.as_ref().map(drop).map_err(Error::clone);
        self.reducer.call_together("begin an evaluation", told)?;
        let mut trained = ready?;
        self.apart_from_steps(|all| all.evaluate_own(&mut trained))?;
        self.trained = Some(trained);
        self.reducer.progress.evaluating = true;
        Ok(())
    }

    /// Takes the parameters back to where they are trained, with the bits that they had there. Collective; does nothing if they are
    /// there.
    pub fn end_evaluation(&mut self) -> Result<(), Error> {
        let _name = name_calls("Optimizer::end_evaluation");
        self.reducer.healthy()?;
        if !self.is_evaluating() {
            return Ok(());
        }
        self.reducer.call_together("end an evaluation", Ok(()))?;
        let trained = self.trained.take();
        self.apart_from_steps(|all| all.return_own(trained.as_ref()))?;
        self.reducer.progress.evaluating = false;
        Ok(())
    }

    /// Returns true between [`begin_evaluation`](Self::begin_evaluation) and [`end_evaluation`](Self::end_evaluation).
    pub fn is_evaluating(&self) -> bool {
        self.reducer.progress.evaluating
    }

    /// Writes the values to evaluate over this rank's parameters, and sends them to every rank.
    fn evaluate_own(&mut self, trained: &mut TrainedValues) -> Result<(), Error> {
        let groups = evaluations(&self.params.groups);
        // On a GPU the rows are those of another rule, before and after.
        self.decider.recount(&mut self.params);
        let converted = trained.0.iter_mut().enumerate().try_for_each(|(b, trained)| match trained {
            Some(trained) => convert(&mut self.params, b, &mut trained.params, &groups),
            None => Ok(()),
        });
        self.decider.recount(&mut self.params);
        converted?;
        self.gatherer.gather_all(&mut self.params, &self.reducer)
    }

    /// Writes the trained values over this rank's parameters, and sends them to every rank.
    fn return_own(&mut self, trained: Option<&TrainedValues>) -> Result<(), Error> {
        let kept = trained.iter().flat_map(|trained| &trained.0);
        for (owned, kept) in self.params.buckets.iter_mut().zip(kept) {
            let Some(TrainedBucket { params, master }) = kept else { continue };
            owned.wait_for_params()?;
            owned.set_params(params.as_slice())?;
            if let (Some(to), Some(from)) = (owned.master_mut(), master) {
                self.params.options.queue.copy(from.as_slice(), to.as_mut())?;
            }
        }
        self.gatherer.gather_all(&mut self.params, &self.reducer)
    }
}

impl TrainedValues {
    /// Copies this rank's trained parameters, if their rule evaluates elsewhere.
    fn copied(params: &Params) -> Result<Self, Error> {
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
    buckets[b].update_on_gpu(grads, groups, |p| entries[p].t + 1, (&step, None), &options.meter)
}
