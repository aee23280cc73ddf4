//! A worker's side of the world: its membership and its communicators, where it waits, stands still and dies.

use crate::group::Group;
use crate::world::{COMM_DEADLINE, Event, Inner, Killed, Need, World, millis};
use meshstep_comm::{Communicator, Error as CommError, InFlight, Op, Stats, Tickets};
use meshstep_shard::local::Workers;
use meshstep_shard::local::membership::{Answer, Ballot, Decision, Error, Membership, Request, Round};
use meshstep_tensor::{Buffer, Queue};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A worker's place in the world.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) world: Arc<World>,
    pub(crate) life: usize,
}

impl Place {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.world.lock()
    }

    /// The time, less what it has stood still.
    pub(crate) fn awake(&self) -> Duration {
        let inner = self.lock();
        inner.now.saturating_sub(inner.lives[self.life].stalled)
    }

    pub(crate) fn wait(&self, need: Need) {
        self.world.wait(self.life, need);
    }

    pub(crate) fn chance(&self, per_mille: u64) -> bool {
        self.lock().random.chance(per_mille)
    }

    /// Dies here, as often.
    pub(crate) fn may_die(&self, per_mille: u64, where_: &str) {
        if !std::thread::panicking() && self.chance(per_mille) {
            let mut inner = self.lock();
            inner.note(format!("{} dies {where_}", self.life));
            inner.lives[self.life].dead = true;
            drop(inner);
            resume_unwind(Box::new(Killed));
        }
    }

    /// Asks, and waits for the answer: for its deadline at most, however long it stands still.
    pub(crate) fn ask(&self, request: Request) -> Result<Answer, Error> {
        let begun = self.awake();
        let number = {
            let mut inner = self.lock();
            let now = inner.now;
            inner.lives[self.life].member.begin(request, now)
        };
        if matches!(request, Request::Vote { .. }) {
            // Its word may be heard, or not.
            self.lock().settle(self.life);
            self.may_die(self.world.setup.trouble.death_after_vote, "after its vote");
        }
        self.wait(Need::Answer(number));
        let took = self.awake().saturating_sub(begun);
        assert!(took <= self.world.setup.deadline + millis(1), "{request:?} took {took:?}");
        self.lock().lives[self.life].answer.take().unwrap()
    }

    /// Communicators of a round's members.
    pub(crate) fn connect(&self, round: &Round) -> Workers {
        let mut inner = self.lock();
        let told = self.world.setup.told;
        let next = inner.groups.len();
        let group = *inner.epochs.entry(round.epoch).or_insert(next);
        if group == next {
            inner.groups.push(Group::new(round.members.len(), told));
        }
        inner.groups[group].lives[round.rank] = Some(self.life);
        drop(inner);
        let seat = Seat { place: self.clone(), group, rank: round.rank, ranks: round.members.len() };
        let world: Arc<dyn Communicator> = Arc::new(Handle(Arc::new(seat)));
        Workers { across: Arc::clone(&world), world }
    }

    /// A communicator of this rank alone.
    pub(crate) fn alone(&self) -> Arc<dyn Communicator> {
        let mut inner = self.lock();
        let group = inner.groups.len();
        inner.groups.push(Group::new(1, true));
        inner.groups[group].lives[0] = Some(self.life);
        Arc::new(Handle(Arc::new(Seat { place: self.clone(), group, rank: 0, ranks: 1 })))
    }
}

/// A worker's membership, and what it was told last.
#[derive(Debug)]
pub(crate) struct Seated {
    pub(crate) place: Place,
    pub(crate) granted: Mutex<Option<Round>>,
    pub(crate) voted: Mutex<Option<(u64, Result<Decision, Error>)>>,
}

impl Membership for Seated {
    fn boundary(&self, step: u64) -> Result<Round, Error> {
        let trouble = &self.place.world.setup.trouble;
        self.place.may_die(trouble.death, "before a boundary");
        let answer = self.place.ask(Request::Boundary(step))?;
        let Answer::Granted(round) = answer else { panic!("{answer:?}") };
        self.place.lock().truth.check_granted(&round);
        *self.granted.lock().unwrap() = Some(round.clone());
        self.place.may_die(trouble.death, "between boundary and exchange");
        Ok(round)
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error> {
        let trouble = &self.place.world.setup.trouble;
        self.place.may_die(trouble.death, "before its vote");
        let result = match self.place.ask(Request::Vote { round: round.number, ballot }) {
            Ok(Answer::Decided(decision)) => Ok(decision),
            Ok(answer) => panic!("{answer:?}"),
            Err(error) => Err(error),
        };
        {
            let mut inner = self.place.lock();
            inner.note(format!("{} voted {ballot:?} on {}: {result:?}", self.place.life, round.number));
            if let Ok(decision) = &result {
                assert_eq!(inner.truth.decided[&round.number], *decision);
            }
        }
        *self.voted.lock().unwrap() = Some((round.number, result.clone()));
        self.place.may_die(trouble.death_before_apply, "between decision and apply");
        result
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.place.lock().lives[self.place.life].member.decided(round.number).cloned()
    }

    fn leave(&self) -> Result<(), Error> {
        self.place.ask(Request::Leave).map(drop)
    }
}

/// A rank of a group; when the last handle is gone the rank is.
#[derive(Debug)]
struct Handle(Arc<Seat>);

#[derive(Clone, Debug)]
struct Seat {
    place: Place,
    group: usize,
    rank: usize,
    ranks: usize,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Seat { place, group, rank, .. } = &*self.0;
        place.lock().leave(*group, *rank, place.life);
    }
}

impl Communicator for Handle {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn world_size(&self) -> usize {
        self.0.ranks
    }

    fn start(&self, op: Op, buffer: Buffer, _after: &Queue) -> Result<InFlight, (Buffer, CommError)> {
        let Seat { place, group, rank, ranks } = &*self.0;
        let trouble = &place.world.setup.trouble;
        if *ranks > 1 {
            place.may_die(trouble.death, "in the middle of an exchange");
        }
        let mut inner = place.lock();
        let (number, complete) = inner.groups[*group].start(*rank, op, buffer)?;
        if *ranks == 1 {
            inner.groups[*group].complete(number, &[]);
        } else if complete {
            let begun = inner.groups[*group].busy_until.max(inner.now);
            let end = begun + millis(1 + inner.random.below(10));
            inner.groups[*group].busy_until = end;
            let fails = inner.random.chance(trouble.failure);
            let without = (0..*ranks).filter(|_| fails && inner.random.chance(500)).collect();
            inner.at(end, Event::Moved(*group, number, without));
        }
        let late = inner.now + COMM_DEADLINE;
        if *ranks > 1 {
            inner.at(late, Event::Late(*group, *rank, number));
        }
        Ok(InFlight::new(Arc::clone(&self.0) as _, number))
    }

    fn split(&self, _color: Option<u32>, _key: i64) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        assert_eq!(self.0.ranks, 1, "workers here have one rank");
        Ok(Some(self.0.place.alone()))
    }

    fn abort(&self) {
        self.0.place.lock().abort(self.0.group, self.0.rank);
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

impl Tickets for Seat {
    fn redeem(&self, ticket: usize, _on: &Queue) -> (Buffer, Result<(), CommError>) {
        if !self.is_done(ticket) {
            let begun = self.place.awake();
            self.place.wait(Need::Operation { group: self.group, rank: self.rank, number: ticket });
            let took = self.place.awake().saturating_sub(begun);
            assert!(took <= COMM_DEADLINE + millis(1), "operation {ticket} took {took:?}");
        }
        self.place.lock().groups[self.group].take(self.rank, ticket)
    }

    fn is_done(&self, ticket: usize) -> bool {
        self.place.lock().groups[self.group].end(self.rank, ticket).is_some()
    }

    fn ends_within(&self, ticket: usize, patience: Duration) -> bool {
        let until = self.place.lock().now + patience;
        if !self.is_done(ticket) {
            self.place.wait(Need::Until(until));
        }
        self.is_done(ticket)
    }

    fn forget(&self, _ticket: usize) {}
}
