//! Workers that come and go while they train: among whom a step exchanges is asked for before it.

use super::engine::Engine;
use super::membership::{Ballot, Digest, Error as MembershipError, Membership, Round};
use super::optimizer::{LocalOptimizer, rules};
use super::{LocalError, LocalPlan, Merge, Placement, Veto, Workers};
use crate::Optimizer;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// A worker's place in a run whose workers come and go.
#[derive(Debug)]
pub(crate) struct Following {
    member: Arc<dyn Membership>,
    epoch: u64,
    /// The exchange that was granted, until it has ended.
    round: Option<Round>,
    /// Why its end is not known.
    lost: Option<MembershipError>,
}

impl LocalPlan {
    /// What a worker with this optimizer says of itself when it joins: with another plan, or other rules, it is refused.
    pub fn digest(&self, inner: &Optimizer) -> Digest {
        Digest { plan: self.hash(), rule: xxh3_64(rules(inner).as_bytes()) }
    }
}

impl LocalOptimizer {
    /// A worker of one rank in a run whose workers come and go, of which `member` is its membership. It waits for the first
    /// boundary: with all others of a run that begins, as [`new`](Self::new) does, or in the middle of one that is under way.
    /// There it [enters](Self::enter): the parameters, moments, `t`, step and outer optimizer's state are those of the first member
    /// that counts, and its own values count once an exchange has come about.
    ///
    /// `connect` makes the communicators of a round's members, by their ranks there; it is called once for each epoch. From then on
    /// [`follow`](Self::follow) comes before every step.
    pub fn join(
        inner: Optimizer,
        plan: LocalPlan,
        member: Arc<dyn Membership>,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Self, LocalError> {
        check_followed(&inner, &plan)?;
        let round = member.boundary(0)?;
        let workers = connect(&round)?;
        let following =
            |epoch, round| Some(Following { member: Arc::clone(&member), epoch, round, lost: None });
        if round.counts() {
            let mut local = LocalOptimizer::new(inner, workers, plan)?;
            local.engine.following = following(round.epoch, Some(round));
            // Nothing is exchanged before the first step.
            local.engine.end_round(Ballot::Ready)?;
            return Ok(local);
        }
        let (_, alone) = Workers::split(Arc::clone(inner.comm()), 0)?;
        let mut local = LocalOptimizer::new(inner, alone, plan)?;
        local.enter();
        local.regroup(workers)?;
        local.engine.following = following(round.epoch, Some(round));
        Ok(local)
    }

    /// Comes before every step. Where that exchanges something it waits for the other members, with whom it is then; who has come or
    /// gone since is known by the round that is returned. Where they are others, `connect` makes their communicators, and the worker
    /// goes on with those as [`regroup`](Self::regroup) says.
    ///
    /// An exchange that the members do not all vote for has not come about, on any of them: a member that is lost then costs the
    /// others that one exchange, by its fragments' policy.
    pub fn follow(
        &mut self,
        connect: impl FnOnce(&Round) -> Result<Workers, MembershipError>,
    ) -> Result<Option<&Round>, LocalError> {
        let (step, due) = (self.engine.step + 1, self.engine.exchanges());
        let wanting = self.engine.following.as_mut().filter(|following| due && following.round.is_none());
        if let Some(following) = wanting {
            let round = following.member.boundary(step)?;
            let (epoch, counts) = (round.epoch, round.counts());
            let workers = if epoch == following.epoch { None } else { Some(connect(&round)?) };
            (following.epoch, following.round) = (epoch, Some(round));
            if let Some(workers) = workers {
                self.engine.active = counts;
                self.regroup(workers)?;
            }
        }
        Ok(self.engine.following.as_ref().and_then(|following| following.round.as_ref()))
    }
}

impl Engine {
    /// Whether something is exchanged at this step, before or after its update.
    fn exchanges(&self) -> bool {
        let travels = |f: usize| !matches!(self.plan.fragments[f].merge, Merge::Reset);
        [Placement::Before, Placement::After].into_iter().any(|placement| {
            self.plan.due(self.step, placement).any(travels)
                || self.flights.iter().any(|flight| flight.arrives == (self.step, placement))
        }) || self.again.iter().copied().any(travels)
    }

    /// What becomes of an exchange of which this worker knows `counted`: where workers come and go, all members say so.
    pub(crate) fn confirm(&mut self, counted: Result<(), Veto>) -> Result<(), Veto> {
        if self.following.is_none() {
            return counted;
        }
        let failed = Veto::Failed { rank: self.workers.world.rank() };
        let ballot = match counted {
            Ok(()) => Ballot::Ready,
            Err(Veto::Failed { .. }) => Ballot::Failed,
            Err(_) => Ballot::Veto,
        };
        match self.end_round(ballot) {
            Ok(true) => counted,
            Ok(false) => counted.and(Err(failed)),
            Err(error) => {
                self.following.iter_mut().for_each(|following| following.lost = Some(error.clone()));
                counted.and(Err(failed))
            }
        }
    }

    /// After a step: nothing of an exchange is left open, whether or not there was something to exchange.
    pub(crate) fn end_step(&mut self, stepped: bool) -> Result<(), MembershipError> {
        let ended = self.end_round(if stepped { Ballot::Ready } else { Ballot::Failed });
        let lost = self.following.as_mut().and_then(|following| following.lost.take());
        lost.map_or(ended.map(drop), Err)
    }

    /// Votes on the exchange that was granted, if it has not ended; whether it is applied.
    pub(crate) fn end_round(&mut self, ballot: Ballot) -> Result<bool, MembershipError> {
        let Some(Following { member, round, .. }) = &mut self.following else { return Ok(true) };
        let Some(round) = round.take() else { return Ok(true) };
        Ok(member.vote(&round, ballot)?.is_commit())
    }
}

/// What cannot be followed: a worker of several ranks, and exchanges on both sides of an update.
fn check_followed(inner: &Optimizer, plan: &LocalPlan) -> Result<(), LocalError> {
    let ranks = inner.comm().world_size();
    let sides = |side| plan.fragments.iter().any(|f| f.travels() && f.timing.placement == side);
    if ranks != 1 {
        return Err(LocalError::RanksOfMember { ranks });
    }
    if sides(Placement::Before) && sides(Placement::After) {
        return Err(LocalError::BothSides);
    }
    Ok(())
}
