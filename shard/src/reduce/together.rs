//! Calls between steps that all ranks make together, and the end of a run in which one rank cannot continue.

use crate::error::Error;
use crate::ranks::{agree, host_words};
use crate::reduce::reducer::GradReducer;
use meshstep_comm::{Communicator, Error as CommError, Op};
use std::sync::Arc;
use std::time::Instant;

/// Start of a call that all ranks make, and the bytes sent to agree on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begun {
    pub(crate) at: Instant,
    pub(crate) sent: u64,
}

impl Begun {
    /// Returns the start of a call now.
    pub(crate) fn now() -> Self {
        Begun { at: Instant::now(), sent: 0 }
    }
}

/// Returns the first line of the text that ranks compare: the error of this rank, or that there is none.
pub fn objection(error: Option<&Error>) -> String {
    error.map_or("this call = no objection\n".to_owned(), |error| format!("this call = {error}\n"))
}

impl GradReducer {
    /// Begins a call that all ranks make together. If a rank is in the middle of a step, or makes another call, all ranks that
    /// still communicate get an error.
    pub(crate) fn call_together(&mut self, what: &str, ready: Result<(), Error>) -> Result<Begun, Error> {
        let begun = Begun::now();
        let text = match &ready {
            Ok(()) => format!("this call = {what}\n"),
            Err(error) => objection(Some(error)),
        };
        let same = self.apart(|reducer| reducer.agree_apart(&text));
        ready?;
        let ((), sent) = same?;
        Ok(Begun { sent, ..begun })
    }

    /// Compares `text` over all ranks, none of which may be in the middle of a step. Collective.
    pub(crate) fn agree_apart(&mut self, text: &str) -> Result<(), Error> {
        self.barrier_all()?;
        agree::same_everywhere(&*self.config.comm, &self.config.options, text)
    }

    /// Runs `call` between two steps, and returns the bytes that this rank sends in it, which no step counts. An error of this
    /// rank alone ends the run.
    pub(crate) fn apart<T>(
        &mut self,
        call: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<(T, u64), Error> {
        let before = self.sent();
        let called = call(self);
        let sent = self.exclude_from_step(before);
        Ok((self.end_if_alone(called)?, sent))
    }

    /// Excludes the bytes sent since `before` from the step's traffic, and returns their number.
    pub(crate) fn exclude_from_step(&mut self, before: u64) -> u64 {
        let sent = self.sent() - before;
        self.progress.sent_before += sent;
        sent
    }

    /// Runs a barrier on each communicator that a step or a gather would use before that of all ranks, or instead of it for its
    /// words. A rank that steps or gathers meanwhile then causes a mismatch instead of a deadlock. Calls that may meet begin
    /// with it.
    pub(crate) fn barrier_all(&self) -> Result<(), Error> {
        let all = self.config.all_in_order();
        if all.len() == 1 {
            return Ok(()); // the call's own words use this communicator
        }
        self.barrier_on(all)
    }

    /// Runs a barrier on each of these, starting all of them before waiting. It allocates nothing, because this rank may be out
    /// of memory, which the call's own words report. Among several errors it returns a mismatch, the cause of the rest.
    pub(crate) fn barrier_on(&self, comms: Vec<Arc<dyn Communicator>>) -> Result<(), Error> {
        let (queue, mut started) = (&self.config.queue, Vec::new());
        for comm in comms {
            started.push(comm.start(Op::barrier(), self.gather_barrier.nothing()?, queue));
        }
        let landed: Vec<_> = started.into_iter().map(|started| host_words::land(started, queue).1).collect();
        let failed = landed.into_iter().filter_map(Result::err);
        let cause = failed.min_by_key(|error| !matches!(error.cause(), CommError::Mismatch { .. }));
        cause.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Aborts the run if communication has failed, or if this rank alone cannot continue, so that the other ranks do not wait.
    pub(crate) fn end_if_alone<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        match &result {
            Ok(_) | Err(Error::Differs(_) | Error::Verify(_) | Error::Disagree { .. }) => {}
            Err(error) => {
                if let Error::Comm(failure) = error {
                    self.poison(failure.clone());
                }
                self.abort();
            }
        }
        result
    }
}
