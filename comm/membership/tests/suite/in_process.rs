//! Workers that are threads of one process, with real communicators and a manual clock.

use crate::common::{DIGEST, LONG, config, secs};
use meshstep_comm::{Clock, Communicator, Reduction};
use meshstep_membership::{
    Ballot, Config, ConfigError, Decision, Departure, Digest, Error, InProcess, InProcessWorker, Membership,
    Refusal, Round,
};
use meshstep_tensor::{Buffer, Category, Meter};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

fn run(workers: usize, min: usize) -> (InProcess, Clock) {
    let clock = Clock::manual();
    (InProcess::new(config(workers, min), clock.clone()).unwrap(), clock)
}

/// A worker that averages `x` at steps 4, 8, ... and adds its id + 1 to it in each step between.
struct Training {
    worker: InProcessWorker,
    comm: Option<(u64, Arc<dyn Communicator>)>,
    x: f64,
    step: u64,
}

impl Training {
    fn new(run: &InProcess, id: u64) -> Self {
        Training { worker: run.join(id, DIGEST, secs(60)).unwrap(), comm: None, x: 0.0, step: 0 }
    }

    /// Trains to the end of the next exchange.
    fn interval(&mut self, id: u64) -> Result<(Round, Decision), Error> {
        while self.step == 0 || !self.step.is_multiple_of(4) {
            (self.x, self.step) = (self.x + (id + 1) as f64, self.step + 1);
        }
        let round = self.worker.boundary(self.step)?;
        if self.comm.as_ref().is_none_or(|(epoch, _)| *epoch != round.epoch) {
            self.comm = Some((round.epoch, self.worker.communicator(&round, LONG)?));
        }
        let mean = self.exchange(&round);
        let ballot = if mean.is_some() { Ballot::Ready } else { Ballot::Failed };
        let decision = self.worker.vote(&round, ballot)?;
        self.step = round.step + 1;
        if let (true, Some(mean)) = (decision.is_commit(), mean) {
            self.x = mean;
        }
        self.x += (id + 1) as f64;
        Ok((round, decision))
    }

    fn exchange(&mut self, round: &Round) -> Option<f64> {
        let (_, comm) = self.comm.as_ref()?;
        let part = if round.counts() { self.x } else { 0.0 };
        let mut buffer = Buffer::from_slice(&[part], &Meter::new(), Category::Staging).unwrap();
        comm.all_reduce(&mut buffer, Reduction::Sum).ok()?;
        Some(buffer.typed::<f64>().unwrap()[0] / round.divisor() as f64)
    }
}

#[test]
fn three_become_two_which_divide_by_two_and_three_again() {
    let (run, _) = run(3, 2);
    let (send, receive) = channel();
    let send = &send;
    thread::scope(|scope| {
        let run = &run;
        let mut threads = Vec::new();
        for id in 0..3u64 {
            threads.push(scope.spawn(move || {
                let mut training = Training::new(run, id);
                (0..if id == 2 { 1 } else { 2 }).for_each(|_| {
                    let (round, decision) = training.interval(id).unwrap();
                    send.send((id, round.step, round.divisor(), decision.is_commit(), training.x)).unwrap();
                });
                // Worker 2 ends without leaving.
                (id != 2).then_some(training)
            }));
        }
        let mut trained: Vec<_> = threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect();
        // Another worker joins in the middle of an interval, and does not count at first.
        scope.spawn(move || {
            let mut training = Training::new(run, 5);
            for _ in 0..2 {
                let (round, _) = training.interval(5).unwrap();
                send.send((5, round.step, round.divisor(), round.counts(), training.x)).unwrap();
            }
            training.worker.leave().unwrap();
        });
        // The others continue until the new worker is a member and counts.
        for (id, mut training) in (0..2).zip(trained.drain(..)) {
            scope.spawn(move || {
                while training.interval(id).unwrap().0.members.len() == 2 {}
                training.interval(id).unwrap();
            });
        }
    });
    let mut said: Vec<_> = receive.try_iter().collect();
    said.sort_by(|a, b| (a.1, a.0).partial_cmp(&(b.1, b.0)).unwrap());
    // The first exchange averages 4, 8 and 12 to 8, and a step adds id + 1; the second averages 9 + 3 and 10 + 6.
    assert_eq!(said[..3], [(0, 4, 3, true, 9.0), (1, 4, 3, true, 10.0), (2, 4, 3, true, 11.0)]);
    assert_eq!(said[3..5], [(0, 8, 2, true, 15.0), (1, 8, 2, true, 16.0)]);
    let joiner: Vec<_> = said.iter().filter(|said| said.0 == 5).copied().collect();
    let joined = joiner[0].1;
    assert!(joined >= 12 && joined.is_multiple_of(4), "{joiner:?}");
    assert_eq!((joiner[0].2, joiner[0].3), (2, false));
    assert_eq!((joiner[1].1, joiner[1].2, joiner[1].3), (joined + 4, 3, true));
}

/// Moves the clock until the thread has its answer.
fn with_time<T: Send>(clock: &Clock, call: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(call);
        while !thread.is_finished() {
            clock.advance(Duration::from_millis(100));
            thread::yield_now();
        }
        thread.join().unwrap()
    })
}

#[test]
fn one_that_stands_still_is_dropped_and_learns_it_when_it_goes_on() {
    let (run, clock) = run(2, 1);
    let worker = |id| run.join(id, DIGEST, secs(1000)).unwrap();
    let (quick, slow) = (worker(0), worker(1));
    let first = thread::scope(|scope| {
        let there = scope.spawn(|| slow.boundary(4).unwrap());
        let here = quick.boundary(4).unwrap();
        (here, there.join().unwrap())
    });
    assert_eq!(quick.decided(&first.0), None);
    let decision = with_time(&clock, || quick.vote(&first.0, Ballot::Ready)).unwrap();
    assert_eq!(decision, Decision::Abort { vetoed: vec![], failed: vec![], lost: vec![1] });
    assert!(clock.now() >= secs(3));
    assert_eq!(quick.decided(&first.0), Some(decision));
    let round = quick.boundary(4).unwrap();
    assert_eq!((round.epoch, round.divisor()), (2, 1));
    let fenced = Refusal::Fenced { epoch: 1, now: 2, why: Some(Departure::Late) };
    assert_eq!(slow.vote(&first.1, Ballot::Ready), Err(fenced.clone().into()));
    assert_eq!(slow.boundary(8), Err(fenced.into()));
    assert_eq!(quick.vote(&round, Ballot::Ready), Ok(Decision::Commit {}));
    // The only member leaves.
    quick.leave().unwrap();
    assert_eq!(quick.boundary(8), Err(Error::Left));
}

#[test]
fn an_arbiter_may_die_at_any_moment() {
    let (run, _) = run(2, 2);
    thread::scope(|scope| {
        for id in 0..2u64 {
            let run = &run;
            scope.spawn(move || {
                let worker = run.join(id, DIGEST, LONG).unwrap();
                for i in 1..=20 {
                    if id == 0 {
                        run.restart_arbiter();
                    }
                    let round = worker.boundary(4 * i).unwrap();
                    assert_eq!((round.number, round.epoch), (i, 1));
                    if id == 1 {
                        run.restart_arbiter();
                    }
                    assert!(worker.vote(&round, Ballot::Ready).unwrap().is_commit());
                }
            });
        }
    });
}

#[test]
fn a_call_that_takes_another_s_place_ends_it() {
    let (run, _) = run(2, 1);
    let worker = run.join(0, DIGEST, LONG).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| worker.boundary(4));
        // Either call may win; leaving is final.
        worker.leave().unwrap();
        let answer = waiting.join().unwrap();
        assert!(matches!(answer, Err(Error::Overtaken | Error::Left)), "{answer:?}");
    });
}

#[test]
fn nobody_waits_longer_than_it_wants_to() {
    let clock = Clock::manual();
    let patient = Config { patience: secs(30 * 24 * 3600), ..config(2, 1) };
    let run = InProcess::new(patient, clock.clone()).unwrap();
    let worker = run.join(0, DIGEST, secs(2)).unwrap();
    let answer = with_time(&clock, || worker.boundary(4));
    assert_eq!(answer, Err(Error::Unanswered { what: "a boundary", after: secs(2) }));
    // The worker is still a member, and may ask again.
    let other = run.join(1, DIGEST, secs(2)).unwrap();
    thread::scope(|scope| {
        let there = scope.spawn(|| other.boundary(4).unwrap());
        assert_eq!((worker.boundary(4).unwrap().divisor(), there.join().unwrap().divisor()), (2, 2));
    });
}

#[test]
fn who_panics_is_missed_at_once_and_so_is_a_seat_that_nobody_took() {
    let (run, _) = run(3, 1);
    thread::scope(|scope| {
        let run = &run;
        let dying = scope.spawn(move || {
            let worker = run.join(9, DIGEST, secs(60)).unwrap();
            let _round = worker.boundary(4).unwrap();
            panic!("as it should");
        });
        let others: Vec<_> = (0..2u64)
            .map(|id| {
                scope.spawn(move || {
                    let mut training = Training::new(run, id);
                    let first = training.interval(id).unwrap();
                    let second = training.interval(id).unwrap();
                    (first, second)
                })
            })
            .collect();
        assert!(dying.join().is_err());
        for other in others {
            let ((_, first), (round, second)) = other.join().unwrap();
            assert!(matches!(&first, Decision::Abort { lost, .. } if lost == &[9]), "{first:?}");
            assert_eq!((round.divisor(), second), (2, Decision::Commit {}));
        }
    });
}

#[test]
fn who_goes_before_seats_are_made_is_not_waited_for() {
    for leaves in [true, false] {
        let run = InProcess::new(config(2, 1), Clock::real()).unwrap();
        let [stays, goes] = [0, 1].map(|id| run.join(id, DIGEST, LONG).unwrap());
        let round = thread::scope(|scope| {
            let other = scope.spawn(|| goes.boundary(4).unwrap());
            let round = stays.boundary(4).unwrap();
            assert_eq!(other.join().unwrap().number, round.number);
            round
        });
        let _kept = if leaves {
            goes.leave().unwrap();
            Some(goes)
        } else {
            drop(goes);
            None
        };
        let begun = Instant::now();
        let comm = stays.communicator(&round, secs(60)).unwrap();
        let mut buffer = Buffer::from_slice(&[1f64], &Meter::new(), Category::Staging).unwrap();
        assert!(comm.all_reduce(&mut buffer, Reduction::Sum).is_err());
        assert!(begun.elapsed() < secs(30));
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let bad = Config { min_workers: 3, ..config(2, 1) };
    let expected = ConfigError::Workers { workers: 2, min_workers: 3, max: 256 };
    assert_eq!(InProcess::new(bad, Clock::manual()).err(), Some(expected.into()));
    let (run, _) = run(1, 1);
    let worker = run.join(0, DIGEST, secs(1)).unwrap();
    let join = |id, digest| run.join(id, digest, secs(1)).map(drop);
    assert_eq!(join(0, DIGEST), Err(Refusal::IdTaken { id: 0 }.into()));
    let other = Digest { plan: 0, ..DIGEST };
    assert_eq!(join(1, other), Err(Refusal::OtherPlan { mine: 0, run: 3 }.into()));
    let round = worker.boundary(4).unwrap();
    assert_eq!(worker.boundary(8), Err(Error::Undecided { round: 1 }));
    let comm = worker.communicator(&round, LONG).unwrap();
    assert_eq!((comm.rank(), comm.world_size()), (0, 1));
    assert!(matches!(worker.communicator(&round, LONG), Err(Error::NoSeat { epoch: 1, rank: 0 })));
    let other = Round { number: 2, ..round.clone() };
    assert_eq!(worker.vote(&other, Ballot::Ready), Err(Error::OtherRound { asked: 2, round: 1 }));
    assert!(worker.vote(&round, Ballot::Ready).unwrap().is_commit());
    assert_eq!(worker.boundary(4), Err(Refusal::Passed { asked: 4, step: 4 }.into()));
    // After all workers have gone, no worker with the state is left for a new one.
    drop(worker);
    let late = run.join(0, DIGEST, secs(1)).unwrap();
    assert_eq!(late.boundary(0), Err(Refusal::StateLost { step: 4 }.into()));
}

#[test]
fn every_rank_of_a_worker_has_one_place_among_all() {
    let run = InProcess::new(config(2, 1), Clock::real()).unwrap();
    let workers = [0, 1].map(|id| run.join(id, DIGEST, LONG).unwrap());
    let rounds = thread::scope(|scope| {
        let there = scope.spawn(|| workers[1].boundary(4).unwrap());
        [workers[0].boundary(4).unwrap(), there.join().unwrap()]
    });
    let of = |round: &Round, place| run.communicator(round, place, LONG);
    let comms: Vec<_> = (0..2).map(|rank| of(&rounds[0], [rank, 2]).unwrap()).collect();
    for (rank, comm) in comms.iter().enumerate() {
        assert_eq!((comm.rank(), comm.world_size()), (2 * rounds[0].rank + rank, 4));
    }
    // A second request, a rank beyond the worker's, and another number of ranks.
    for place in [[1, 2], [2, 2], [0, 1], [0, 0]] {
        assert!(matches!(of(&rounds[0], place), Err(Error::NoSeat { epoch: 1, .. })), "{place:?}");
    }
    assert!(matches!(workers[1].communicator(&rounds[1], LONG), Err(Error::NoSeat { .. })));
    // The others do not wait for a worker that left without taking its communicators.
    let [first, second] = workers;
    drop(second);
    let begin = std::time::Instant::now();
    thread::scope(|scope| {
        let waits = comms.iter().map(|comm| scope.spawn(|| comm.barrier().unwrap_err()));
        waits.collect::<Vec<_>>().into_iter().for_each(|told| drop(told.join().unwrap()));
    });
    assert!(begin.elapsed() < LONG / 2 && first.vote(&rounds[0], Ballot::Ready).is_ok());
}
