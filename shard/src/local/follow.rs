//! Workers that come and go while they train: among whom a step exchanges is asked for before it.

use super::engine::Engine;
use super::optimizer::{LocalOptimizer, rules};
use super::replica::Replica;
use super::sides::{Sides, check_sides};
use super::spots::on_gpu;
use super::{LocalError, LocalPlan, Placement, Veto, Workers};
use crate::{Error, Optimizer};
use meshstep_membership::{Ballot, Decision, Digest, Error as MembershipError, Membership, Round};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// A worker's place in a run whose workers come and go.
#[derive(Debug)]
pub(crate) struct Following {
    replica: Replica,
    /// That of the communicators.
    epoch: u64,
    /// The exchange that was granted, until it has ended.
    round: Option<Round>,
    /// The step of the last that was granted: there is one a step, as others have gone on.
    granted: u64,
    /// On which side of its step's update it is.
    side: Option<Placement>,
    /// Why the end of one is not known, and which.
    lost: Option<MembershipError>,
    unheard: Option<Round>,
}

/// What became of a call: an answer of the membership, or its error; beyond both, ranks that can do nothing together any more.
type Heard<T> = Result<Result<T, MembershipError>, Error>;

impl LocalPlan {
    /// What a worker with this optimizer says of itself when it joins: with another plan, or other rules, it is refused.
    pub fn digest(&self, inner: &Optimizer) -> Digest {
        Digest { plan: self.hash(), rule: xxh3_64(rules(inner).as_bytes()) }
    }
}

impl LocalOptimizer {
    /// A worker in a run whose workers come and go, of which `member` is its membership. It waits for the first boundary: with all
    /// others of a run that begins, as [`new`](Self::new) does, or in the middle of one that is under way. There it
    /// [enters](Self::enter): the parameters, moments, `t`, step and outer optimizer's state are those of the first member that
    /// counts, and its own values count once an exchange has come about.
    ///
    /// `connect` makes the communicators of a round's members, by their ranks there; it is called once for each epoch. From then on
    /// [`follow`](Self::follow) comes before every step.
    ///
    /// Of a worker of several ranks rank 0 calls this, and every other rank [`join_through_rank0`](Self::join_through_rank0); each calls
    /// its own `connect`. They hear the same, and an error on one is one on all.
    ///
    /// # Errors
    /// As [`new`](Self::new) and [`regroup`](Self::regroup), [`LocalError::BothSides`], [`LocalError::Membership`]. A worker that has
    /// asked for the boundary has left the membership then, whatever the answer was: nobody waits for it.
    pub fn join(
        inner: Optimizer,
        plan: LocalPlan,
        member: Arc<dyn Membership>,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Self, LocalError> {
        Self::join_as(inner, plan, Some(member), connect)
    }

    /// [`join`](Self::join) on the ranks of a worker that are not its first.
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
            // Nothing is exchanged before the first step.
            let ended = local.engine.end_round(Ballot::Ready).map_err(LocalError::from);
            if let Err(error) = ended.and_then(|ended| Ok(ended?)) {
                local.engine.leave_membership();
                return Err(error);
            }
        }
        Ok(local)
    }

    /// With the others of a run that begins, or among those of one that is under way.
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
        // The others may wait for this rank there.
        begun().inspect_err(|_| world.abort())
    }

    /// Comes before every step. Where that exchanges something it waits for the other members, with whom it is then; who has come or
    /// gone since is known by the round that is returned. Where they are others, `connect` makes their communicators, and the worker
    /// goes on with those as [`regroup`](Self::regroup) says. Collective over the worker's ranks, which all get the same.
    ///
    /// An exchange that the members do not all vote for has not come about, on any of them: a member that is lost then costs the
    /// others that one exchange, by its fragments' policy. If it is lost before they are connected there is no round, and the step
    /// says what has failed.
    ///
    /// # Errors
    /// [`LocalError::Membership`]: where its refusal is not final, or the answer has not come, this may be called again.
    /// [`LocalError::Missed`]: the worker has to join anew. An error of `connect` or of [`regroup`](Self::regroup) costs the exchange.
    pub fn follow(
        &mut self,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Option<&Round>, LocalError> {
        self.inner.handover.healthy()?;
        let (step, side) = (self.engine.step + 1, self.engine.side());
        if let Some(following) = &mut self.engine.following {
            following.side = side;
            if side.is_some() && following.round.is_none() {
                let granted = following.granted;
                self.hear_end()?;
                if granted != step {
                    let round = self.ask(|replica| replica.boundary(step))?;
                    self.go_on_with(round, connect)?;
                    // What was on its way may have been given up: who joins knows of none.
                    let side = self.engine.side();
                    self.engine.following.iter_mut().for_each(|following| following.side = side);
                }
            }
        }
        Ok(self.engine.following.as_ref().and_then(|following| following.round.as_ref()))
    }

    /// Asks for the end of an exchange of which it was not heard.
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

    /// An answer that all ranks of the worker have.
    fn ask<T>(&mut self, call: impl FnOnce(&Replica) -> Heard<T>) -> Result<T, LocalError> {
        let Some(following) = &self.engine.following else { unreachable!("asked for by who follows") };
        match call(&following.replica) {
            Ok(answer) => Ok(answer?),
            Err(error) => Err(self.part(error)),
        }
    }

    /// The worker's ranks can do nothing together any more, and the others are not to wait for them.
    fn part(&mut self, error: Error) -> LocalError {
        let error = self.inner.handover.alone(error);
        self.engine.part();
        error.into()
    }

    /// Takes part in a round, whose members others may be.
    fn go_on_with(
        &mut self,
        round: Round,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<(), LocalError> {
        let Some(following) = &mut self.engine.following else { return Ok(()) };
        let epoch = round.epoch;
        let known = epoch == following.epoch;
        (following.round, following.granted) = (Some(round.clone()), round.step);
        // Also after a round in which nothing was left to exchange. Who does not count gives up what it has once more.
        self.engine.active = round.counts();
        if known {
            return Ok(());
        }
        // Whatever becomes of the new communicators: all members know of this round, and of what is on its way each else for itself.
        let rank = self.engine.workers.world.rank();
        let mut given_up = self.engine.give_up(&mut self.inner, Veto::Failed { rank });
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
        // The other workers hear of it, wherever they are.
        self.engine.workers.world.abort();
        new.iter().for_each(|world| world.abort());
        let told = if worst == LOST { Ok(()) } else { following.replica.together(own) };
        match self.engine.end_round(Ballot::Failed) {
            Ok(ended) => told.and(ended.map(drop).map_err(LocalError::from)),
            Err(error) => Err(self.part(error)),
        }
    }
}

/// Refuses GPUs, where a worker that is lost ends the others too: NCCL's communicators of a process end together.
fn check_place(inner: &Optimizer) -> Result<(), LocalError> {
    if !on_gpu(inner) {
        return Ok(());
    }
    let what = "a run whose workers come and go (LocalOptimizer::join)".to_owned();
    let works = "memory of the CPU, or LocalOptimizer::new and regroup";
    Err(Error::NotOnGpu { what, works }.into())
}

const OK: u64 = 0;
/// Somebody was not there any more, which costs one exchange.
const LOST: u64 = 1;
const WRONG: u64 = 2;

/// How new communicators have been taken up on this rank.
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
    /// On which side of this step's update something is exchanged.
    fn side(&self) -> Option<Placement> {
        Sides::of(self).first()
    }

    /// Whether fragment `f`, which is to be sent again, waits: its step's round, if there is one, is of the other side.
    pub(crate) fn waits(&self, f: usize, placement: Placement) -> bool {
        let elsewhere = |following: &Following| following.side != Some(placement);
        self.plan.fragments[f].travels() && self.following.as_ref().is_some_and(elsewhere)
    }

    /// Whether there are communicators for an exchange there: where workers come and go, a round.
    pub(crate) fn may_exchange(&self, placement: Placement) -> bool {
        let granted = |following: &Following| following.round.is_some() && following.side == Some(placement);
        self.following.as_ref().is_none_or(granted)
    }

    /// What becomes of an exchange of which this rank knows `counted`, and whether it is itself to blame: where workers come and go,
    /// all members say so. An error ends the worker.
    pub(crate) fn confirm(
        &mut self,
        counted: Result<(), Veto>,
        to_blame: bool,
    ) -> Result<Result<(), Veto>, Error> {
        if self.following.is_none() {
            return Ok(counted);
        }
        if self.failure.is_some() {
            // Others may wait for this rank there, of this worker too, whose word comes next.
            self.workers.world.abort();
            self.workers.across.abort();
        }
        let failed = Veto::Failed { rank: self.workers.world.rank() };
        let ballot = match counted {
            Ok(()) => Ballot::Ready,
            // Who has given up its communicators needs others, to blame or not.
            Err(_) if to_blame && self.failure.is_none() => Ballot::Veto,
            // Who could not take its step vetoes it; the others have nothing against it, and are not to be dropped for it.
            Err(Veto::Fault { .. }) => Ballot::Ready,
            Err(_) => Ballot::Failed,
        };
        Ok(match self.end_round(ballot)? {
            Ok(true) => counted,
            Ok(false) => counted.and(Err(failed)),
            Err(error) => {
                self.following.iter_mut().for_each(|following| following.lost = Some(error.clone()));
                counted.and(Err(failed))
            }
        })
    }

    /// After a step: nothing of an exchange is left open, whether or not there was something to exchange.
    pub(crate) fn end_step(&mut self, stepped: bool) -> Heard<()> {
        // A round that is still open exchanged nothing.
        let ended = self.end_round(if stepped { Ballot::Idle } else { Ballot::Failed })?;
        let lost = self.following.as_mut().and_then(|following| following.lost.take());
        Ok(lost.map_or(ended.map(drop), Err))
    }

    /// Votes on the exchange that was granted, if it has not ended; whether it is applied.
    fn end_round(&mut self, ballot: Ballot) -> Heard<bool> {
        let Some(following) = &mut self.following else { return Ok(Ok(true)) };
        let Some(round) = following.round.take() else { return Ok(Ok(true)) };
        let decision = following.replica.vote(&round, ballot)?;
        if decision.is_err() {
            following.unheard = Some(round);
        }
        Ok(decision.map(|decision| decision.is_commit()))
    }

    /// Nobody is to wait for this worker, which has lost a rank.
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
