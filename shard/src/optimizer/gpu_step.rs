//! Steps on a GPU: everything is launched at once, the device decides, and the host learns the outcome later. With hooks that
//! have work the host waits for the decision.

use crate::config::options::StepArgs;
use crate::error::Error;
use crate::optimizer::Optimizer;
use crate::step::gpu::{DeviceState, StepTicket, outside_captures};
use crate::update::gpu::GpuUpdate;
use crate::update::gpu_matrices::GpuMatrices;
use crate::update::hooks::UpdateHooks;
use crate::update::owned_bucket::ParamUpdate;
use crate::update::params::Params;
use meshstep_optim::cuda::{Answer, Tables, Update, Verdict};
use meshstep_tensor::Place;
use std::sync::Arc;

/// Takes the step; its outcome is the ticket's.
pub(super) fn take(
    opt: &mut Optimizer,
    at: &StepArgs,
    hooks: &mut dyn UpdateHooks,
) -> Result<Arc<StepTicket>, Error> {
    if hooks.waits() { step_with_hooks(opt, at, hooks) } else { step(opt, at) }
}

/// Returns the device address of the coming step's loss scale; `None` on the CPU.
pub(super) fn loss_scale_address(opt: &mut Optimizer) -> Result<Option<u64>, Error> {
    if opt.params.options.queue.place() == Place::Cpu {
        return Ok(None);
    }
    Ok(Some(opt.decider.device(&opt.params)?.decision.loss_scale_address()))
}

/// Launches the step, and returns before it is decided.
fn step(opt: &mut Optimizer, at: &StepArgs) -> Result<Arc<StepTicket>, Error> {
    outside_captures(&opt.params.options.queue)?;
    let launched = launch(opt, at);
    match &launched {
        // All ranks get these errors, before the step was launched.
        Err(Error::Differs(_) | Error::Disagree { .. }) => opt.reducer.settle()?,
        // Abort, so that the other ranks do not wait.
        Err(error) => drop(opt.reducer.abort_with(error.clone())),
        Ok(_) => {}
    }
    if let Err(poisoned) = opt.reducer.healthy() {
        return Err(launched.err().unwrap_or(poisoned));
    }
    opt.reducer.forget()?;
    let ticket = launched?;
    // Every collective of this step is in flight, so returning an error of an earlier step does not desynchronize the ranks.
    opt.decider.add_unknown(&ticket);
    opt.decider.poll_outcomes(&mut opt.params, &opt.reducer, false)?;
    opt.keep_after_step(true)?;
    Ok(ticket)
}

fn launch(opt: &mut Optimizer, at: &StepArgs) -> Result<Arc<StepTicket>, Error> {
    let (answer, max_norm) = launch_decision(opt, at)?;
    let later = apply(opt)?;
    let answer = (later.unwrap_or(answer), max_norm);
    let ticket = opt.decider.ticket(&opt.params, &opt.reducer, answer)?;
    ticket.count(opt.traffic());
    Ok(ticket)
}

/// Launches the decision of a step; returns its answer, and the bound on the norm.
fn launch_decision(opt: &mut Optimizer, at: &StepArgs) -> Result<(Answer, f64), Error> {
    let fault = opt.decider.arrive(&opt.params, &mut opt.reducer, at)?;
    opt.verify_in_step()?;
    let operations = opt.gatherer.operations(&mut opt.reducer);
    opt.decider.launch((&opt.params, &mut opt.reducer), at, (fault, operations))
}

/// Updates this rank's shard, if the device decides so, bucket by bucket as they arrive, and sends it to every rank. Returns the
/// answer with the norm, if the step was decided without it.
fn apply(opt: &mut Optimizer) -> Result<Option<Answer>, Error> {
    let mut updated = prepare(opt);
    for b in 0..opt.params.buckets.len() {
        updated = updated.and_then(|()| update(opt, b));
        if opt.updater.exchanged().binary_search(&b).is_err() {
            updated = updated.and_then(|()| opt.gatherer.send(b, &mut opt.params, &opt.reducer));
        }
    }
    updated = updated.and_then(|()| exchange(opt));
    for &b in opt.updater.exchanged() {
        updated = updated.and_then(|()| opt.gatherer.send(b, &mut opt.params, &opt.reducer));
    }
    let updated = updated.and_then(|()| join_tables(opt));
    if updated.is_err() {
        // The other ranks must not wait for buckets that will not come.
        opt.reducer.abort();
    }
    let norm = updated.and_then(|()| opt.decider.launch_norm(&opt.params, &mut opt.reducer));
    let landed = land(opt);
    norm.and_then(|norm| landed.map(|()| norm))
}

/// Puts the parameters back while they are in flight; later uses of them wait.
fn land(opt: &mut Optimizer) -> Result<(), Error> {
    let DeviceState { side_stream, .. } = opt.decider.device(&opt.params)?;
    opt.gatherer.in_flight.land_later(side_stream, &mut opt.params.buckets)
}

/// Updates this rank's whole shard, if the device decides so, and sends nothing. Returns the answer with the norm, if the step
/// was decided without it.
fn update_all(opt: &mut Optimizer) -> Result<Option<Answer>, Error> {
    prepare(opt)?;
    (0..opt.params.buckets.len()).try_for_each(|b| update(opt, b))?;
    exchange(opt)?;
    join_tables(opt)?;
    opt.decider.launch_norm(&opt.params, &mut opt.reducer)
}

/// Prepares the rows that earlier steps have built: one launch for all buckets. The first step allocates memory for matrices.
fn prepare(opt: &mut Optimizer) -> Result<(), Error> {
    let DeviceState { decision, tables, matrices, .. } = opt.decider.device(&opt.params)?;
    if matrices.is_none() {
        *matrices = Some(GpuMatrices::new(&mut opt.params, opt.updater.matrices())?);
    }
    let Some(tables) = tables else { return Ok(()) };
    Ok(tables.prepare(decision.step(), &opt.params.options.queue)?)
}

/// Updates this rank's range of bucket `b`, except for pieces of matrices: one launch, or a few for each matrix.
fn update(opt: &mut Optimizer, b: usize) -> Result<(), Error> {
    opt.reducer.settle_one(b)?;
    let DeviceState { decision, tables, matrices, .. } = opt.decider.device(&opt.params)?;
    if let Some(grads) = opt.reducer.grads(b) {
        let Params { buckets, entries, groups, options, .. } = &mut opt.params;
        let next = |p: usize| ParamUpdate { t: entries[p].t + 1, ratio: 1.0, matrix: entries[p].matrix };
        let (step, meter) = (decision.step(), &options.meter);
        let at = GpuUpdate { step, prepared: tables.as_ref(), matrices: matrices.as_ref(), meter };
        buckets[b].update_on_gpu(grads, groups, next, at)?;
    }
    Ok(())
}

/// Updates the matrices of which several ranks hold pieces.
fn exchange(opt: &mut Optimizer) -> Result<(), Error> {
    let DeviceState { decision, matrices, .. } = opt.decider.device(&opt.params)?;
    let Some(matrices) = matrices else { return Ok(()) };
    opt.updater.exchange_on_gpu(&mut opt.params, &mut opt.reducer, (decision.step(), matrices))
}

/// Joins the rows of all buckets, if a step has built new ones.
fn join_tables(opt: &mut Optimizer) -> Result<(), Error> {
    let DeviceState { tables, .. } = opt.decider.device(&opt.params)?;
    let (queue, meter) = (opt.params.options.queue.clone(), opt.params.options.meter.clone());
    let mut updates: Vec<&mut Update> =
        opt.params.buckets.iter_mut().flat_map(|owned| owned.updates()).collect();
    if tables.as_ref().is_some_and(|tables| updates.iter().all(|update| tables.has(update))) {
        return Ok(());
    }
    *tables = Some(Tables::join(&mut updates, &queue, &meter)?);
    Ok(())
}

/// Takes a step with hooks that have work to do. Errors of the decision, which all ranks share, are the ticket's.
fn step_with_hooks(
    opt: &mut Optimizer,
    at: &StepArgs,
    hooks: &mut dyn UpdateHooks,
) -> Result<Arc<StepTicket>, Error> {
    // The hooks count updates, including those of earlier steps.
    opt.decider.take_notes(&mut opt.params, &opt.reducer, true)?;
    let stepped = conclude(opt, at, hooks);
    if let Err(error @ Error::Comm(_)) = &stepped {
        tracing::debug!(%error, "a step with hooks failed");
    }
    opt.end_failed(&stepped)?;
    opt.reducer.settle()?;
    stepped.iter().for_each(|ticket| ticket.count(opt.traffic()));
    opt.reducer.forget()?;
    let ticket = stepped?;
    opt.decider.poll_outcomes(&mut opt.params, &opt.reducer, false)?;
    let taken = matches!(ticket.verdict()?, Verdict::Applied | Verdict::Skipped);
    opt.keep_after_step(taken)?;
    Ok(ticket)
}

fn conclude(
    opt: &mut Optimizer,
    at: &StepArgs,
    hooks: &mut dyn UpdateHooks,
) -> Result<Arc<StepTicket>, Error> {
    outside_captures(&opt.params.options.queue).map_err(|error| opt.reducer.abort_with(error.into()))?;
    let launched = launch_decision(opt, at).map_err(|error| unless_alike(opt, error));
    let (answer, max_norm) = launched?;
    let ticket = opt.decider.ticket(&opt.params, &opt.reducer, (answer, max_norm))?;
    let verdict = ticket.verdict().map_err(|error| opt.reducer.abort_with(error))?;
    match verdict {
        Verdict::Applied => apply_with_hooks(opt, ticket, max_norm, hooks),
        Verdict::Skipped | Verdict::TooManySkips => {
            note(opt, &ticket)?;
            opt.pass_by(hooks).map(|()| ticket)
        }
        _ => note(opt, &ticket).map(|()| ticket),
    }
}

/// Returns an error that every rank gets before a step is launched; aborts the run on any other.
fn unless_alike(opt: &Optimizer, error: Error) -> Error {
    match error {
        Error::Differs(_) | Error::Disagree { .. } => error,
        error => opt.reducer.abort_with(error),
    }
}

/// Runs the update between the hooks, and sends the parameters.
fn apply_with_hooks(
    opt: &mut Optimizer,
    ticket: Arc<StepTicket>,
    max_norm: f64,
    hooks: &mut dyn UpdateHooks,
) -> Result<Arc<StepTicket>, Error> {
    let updated = hooks.before(&mut opt.params).and_then(|()| update_all(opt));
    let norm = updated.map_err(|error| opt.reducer.abort_with(error))?;
    note(opt, &ticket)?;
    let after = hooks.after(&mut opt.params, true);
    after.map_err(|error| opt.reducer.abort_with(error))?;
    // Parameters travel while the host continues.
    let sent = opt.gatherer.send_all(&mut opt.params, &opt.reducer);
    let landed = land(opt);
    sent.and(landed)?;
    match norm {
        Some(norm) => opt.decider.ticket(&opt.params, &opt.reducer, (norm, max_norm)),
        None => Ok(ticket),
    }
}

/// Makes the host follow a launched step, once it is decided.
fn note(opt: &mut Optimizer, ticket: &Arc<StepTicket>) -> Result<(), Error> {
    opt.decider.add_unknown(ticket);
    opt.decider.take_notes(&mut opt.params, &opt.reducer, true)
}
