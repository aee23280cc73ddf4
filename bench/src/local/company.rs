//! Other workers of a worker: all stay, come and go by a schedule as threads, or come and go as processes.

use std::sync::Arc;

use meshstep_comm::Communicator;
use meshstep_membership::{Error, InProcess, InProcessWorker, Membership, Round};

use super::gate::Gate;
use super::worker::PATIENCE;

/// Makes this worker's communicator among the members of a round.
pub(crate) type Connect<'a> = dyn Fn(&Round) -> Result<Arc<dyn Communicator>, Error> + 'a;

/// Shared state of a training with changing workers.
pub(super) struct Chaos<'a> {
    pub(super) gate: &'a Gate,
    pub(super) members: &'a InProcess,
}

/// The other workers, and this one's membership.
#[derive(Clone)]
pub(super) enum Company<'a> {
    /// All workers stay.
    Fixed,
    /// Workers are threads, and come and go as the schedule says.
    Scheduled { chaos: &'a Chaos<'a>, member: Arc<InProcessWorker> },
    /// Workers are processes, and come and go at any time.
    Elastic { member: Arc<dyn Membership>, connect: &'a Connect<'a> },
}

impl Company<'_> {
    /// Returns true if workers come and go.
    pub(super) fn changes(&self) -> bool {
        !matches!(self, Company::Fixed)
    }

    /// Returns the membership, if workers come and go.
    pub(super) fn member(&self) -> Option<Arc<dyn Membership>> {
        match self {
            Company::Fixed => None,
            Company::Scheduled { member, .. } => Some(Arc::clone(member) as _),
            Company::Elastic { member, .. } => Some(Arc::clone(member)),
        }
    }

    /// Makes the communicator of the members of `round`.
    pub(super) fn connect(&self, round: &Round) -> Result<Arc<dyn Communicator>, Error> {
        match self {
            Company::Fixed => Err(Error::NoSeat { epoch: round.epoch, rank: round.rank }),
            Company::Scheduled { member, .. } => member.communicator(round, PATIENCE),
            Company::Elastic { connect, .. } => connect(round),
        }
    }
}
