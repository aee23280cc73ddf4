//! Elastic workers: workers that join and leave a run while it trains. Before a step that exchanges, each asks for the members.

use crate::exchange::elastic_round::{Following, Heard};
use crate::exchange::owned_spans::on_gpu;
use crate::exchange::placement_conflict::check_sides;
use crate::exchange::replica::Replica;
use crate::worker::optimizer::{LocalOptimizer, rules};
use crate::{LocalError, LocalPlan, Veto, Workers};
use meshstep_membership::{Ballot, Decision, Digest, Error as MembershipError, Membership, Refusal, Round};
use meshstep_shard::extend::{OptimizerExchange, OptimizerShard};
use meshstep_shard::{Error, Optimizer};
use std::sync::Arc;
use twox_hash::XxHash3_64;

impl LocalPlan {
    /// Returns the digest that a worker with this optimizer joins with: the arbiter refuses another plan, or other rules.
    pub fn digest(&self, inner: &Optimizer) -> Digest {
        Digest { plan: self.hash(), rule: XxHash3_64::oneshot(rules(inner).as_bytes()) }
    }
}

impl LocalOptimizer {
    /// Joins an elastic run, one that workers join and leave, through the membership `member`. The call waits for the first
    /// boundary: with all workers of a run that begins, like [`new`](Self::new), or in the middle of a run. In the latter case the
    /// worker [enters](Self::enter): it takes the parameters, moments, `t`, step and outer optimizer's state of the first member
    /// that counts, and its own values count after one committed exchange.
    ///
    /// `connect` makes the communicators of a round's members, by their ranks there; it is called once for each epoch. From then on
    /// the worker calls [`follow`](Self::follow) before every step.
    ///
    /// In a worker of several ranks, rank 0 calls this function and every other rank
    /// [`join_through_rank0`](Self::join_through_rank0); each rank calls its own `connect`. All ranks get the same answers, and an
    /// error on one is an error on all.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new) and [`regroup`](Self::regroup), [`LocalError::BothSides`], [`LocalError::Membership`]. If
    /// the call fails after it has asked for the boundary, the worker has left the membership: no other worker waits for it.
    pub fn join(
        inner: Optimizer,
        plan: LocalPlan,
        member: Arc<dyn Membership>,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Self, LocalError> {
        Self::join_as(inner, plan, Some(member), connect)
    }

    /// [`join`](Self::join) for the ranks of a worker other than rank 0.
    pub fn join_through_rank0(
        inner: Optimizer,
        plan: LocalPlan,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Self, LocalError> {
        Self::join_as(inner, plan, None, connect)
    }

    fn join_as(
        inner: Optimizer,
        plan: LocalPlan,
        member: Option<Arc<dyn Membership>>,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Self, LocalError> {
        let fits = check_sides(&plan).and_then(|()| check_place(&inner));
        let text = fits.as_ref().map_or_else(|error| format!("this call = {error}\n"), |()| plan.describe());
        let replica = Replica::new(&inner, member, &text);
        fits?;
        let mut replica = replica?;
        let asked = replica.boundary(0).map_err(LocalError::from);
        let round = match asked.and_then(|answer| Ok(answer?)) {
            Ok(round) => round,
            Err(error) => {
                replica.leave();
                return Err(error);
            }
        };
        let begun = Self::begin(inner, plan, &round, connect);
        let mut local = match replica.together(begun) {
            Ok(local) => local,
            Err(error) => {
                replica.leave();
                return Err(error);
            }
        };
        let (epoch, counts, granted) = (round.epoch, round.counts(), round.step);
        let (round, side, lost, unheard) = (Some(round), None, None, None);
        local.engine.following = Some(Following { replica, epoch, round, granted, side, lost, unheard });
        if counts {
            // No exchange takes place before the first step.
            let ended = local.engine.end_round(Ballot::Ready).map_err(LocalError::from);
            if let Err(error) = ended.and_then(|ended| Ok(ended?)) {
                local.engine.leave_membership();
                return Err(error);
            }
        }
        Ok(local)
    }

    /// Begins with all members of a new run, or takes over the state of a running one.
    fn begin(
        inner: Optimizer,
        plan: LocalPlan,
        round: &Round,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Self, LocalError> {
        let workers = connect(round)?;
        let world = Arc::clone(&workers.world);
        let begun = || {
            if round.counts() {
                return LocalOptimizer::new(inner, workers, plan);
            }
            let (_, alone) = Workers::split(Arc::clone(inner.comm()), 0)?;
            let mut local = LocalOptimizer::new(inner, alone, plan)?;
            local.enter();
            local.regroup(workers)?;
            Ok(local)
        };
        // The other members may wait for this rank in `world`.
        begun().inspect_err(|_| world.abort())
    }

    /// Prepares the next step; called before every step. If that step exchanges, the call waits for the other members, and the
    /// returned round names them and the workers that left since the last one. If the members have changed, `connect` makes their
    /// communicators, and the worker continues with these as [`regroup`](Self::regroup) says. Collective over the worker's ranks,
    /// which all get the same result.
    ///
    /// An exchange takes effect only if all members vote for it: a member that is lost later costs the others that one exchange,
    /// and its fragments follow their failure policy. If a member is lost before the communicators are made, there is no round, and
    /// the step reports the failed fragments.
    ///
    /// # Errors
    /// [`LocalError::Membership`]: this function may be called again after a refusal that is not final, or without an answer.
    /// If no arbiter can be reached ([`MembershipError::Alone`]), or the others are ahead ([`Refusal::Behind`]), there is no round
    /// either, and the worker goes on alone. [`LocalError::Missed`]: the worker has to join again. An error of `connect` or of [`regroup`](Self::regroup) costs the
    /// exchange.
    pub fn follow(
        &mut self,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Option<&Round>, LocalError> {
        self.inner.healthy()?;
        let (step, side) = (self.engine.step + 1, self.engine.side());
        if let Some(following) = &mut self.engine.following {
            following.side = side;
            if side.is_some() && following.round.is_none() {
                let granted = following.granted;
                self.hear_end()?;
                if granted != step {
                    match self.ask_for_round(step) {
                        Err(LocalError::Membership(error)) if passes(&error) => return Ok(None),
                        round => self.go_on_with(round?, connect)?,
                    }
                    // Flights may have been given up, since joining members know of none: the sides are computed again.
                    let side = self.engine.side();
                    self.engine.following.iter_mut().for_each(|following| following.side = side);
                }
            }
        }
        Ok(self.engine.following.as_ref().and_then(|following| following.round.as_ref()))
    }

    /// Asks for a round of this step. A round of an earlier one was granted after the worker had given up its boundary and taken that
    /// step alone: the worker ends it for all, and asks again.
    fn ask_for_round(&mut self, step: u64) -> Result<Round, LocalError> {
        loop {
            let round = self.ask(|replica| replica.boundary(step))?;
            if round.step == step {
                return Ok(round);
            }
            self.engine.following.iter_mut().for_each(|following| following.round = Some(round.clone()));
            // The others wait for this worker in the exchange.
            self.engine.workers.world.abort();
            self.engine.workers.across.abort();
            match self.engine.end_round(Ballot::Failed) {
                Ok(ended) => drop(ended?),
                Err(error) => return Err(self.part(error)),
            }
        }
    }

    /// Asks for the decision on the last exchange, if it is not known.
    fn hear_end(&mut self) -> Result<(), LocalError> {
        let unheard = self.engine.following.as_ref().and_then(|following| following.unheard.clone());
        let Some(round) = unheard else { return Ok(()) };
        let decision = self.ask(|replica| replica.vote(&round, Ballot::Failed))?;
        self.engine.following.iter_mut().for_each(|following| following.unheard = None);
        if let Decision::Commit {} = decision {
            self.engine.leave_membership();
            return Err(LocalError::Missed { step: round.step });
        }
        Ok(())
    }

    /// Asks for an answer that all ranks of the worker get.
    fn ask<T>(&mut self, call: impl FnOnce(&Replica) -> Heard<T>) -> Result<T, LocalError> {
        let Some(following) = &self.engine.following else { unreachable!("only elastic workers ask") };
        match call(&following.replica) {
            Ok(answer) => Ok(answer?),
            Err(error) => Err(self.part(error)),
        }
    }

    /// Leaves the run: the worker's ranks can no longer work together, and the other workers must not wait for them.
    fn part(&mut self, error: Error) -> LocalError {
        let error = self.inner.abort_with(error);
        self.engine.part();
        error.into()
    }

    /// Takes part in a round, with new communicators if its epoch is new.
    fn go_on_with(
        &mut self,
        round: Round,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<(), LocalError> {
        let Some(following) = &mut self.engine.following else { return Ok(()) };
        let epoch = round.epoch;
        let known = epoch == following.epoch;
        (following.round, following.granted) = (Some(round.clone()), round.step);
        // A worker that still does not count, since its last round had nothing to exchange, takes over state again.
        self.engine.active = round.counts();
        if known {
            return Ok(());
        }
        // Flights are given up even if the new communicators fail: all members know of this round, but may differ in their flights.
        let rank = self.engine.workers.world.rank();
        let given_up = self.engine.give_up(self.inner.own_params_mut(), Veto::Failed { rank });
        let mut given_up = given_up.and_then(|()| self.inner.keep_if_due());
        if std::mem::take(&mut self.engine.changed) {
            given_up = given_up.and_then(|()| self.inner.gather_all());
        }
        if let Err(error) = given_up {
            return Err(self.part(error));
        }
        let connected = connect(&round).map_err(LocalError::from);
        let new = connected.as_ref().ok().map(|workers| Arc::clone(&workers.world));
        let own = connected.and_then(|workers| self.regroup(workers));
        let own_class = class(&own);
        let Some(following) = &mut self.engine.following else { return Ok(()) };
        let worst = match following.replica.worst(own_class) {
            Ok(OK) => {
                following.epoch = epoch;
                return Ok(());
            }
            Ok(worst) => worst,
            Err(error) => return Err(self.part(error)),
        };
        // The abort ends the waits of the other workers, in whichever call they are.
        self.engine.workers.world.abort();
        new.iter().for_each(|world| world.abort());
        let told = if worst == LOST { Ok(()) } else { following.replica.together(own) };
        match self.engine.end_round(Ballot::Failed) {
            Ok(ended) => told.and(ended.map(drop).map_err(LocalError::from)),
            Err(error) => Err(self.part(error)),
        }
    }
}

/// Refuses GPUs: NCCL's communicators of a process end together, so a lost worker would end the others.
fn check_place(inner: &Optimizer) -> Result<(), LocalError> {
    if !on_gpu(inner.options()) {
        return Ok(());
    }
    let what = "a run whose workers come and go (LocalOptimizer::join)".to_owned();
    let works = "memory of the CPU, or LocalOptimizer::new and regroup";
    Err(Error::NotOnGpu { what, works }.into())
}

/// Returns true if the worker takes the step without an exchange.
fn passes(error: &MembershipError) -> bool {
    matches!(error, MembershipError::Alone { .. } | MembershipError::Refused(Refusal::Behind { .. }))
}

const OK: u64 = 0;
/// A member was lost, which costs one exchange.
const LOST: u64 = 1;
const WRONG: u64 = 2;

/// Classifies how this rank took over the new communicators.
fn class(regrouped: &Result<(), LocalError>) -> u64 {
    match regrouped {
        Ok(()) => OK,
        Err(LocalError::Shard(Error::Comm(_)) | LocalError::Membership(MembershipError::Communicator(_))) => {
            LOST
        }
        #[cfg(unix)]
        Err(LocalError::Membership(MembershipError::World { .. })) => LOST,
        Err(_) => WRONG,
    }
}
