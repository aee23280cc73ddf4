//! Replays a trace on loopback ranks through the sharded optimizer.

use std::collections::BTreeMap;
use std::sync::Arc;

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::Norm;
use meshstep_shard::{
    Combine, Error, Groups, Master, Missing, Optimizer, Options, Outcome, Precision, StepArgs,
};
use meshstep_tensor::{DType, Layout, LayoutBuilder, Meter, Param, Slice, SliceMut, cast};

use super::key::Key;
use super::observed::{Observed, join};
use super::reason::Reason;
use super::rule::{Recipe, recipe};
use super::setting::{Asked, Setting};
use super::spec::{Clip, Reduction};
use super::trace::{Tensor, Trace};
use super::{lbfgs, problems::Rows};

/// Replays the trace, and returns the replay's value of every expected tensor.
pub(super) fn replay(trace: &Trace, asked: Asked) -> Result<BTreeMap<Key, Vec<f64>>, Reason> {
    let recipe = recipe(&trace.spec)?;
    let setting = Setting::new(asked, &trace.spec, &recipe)?;
    let problem = Rows::of(trace)?;
    let on_rank = |comm: Arc<dyn Communicator>| match &recipe {
        Recipe::Lbfgs(rule) => lbfgs::run(trace, &setting, rule, problem.as_ref(), comm),
        Recipe::Steps { groups, lr, state, .. } => {
            check_slots(trace, state)?;
            Steps { trace, setting, lr: *lr, problem: problem.as_ref() }.run(groups.clone(), comm)
        }
    };
    join(trace, all_or_cause(loopback::spawn(setting.ranks, on_rank)?)?)
}

/// Replay of a rule that takes one gradient per step.
struct Steps<'a> {
    trace: &'a Trace,
    setting: Setting,
    lr: f64,
    problem: Option<&'a Rows<'a>>,
}

impl Steps<'_> {
    fn run(&self, groups: Groups, comm: Arc<dyn Communicator>) -> Result<Observed, Reason> {
        let Steps { trace, setting, .. } = self;
        let mut opt = Optimizer::new(comm, layout(trace)?, groups, first(trace), options(trace, setting)?)?;
        let mut observed = Observed::default();
        for t in 1..=trace.spec.steps {
            let (norm, loss) = self.step(&mut opt, t)?;
            observed.scalar(trace, Key::Norm { t }, norm);
            if let Some(loss) = loss {
                observed.scalar(trace, Key::Loss { t }, loss);
                observed.scalar(trace, Key::Evals { t }, t as f64);
            }
            observed.params(trace, |name| Key::Expect { t, name }, |name| opt.param(name))?;
            if trace.expected().any(|(key, _)| matches!(key, Key::Eval { t: at, .. } if *at == t)) {
                opt.begin_evaluation()?;
                observed.params(trace, |name| Key::Eval { t, name }, |name| opt.param(name))?;
                opt.end_evaluation()?;
            }
            observe_state(&mut observed, trace, t, &opt)?;
        }
        Ok(observed)
    }

    /// Takes one step. Returns the gradient's norm before clipping, and the loss of a problem.
    fn step(&self, opt: &mut Optimizer, t: u64) -> Result<(f64, Option<f64>), Reason> {
        let at = self.at(t);
        let (outcome, loss) = match self.problem {
            Some(problem) => {
                let rank = opt.comm().rank();
                let evaluated = opt.step_with(at, 1, |mb| problem.evaluate(mb, rank, self.setting.ranks))?;
                (evaluated.outcome, Some(evaluated.loss))
            }
            None => {
                self.hand_over(opt, t)?;
                (opt.step(at)?.outcome()?, None)
            }
        };
        match outcome {
            Outcome::Applied { norm, .. } => Ok((norm, loss)),
            Outcome::Skipped { non_finite, .. } => Err(Reason::Skipped { t, non_finite }),
        }
    }

    fn hand_over(&self, opt: &mut Optimizer, t: u64) -> Result<(), Reason> {
        // All ranks use a trace of one rank.
        let rank = opt.comm().rank() % self.trace.spec.ranks;
        let weight = self.trace.tensors.get(&Key::Weight { t }).map_or(1.0, |weights| {
            // Ranks that use the gradients of one rank also use its weight.
            weights.values[rank.min(weights.values.len() - 1)]
        });
        let micro_batch = opt.micro_batch(weight as u64)?;
        // From the last parameter to the first, like a backward pass.
        let names: Vec<&str> = self.trace.params().map(|(name, _)| name).collect();
        for name in names.into_iter().rev() {
            if let Some(grad) = self.trace.grad(t, rank, name) {
                with_dtype(grad.dtype, &grad.values, |grad| micro_batch.grad(name, grad))??;
            }
        }
        Ok(micro_batch.finish()?)
    }

    fn at(&self, t: u64) -> StepArgs {
        let lrs = self.trace.spec.lrs.as_ref();
        let lr = lrs.and_then(|lrs| lrs.get(t as usize - 1)).copied().unwrap_or(self.lr);
        StepArgs { lr, max_norm: self.trace.spec.clip.map(|clip| clip.max_norm), ..StepArgs::default() }
    }
}

/// Rejects expected state that the rule does not have, before anything runs.
fn check_slots(trace: &Trace, state: &[&str]) -> Result<(), Reason> {
    let narrow = trace.params().any(|(_, param)| is_narrow(param.dtype));
    let known: Vec<&str> = state.iter().copied().chain(narrow.then_some(MASTER)).collect();
    let strange = trace.expected().find_map(|(key, _)| match key {
        Key::State { slot, .. } if !known.contains(&slot.as_str()) => Some(key.clone()),
        _ => None,
    });
    strange.map_or(Ok(()), |key| Err(Reason::NoSuchState { key, known: known.join(", ") }))
}

/// Slot of the f32 values of a 16-bit parameter.
const MASTER: &str = "master";

fn observe_state(observed: &mut Observed, trace: &Trace, t: u64, opt: &Optimizer) -> Result<(), Reason> {
    for (name, _) in trace.params() {
        let state = opt.state(name)?;
        let master = state.master.map(|master| (MASTER, master));
        for (slot, values) in state.slots.into_iter().chain(master) {
            let key = Key::State { t, name: name.to_owned(), slot: slot.to_owned() };
            observed.piece(trace, key, state.range.clone(), values)?;
        }
    }
    Ok(())
}

/// Returns the layout of a trace's parameters, in the order of their names.
pub(super) fn layout(trace: &Trace) -> Result<Layout, Reason> {
    let add = |builder: LayoutBuilder, (name, param): (&str, &Tensor)| {
        builder.param(name, &param.shape, param.dtype)
    };
    Ok(trace.params().fold(Layout::builder(), add).build()?)
}

/// Returns a function that writes the parameters' initial values.
pub(super) fn first(trace: &Trace) -> impl Fn(&Param, SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    |param, out| {
        let tensor = trace.tensors.get(&Key::Param { name: param.name().to_owned() });
        tensor.map_or(Ok(()), |tensor| cast(Slice::from(&tensor.values[..]), out))
    }
}

/// Returns the optimizer's options; 16-bit parameters have an f32 master.
pub(super) fn options(trace: &Trace, setting: &Setting) -> Result<Options, Reason> {
    let combine = match setting.reduce {
        // Every rank computes the part of its rows of the mean over all rows.
        _ if trace.spec.problem.is_some() => Combine::Sum,
        Reduction::Mean => Combine::Mean,
        Reduction::Sum => Combine::Sum,
        Reduction::Weighted => Combine::Weighted,
    };
    Ok(Options {
        stage: setting.stage,
        bucket_len: setting.bucket,
        combine,
        missing: Missing::SkipIfMissingEverywhere,
        grads: grads(trace)?,
        precision: precision(trace),
        norm: trace.spec.clip.as_ref().map_or(Norm::L2, Clip::norm),
        meter: Meter::new(),
        ..Options::default()
    })
}

fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Returns the type of the gradients if it differs from the parameters' types.
fn grads(trace: &Trace) -> Result<Option<DType>, Reason> {
    let mut other = None;
    for (key, grad) in &trace.tensors {
        let Key::Grad { name, .. } = key else { continue };
        let Some(param) = trace.tensors.get(&Key::Param { name: name.clone() }) else { continue };
        if other.is_some_and(|other| other != grad.dtype) && param.dtype != DType::F64 {
            let wanted = other.unwrap_or(grad.dtype);
            return Err(Reason::DType { key: key.clone(), given: grad.dtype, wanted });
        }
        if grad.dtype != param.dtype {
            other = Some(grad.dtype);
        }
    }
    Ok(other)
}

/// Calls `then` with `values` in the type `dtype`, which represents them exactly or rounds to nearest.
pub(super) fn with_dtype<T>(
    dtype: DType,
    values: &[f64],
    then: impl FnOnce(Slice<'_>) -> T,
) -> Result<T, meshstep_tensor::Error> {
    let mut buffer = meshstep_tensor::Buffer::zeroed(
        values.len(),
        dtype,
        &Meter::new(),
        meshstep_tensor::Category::Grads,
    )?;
    cast(Slice::from(values), buffer.as_mut())?;
    Ok(then(buffer.as_slice()))
}

/// Returns the results of all ranks, or the error that caused the errors of the other ranks.
fn all_or_cause(ranks: Vec<Result<Observed, Reason>>) -> Result<Vec<Observed>, Reason> {
    let (mut all, mut reasons) = (Vec::new(), Vec::new());
    for rank in ranks {
        match rank {
            Ok(observed) => all.push(observed),
            Err(reason) => reasons.push(reason),
        }
    }
    let consequence = |reason: &Reason| {
        matches!(reason, Reason::Optimizer(Error::Comm(_) | Error::ClosureElsewhere { .. }))
    };
    reasons.sort_by_key(consequence);
    reasons.into_iter().next().map_or(Ok(all), Err)
}

/// Returns the precision: 16-bit parameters have an f32 master.
fn precision(trace: &Trace) -> Precision {
    let narrow = trace.params().any(|(_, param)| is_narrow(param.dtype));
    Precision { master: if narrow { Master::F32 } else { Master::None }, ..Precision::default() }
}
