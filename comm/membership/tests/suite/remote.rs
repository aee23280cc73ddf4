//! Workers and their arbiter over real sockets in one process: tokens, strangers, cut connections, a restarted arbiter.

use crate::common::{DIGEST, LONG, config};
use meshstep_cases::cases;
use meshstep_cases::process::free_addr;
use meshstep_comm::rendezvous::{Token, call};
use meshstep_membership::{
    Ask, Ballot, Caller, Config, ConnectionError, Digest, Error, LogError, Membership, Refusal, Remote,
    Round, Service, ToArbiter, Worker,
};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) const HEX: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

pub(crate) fn token() -> Token {
    Token::from_hex(HEX).unwrap()
}

/// Settings for real time on a busy machine.
pub(crate) fn patient(workers: usize, min: usize) -> Config {
    Config { silence: Duration::from_secs(5), patience: Duration::from_secs(10), ..config(workers, min) }
}

pub(crate) fn serve(addr: SocketAddr, config: Config, log: &Path) -> Service {
    Service::start(addr, Some(&token()), "run", config, log).unwrap()
}

pub(crate) fn caller(addr: SocketAddr, id: u64) -> Caller {
    let (token, run) = (Some(token()), "run".to_owned());
    let (addrs, contact) = (vec![addr], format!("at {id}"));
    Caller { addrs, token, run, id, digest: DIGEST, contact, deadline: LONG, alone: 0 }
}

/// Purpose of a connection to the service, with the version of its messages.
const PURPOSE: &str = "membership/3 of run";

fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    (dir, log)
}

/// Joins each of these workers and runs `body` with it on a thread of its own.
fn each<T: Send>(addr: SocketAddr, ids: &[u64], body: impl Fn(u64, Remote) -> T + Sync) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let start = |id: &u64| {
            let id = *id;
            scope.spawn(move || body(id, Remote::join(caller(addr, id)).unwrap()))
        };
        let threads: Vec<_> = ids.iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs an exchange in which this worker votes ready.
fn exchange(worker: &Remote, step: u64) -> Result<(Round, bool), Error> {
    let round = worker.boundary(step)?;
    let decision = worker.vote(&round, Ballot::Ready)?;
    Ok((round, decision.is_commit()))
}

#[test]
fn workers_meet_exchange_and_leave() {
    let (_dir, log) = place();
    let service = serve(free_addr(), patient(3, 1), &log);
    let all = each(service.addr(), &[3, 1, 2], |id, worker| {
        let rounds: Vec<_> = (1..=id + 3).map(|i| exchange(&worker, 4 * i).unwrap()).collect();
        worker.leave().unwrap();
        assert_eq!(worker.boundary(99), Err(Error::Left));
        rounds
    });
    for (rounds, id) in all.iter().zip([3, 1, 2]) {
        // Workers with fewer exchanges leave before the others.
        let sizes: Vec<_> =
            rounds.iter().map(|(round, committed)| (round.members.len(), *committed)).collect();
        let expected = [3, 3, 3, 3, 2, 1].map(|size| (size, true));
        assert_eq!(sizes, expected[..id + 3], "worker {id}");
        let (round, _) = &rounds[0];
        let me = &round.members[round.rank];
        assert_eq!((me.id, &me.contact[..]), (id as u64, &format!("at {id}")[..]));
    }
    assert_eq!(service.failed(), None);
}

#[test]
fn who_may_not_be_a_worker_is_told_why() {
    let (_dir, log) = place();
    let service = serve(free_addr(), patient(2, 1), &log);
    let addr = service.addr();
    let _first = Remote::join(caller(addr, 0)).unwrap();
    let join = |caller: Caller| Remote::join(caller).map(drop).unwrap_err();
    let mine = caller(addr, 1);
    let other = Some(Token::from_hex(&HEX.replace('0', "a")).unwrap());
    let wrong_token = Error::Connection(ConnectionError::WrongToken { addr });
    assert_eq!(join(Caller { token: other, ..mine.clone() }), wrong_token);
    assert_eq!(join(Caller { token: None, ..mine.clone() }), wrong_token);
    let error = join(Caller { run: "walk".to_owned(), ..mine.clone() });
    assert!(matches!(error, Error::Connection(ConnectionError::OtherRun { .. })), "{error}");
    let digest = Digest { plan: 1, ..DIGEST };
    assert_eq!(join(Caller { digest, ..mine.clone() }), Refusal::OtherPlan { mine: 1, run: 3 }.into());
    let digest = Digest { rule: 1, ..DIGEST };
    assert_eq!(join(Caller { digest, ..mine.clone() }), Refusal::OtherRule { mine: 1, run: 5 }.into());
    assert_eq!(join(Caller { id: 0, ..mine.clone() }), Refusal::IdTaken { id: 0 }.into());
    let contact = "c".repeat(65);
    assert_eq!(join(Caller { contact, ..mine.clone() }), Refusal::Contact { len: 65, max: 64 }.into());
    let deadline = Duration::from_millis(300);
    let relay = Relay::to(addr);
    let error = join(Caller { addrs: vec![relay.addr], ..mine.clone() });
    let listener = addr.to_string();
    assert_eq!(error, Error::Connection(ConnectionError::OtherEndpoint { addr: relay.addr, listener }));
    let nobody = Caller { addrs: vec![free_addr()], deadline, ..mine };
    assert_eq!(join(nobody), Error::Unanswered { what: "joining", after: deadline });
}

#[test]
fn a_service_that_cannot_be_is_refused() {
    let (_dir, log) = place();
    let start = |addr: SocketAddr, token: Option<&Token>, config: Config| {
        Service::start(addr, token, "run", config, &log).map(drop).unwrap_err()
    };
    let error = start(free_addr(), Some(&token()), config(1, 2));
    assert!(matches!(error, Error::Config(_)), "{error}");
    let error = start("192.0.2.1:1".parse().unwrap(), None, config(1, 1));
    assert!(matches!(error, Error::Connection(ConnectionError::TokenNeeded { .. })), "{error}");
    let service = serve(free_addr(), config(1, 1), &log);
    let error = start(service.addr(), Some(&token()), config(1, 1));
    assert!(matches!(error, Error::Connection(ConnectionError::PortTaken { .. })), "{error}");
    let error = start(free_addr(), Some(&token()), config(1, 1));
    assert_eq!(error, LogError::Locked { path: log.clone() }.into());
}

#[test]
fn garbage_of_strangers_and_of_those_with_the_token_does_no_harm() {
    let (_dir, log) = place();
    let service = serve(free_addr(), patient(1, 1), &log);
    let addr = service.addr();
    let worker = Remote::join(caller(addr, 0)).unwrap();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[255; 64], &[4, 0, 0, 0, 16, 1, 1, 1]] {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(bytes).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        // The service closes the connection, even with unread bytes.
        assert!(!matches!(stream.read(&mut [0]), Ok(1)));
    }
    // More idle connections than the service accepts at a time.
    let loiterers: Vec<_> = (0..20).map(|_| TcpStream::connect(addr).unwrap()).collect();
    for garbage in [&b"garbage"[..], &[], &[0; 41], &[1; 41]] {
        let (mut incoming, mut outgoing) = call(addr, Some(&token()), PURPOSE, LONG).unwrap();
        assert!(incoming.next(Instant::now() + LONG).is_ok()); // the service's term
        outgoing.send(garbage).unwrap();
        assert!(incoming.next(Instant::now() + LONG).is_err());
    }
    // A connection belongs to one worker.
    let (mut incoming, mut outgoing) = call(addr, Some(&token()), PURPOSE, LONG).unwrap();
    assert!(incoming.next(Instant::now() + LONG).is_ok());
    for (id, heard) in [(7, true), (8, false)] {
        let ask = Ask::Join { digest: DIGEST, contact: String::new() };
        let message = ToArbiter { worker: Worker { id, life: 1 }, term: 0, epoch: 0, after: 0, ask };
        outgoing.send(&[&[1], &message.encode()[..]].concat()).unwrap();
        assert_eq!(incoming.next(Instant::now() + LONG).is_ok(), heard);
    }
    assert!(exchange(&worker, 4).unwrap().1);
    drop(loiterers);
    let begin = Instant::now();
    drop(service);
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
}

#[test]
fn a_successor_of_the_arbiter_goes_on_with_the_same_members() {
    let (_dir, log) = place();
    let addr = free_addr();
    let service = Arc::new(Mutex::new(Some(serve(addr, patient(2, 2), &log))));
    let replace = || {
        let mut service = service.lock().unwrap();
        drop(service.take());
        *service = Some(serve(addr, patient(2, 2), &log));
    };
    each(addr, &[0, 1], |id, worker| {
        for i in 1..=6 {
            let round = worker.boundary(4 * i).unwrap();
            assert_eq!((round.number, round.epoch, round.divisor()), (i, 1, 2));
            if id == 0 && i % 2 == 0 {
                replace();
            }
            assert!(worker.vote(&round, Ballot::Ready).unwrap().is_commit());
            if id == 0 && i % 2 == 1 {
                replace();
            }
        }
        worker.leave().unwrap();
    });
}

/// Forwards bytes to `to`, and cuts all connections on request, repeatedly.
struct Relay {
    addr: SocketAddr,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    fn to(to: SocketAddr) -> Self {
        let listener = TcpListener::bind(free_addr()).unwrap();
        let (addr, streams) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let kept = Arc::clone(&streams);
        thread::spawn(move || {
            for here in listener.incoming() {
                let (here, Ok(there)) = (here.unwrap(), TcpStream::connect(to)) else { continue };
                let pairs = [(&here, &there), (&there, &here)];
                for (from, to) in pairs.map(|(a, b)| (a.try_clone().unwrap(), b.try_clone().unwrap())) {
                    thread::spawn(move || std::io::copy(&mut &from, &mut &to));
                }
                kept.lock().unwrap().extend([here, there]);
            }
        });
        Relay { addr, streams }
    }

    fn cut(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

#[test]
fn a_cut_connection_is_made_again_and_nothing_is_lost() {
    let (_dir, log) = place();
    let service = serve(free_addr(), patient(2, 2), &log);
    let relay = Relay::to(service.addr());
    // Without this name the workers' calls belong to another listener.
    service.add_name(relay.addr).unwrap();
    each(relay.addr, &[0, 1], |id, worker| {
        for i in 1..=u64::from(cases(10, 10)) {
            if id == 0 {
                relay.cut();
            }
            let round = worker.boundary(4 * i).unwrap();
            assert_eq!((round.number, round.epoch), (i, 1));
            if id == 1 {
                relay.cut();
            }
            assert!(worker.vote(&round, Ballot::Ready).unwrap().is_commit());
        }
    });
}

#[cfg(target_os = "linux")]
#[test]
fn a_worker_joins_and_exchanges_go_on_during_a_flood_of_a_thousand() {
    use meshstep_cases::flood::{Flood, Way};
    let (_dir, log) = place();
    let service = serve(free_addr(), patient(1, 1), &log);
    let first = Remote::join(caller(service.addr(), 0)).unwrap();
    for (way, id) in Way::ALL.into_iter().zip(1..) {
        let flood = Flood::start(service.addr(), way);
        // The strangers' time ends in it.
        thread::sleep(Duration::from_millis(300));
        let begin = Instant::now();
        let second = Remote::join(caller(service.addr(), id)).unwrap();
        let joined = begin.elapsed();
        second.leave().unwrap();
        let begin = Instant::now();
        assert!(exchange(&first, 4 * id).unwrap().1);
        let (exchanged, opened) = (begin.elapsed(), flood.stop());
        println!("{way:?}: joined after {joined:?}, exchange in {exchanged:?}, {opened} connections");
        assert!(joined < Duration::from_secs(1), "{way:?}: {joined:?}");
        assert!(exchanged < Duration::from_secs(1), "{way:?}: {exchanged:?}");
    }
}
