//! A step on a GPU with hooks around its update: the host waits for the decision, and the hooks run as on the CPU.

use crate::config::options::StepArgs;
use crate::step::gpu::{Ticket, outside_captures};
use crate::step::hooks::UpdateHooks;
use crate::{Error, Optimizer};
use meshstep_optim::cuda::Verdict;
use std::sync::Arc;

impl Optimizer {
    /// Takes a step with hooks that have work to do. Errors of the decision, which all ranks share, are the ticket's.
    pub(crate) fn step_on_gpu_with_hooks(
        &mut self,
        at: &StepArgs,
        hooks: &mut dyn UpdateHooks,
    ) -> Result<Arc<Ticket>, Error> {
        // The hooks count updates, including those of earlier steps.
        self.take_notes(true)?;
        let stepped = self.conclude(at, hooks);
        if let Err(error @ Error::Comm(failure)) = &stepped {
            tracing::debug!(%error, "a step with hooks failed");
            self.reducer.poison(failure.clone());
        }
        if let Err(poisoned) = self.reducer.healthy() {
            return Err(stepped.err().unwrap_or(poisoned));
        }
        self.reducer.settle()?;
        stepped.iter().for_each(|ticket| ticket.count(self.traffic()));
        self.forget()?;
        let ticket = stepped?;
        self.poll_outcomes(false)?;
        let taken = matches!(ticket.verdict()?, Verdict::Applied | Verdict::Skipped);
        self.keep_after_step(taken)?;
        Ok(ticket)
    }

    fn conclude(&mut self, at: &StepArgs, hooks: &mut dyn UpdateHooks) -> Result<Arc<Ticket>, Error> {
        outside_captures(&self.options.queue).map_err(|error| self.reducer.abort_with(error.into()))?;
        let launched = self.launch_decision(at).map_err(|error| self.unless_alike(error));
        let (answer, max_norm) = launched?;
        let ticket = self.ticket(answer, max_norm)?;
        let verdict = ticket.verdict().map_err(|error| self.reducer.abort_with(error))?;
        match verdict {
            Verdict::Applied => self.apply_with_hooks(ticket, max_norm, hooks),
            Verdict::Skipped | Verdict::TooManySkips => {
                self.note(&ticket)?;
                self.pass_by(hooks).map(|()| ticket)
            }
            _ => self.note(&ticket).map(|()| ticket),
        }
    }

    /// Returns an error that every rank gets before a step is launched; aborts the run on any other.
    fn unless_alike(&self, error: Error) -> Error {
        match error {
            Error::Differs(_) | Error::Disagree { .. } => error,
            error => self.reducer.abort_with(error),
        }
    }

    /// Runs the update between the hooks, and sends the parameters.
    fn apply_with_hooks(
        &mut self,
        ticket: Arc<Ticket>,
        max_norm: f64,
        hooks: &mut dyn UpdateHooks,
    ) -> Result<Arc<Ticket>, Error> {
        let updated = hooks.before(self).and_then(|()| self.update_all_on_gpu());
        let norm = updated.map_err(|error| self.reducer.abort_with(error))?;
        self.note(&ticket)?;
        let after = hooks.after(self, true);
        after.map_err(|error| self.reducer.abort_with(error))?;
        self.send_all_on_gpu()?;
        match norm {
            Some(norm) => self.ticket(norm, max_norm),
            None => Ok(ticket),
        }
    }

    /// Makes the host follow a launched step, once it is decided.
    fn note(&mut self, ticket: &Arc<Ticket>) -> Result<(), Error> {
        self.with_gpu(|_, gpu| {
            gpu.unheard.push_back(Arc::clone(ticket));
            Ok(())
        })?;
        self.take_notes(true)
    }

    /// Sends every bucket to every rank, and continues while they travel.
    fn send_all_on_gpu(&mut self) -> Result<(), Error> {
        let sent = self.send_all().map_err(|error| self.reducer.abort_with(error));
        let landed =
            self.with_gpu(|all, gpu| all.room.gathering.land_later(&gpu.side_stream, &mut all.buckets));
        sent.and(landed)
    }
}
