//! A step launched on a GPU: the device decides it, and the host reads the outcome later.

use crate::error::{Error, WeightError};
use crate::plan::step_plan::FIELDS;
use crate::step::exchange;
use crate::step::outcome::{Outcome, Traffic};
use meshstep_comm::Communicator;
use meshstep_optim::clip_coef;
use meshstep_optim::cuda::{Answer, Decided, Verdict};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

/// A launched step.
#[derive(Debug)]
pub(crate) struct StepTicket {
    pub(super) answer: Answer,
    comm: Arc<dyn Communicator>,
    decided: OnceLock<Decided>,
    /// True for each parameter that was updated, if ranks count gradients.
    updated: OnceLock<Vec<bool>>,
    /// True once the caller has asked for the outcome.
    read: AtomicBool,
    traffic: OnceLock<Traffic>,
    max_norm: f64,
    names: Arc<[String]>,
}

impl StepTicket {
    /// Makes the ticket of the step that `answer` reports; its bytes are counted later.
    pub(crate) fn new(
        answer: Answer,
        comm: Arc<dyn Communicator>,
        max_norm: f64,
        names: Arc<[String]>,
    ) -> Self {
        let (decided, updated, traffic) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        StepTicket { answer, comm, decided, updated, read: AtomicBool::new(false), traffic, max_norm, names }
    }

    /// Returns true once the caller has asked for the outcome.
    pub(super) fn is_read(&self) -> bool {
        self.read.load(SeqCst)
    }

    /// Waits for the outcome.
    pub(crate) fn outcome(&self) -> Result<Outcome, Error> {
        self.read.store(true, SeqCst);
        let decided = self.decided()?;
        let Decided { norm, coef, non_finite, in_a_row, fault, .. } = decided;
        let traffic = self.traffic.get().copied().unwrap_or_default();
        let preempted = exchange::is_preempted(fault);
        match self.verdict()? {
            Verdict::Applied => Ok(Outcome::Applied { norm, coef, preempted, traffic }),
            Verdict::Skipped => Ok(Outcome::Skipped { non_finite, in_a_row, preempted, traffic }),
            Verdict::Faulty | Verdict::Uneven => {
                let name = |param: usize| self.names.get(param).cloned().unwrap_or_default();
                let (rank, fault) = exchange::decode_fault(fault, name);
                Err(Error::Fault { rank, fault })
            }
            Verdict::Unbalanced => Err(WeightError::Somewhere.into()),
            Verdict::Weightless => Err(WeightError::AllZero.into()),
            Verdict::TooManySkips => Err(Error::TooManySkips { skips: in_a_row }),
            // The host reports such a norm with the same error.
            Verdict::NoNorm => {
                Err(clip_coef(norm, self.max_norm).err().map_or(no_verdict(&decided), Error::from))
            }
            Verdict::Parted => Err(differ(&decided)),
        }
    }

    /// Records the bytes that the step has moved.
    pub(crate) fn count(&self, traffic: Traffic) {
        let _ = self.traffic.set(traffic);
    }

    /// Waits for the decision.
    fn decided(&self) -> Result<Decided, Error> {
        if let Some(&decided) = self.decided.get() {
            return Ok(decided);
        }
        let decided = self.answer.read()?;
        // An aborted exchange lets the stream continue, and leaves words that are not the ranks' sums.
        self.comm.sound()?;
        Ok(*self.decided.get_or_init(|| decided))
    }

    pub(crate) fn verdict(&self) -> Result<Verdict, Error> {
        let decided = self.decided()?;
        Verdict::ALL.get(decided.verdict as usize).copied().ok_or(no_verdict(&decided))
    }

    /// Returns true if the step has updated trainable parameter `param`.
    pub(super) fn has_updated(&self, param: usize) -> Result<bool, Error> {
        if self.verdict()? != Verdict::Applied {
            return Ok(false);
        }
        if self.updated.get().is_none() {
            let _ = self.updated.set(self.answer.updated()?);
        }
        // Parameters that are not counted are all updated.
        let counted = self.updated.get().filter(|updated| !updated.is_empty());
        Ok(counted.is_none_or(|updated| updated.get(param) == Some(&true)))
    }
}

fn no_verdict(decided: &Decided) -> Error {
    Error::NoVerdict { verdict: decided.verdict }
}

/// Returns the error of ranks that disagree on a field.
fn differ(decided: &Decided) -> Error {
    let Decided { param, mine, smallest, largest, .. } = *decided;
    let field = usize::try_from(param).ok().and_then(|field| FIELDS.get(field));
    let Some(field) = field else { return no_verdict(decided) };
    let [mine, smallest, largest] = [mine, smallest, largest].map(|value| exchange::shown(field, value));
    Error::Differ { field, mine, smallest, largest }
}
