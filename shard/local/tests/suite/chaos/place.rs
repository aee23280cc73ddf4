//! A worker's access to the world: its membership and communicators, which may wait, stall and die.

use crate::chaos::group::Group;
use crate::chaos::schedule::Setup;
use crate::chaos::world::{COMM_DEADLINE, Event, Inner, Killed, Need, World, millis};
use meshstep_comm::{Communicator, Error as CommError, InFlight, Op, Stats, Tickets};
use meshstep_local::Workers;
use meshstep_membership::{Answer, Ballot, Decision, Error, Membership, Request, Round};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::panic::resume_unwind;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

/// Position of a rank in the world.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) world: Arc<World>,
    pub(crate) life: usize,
    /// Rank 0 of the worker.
    pub(crate) lead: usize,
    pub(crate) rank: usize,
}

impl Place {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.world.lock()
    }

    /// Returns the time without the stalls of this rank.
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

    /// Dies here with this probability, per mille.
    pub(crate) fn may_die(&self, per_mille: u64, where_: &str) {
        if !std::thread::panicking() && self.chance(per_mille) {
            let mut inner = self.lock();
            inner.note(format!("{} dies {where_}", self.life));
            inner.lives[self.life].dead = true;
            drop(inner);
            resume_unwind(Box::new(Killed));
        }
    }

    /// Sends a request and waits for the answer, for at most the deadline plus stalls.
    pub(crate) fn ask(&self, request: Request) -> Result<Answer, Error> {
        let begun = self.awake();
        let number = {
            let mut inner = self.lock();
            let now = inner.now;
            inner.lives[self.life].member.as_mut().unwrap().begin(request, now)
        };
        if matches!(request, Request::Vote { .. }) {
            // The vote is sent now; the network may lose it.
            self.lock().settle(self.life);
            self.may_die(self.world.setup.trouble.death_after_vote, "after its vote");
        }
        self.wait(Need::Answer(number));
        let took = self.awake().saturating_sub(begun);
        assert!(took <= self.world.setup.deadline + millis(1), "{request:?} took {took:?}");
        self.lock().lives[self.life].answer.take().unwrap()
    }

    /// Makes the communicators of a round's members.
    pub(crate) fn connect(&self, round: &Round) -> Workers {
        let mut inner = self.lock();
        let Setup { told, ranks, .. } = self.world.setup;
        let (next, members) = (inner.groups.len(), round.members.len());
        let all = *inner.epochs.entry((round.epoch, None)).or_insert(next);
        if all == next {
            inner.groups.push(Group::new(members * ranks, told, COMM_DEADLINE));
        }
        let world = self.seat(&mut inner, all, round.rank * ranks + self.rank);
        if ranks == 1 {
            return Workers { across: Arc::clone(&world), world };
        }
        let across = match inner.epochs.get(&(round.epoch, Some(self.rank))) {
            Some(across) => *across,
            None => inner.part_of(all, members),
        };
        inner.epochs.insert((round.epoch, Some(self.rank)), across);
        Workers { across: self.seat(&mut inner, across, round.rank), world }
    }

    fn seat(&self, inner: &mut Inner, group: usize, rank: usize) -> Arc<dyn Communicator> {
        inner.groups[group].lives[rank] = Some(self.life);
        let ranks = inner.groups[group].lives.len();
        Arc::new(Handle(Arc::new(Seat { place: self.clone(), group, rank, ranks })))
    }

    /// Returns a communicator of this worker's ranks.
    pub(crate) fn inside(&self) -> Arc<dyn Communicator> {
        let mut inner = self.lock();
        let group = inner.lives[self.life].inside;
        self.seat(&mut inner, group, self.rank)
    }
}

/// Membership of a worker, held by its rank 0.
#[derive(Debug)]
pub(crate) struct Seated(pub(crate) Place);

impl Membership for Seated {
    fn boundary(&self, step: u64) -> Result<Round, Error> {
        let trouble = &self.0.world.setup.trouble;
        self.0.may_die(trouble.death, "before a boundary");
        let answer = self.0.ask(Request::Boundary(step))?;
        let Answer::Granted(round) = answer else { panic!("{answer:?}") };
        self.0.lock().truth.check_granted(&round);
        self.0.lock().lives[self.0.life].granted.push(round.clone());
        self.0.may_die(trouble.death, "between boundary and exchange");
        Ok(round)
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error> {
        let trouble = &self.0.world.setup.trouble;
        self.0.may_die(trouble.death, "before its vote");
        let result = match self.0.ask(Request::Vote { round: round.number, ballot }) {
            Ok(Answer::Decided(decision)) => Ok(decision),
            Ok(answer) => panic!("{answer:?}"),
            Err(error) => Err(error),
        };
        {
            let mut inner = self.0.lock();
            inner.note(format!("{} voted {ballot:?} on {}: {result:?}", self.0.life, round.number));
            if let Ok(decision) = &result {
                assert_eq!(inner.truth.decided[&round.number], *decision);
            }
        }
        self.0.lock().lives[self.0.life].voted.push((round.number, result.clone()));
        self.0.may_die(trouble.death_before_apply, "between decision and apply");
        result
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        self.0.lock().lives[self.0.life].member.as_ref()?.decided(round.number).cloned()
    }

    fn leave(&self) -> Result<(), Error> {
        self.0.ask(Request::Leave).map(drop)
    }
}

/// Handle of one rank to a group; the rank leaves the group with its last handle.
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
        let inside = place.lock().groups[*group].inside;
        if *ranks > 1 {
            // A worker's step has about as many operations inside the worker as an exchange has between workers.
            place.may_die(
                if inside { trouble.death / 4 } else { trouble.death },
                "in the middle of an exchange",
            );
        }
        let mut inner = place.lock();
        let (number, complete) = inner.groups[*group].start(*rank, op, buffer)?;
        if *ranks == 1 {
            inner.groups[*group].complete(number, &[]);
        } else if complete {
            let begun = inner.groups[*group].busy_until.max(inner.now);
            let end = begun + millis(1 + inner.random.below(if inside { 2 } else { 10 }));
            inner.groups[*group].busy_until = end;
            let fails = !inside && inner.random.chance(trouble.failure);
            let without = (0..*ranks).filter(|_| fails && inner.random.chance(500)).collect();
            inner.at(end, Event::Moved(*group, number, without));
        }
        let late = inner.now + inner.groups[*group].patience(*rank, number);
        if *ranks > 1 {
            inner.at(late, Event::Late(*group, *rank, number));
        }
        Ok(InFlight::new(Arc::clone(&self.0) as _, number))
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>, CommError> {
        let Seat { place, group, rank, ranks } = &*self.0;
        // Colours have 32 bits.
        let color = color.map_or(u64::MAX, u64::from);
        let mut words = Buffer::zeroed(2 * ranks, DType::U64, &Meter::new(), Category::Staging).unwrap();
        words.typed_mut().unwrap()[2 * rank..2 * rank + 2].copy_from_slice(&[color, key as u64]);
        let started = self.start(Op::all_gather(), words, &Queue::cpu()).map_err(|(_, error)| error)?;
        let number = place.lock().groups[*group].calls_of(*rank) - 1;
        let (words, done) = started.wait(&Queue::cpu());
        done?;
        let words = words.typed::<u64>().unwrap();
        let mut own: Vec<usize> = (0..*ranks).filter(|r| words[2 * r] == color).collect();
        own.sort_by_key(|r| words[2 * r + 1] as i64);
        let Ok(color) = u32::try_from(color) else { return Ok(None) };
        let mut inner = place.lock();
        let part = match inner.splits.get(&(*group, number, color)) {
            Some(part) => *part,
            None => inner.part_of(*group, own.len()),
        };
        inner.splits.insert((*group, number, color), part);
        let at = own.iter().position(|r| r == rank).unwrap();
        Ok(Some(place.seat(&mut inner, part, at)))
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
            let patience = self.place.lock().groups[self.group].patience(self.rank, ticket);
            assert!(took <= patience + millis(1), "operation {ticket} took {took:?}");
        }
        if std::thread::panicking() {
            self.place.lock().groups[self.group].give_up(self.rank);
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
