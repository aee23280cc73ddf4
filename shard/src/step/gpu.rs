//! Steps on a GPU: everything is launched at once, the device decides, and the host learns the outcome later.

use crate::config::options::StepArgs;
use crate::config::param_groups::of_groups;
use crate::step::exchange::{self, FaultCode};
use crate::step::{Outcome, Traffic};
use crate::{Clip, Combine, Error, Missing, NonFinite, Optimizer, Options, WeightError};
use meshstep_comm::Communicator;
use meshstep_optim::cuda::{Answer, Decided, Decision, Progress, Settings, Tables, Verdict, norm_code};
use meshstep_optim::{LossScale, LossScaleState, clip_coef};
use meshstep_tensor::cuda::{self, Stream};
use meshstep_tensor::{Place, Queue};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

/// Decision state on the GPU, and the steps with outcomes that the host does not know yet.
#[derive(Debug)]
pub(crate) struct GpuStep {
    pub(crate) decision: Decision,
    /// Rows of all buckets' tables, once a step has built them.
    pub(crate) tables: Option<Tables>,
    /// Stream that only waits for parameters in flight.
    pub(crate) side_stream: Stream,
    pub(crate) unheard: VecDeque<Arc<Ticket>>,
    names: Arc<[String]>,
}

/// A launched step.
#[derive(Debug)]
pub(crate) struct Ticket {
    answer: Answer,
    comm: Arc<dyn Communicator>,
    decided: OnceLock<Decided>,
    /// True for each parameter that was updated, if ranks count gradients.
    updated: OnceLock<Vec<bool>>,
    /// True once the caller has asked for the outcome.
    told: AtomicBool,
    traffic: OnceLock<Traffic>,
    max_norm: f64,
    names: Arc<[String]>,
}

impl Ticket {
    /// Waits for the outcome.
    pub(crate) fn outcome(&self) -> Result<Outcome, Error> {
        self.told.store(true, SeqCst);
        let decided = self.decided()?;
        let Decided { norm, coef, non_finite, in_a_row, fault, .. } = decided;
        let traffic = self.traffic.get().copied().unwrap_or_default();
        match self.verdict()? {
            Verdict::Applied => Ok(Outcome::Applied { norm, coef, traffic }),
            Verdict::Skipped => Ok(Outcome::Skipped { non_finite, in_a_row, traffic }),
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
    fn has_updated(&self, param: usize) -> Result<bool, Error> {
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

pub(crate) fn outside_captures(queue: &Queue) -> Result<(), meshstep_tensor::Error> {
    let capturing = queue.stream().map_or(Ok(false), Stream::is_capturing)?;
    let what = "a step of an Optimizer";
    if capturing { Err(cuda::Error::Capturing { what }.into()) } else { Ok(()) }
}

fn no_verdict(decided: &Decided) -> Error {
    Error::NoVerdict { verdict: decided.verdict }
}

/// Returns the error of ranks that disagree on a field.
fn differ(decided: &Decided) -> Error {
    let Decided { param, mine, smallest, largest, .. } = *decided;
    let field = usize::try_from(param).ok().and_then(|field| exchange::FIELDS.get(field));
    let Some(field) = field else { return no_verdict(decided) };
    let [mine, smallest, largest] = [mine, smallest, largest].map(|value| exchange::shown(field, value));
    Error::Differ { field, mine, smallest, largest }
}

impl Optimizer {
    /// Launches the step, and returns before it is decided.
    pub(crate) fn step_on_gpu(&mut self, at: &StepArgs) -> Result<Arc<Ticket>, Error> {
        // The host tracks its steps, and does not see launches of a captured graph.
        outside_captures(&self.options.queue)?;
        let launched = self.launch(at);
        match &launched {
            // All ranks get these errors, before the step was launched.
            Err(Error::Differs(_) | Error::Disagree { .. }) => self.reducer.settle()?,
            // Abort, so that the other ranks do not wait.
            Err(error) => drop(self.reducer.abort_with(error.clone())),
            Ok(_) => {}
        }
        if let Err(poisoned) = self.reducer.healthy() {
            return Err(launched.err().unwrap_or(poisoned));
        }
        self.forget()?;
        let ticket = launched?;
        // Every collective of this step is in flight, so returning an error of an earlier step does not desynchronize the ranks.
        if let Some(gpu) = &mut self.room.gpu {
            gpu.unheard.push_back(Arc::clone(&ticket));
        }
        self.poll_outcomes(false)?;
        self.keep_after_step(true)?;
        Ok(ticket)
    }

    fn launch(&mut self, at: &StepArgs) -> Result<Arc<Ticket>, Error> {
        let (answer, max_norm) = self.launch_decision(at)?;
        let later = self.with_gpu(Self::apply_on_gpu)?;
        let ticket = self.ticket(later.unwrap_or(answer), max_norm)?;
        ticket.count(self.traffic());
        Ok(ticket)
    }

    /// Launches the decision of a step; returns its answer, and the bound on the norm.
    pub(crate) fn launch_decision(&mut self, at: &StepArgs) -> Result<(Answer, f64), Error> {
        let fault = self.arrive(at)?;
        self.verify_in_step()?;
        let settings = self.settings(at, fault);
        let answer = self.with_gpu(|all, gpu| all.decide_on_gpu(&mut gpu.decision, &settings))?;
        Ok((answer, settings.max_norm))
    }

    /// Calls `then` with the decision state, which is made if there is none yet.
    pub(crate) fn with_gpu<T>(
        &mut self,
        then: impl FnOnce(&mut Self, &mut GpuStep) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut gpu = match self.room.gpu.take() {
            Some(gpu) => gpu,
            None => self.gpu()?,
        };
        let done = then(self, &mut gpu);
        self.room.gpu = Some(gpu);
        done
    }

    /// Makes the ticket of the step that `answer` reports; its bytes are counted later.
    pub(crate) fn ticket(&mut self, answer: Answer, max_norm: f64) -> Result<Arc<Ticket>, Error> {
        let names = self.with_gpu(|_, gpu| Ok(Arc::clone(&gpu.names)))?;
        let (decided, updated, told) = (OnceLock::new(), OnceLock::new(), AtomicBool::new(false));
        let (comm, traffic) = (Arc::clone(self.reducer.config.words()), OnceLock::new());
        Ok(Arc::new(Ticket { answer, comm, decided, updated, told, traffic, max_norm, names }))
    }

    fn gpu(&self) -> Result<GpuStep, Error> {
        let Options { queue, meter, .. } = &self.options;
        let decision = Decision::new(&self.known_progress(), self.counted(), queue, meter)?;
        let names = self.entries.iter().map(|entry| entry.param.name().to_owned()).collect();
        let elsewhere = meshstep_tensor::Error::Place { given: queue.place(), expected: Place::Cuda(0) };
        let stream = queue.stream().ok_or(elsewhere)?;
        let side_stream = Stream::new(stream.device()).map_err(meshstep_tensor::Error::from)?;
        Ok(GpuStep { decision, tables: None, side_stream, unheard: VecDeque::new(), names })
    }

    /// Returns the host's view of the run's progress.
    fn known_progress(&self) -> Progress {
        let (steps, loss_scale) = (self.progress.steps, self.progress.loss_scale);
        let (skips, skips_at_min_scale) = (self.progress.skips, self.progress.skips_at_min_scale);
        Progress { skips, skips_at_min_scale, ..Progress::new(steps, loss_scale) }
    }

    fn settings(&mut self, at: &StepArgs, fault: Option<FaultCode>) -> Settings {
        let (rank, world_size) = (self.comm().rank(), self.comm().world_size());
        let fault = fault.map_or(0, |fault| exchange::encode_fault(&fault, rank));
        let launches = self.operations();
        let combine = match self.options.combine {
            Combine::Mean => 0,
            Combine::Sum => 1,
            Combine::Weighted => 2,
        };
        let settings = Settings {
            lr: at.lr,
            max_norm: at.max_norm.unwrap_or(f64::INFINITY),
            grad_scale: at.grad_scale,
            batches: self.progress.batches,
            launches,
            rules: of_groups(&self.groups),
            rank: rank as u64,
            weight: self.weight(),
            balance: self.balance(),
            fault,
            world_size: world_size as u64,
            combine,
            // A norm without kernels is refused when its sum is made.
            norm: norm_code(self.options.norm).unwrap_or_default(),
            clips: (self.options.clip == Clip::AfterReduce).into(),
            max_skips: self.options.max_skips,
            params: if self.options.missing == Missing::AllOrNone { self.counted() as u64 } else { 0 },
            propagates: (self.options.non_finite == NonFinite::Propagate).into(),
            ..Settings::default()
        };
        settings.with_loss_scale(self.options.loss_scale.as_ref())
    }

    fn decide_on_gpu(&mut self, decision: &mut Decision, settings: &Settings) -> Result<Answer, Error> {
        let comm = Arc::clone(self.reducer.config.words());
        let norm = self.reducer.norm_sum();
        let present = self.progress.present.iter().map(|p| p.load(SeqCst));
        self.exchange.run_on_gpu(&*comm, norm, decision, settings, present)
    }

    /// Lets a dynamic loss scale follow the steps with outcomes that the host does not know yet. Waits for them; a step without a
    /// verdict leaves it unchanged.
    pub(crate) fn follow_unheard(&self, state: &mut LossScaleState) {
        let Some(rule @ LossScale::Dynamic(_)) = &self.options.loss_scale else { return };
        for ticket in self.room.gpu.iter().flat_map(|gpu| &gpu.unheard) {
            match ticket.verdict() {
                Ok(Verdict::Applied) => rule.update(state, false),
                Ok(Verdict::Skipped) => rule.update(state, true),
                _ => {}
            }
        }
    }

    /// Returns the number of launched steps with outcomes that the host does not know yet.
    pub(crate) fn unheard(&self) -> u64 {
        self.room.gpu.as_ref().map_or(0, |gpu| gpu.unheard.len() as u64)
    }

    /// Returns the device address of the coming step's loss scale, an f64: kernels on the options' queue multiply the loss by it
    /// while the host does not wait. `None` on the CPU.
    pub fn loss_scale_address(&mut self) -> Result<Option<u64>, Error> {
        if self.options.queue.place() == Place::Cpu {
            return Ok(None);
        }
        self.with_gpu(|_, gpu| Ok(Some(gpu.decision.loss_scale_address())))
    }

    /// Runs [`Self::take_notes`], then returns one error of a step if no caller has asked, or can ask, for its outcome.
    pub(crate) fn poll_outcomes(&mut self, wait: bool) -> Result<(), Error> {
        self.take_notes(wait)?;
        let unreported = &mut self.room.unreported;
        unreported.retain(|ticket| !ticket.told.load(SeqCst));
        // A caller still holds the `Pending` of each other one.
        let next = unreported.iter().position(|ticket| Arc::strong_count(ticket) == 1);
        next.map_or(Ok(()), |next| unreported.remove(next).outcome().map(|_| ()))
    }

    /// Applies the outcomes of launched steps to the host's counters: of all steps if `wait`, else of those that are decided.
    pub(crate) fn take_notes(&mut self, wait: bool) -> Result<(), Error> {
        self.take_notes_of(wait).map_err(|error| self.reducer.abort_with(error))
    }

    fn take_notes_of(&mut self, wait: bool) -> Result<(), Error> {
        loop {
            let Some(gpu) = &mut self.room.gpu else { return Ok(()) };
            let Some(ticket) = gpu.unheard.front() else { return Ok(()) };
            if !wait && !ticket.answer.has_arrived()? {
                return Ok(());
            }
            let verdict = ticket.verdict()?;
            for (param, entry) in
                self.entries.iter_mut().enumerate().filter(|(_, entry)| !entry.param.frozen())
            {
                entry.t += u64::from(ticket.has_updated(param)?);
            }
            let ticket = gpu.unheard.pop_front();
            self.take_note(verdict);
            if !matches!(verdict, Verdict::Applied | Verdict::Skipped) {
                self.room.unreported.extend(ticket);
            }
        }
    }

    /// Updates the host's counters as the device has updated its own.
    fn take_note(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Applied => {
                (self.progress.skips, self.progress.skips_at_min_scale) = (0, 0);
                self.rescale(false);
            }
            Verdict::Skipped => {
                let _ = self.count_skip();
                self.rescale(true);
            }
            Verdict::TooManySkips => {
                let _ = self.count_skip();
            }
            _ => {}
        }
        self.progress.steps += u64::from(matches!(verdict, Verdict::Applied | Verdict::Skipped));
    }

    /// Sends the host's changed progress to the device, if it has decision state already.
    pub(crate) fn publish_to_gpu(&mut self) -> Result<(), Error> {
        let progress = self.known_progress();
        match &mut self.room.gpu {
            Some(gpu) => Ok(gpu.decision.set_progress(&progress, &self.options.queue)?),
            None => Ok(()),
        }
    }

    /// Returns how many launched steps, with outcomes not yet applied on the host, have updated this parameter. Waits for them.
    pub(crate) fn unheard_updates(&self, param: usize) -> Result<u64, Error> {
        let unheard = self.room.gpu.iter().flat_map(|gpu| &gpu.unheard);
        unheard.map(|ticket| Ok(u64::from(ticket.has_updated(param)?))).sum()
    }

    /// Returns the number of parameters for which ranks count gradients.
    fn counted(&self) -> usize {
        if self.options.missing.counts() { self.entries.len() } else { 0 }
    }
}
