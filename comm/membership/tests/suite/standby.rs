//! Workers with several arbiters' addresses: none of them reached for a while, a promoted copy of the log, and the old arbiter's return.

use crate::common::{DIGEST, LONG, config};
use crate::remote::{caller, patient, serve, token};
use meshstep_cases::process::free_addr;
use meshstep_membership::{
    Ballot, Caller, Config, ConnectionError, Decision, Error, Log, LogError, Membership, Remote, Service,
    Standby, State,
};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Arbiters of one run at two addresses, each with a log of its own.
struct Two {
    _dir: tempfile::TempDir,
    logs: [PathBuf; 2],
    addrs: [SocketAddr; 2],
}

impl Two {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let logs = ["first", "second"].map(|name| dir.path().join(name));
        Two { _dir: dir, logs, addrs: [free_addr(), free_addr()] }
    }

    fn serve(&self, which: usize) -> Service {
        serve(self.addrs[which], patient(1, 1), &self.logs[which])
    }

    /// A worker that waits `deadline` for answers, and takes ten steps alone.
    fn worker(&self, deadline: Duration) -> Remote {
        let addrs = self.addrs.to_vec();
        Remote::join(Caller { addrs, deadline, alone: 10, ..caller(self.addrs[0], 0) }).unwrap()
    }

    fn copy(&self) {
        std::fs::copy(&self.logs[0], &self.logs[1]).unwrap();
    }
}

fn exchange(worker: &Remote, step: u64) {
    // A worker that has lost the arbiter goes on alone until it has reached the next one.
    let round = loop {
        match worker.boundary(step) {
            Err(Error::Alone { .. }) => sleep(Duration::from_millis(5)),
            round => break round.unwrap(),
        }
    };
    assert_eq!(round.step, step);
    assert!(worker.vote(&round, Ballot::Ready).unwrap().is_commit());
}

/// Waits until this is true.
fn until(what: &str, is: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < LONG, "{what}");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn without_an_arbiter_a_worker_goes_on_at_once_up_to_its_bound_and_ends_with_an_error_there() {
    let two = Two::new();
    // The second address answers.
    let service = two.serve(1);
    let deadline = Duration::from_secs(3);
    let worker = two.worker(deadline);
    exchange(&worker, 4);
    drop(service);
    assert_eq!(worker.boundary(8), Err(Error::Alone { step: 8, left: 6 }));
    let begin = Instant::now();
    assert_eq!(worker.boundary(14), Err(Error::Alone { step: 14, left: 0 }));
    assert!(begin.elapsed() < deadline, "{:?}", begin.elapsed());
    // One step further it waits.
    assert_eq!(worker.boundary(15), Err(Error::Away { step: 15, last: 4, alone: 10, after: deadline }));
    assert!(begin.elapsed() >= deadline);
    let _service = two.serve(1);
    exchange(&worker, 15);
    worker.leave().unwrap();
}

#[test]
fn a_vote_waits_for_an_arbiter_that_is_started_again() {
    let two = Two::new();
    let service = two.serve(0);
    let worker = two.worker(LONG);
    let round = worker.boundary(4).unwrap();
    drop(service);
    std::thread::scope(|scope| {
        let votes = scope.spawn(|| worker.vote(&round, Ballot::Ready));
        sleep(Duration::from_millis(1500)); // longer than a boundary waits
        let _service = two.serve(0);
        assert!(votes.join().unwrap().unwrap().is_commit());
    });
}

#[test]
fn an_old_arbiter_is_refused_by_a_worker_that_knows_the_promoted_one_and_stops() {
    let two = Two::new();
    let service = two.serve(0);
    let worker = two.worker(Duration::from_secs(3));
    exchange(&worker, 4);
    drop(service);
    two.copy();
    let term = Log::promote(&two.logs[1]).unwrap();
    assert_eq!(term, 1 << 32);
    let promoted = two.serve(1);
    exchange(&worker, 8);
    assert_eq!(promoted.term(), term + 1);
    drop(promoted);
    // Started again twice, the old one is still of a lower term.
    drop(two.serve(0));
    let old = two.serve(0);
    until("the old arbiter stops", || old.failed().is_some());
    let later_term = term + 1;
    let superseded = Error::Superseded { term: 3, epoch: 1, later_term, later_epoch: 1 };
    assert_eq!(old.failed(), Some(superseded));
    assert_eq!(worker.boundary(12), Err(Error::Alone { step: 12, left: 6 }));
    let _promoted = two.serve(1);
    // The worker calls again within a moment.
    until("it is reached", || !matches!(worker.boundary(12), Err(Error::Alone { .. })));
    assert!(matches!(worker.boundary(12), Err(Error::Undecided { round: 3 })));
}

#[test]
fn of_two_arbiters_a_new_worker_takes_the_promoted_one() {
    let two = Two::new();
    let service = two.serve(0);
    exchange(&two.worker(LONG), 4);
    drop(service);
    two.copy();
    Log::promote(&two.logs[1]).unwrap();
    let [old, promoted] = [two.serve(0), two.serve(1)];
    let _worker = two.worker(LONG);
    assert!(matches!(old.failed(), Some(Error::Superseded { term: 2, .. })), "{:?}", old.failed());
    assert_eq!(promoted.failed(), None);
}

#[test]
fn an_arbiter_on_an_incomplete_copy_stops_instead_of_waiting_for_votes() {
    let two = Two::new();
    let service = two.serve(0);
    let worker = two.worker(Duration::from_secs(2));
    let round = worker.boundary(4).unwrap();
    two.copy();
    assert!(worker.vote(&round, Ballot::Ready).unwrap().is_commit());
    drop(service);
    Log::promote(&two.logs[1]).unwrap();
    let stale = two.serve(1);
    assert!(worker.boundary(15).is_err());
    assert_eq!(stale.failed(), Some(Error::Stale { round: 1, later: 1 }));
}

#[test]
fn a_standby_has_every_state_before_a_worker_hears_of_it() {
    let two = Two::new();
    let service = two.serve(0);
    let standby = Standby::start(&two.addrs[..1], Some(&token()), "run", &two.logs[1]).unwrap();
    until("the standby follows", || service.has_standby());
    let worker = two.worker(LONG);
    for i in 1..=20 {
        let round = worker.boundary(4 * i).unwrap();
        // The record is on the disk of the standby by now; its file is read beside it.
        assert_eq!(last(&two.logs[1]).map(|state| (state.round, state.decision)), Some((i, None)));
        let decision = worker.vote(&round, Ballot::Ready).unwrap();
        assert_eq!(last(&two.logs[1]).map(|state| (state.round, state.decision)), Some((i, Some(decision))));
    }
    let kept = standby.kept();
    assert!(kept.follows && kept.records >= 40 && kept.term == 1, "{kept:?}");
    // A second standby takes the place of the first.
    let third = two.logs[1].with_file_name("third");
    let other = Standby::start(&two.addrs[..1], Some(&token()), "run", &third).unwrap();
    until("the first standby ends", || standby.failed().is_some());
    assert_eq!(standby.failed(), Some(Error::Replaced));
    until("the other follows", || other.kept().follows);
    exchange(&worker, 100);
}

/// An arbiter on a new log, and one on an old copy of its log.
#[test]
fn a_standby_keeps_its_copy_when_the_arbiter_has_lost_a_part_of_its_log() {
    for (copied, term, round) in [(false, 1, 0), (true, 2, 1)] {
        let two = Two::new();
        let service = two.serve(0);
        let standby = Standby::start(&two.addrs[..1], Some(&token()), "run", &two.logs[1]).unwrap();
        until("the standby follows", || service.has_standby());
        let worker = two.worker(LONG);
        let granted = worker.boundary(4).unwrap();
        let open = std::fs::read(&two.logs[0]).unwrap();
        assert!(worker.vote(&granted, Ballot::Ready).unwrap().is_commit());
        drop((worker, service));
        std::fs::write(&two.logs[0], if copied { &open[..] } else { &[] }).unwrap();
        let _service = two.serve(0);
        until("the standby stops", || standby.failed().is_some());
        let (copy_term, copy_epoch, copy_round) = (1, 1, 1);
        let old = Error::OldRecord { term, epoch: round, round, copy_term, copy_epoch, copy_round };
        assert_eq!(standby.failed(), Some(old));
        let kept = last(&two.logs[1]).unwrap();
        assert_eq!((kept.term, kept.round, kept.decision), (1, 1, Some(Decision::Commit {})));
    }
}

#[test]
fn without_an_address_there_is_an_error_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let none = Error::Connection(ConnectionError::NoAddress);
    let begin = Instant::now();
    let caller = Caller { addrs: Vec::new(), ..caller(free_addr(), 0) };
    assert_eq!(Remote::join(caller).map(drop), Err(none.clone()));
    let log = dir.path().join("log");
    assert_eq!(Standby::start(&[], Some(&token()), "run", &log).map(drop), Err(none));
    assert!(begin.elapsed() < LONG / 2 && !log.exists());
}

/// Returns the last state of a log that another process has open: of a copy of the file.
fn last(log: &Path) -> Option<State> {
    let copy = log.with_extension("read");
    std::fs::copy(log, &copy).unwrap();
    Log::open(&copy).unwrap().1
}

#[test]
fn a_standby_that_cannot_keep_the_log_says_why() {
    let two = Two::new();
    let _service = two.serve(0);
    let start = |run: &str, log: &Path| Standby::start(&two.addrs[..1], Some(&token()), run, log);
    // Its log is of another run.
    let (mut log, _) = Log::open(&two.logs[1]).unwrap();
    let digest = meshstep_membership::Digest { plan: 1, ..DIGEST };
    let other = serve(
        free_addr(),
        Config { digest: Some(digest), ..config(1, 1) },
        &two.logs[1].with_extension("other"),
    );
    drop(other);
    log.append(&last(&two.logs[1].with_extension("other")).unwrap()).unwrap();
    let locked = start("run", &two.logs[1]).map(drop).unwrap_err();
    assert_eq!(locked, LogError::Locked { path: two.logs[1].clone() }.into());
    drop(log);
    let standby = start("run", &two.logs[1]).unwrap();
    until("the digest differs", || standby.failed().is_some());
    assert_eq!(standby.failed(), Some(meshstep_membership::ConfigError::OtherRun.into()));
    // The arbiter serves another run, by its name.
    let standby = start("walk", &two.logs[1].with_extension("new")).unwrap();
    until("the name differs", || standby.failed().is_some());
    assert!(matches!(standby.failed(), Some(Error::Connection(_))), "{:?}", standby.failed());
    drop(standby);
    let empty = Log::promote(&two.logs[1].with_extension("new")).unwrap_err();
    assert_eq!(empty, LogError::Empty { path: two.logs[1].with_extension("new") });
}
