//! Ranks that do not match: missing, duplicate, of another world size, run or start, or with another token.

use crate::rendezvous::common::{HEX, LONG, environment, free_addr, meet, options, world};
use crate::rendezvous::proxy::Proxy;
use meshstep_comm::rendezvous::{Environment, EnvironmentError, Error, Store, Token, Why};
use std::net::TcpListener;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

const SHORT: Duration = Duration::from_millis(1500);

#[test]
fn ranks_that_never_come_are_named_on_all() {
    let world = world(5);
    let there = [world[0].clone(), world[2].clone(), world[3].clone()];
    let begin = Instant::now();
    for error in meet(&there, &options(SHORT), drop) {
        let Err(Error::Missing { missing, after, .. }) = error else { panic!("{error:?}") };
        assert_eq!((missing, after), (vec![1, 4], SHORT));
    }
    assert!(begin.elapsed() < SHORT + Duration::from_secs(2));
}

#[test]
fn without_rank_0_the_store_is_unreachable() {
    let world = world(2);
    let nowhere = Environment { host: "no-such-host.invalid".to_owned(), ..world[1].clone() };
    let (result, elsewhere) = thread::scope(|scope| {
        let elsewhere = scope.spawn(|| Store::join(&nowhere, &options(SHORT)).map(drop));
        (Store::join(&world[1], &options(SHORT)).map(drop), elsewhere.join().unwrap())
    });
    let Err(Error::Unreachable { host, port, after, last }) = result else { panic!("{result:?}") };
    assert_eq!((host, port, after), (world[1].host.clone(), world[1].port, SHORT));
    assert!(!last.is_empty());
    assert!(matches!(elsewhere, Err(Error::Unreachable { .. })), "{elsewhere:?}");
}

/// Returns the errors of all ranks if one of them is `odd` while they gather, and the error of `odd` if it comes later.
fn with(odd: &Environment, addr: std::net::SocketAddr) -> (Vec<Error>, Error) {
    let gathering = [environment(addr, 0, 3), environment(addr, 1, 3), odd.clone()];
    let errors = meet(&gathering, &options(LONG), drop).into_iter().map(|result| result.unwrap_err());
    let errors = errors.collect();
    let complete: Vec<_> = (0..3).map(|rank| environment(addr, rank, 3)).collect();
    let (before, after) = (Barrier::new(4), Barrier::new(4));
    let late = thread::scope(|scope| {
        let late = scope.spawn(|| {
            before.wait();
            let result = Store::join(odd, &options(LONG)).map(drop);
            after.wait();
            result.unwrap_err()
        });
        let undisturbed = meet(&complete, &options(LONG), |store| {
            before.wait();
            after.wait();
            store.generation(0).barrier("still there", LONG)
        });
        assert_eq!(undisturbed, vec![Ok(Ok(())); 3]);
        late.join().unwrap()
    });
    (errors, late)
}

#[test]
fn two_processes_of_one_rank_are_an_error_on_all() {
    let addr = free_addr();
    let (errors, late) = with(&environment(addr, 1, 3), addr);
    assert_eq!(errors, vec![Error::SameRank { rank: 1 }; 3]);
    assert_eq!(late, Error::SameRank { rank: 1 });
}

#[test]
fn another_world_size_is_an_error_on_all() {
    for world_size in [4, 1024] {
        let addr = free_addr();
        let (errors, late) = with(&environment(addr, 2, world_size), addr);
        let error = Error::WorldSize { rank: 2, world_size, store: 3 };
        assert_eq!(errors, vec![error.clone(); 3]);
        assert_eq!(late, error);
    }
}

/// Ranks that the store of another run or start refuses, without any effect on its own ranks.
fn stranger(change: impl Fn(&mut Environment)) -> Error {
    let addr = free_addr();
    let mut odd = environment(addr, 1, 2);
    change(&mut odd);
    let turned_away = Barrier::new(2);
    thread::scope(|scope| {
        let stranger = scope.spawn(|| {
            let result = Store::join(&odd, &options(LONG)).map(drop);
            turned_away.wait();
            result.unwrap_err()
        });
        let first = scope.spawn(|| Store::join(&environment(addr, 0, 2), &options(LONG)).map(drop));
        turned_away.wait();
        Store::join(&environment(addr, 1, 2), &options(LONG)).unwrap();
        first.join().unwrap().unwrap();
        stranger.join().unwrap()
    })
}

#[test]
fn a_rank_of_another_run_start_or_token_is_refused_alone() {
    let other_run = stranger(|odd| odd.run_id = "other".to_owned());
    let expected = |run_id: &str, store: &str| (run_id.to_owned(), store.to_owned());
    let Error::OtherRun { run_id, store, .. } = other_run else { panic!("{other_run}") };
    assert_eq!((run_id, store), expected("other", "run"));
    assert_eq!(stranger(|odd| odd.restart = 0), Error::OtherRestart { restart: 0, store: 1 });
    for token in [None, Some(Token::from_hex(&HEX.replace('0', "f")).unwrap())] {
        let error = stranger(|odd| odd.token = token.clone());
        assert!(matches!(error, Error::WrongToken { .. }), "{error}");
    }
}

#[test]
fn a_rank_of_a_later_start_waits_for_its_store() {
    let addr = free_addr();
    let later = |rank| Environment { restart: 2, ..environment(addr, rank, 2) };
    let old = thread::scope(|scope| {
        let old = scope.spawn(|| {
            let waiting = options(SHORT);
            Store::join(&environment(addr, 0, 2), &waiting).map(drop)
        });
        let new = scope.spawn(|| Store::join(&later(1), &options(LONG)).map(drop));
        let old = old.join().unwrap();
        Store::join(&later(0), &options(LONG)).unwrap();
        new.join().unwrap().unwrap();
        old
    });
    assert!(matches!(old, Err(Error::Missing { .. })), "{old:?}");
}

#[test]
fn rank_0_reports_rejected_peers() {
    let addr = free_addr();
    let wrong = Environment { token: None, ..environment(addr, 1, 2) };
    let results = meet(&[environment(addr, 0, 2), wrong], &options(SHORT), drop);
    let Err(Error::Missing { turned_away, missing, gave_up, .. }) = &results[0] else {
        panic!("{results:?}")
    };
    assert_eq!((missing, gave_up), (&vec![1], &0));
    assert_eq!(turned_away.iter().map(|peer| &peer.why).collect::<Vec<_>>(), [&Why::WrongToken]);
    let text = results[0].as_ref().unwrap_err().to_string();
    assert!(text.contains("it has another token"), "{text}");
    assert_eq!(results[1], Err(Error::WrongToken { addr }));
}

#[test]
fn a_taken_port_is_an_error_with_advice() {
    let addr = free_addr();
    let taken = TcpListener::bind(addr).unwrap();
    let error = Store::join(&environment(addr, 0, 1), &options(LONG)).unwrap_err();
    assert_eq!(error, Error::PortTaken { addr });
    let text = error.to_string();
    assert!(text.contains("ss -ltnp") && text.contains("MESHSTEP_PORT"), "{text}");
    drop(taken);
    Store::join(&environment(addr, 0, 1), &options(LONG)).unwrap();
}

#[test]
fn a_port_that_is_free_soon_is_no_error() {
    let addr = free_addr();
    let taken = TcpListener::bind(addr).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(300));
            drop(taken);
        });
        Store::join(&environment(addr, 0, 1), &options(LONG)).unwrap();
    });
}

#[test]
fn addresses_that_cannot_be_a_store_s_are_refused() {
    let at = |host: &str, token: bool, rank| {
        let mut environment = environment(free_addr(), rank, 2);
        environment.host = host.to_owned();
        environment.token = environment.token.filter(|_| token);
        Store::join(&environment, &options(SHORT)).map(drop).unwrap_err()
    };
    // An address reserved for documentation, which no machine has.
    for rank in [0, 1] {
        assert!(matches!(at("192.0.2.1", false, rank), Error::TokenNeeded { .. }));
        assert!(matches!(at("0.0.0.0", true, rank), Error::NoAddress { .. }));
        assert!(matches!(at("::", false, rank), Error::NoAddress { .. }));
    }
    assert!(matches!(at("192.0.2.1", true, 0), Error::NotLocal { .. }));
    assert!(matches!(at("no-such-host.invalid", true, 0), Error::NoAddress { .. }));
}

#[test]
fn fields_that_contradict_each_other_are_refused() {
    let odd = Environment { rank: 2, ..world(2)[0].clone() };
    let error = EnvironmentError::NoSuchRank { variable: "RANK", rank: 2, world_size: 2 };
    assert_eq!(Store::join(&odd, &options(SHORT)).unwrap_err(), Error::Environment(error));
    let huge = Environment { world_size: usize::MAX, ..world(2)[0].clone() };
    let result = Store::join(&huge, &options(SHORT)).unwrap_err();
    assert!(matches!(result, Error::Environment(EnvironmentError::WorldSize { .. })), "{result}");
}

#[test]
fn a_store_that_is_called_by_another_name_refuses_the_rank() {
    let (addr, middle) = (free_addr(), free_addr());
    let _relay = Proxy::honest(middle, addr);
    let relayed = environment(middle, 1, 2);
    let results = thread::scope(|scope| {
        let first = scope.spawn(|| Store::join(&environment(addr, 0, 2), &options(SHORT)).map(drop));
        [Store::join(&relayed, &options(LONG)).map(drop), first.join().unwrap()]
    });
    let (endpoint, listener) = (middle.to_string(), addr.to_string());
    assert_eq!(results[0], Err(Error::OtherEndpoint { addr: middle, endpoint, listener }));
    let Err(Error::Missing { turned_away, .. }) = &results[1] else { panic!("{results:?}") };
    assert_eq!(turned_away[0].why, Why::OtherEndpoint);
}
