//! Replays a trace of L-BFGS through the sharded implementation.
//!
//! A gradient norm is compared like every other value, within `atol + rtol |want|`. Near a minimum `atol` dominates,
//! because the gradient is a difference of larger terms there, and its digits are rounding errors.

use std::sync::Arc;

use meshstep_comm::Communicator;
use meshstep_optim::Lbfgs;
use meshstep_shard::ShardedLbfgs;

use super::key::Key;
use super::observed::Observed;
use super::problems::Rows;
use super::reason::Reason;
use super::replay::{first, layout, options};
use super::setting::Setting;
use super::trace::Trace;

/// Replays every step of the trace on this rank, which evaluates its rows of the problem.
pub(super) fn run(
    trace: &Trace,
    setting: &Setting,
    rule: &Lbfgs,
    problem: Option<&Rows<'_>>,
    comm: Arc<dyn Communicator>,
) -> Result<Observed, Reason> {
    let problem = problem.ok_or(Reason::NoProblem)?;
    let rank = comm.rank();
    let mut opt =
        ShardedLbfgs::new(comm, layout(trace)?, rule.clone(), first(trace), options(trace, setting)?)?;
    let (mut observed, mut evaluations) = (Observed::default(), 0);
    for t in 1..=trace.spec.steps {
        let report = opt.step(|mb| problem.evaluate(mb, rank, setting.ranks))?.report;
        evaluations += report.evaluations;
        // PyTorch's step also returns the loss at its start.
        observed.scalar(trace, Key::Loss { t }, report.first_loss);
        observed.scalar(trace, Key::Norm { t }, report.grad_norm);
        observed.scalar(trace, Key::Evals { t }, evaluations as f64);
        observed.params(trace, |name| Key::Expect { t, name }, |name| opt.optimizer().param(name))?;
    }
    Ok(observed)
}
