//! Elastic workers: workers that join and leave a run while it trains. Before a step that exchanges, each asks for the members.

use crate::engine::Engine;
use crate::optimizer::{LocalOptimizer, rules};
use crate::owned_spans::on_gpu;
use crate::placement_conflict::{Sides, check_sides};
use crate::replica::Replica;
use crate::{LocalError, LocalPlan, Placement, Veto, Workers};
use meshstep_membership::{Ballot, Decision, Digest, Error as MembershipError, Membership, Round};
use meshstep_shard::extend::{OptimizerExchange, OptimizerShard};
use meshstep_shard::{Error, Optimizer};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// State of a worker in an elastic run.
#[derive(Debug)]
pub(crate) struct Following {
    replica: Replica,
    /// Epoch of the communicators.
    epoch: u64,
    /// The granted exchange, until it has ended.
    round: Option<Round>,
    /// Step of the last granted round: a step has one round at most, since the other members have gone on.
    granted: u64,
    /// The side of the step's update on which the round exchanges.
    side: Option<Placement>,
    /// Error of the last vote, if its decision is not known; `unheard` is the round of that vote.
    lost: Option<MembershipError>,
    unheard: Option<Round>,
}

/// Result of a call: the membership's answer or error; the outer error means that the worker's ranks can no longer work together.
type Heard<T> = Result<Result<T, MembershipError>, Error>;

impl LocalPlan {
    /// Returns the digest that a worker with this optimizer joins with: the arbiter refuses another plan, or other rules.
    pub fn digest(&self, inner: &Optimizer) -> Digest {
        Digest { plan: self.hash(), rule: xxh3_64(rules(inner).as_bytes()) }
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
    /// [`LocalError::Missed`]: the worker has to join again. An error of `connect` or of [`regroup`](Self::regroup) costs the
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
                    let round = self.ask(|replica| replica.boundary(step))?;
                    self.go_on_with(round, connect)?;
                    // Flights may have been given up, since joining members know of none: the sides are computed again.
                    let side = self.engine.side();
                    self.engine.following.iter_mut().for_each(|following| following.side = side);
                }
            }
        }
        Ok(self.engine.following.as_ref().and_then(|following| following.round.as_ref()))
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
        Err(_) => WRONG,
    }
}

impl Engine {
    /// Returns the side of this step's update on which the step exchanges.
    fn side(&self) -> Option<Placement> {
        Sides::of(self).first()
    }

    /// Returns true if fragment `f`, which is to be sent again, waits because its step's round, if any, is on the other side.
    pub(crate) fn waits(&self, f: usize, placement: Placement) -> bool {
        let elsewhere = |following: &Following| following.side != Some(placement);
        self.plan.fragments[f].travels() && self.following.as_ref().is_some_and(elsewhere)
    }

    /// Returns true if this side of the update has communicators for an exchange; in an elastic run they need a round.
    pub(crate) fn may_exchange(&self, placement: Placement) -> bool {
        let granted = |following: &Following| following.round.is_some() && following.side == Some(placement);
        self.following.as_ref().is_none_or(granted)
    }

    /// Returns the outcome of an exchange that this rank knows as `counted`. In an elastic run the members vote on it, and
    /// `to_blame` says that this rank is at fault. An error ends the worker.
    pub(crate) fn confirm(
        &mut self,
        counted: Result<(), Veto>,
        to_blame: bool,
    ) -> Result<Result<(), Veto>, Error> {
        if self.following.is_none() {
            return Ok(counted);
        }
        if self.failure.is_some() {
            // Other ranks may wait for this rank in these communicators, also ranks of this worker, which are to vote next.
            self.workers.world.abort();
            self.workers.across.abort();
        }
        let failed = Veto::Failed { rank: self.workers.world.rank() };
        let ballot = match counted {
            Ok(()) => Ballot::Ready,
            // A worker with aborted communicators needs new ones, even if it is at fault.
            Err(_) if to_blame && self.failure.is_none() => Ballot::Veto,
            // Only the worker that could not take its step vetoes; the others vote ready, so that the arbiter does not drop them.
            Err(Veto::Fault { .. }) => Ballot::Ready,
            Err(_) => Ballot::Failed,
        };
        Ok(match self.end_round(ballot)? {
            Ok(None | Some(Decision::Commit {})) => counted,
            // All members name the lost worker, whatever each of them has seen of it.
            Ok(Some(Decision::Abort { lost, .. })) if let Some(&worker) = lost.iter().min() => {
                Err(Veto::Lost { worker })
            }
            Ok(Some(_)) => counted.and(Err(failed)),
            Err(error) => {
                self.following.iter_mut().for_each(|following| following.lost = Some(error.clone()));
                counted.and(Err(failed))
            }
        })
    }

    /// Ends a step: no exchange stays open, even if there was nothing to exchange.
    pub(crate) fn end_step(&mut self, stepped: bool) -> Heard<()> {
        // A round that is still open has exchanged nothing.
        let ended = self.end_round(if stepped { Ballot::Idle } else { Ballot::Failed })?;
        let lost = self.following.as_mut().and_then(|following| following.lost.take());
        Ok(lost.map_or(ended.map(drop), Err))
    }

    /// Votes on the granted exchange and returns the members' decision; `None` if no exchange is open.
    fn end_round(&mut self, ballot: Ballot) -> Heard<Option<Decision>> {
        let Some(following) = &mut self.following else { return Ok(Ok(None)) };
        let Some(round) = following.round.take() else { return Ok(Ok(None)) };
        let decision = following.replica.vote(&round, ballot)?;
        if decision.is_err() {
            following.unheard = Some(round);
        }
        Ok(decision.map(Some))
    }

    /// Leaves the run after a rank of this worker was lost, so that no other worker waits.
    pub(crate) fn part(&mut self) {
        self.workers.world.abort();
        self.workers.across.abort();
        self.leave_membership();
    }

    fn leave_membership(&mut self) {
        if let Some(following) = &mut self.following {
            following.round = None;
            following.replica.leave();
        }
    }
}
