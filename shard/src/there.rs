//! Steps on a GPU: everything is launched at once, the device decides, and the host hears later what became of it.

use crate::exchange::{self, FaultCode};
use crate::options::At;
use crate::step::{Outcome, Traffic};
use crate::{Clip, Combine, Error, Optimizer, Options};
use meshstep_optim::cuda::{Answer, Decided, Decision, Progress, Settings, Verdict, norm_code};
use meshstep_optim::{LossScale, clip_coef};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

/// What a GPU decides by, and the steps whose outcome the host has not heard of.
#[derive(Debug)]
pub(crate) struct There {
    decision: Decision,
    unheard: VecDeque<Arc<Ticket>>,
    names: Arc<[String]>,
}

/// A step that was launched.
#[derive(Debug)]
pub(crate) struct Ticket {
    answer: Answer,
    decided: OnceLock<Decided>,
    /// Whether somebody has asked for the outcome.
    told: AtomicBool,
    traffic: Traffic,
    max_norm: f64,
    names: Arc<[String]>,
}

impl Ticket {
    /// Waits for the outcome.
    pub(crate) fn outcome(&self) -> Result<Outcome, Error> {
        self.told.store(true, SeqCst);
        let Decided { norm, coef, non_finite, in_a_row, fault, .. } = self.decided()?;
        let traffic = self.traffic;
        match self.verdict()? {
            Verdict::Applied => Ok(Outcome::Applied { norm, coef, traffic }),
            Verdict::Skipped => Ok(Outcome::Skipped { non_finite, in_a_row, traffic }),
            Verdict::Faulty => {
                let name = |param: usize| self.names.get(param).cloned().unwrap_or_default();
                let (rank, fault) = exchange::decode_fault(fault, name);
                Err(Error::Fault { rank, fault })
            }
            Verdict::Weightless => Err(Error::ZeroWeight),
            Verdict::TooManySkips => Err(Error::TooManySkips { skips: in_a_row }),
            // What the host would say of such a norm.
            Verdict::NoNorm => Err(clip_coef(norm, self.max_norm).err().map_or(Error::Differ, Error::from)),
            Verdict::Parted | Verdict::Uneven => Err(Error::Differ),
        }
    }

    /// Waits for what was decided.
    fn decided(&self) -> Result<Decided, Error> {
        if self.decided.get().is_none() {
            let _ = self.decided.set(self.answer.read()?);
        }
        self.decided.get().copied().ok_or(Error::Differ)
    }

    fn verdict(&self) -> Result<Verdict, Error> {
        let number = self.decided()?.verdict as usize;
        Verdict::ALL.get(number).copied().ok_or(Error::Differ)
    }
}

impl Optimizer {
    /// Launches the step, and returns before it is decided.
    pub(crate) fn step_there(&mut self, at: &At) -> Result<Arc<Ticket>, Error> {
        let launched = self.launch(at);
        if let Err(Error::Comm(failure)) = &launched {
            self.handover.poison(failure.clone());
        }
        if let Err(poisoned) = self.handover.healthy() {
            return Err(launched.err().unwrap_or(poisoned));
        }
        self.forget()?;
        let ticket = launched?;
        // Every collective of this step is on its way: an error of an earlier one may be told without parting from other ranks.
        let earlier = self.hear(self.scale_follows());
        if let Some(there) = &mut self.room.there {
            there.unheard.push_back(Arc::clone(&ticket));
        }
        earlier?;
        if self.scale_follows() {
            self.hear(true)?;
        }
        Ok(ticket)
    }

    fn launch(&mut self, at: &At) -> Result<Arc<Ticket>, Error> {
        let fault = self.arrive(at)?;
        let settings = self.settings(at, fault);
        let mut there = match self.room.there.take() {
            Some(there) => there,
            None => self.there()?,
        };
        let answer = self.decide_there(&mut there.decision, &settings);
        let updated = answer.and_then(|answer| self.apply_there(&there.decision).map(|()| answer));
        let (names, traffic) = (Arc::clone(&there.names), self.traffic());
        self.room.there = Some(there);
        let (decided, told, max_norm) = (OnceLock::new(), AtomicBool::new(false), settings.max_norm);
        Ok(Arc::new(Ticket { answer: updated?, decided, told, traffic, max_norm, names }))
    }

    fn there(&self) -> Result<There, Error> {
        let Options { queue, meter, .. } = &self.options;
        let decision = Decision::new(&self.known_progress(), queue, meter)?;
        let names = self.entries.iter().map(|entry| entry.param.name().to_owned()).collect();
        Ok(There { decision, unheard: VecDeque::new(), names })
    }

    /// What the host knows of the run.
    fn known_progress(&self) -> Progress {
        let (steps, loss_scale) = (self.progress.steps, self.progress.loss_scale);
        let (skips, hopeless) = (self.progress.skips, self.progress.hopeless);
        Progress { skips, hopeless, ..Progress::new(steps, loss_scale) }
    }

    fn settings(&mut self, at: &At, fault: Option<FaultCode>) -> Settings {
        let (rank, world_size) = (self.comm().rank(), self.comm().world_size());
        let fault = fault.map_or(0, |fault| exchange::encode_fault(&fault, rank));
        let launches = self.handover.launches();
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
            rank: rank as u64,
            weight: self.progress.weight,
            fault,
            world_size: world_size as u64,
            params: 0,
            growth_factor: 1.0,
            backoff_factor: 1.0,
            min_scale: 1.0,
            growth_interval: 1,
            hysteresis: 1,
            dynamic: 0,
            combine,
            // One that kernels do not know is refused where its sum is made.
            norm: norm_code(self.options.norm).unwrap_or_default(),
            clips: (self.options.clip == Clip::AfterReduce).into(),
            max_skips: self.options.max_skips,
            zero_grads: 0,
        };
        settings.with_loss_scale(self.options.loss_scale.as_ref())
    }

    fn decide_there(&mut self, decision: &mut Decision, settings: &Settings) -> Result<Answer, Error> {
        let comm = Arc::clone(&self.handover.fixed.comm);
        let norm = self.handover.norm_sum();
        self.exchange.run_there(&*comm, norm, decision, settings)
    }

    /// Updates what this rank owns, if the device has decided so, and sends it to every rank.
    fn apply_there(&mut self, decision: &Decision) -> Result<(), Error> {
        let mut updated = Ok(());
        for b in 0..self.buckets.len() {
            updated = updated.and_then(|()| self.update_there(b, decision));
        }
        if updated.is_err() {
            // The other ranks are not to wait for what will not come.
            self.handover.abort();
        }
        let landed = self.room.gathering.land(&self.handover.fixed.queue, &mut self.buckets);
        updated.and(landed)
    }

    fn update_there(&mut self, b: usize, decision: &Decision) -> Result<(), Error> {
        let owned = &mut self.buckets[b];
        if let Some(grads) = self.handover.grads(b) {
            let next = |p: usize| self.entries[p].t + 1;
            owned.update_there(grads, &self.groups, next, decision.step(), &self.options.meter)?;
        }
        self.send_updated(b)
    }

    /// Whether the host needs to know each step's outcome before the next backward pass.
    fn scale_follows(&self) -> bool {
        matches!(self.options.loss_scale, Some(LossScale::Dynamic(_)))
    }

    /// Takes in what earlier steps came to, of all if `wait`, else of those that are known; an error of theirs that nobody
    /// has asked for.
    pub(crate) fn hear(&mut self, wait: bool) -> Result<(), Error> {
        let mut untold = Ok(());
        loop {
            let Some(there) = &mut self.room.there else { return untold };
            let Some(ticket) = there.unheard.front() else { return untold };
            if !wait && !ticket.answer.has_arrived()? {
                return untold;
            }
            let ticket = Arc::clone(ticket);
            there.unheard.pop_front();
            self.take_note(ticket.verdict()?);
            if !ticket.told.load(SeqCst) {
                untold = untold.and(ticket.outcome().map(|_| ()));
            }
        }
    }

    /// Keeps the host's counters as the device has kept its own.
    fn take_note(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Applied => {
                (self.progress.skips, self.progress.hopeless) = (0, 0);
                self.rescale(false);
                self.entries.iter_mut().filter(|entry| !entry.param.frozen()).for_each(|entry| entry.t += 1);
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

    /// Tells the device what the host has changed, if it is there already.
    pub(crate) fn tell_there(&mut self) -> Result<(), Error> {
        let progress = self.known_progress();
        match &mut self.room.there {
            Some(there) => Ok(there.decision.set_progress(&progress, &self.options.queue)?),
            None => Ok(()),
        }
    }

    /// How many of the steps that the host has not heard of were applied. Waits for them.
    pub(crate) fn unheard_updates(&self) -> Result<u64, Error> {
        let unheard = self.room.there.iter().flat_map(|there| &there.unheard);
        let applied = unheard.map(|ticket| Ok(u64::from(ticket.verdict()? == Verdict::Applied)));
        applied.sum()
    }
}
