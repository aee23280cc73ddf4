//! Membership of workers that are threads of one process, like loopback's ranks; they share the arbiter as a value.

use crate::durable_arbiter::DurableArbiter;
use crate::member::{Answer, Member, Request};
use crate::message::{Digest, FromArbiter, Worker};
use crate::{Ballot, Config, Decision, Error, Membership, Round};
use meshstep_comm::{Clock, Communicator, Faults, Wake, loopback};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// A run of workers that are threads. Clones are the same run.
///
/// A thread is a member for as long as it keeps its [`InProcessWorker`]. A thread that ends, or panics, without
/// [`leave`](Membership::leave) is dropped from the run at once; one that stands still is dropped when the others' patience ends.
#[derive(Clone, Debug)]
pub struct InProcess {
    hub: Arc<Hub>,
}

/// Membership of one thread.
#[derive(Debug)]
pub struct InProcessWorker {
    hub: Arc<Hub>,
    worker: Worker,
}

#[derive(Debug)]
struct Hub {
    clock: Clock,
    durable: Mutex<Inside>,
    changed: Condvar,
}

#[derive(Debug)]
struct Inside {
    durable: DurableArbiter,
    members: BTreeMap<Worker, Member>,
    lives: u64,
    seats: Seats,
}

/// Communicators of the last requested epoch, by rank, until they are handed out.
#[derive(Debug, Default)]
struct Seats {
    epoch: u64,
    /// Workers to which the communicators belong; `None` for a worker that was gone before its communicators were made.
    members: Vec<Option<Worker>>,
    /// Ranks of each worker.
    ranks: usize,
    of_all: Vec<Option<Arc<dyn Communicator>>>,
}

impl InProcess {
    /// Creates a run without workers; its deadlines follow `clock`.
    ///
    /// # Errors
    /// [`ConfigError`](crate::ConfigError) for invalid settings.
    pub fn new(config: Config, clock: Clock) -> Result<Self, Error> {
        let durable = DurableArbiter::open(config, None, clock.now())?;
        let inside = Inside { durable, members: BTreeMap::new(), lives: 0, seats: Seats::default() };
        let hub = Arc::new(Hub { clock, durable: Mutex::new(inside), changed: Condvar::new() });
        let weak: Weak<Hub> = Arc::downgrade(&hub);
        hub.clock.register(weak);
        Ok(InProcess { hub })
    }

    /// Returns the ids of workers that wait at a boundary, for a worker that is about to come to one.
    pub fn waiting(&self) -> Vec<u64> {
        self.hub.lock().durable.waiting().collect()
    }

    /// Replaces the arbiter by a successor that knows only what the old one would have logged.
    pub fn restart_arbiter(&self) {
        let (mut inside, now) = (self.hub.lock(), self.hub.clock.now());
        inside.durable.restart(now);
        inside.members.values_mut().for_each(|member| member.repeat(now));
        drop(inside);
        self.hub.changed.notify_all();
    }

    /// Joins a worker, which takes part from the next boundary on. The worker waits for answers for `deadline` at most.
    ///
    /// # Errors
    /// [`Refusal`](crate::Refusal) for another plan or rule, or an id that is taken.
    pub fn join(&self, id: u64, digest: Digest, deadline: Duration) -> Result<InProcessWorker, Error> {
        let hub = Arc::clone(&self.hub);
        let mut inside = hub.lock();
        inside.lives += 1;
        let worker = Worker { id, life: inside.lives };
        inside.members.insert(worker, Member::new(worker, digest, String::new(), deadline));
        drop(inside);
        let worker = InProcessWorker { hub, worker };
        worker.ask(Request::Join)?;
        Ok(worker)
    }

    /// Returns the loopback communicator among all ranks of the members of the round's epoch, for rank `rank` of the `ranks` ranks
    /// that each worker has. Ranks are ordered by member, then by rank in the worker. Each communicator is made once for each
    /// epoch; its operations wait for others for the `timeout` of the first rank that asks. Workers that have gone meanwhile have
    /// left it.
    ///
    /// # Errors
    /// [`Error::NoSeat`] for an epoch that is over, for a second request, for `rank` not below `ranks`, and for a `ranks` that
    /// differs from the one that others gave.
    pub fn communicator(
        &self,
        round: &Round,
        [rank, ranks]: [usize; 2],
        timeout: Duration,
    ) -> Result<Arc<dyn Communicator>, Error> {
        self.hub.communicator(round, [rank, ranks], timeout)
    }
}

impl Membership for InProcessWorker {
    fn boundary(&self, step: u64) -> Result<Round, Error> {
        self.ask(Request::Boundary(step)).map(Answer::into_round)
    }

    fn vote(&self, round: &Round, ballot: Ballot) -> Result<Decision, Error> {
        self.ask(Request::Vote { round: round.number, ballot }).map(Answer::into_decision)
    }

    fn decided(&self, round: &Round) -> Option<Decision> {
        let inside = self.hub.lock();
        inside.members.get(&self.worker).and_then(|member| member.decided(round.number).cloned())
    }

    fn leave(&self) -> Result<(), Error> {
        let left = self.ask(Request::Leave).map(drop);
        self.hub.lock().give_up_seats(self.worker);
        left
    }

    fn deadline(&self) -> Option<Duration> {
        self.hub.lock().members.get(&self.worker).map(Member::deadline)
    }
}

impl InProcessWorker {
    /// Returns this worker's loopback communicator among the members of the round's epoch, made once for each epoch; its operations
    /// wait for others for the `timeout` of the first member that asks. Workers that have gone meanwhile have left it.
    ///
    /// # Errors
    /// [`Error::NoSeat`] for an epoch that is over, and for a second request.
    pub fn communicator(&self, round: &Round, timeout: Duration) -> Result<Arc<dyn Communicator>, Error> {
        self.hub.communicator(round, [0, 1], timeout)
    }

    fn ask(&self, request: Request) -> Result<Answer, Error> {
        let mut inside = self.hub.lock();
        let now = self.hub.clock.now();
        let member = inside.members.get_mut(&self.worker).ok_or(Error::Left)?;
        let number = member.begin(request, now);
        loop {
            let now = self.hub.clock.now();
            if inside.pump(now) {
                self.hub.changed.notify_all();
            }
            let wake_at = inside.durable.wake_at();
            let member = inside.members.get_mut(&self.worker).ok_or(Error::Left)?;
            if let Some(answer) = member.take(number, now) {
                return answer;
            }
            let until = wake_at.map_or(member.wake_at(), |at| at.min(member.wake_at()));
            inside = self.hub.wait(inside, until);
        }
    }
}

impl Drop for InProcessWorker {
    fn drop(&mut self) {
        let mut inside = self.hub.lock();
        inside.members.remove(&self.worker);
        inside.give_up_seats(self.worker);
        let said = inside.durable.lose(self.worker);
        inside.deliver(said);
        drop(inside);
        self.hub.changed.notify_all();
    }
}

impl Inside {
    /// Drops the communicators that a worker never took: the operations of the others must not wait for it.
    fn give_up_seats(&mut self, worker: Worker) {
        let Seats { members, ranks, of_all, .. } = &mut self.seats;
        let Some(place) = members.iter().position(|member| *member == Some(worker)) else { return };
        of_all.iter_mut().skip(place * *ranks).take(*ranks).for_each(|seat| *seat = None);
    }

    /// Delivers the messages due at this time, of the workers and of the arbiter; returns true if there was a message.
    fn pump(&mut self, now: Duration) -> bool {
        let mut any = false;
        for worker in self.members.keys().copied().collect::<Vec<_>>() {
            let asked = self.members.get_mut(&worker).map(|member| member.tick(now)).unwrap_or_default();
            for message in asked {
                let said = self.durable.hear(message, now);
                any |= self.deliver(said);
            }
        }
        let said = self.durable.tick(now);
        self.deliver(said) | any
    }

    fn deliver(&mut self, said: Vec<FromArbiter>) -> bool {
        let any = !said.is_empty();
        for message in said {
            if let Some(member) = self.members.get_mut(&message.to) {
                member.hear(message);
            }
        }
        any
    }
}

impl Hub {
    fn communicator(
        &self,
        round: &Round,
        [rank, ranks]: [usize; 2],
        timeout: Duration,
    ) -> Result<Arc<dyn Communicator>, Error> {
        let none = Error::NoSeat { epoch: round.epoch, rank: round.rank };
        let mut inside = self.lock();
        if rank >= ranks {
            return Err(none);
        }
        if inside.seats.epoch < round.epoch {
            let (clock, faults) = (self.clock.clone(), Faults::none());
            let all = round.members.len() * ranks;
            let world = loopback::world(loopback::Config { ranks: all, timeout, clock, faults })?;
            let state = inside.durable.state();
            let here =
                |id: u64| state.members.iter().find(|place| place.worker.id == id && place.gone.is_none());
            let members: Vec<_> =
                round.members.iter().map(|seat| here(seat.id).map(|place| place.worker)).collect();
            let seat = |(i, seat): (usize, _)| members[i / ranks].map(|_| seat);
            let of_all = world.into_iter().enumerate().map(seat).collect();
            inside.seats = Seats { epoch: round.epoch, members, ranks, of_all };
        }
        let Seats { epoch, ranks: named, of_all, .. } = &mut inside.seats;
        let known = (*epoch, *named) == (round.epoch, ranks);
        let seat = of_all.get_mut(round.rank * ranks + rank).filter(|_| known).and_then(Option::take);
        seat.ok_or(none)
    }

    /// Returns the state, also after a panic (decision 119): a worker that panics is dropped, and the arbiter decides without it.
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.durable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, inside: MutexGuard<'a, Inside>, until: Duration) -> MutexGuard<'a, Inside> {
        match self.clock.sleep_for(until) {
            None => self.changed.wait(inside).unwrap_or_else(PoisonError::into_inner),
            Some(left) => self.changed.wait_timeout(inside, left).unwrap_or_else(PoisonError::into_inner).0,
        }
    }
}

impl Wake for Hub {
    fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    /// An arbiter that knows of a later one is silent.
    fn silence(run: &InProcess) {
        run.hub.lock().durable.meet(u64::MAX);
    }

    #[test]
    fn leaving_a_silent_arbiter_ends_at_the_deadline() {
        let config = Config::new(None, 1);
        let clock = Clock::manual();
        let run = InProcess::new(config, clock.clone()).unwrap();
        let worker = run.join(0, Digest { plan: 3, rule: 4 }, secs(2)).unwrap();
        silence(&run);
        let left = std::thread::scope(|scope| {
            let leaving = scope.spawn(|| worker.leave());
            while !leaving.is_finished() {
                assert!(clock.now() < secs(3600), "the worker waits past its deadline");
                clock.advance(Duration::from_millis(100));
                std::thread::sleep(Duration::from_millis(1));
            }
            leaving.join().unwrap()
        });
        assert_eq!(left, Err(Error::Unanswered { what: "leaving", after: secs(2) }));
    }

    #[test]
    fn leaving_a_silent_arbiter_ends_by_the_machines_clock_too() {
        let run = InProcess::new(Config::new(None, 1), Clock::real()).unwrap();
        let deadline = Duration::from_millis(50);
        let worker = run.join(0, Digest { plan: 3, rule: 4 }, deadline).unwrap();
        silence(&run);
        assert_eq!(worker.leave(), Err(Error::Unanswered { what: "leaving", after: deadline }));
    }
}
