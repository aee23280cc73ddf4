//! Rounds of an elastic run: the members grant an exchange, and vote on it.

use crate::exchange::engine::Engine;
use crate::exchange::placement_conflict::Sides;
use crate::exchange::replica::Replica;
use crate::{Placement, Veto};
use meshstep_membership::{Ballot, Decision, Error as MembershipError, Round};
use meshstep_shard::Error;

/// State of a worker in an elastic run.
#[derive(Debug)]
pub(crate) struct Following {
    pub(crate) replica: Replica,
    /// Epoch of the communicators.
    pub(crate) epoch: u64,
    /// The granted exchange, until it has ended.
    pub(crate) round: Option<Round>,
    /// Step of the last granted round: a step has one round at most, since the other members have gone on.
    pub(crate) granted: u64,
    /// The side of the step's update on which the round exchanges.
    pub(crate) side: Option<Placement>,
    /// Error of the last vote, if its decision is not known; `unheard` is the round of that vote.
    pub(crate) lost: Option<MembershipError>,
    pub(crate) unheard: Option<Round>,
}

/// Result of a call: the membership's answer or error; the outer error means that the worker's ranks can no longer work together.
pub(crate) type Heard<T> = Result<Result<T, MembershipError>, Error>;

impl Engine {
    /// Returns the side of this step's update on which the step exchanges.
    pub(crate) fn side(&self) -> Option<Placement> {
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
            Ok(Some(Decision::Abort { lost, .. })) => match lost.iter().min() {
                Some(&worker) => Err(Veto::Lost { worker }),
                None => counted.and(Err(failed)),
            },
            Ok(Some(Decision::Idle {})) => counted.and(Err(failed)),
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
    pub(crate) fn end_round(&mut self, ballot: Ballot) -> Heard<Option<Decision>> {
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

    pub(crate) fn leave_membership(&mut self) {
        if let Some(following) = &mut self.following {
            following.round = None;
            following.replica.leave();
        }
    }
}
