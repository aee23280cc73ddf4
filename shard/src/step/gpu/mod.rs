//! Decider of steps on a GPU: the device decides, and the host's counters follow when outcomes are known.

mod exchange;
mod ticket;

pub(crate) use ticket::StepTicket;

use crate::config::options::{Clip, Combine, Missing, NonFinite, Options, StepArgs};
use crate::config::param_groups::of_groups;
use crate::error::Error;
use crate::reduce::reducer::GradReducer;
use crate::step::decider::Decider;
use crate::step::exchange::{FaultCode, fault_word};
use crate::update::gpu_matrices::GpuMatrices;
use crate::update::params::Params;
use meshstep_optim::cuda::{Answer, Decision, Progress, Settings, Tables, Verdict, norm_code};
use meshstep_optim::{LossScale, LossScaleState};
use meshstep_tensor::cuda::{self, Event, Stream};
use meshstep_tensor::{Place, Queue};
use std::collections::VecDeque;
use std::sync::Arc;

/// Steps launched on a GPU, and the device's state.
#[derive(Debug, Default)]
pub(crate) struct Launched {
    /// State of the device, made by the first step.
    device: Option<DeviceState>,
    /// Failed steps with an outcome that the caller has not read yet.
    unreported: Vec<Arc<StepTicket>>,
}

/// Decision state on the GPU, and the steps with outcomes that the host does not know yet.
#[derive(Debug)]
pub(crate) struct DeviceState {
    pub(crate) decision: Decision,
    /// Rows of all buckets' tables, once a step has built them.
    pub(crate) tables: Option<Tables>,
    /// Memory of updates of matrices, once a step has allocated it.
    pub(crate) matrices: Option<GpuMatrices>,
    /// Stream that only waits for parameters in flight.
    pub(crate) side_stream: Stream,
    unknown: VecDeque<Arc<StepTicket>>,
    names: Arc<[String]>,
}

/// Event after which another stream no longer uses the exchange's vectors.
#[derive(Debug, Default)]
pub(crate) struct LentWords(Option<Event>);

impl LentWords {
    /// Lends the vectors until the work that `stream` has so far.
    fn until(stream: &Stream) -> Result<Self, meshstep_tensor::Error> {
        Ok(LentWords(Some(stream.record()?)))
    }

    /// Makes the queue wait until the other stream has released the vectors.
    pub(super) fn take_back(&mut self, queue: &Queue) -> Result<(), meshstep_tensor::Error> {
        let lent = self.0.take().zip(queue.stream());
        Ok(lent.map_or(Ok(()), |(event, stream)| stream.wait(&event))?)
    }
}

impl Launched {
    /// Returns the number of launched steps with outcomes that the host does not know yet.
    pub(crate) fn len(&self) -> u64 {
        self.unknown().count() as u64
    }

    fn unknown(&self) -> impl Iterator<Item = &Arc<StepTicket>> {
        self.device.iter().flat_map(|device| &device.unknown)
    }

    /// Returns the loss scale after the steps with outcomes that the host does not know yet. Waits for them if the scale is
    /// dynamic; a step without a verdict leaves it unchanged.
    pub(super) fn follow(&self, options: &Options, mut state: LossScaleState) -> LossScaleState {
        let Some(rule @ LossScale::Dynamic(_)) = &options.loss_scale else { return state };
        for ticket in self.unknown() {
            match ticket.verdict() {
                Ok(Verdict::Applied) => rule.update(&mut state, false),
                Ok(Verdict::Skipped) => rule.update(&mut state, true),
                _ => {}
            }
        }
        state
    }

    /// Returns how many launched steps, with outcomes not yet applied on the host, have updated this parameter. Waits for them.
    pub(crate) fn updates_of(&self, param: usize) -> Result<u64, Error> {
        self.unknown().map(|ticket| Ok(u64::from(ticket.has_updated(param)?))).sum()
    }

    /// Drops the device's state; the next step makes it again, for all parameters.
    pub(crate) fn reset(&mut self) {
        self.device = None;
    }
}

/// Checks that the queue is not being captured into a graph: the host tracks its steps, and does not see a graph's launches.
pub(crate) fn outside_captures(queue: &Queue) -> Result<(), meshstep_tensor::Error> {
    let capturing = queue.stream().map_or(Ok(false), Stream::is_capturing)?;
    let what = "a step of an Optimizer";
    if capturing { Err(cuda::Error::Capturing { what }.into()) } else { Ok(()) }
}

impl Decider {
    /// Returns the device's state, which is made if there is none yet.
    pub(crate) fn device(&mut self, params: &Params) -> Result<&mut DeviceState, Error> {
        if self.launched.device.is_none() {
            self.launched.device = Some(self.make_device(params)?);
        }
        Ok(self.launched.device.as_mut().unwrap_or_else(|| unreachable!("made above")))
    }

    fn make_device(&self, params: &Params) -> Result<DeviceState, Error> {
        let Options { queue, meter, .. } = &params.options;
        let decision = Decision::new(&self.known_progress(), counted(params), queue, meter)?;
        let names = (0..params.entries.len()).map(|param| params.name(param)).collect();
        let elsewhere = meshstep_tensor::Error::Place { given: queue.place(), expected: Place::Cuda(0) };
        let stream = queue.stream().ok_or(elsewhere)?;
        let side_stream = Stream::new(stream.device()).map_err(meshstep_tensor::Error::from)?;
        let unknown = VecDeque::new();
        Ok(DeviceState { decision, tables: None, matrices: None, side_stream, unknown, names })
    }

    /// Launches the decision of a step; returns its answer, and the bound on the norm.
    pub(crate) fn launch(
        &mut self,
        (params, reducer): (&Params, &mut GradReducer),
        at: &StepArgs,
        (fault, operations): (Option<FaultCode>, u64),
    ) -> Result<(Answer, f64), Error> {
        let settings = settings(params, reducer, at, fault, operations);
        let comm = Arc::clone(reducer.config.words());
        self.device(params)?;
        let Decider { exchange, launched, .. } = self;
        let device = launched.device.as_mut().unwrap_or_else(|| unreachable!("made above"));
        let (norm, progress) = reducer.norm_and_progress();
        let (decision, present) = (&mut device.decision, progress.present());
        let answer = exchange.run_on_gpu(&*comm, norm, decision, &settings, present)?;
        Ok((answer, settings.max_norm))
    }

    /// Launches the exchange of the norm, if the step was decided without it; returns its answer.
    pub(crate) fn launch_norm(
        &mut self,
        params: &Params,
        reducer: &mut GradReducer,
    ) -> Result<Option<Answer>, Error> {
        if params.options.non_finite == NonFinite::Skip {
            return Ok(None);
        }
        let comm = Arc::clone(reducer.config.words());
        self.device(params)?;
        let Decider { exchange, launched, .. } = self;
        let device = launched.device.as_mut().unwrap_or_else(|| unreachable!("made above"));
        let (norm, _) = reducer.norm_and_progress();
        exchange.norm_on_gpu(&*comm, norm, &mut device.decision, &device.side_stream).map(Some)
    }

    /// Makes the ticket of the step that `answer` reports; its bytes are counted later.
    pub(crate) fn ticket(
        &mut self,
        params: &Params,
        reducer: &GradReducer,
        (answer, max_norm): (Answer, f64),
    ) -> Result<Arc<StepTicket>, Error> {
        let names = Arc::clone(&self.device(params)?.names);
        Ok(Arc::new(StepTicket::new(answer, Arc::clone(reducer.config.words()), max_norm, names)))
    }

    /// Adds a launched step to those with an unknown outcome.
    pub(crate) fn add_unknown(&mut self, ticket: &Arc<StepTicket>) {
        if let Some(device) = &mut self.launched.device {
            device.unknown.push_back(Arc::clone(ticket));
        }
    }

    /// Returns the host's view of the run's progress.
    fn known_progress(&self) -> Progress {
        let known = &self.progress;
        let (skips, skips_at_min_scale) = (known.skips, known.skips_at_min_scale);
        Progress { skips, skips_at_min_scale, ..Progress::new(known.steps, known.loss_scale) }
    }

    /// Runs [`Self::take_notes`], then returns one error of a step if no caller has asked, or can ask, for its outcome.
    pub(crate) fn poll_outcomes(
        &mut self,
        params: &mut Params,
        reducer: &GradReducer,
        wait: bool,
    ) -> Result<(), Error> {
        self.take_notes(params, reducer, wait)?;
        let unreported = &mut self.launched.unreported;
        unreported.retain(|ticket| !ticket.is_read());
        // A caller still holds the `Pending` of each other one.
        let next = unreported.iter().position(|ticket| Arc::strong_count(ticket) == 1);
        next.map_or(Ok(()), |next| unreported.remove(next).outcome().map(|_| ()))
    }

    /// Applies the outcomes of launched steps to the host's counters: of all steps if `wait`, else of those that are decided.
    pub(crate) fn take_notes(
        &mut self,
        params: &mut Params,
        reducer: &GradReducer,
        wait: bool,
    ) -> Result<(), Error> {
        self.take_known(params, wait).map_err(|error| reducer.abort_with(error))
    }

    fn take_known(&mut self, params: &mut Params, wait: bool) -> Result<(), Error> {
        loop {
            let Some(device) = &mut self.launched.device else { return Ok(()) };
            let Some(ticket) = device.unknown.front() else { return Ok(()) };
            if !wait && !ticket.answer.has_arrived()? {
                return Ok(());
            }
            let verdict = ticket.verdict()?;
            let trained = params.entries.iter_mut().enumerate().filter(|(_, entry)| !entry.param.frozen());
            for (param, entry) in trained {
                entry.t += u64::from(ticket.has_updated(param)?);
            }
            let ticket = device.unknown.pop_front();
            self.take_note(&params.options, verdict);
            if !matches!(verdict, Verdict::Applied | Verdict::Skipped) {
                self.launched.unreported.extend(ticket);
            }
        }
    }

    /// Updates the host's counters as the device has updated its own.
    fn take_note(&mut self, options: &Options, verdict: Verdict) {
        match verdict {
            Verdict::Applied => self.count_applied(options),
            Verdict::Skipped => {
                let _ = self.count_skip(options);
                self.rescale(options, true);
            }
            Verdict::TooManySkips => {
                let _ = self.count_skip(options);
            }
            _ => {}
        }
        self.progress.steps += u64::from(matches!(verdict, Verdict::Applied | Verdict::Skipped));
    }

    /// Sends the host's changed progress to the device, if it has decision state already.
    pub(crate) fn publish(&mut self, params: &Params) -> Result<(), Error> {
        let progress = self.known_progress();
        match &mut self.launched.device {
            Some(device) => Ok(device.decision.set_progress(&progress, &params.options.queue)?),
            None => Ok(()),
        }
    }

    /// Makes the next step read each parameter's `t` again.
    pub(crate) fn recount(&mut self, params: &mut Params) {
        params.buckets.iter_mut().for_each(|owned| owned.recount());
        if let Some(device) = &mut self.launched.device {
            device.tables = None;
        }
    }
}

/// Returns the number of parameters for which ranks count gradients.
fn counted(params: &Params) -> usize {
    if params.options.missing.counts() { params.entries.len() } else { 0 }
}

/// Returns this rank's arguments of the device's decision.
fn settings(
    params: &Params,
    reducer: &GradReducer,
    at: &StepArgs,
    fault: Option<FaultCode>,
    operations: u64,
) -> Settings {
    let options = &params.options;
    let (rank, world_size) = (reducer.config.comm.rank(), reducer.config.comm.world_size());
    let combine = match options.combine {
        Combine::Mean => 0,
        Combine::Sum => 1,
        Combine::Weighted => 2,
    };
    let settings = Settings {
        lr: at.lr,
        max_norm: at.max_norm.unwrap_or(f64::INFINITY),
        grad_scale: at.grad_scale,
        batches: reducer.batches(),
        launches: operations,
        rules: of_groups(&params.groups),
        rank: rank as u64,
        weight: reducer.weight(),
        balance: reducer.balance(),
        fault: fault_word(fault, rank, &options.preemption),
        world_size: world_size as u64,
        combine,
        // A norm without kernels is refused when its sum is made.
        norm: norm_code(options.norm).unwrap_or_default(),
        clips: (options.clip == Clip::AfterReduce).into(),
        max_skips: options.max_skips,
        params: if options.missing == Missing::AllOrNone { counted(params) as u64 } else { 0 },
        propagates: (options.non_finite == NonFinite::Propagate).into(),
        ..Settings::default()
    };
    settings.with_loss_scale(options.loss_scale.as_ref())
}
