//! A scheduler's request to end the run, on one rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// Request to end the run after the current step. Clones share it: one goes to [`Options::preemption`](crate::Options::preemption),
/// another to the code that makes the request, such as a signal handler.
///
/// A request on one rank is enough. The ranks exchange it within the step's own exchange, so all of them see it in the outcome of the
/// same step ([`Outcome::preempted`](crate::Outcome::preempted)), save there and end. A request stays; a handle cannot withdraw it.
///
/// ```
/// use meshstep_shard::Preemption;
/// use meshstep_shard::prelude::*;
///
/// let steps = loopback::spawn(3, |comm| -> Result<u64, meshstep_shard::Error> {
///     let (rank, preemption) = (comm.rank(), Preemption::new());
///     let layout = Layout::builder().param("w", &[2], DType::F32).build()?;
///     let options = Options { preemption: preemption.clone(), ..Options::default() };
///     let mut opt = Optimizer::new(comm, layout, Sgd::default(), |_, _| Ok(()), options)?;
///     loop {
///         if rank == 1 && opt.steps() == 4 {
///             preemption.request(); // a signal, on one rank
///         }
///         let mb = opt.micro_batch(1)?;
///         mb.grad("w", &[1f32; 2])?;
///         mb.finish()?;
///         if opt.step(StepArgs::default())?.outcome()?.preempted() {
///             return Ok(opt.steps()); // save here, on every rank
///         }
///     }
/// })?;
/// assert!(steps.into_iter().all(|steps| steps.is_ok_and(|steps| steps == 5)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Preemption(Arc<AtomicBool>);

impl Preemption {
    /// Creates a handle without a request.
    pub fn new() -> Self {
        Self::default()
    }

    /// Requests the end of the run. Async-signal-safe: one store to an atomic, without locks and memory.
    pub fn request(&self) {
        self.0.store(true, SeqCst);
    }

    /// Returns true if the end was requested through this handle or a clone of it: on this rank, not on others.
    pub fn is_requested(&self) -> bool {
        self.0.load(SeqCst)
    }
}

/// Makes a handle of a flag that other code sets, such as `signal_hook::flag::register`.
impl From<Arc<AtomicBool>> for Preemption {
    fn from(flag: Arc<AtomicBool>) -> Self {
        Preemption(flag)
    }
}
