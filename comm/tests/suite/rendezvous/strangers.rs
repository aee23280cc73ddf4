//! Strangers that connect to the store: garbage, long frames, silence, and too many connections.

use crate::rendezvous::common::{LONG, environment, free_addr, meet, options};
use crate::rendezvous::wire::{connect, read_to_end};
use meshstep_comm::rendezvous::{Error, Options, Store, Why};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Returns a well-formed greeting for a store of any name, with an invented message of Noise.
fn greeting() -> Vec<u8> {
    let mut payload = b"mstp\x02".to_vec();
    for name in ["store", "127.0.0.1:1"] {
        payload.extend((name.len() as u16).to_le_bytes());
        payload.extend(name.as_bytes());
    }
    payload.extend([9; 100]);
    frame(&payload)
}

fn frame(payload: &[u8]) -> Vec<u8> {
    [&(payload.len() as u32).to_le_bytes(), payload].concat()
}

/// Bytes of a stranger, and the reason that rank 0 records for it.
fn strangers() -> Vec<(&'static str, Vec<u8>, Why)> {
    let too_long = |len| Why::TooLong { len, max: 1024 };
    let mut other_version = greeting();
    other_version[8] = 1;
    vec![
        ("http", b"GET / HTTP/1.1\r\n\r\n".to_vec(), too_long(0x2054_4547)),
        ("the longest length", vec![0xff; 4], too_long(0xffff_ffff)),
        ("one too long", [&1025u32.to_le_bytes()[..], &[0; 1025]].concat(), too_long(1025)),
        ("nothing in a frame", frame(&[]), Why::NotUnderstood),
        ("no such message", frame(&[77]), Why::NotUnderstood),
        ("another version", other_version, Why::OtherVersion { theirs: 1 }),
        ("the first version", frame(&[1, 1, 0]), Why::NotUnderstood),
        ("a name beyond the frame", frame(b"mstp\x02\xff\x00"), Why::NotUnderstood),
        ("no message of Noise", frame(b"mstp\x02\x00\x00\x00\x00"), Why::WrongToken),
        ("two greetings", [greeting(), greeting()].concat(), Why::WrongToken),
        ("a guess", greeting(), Why::WrongToken),
    ]
}

/// Checks rank 0's report of a stranger in place of rank 1.
fn alone_with(name: &str, bytes: &[u8]) -> Error {
    let addr = free_addr();
    thread::scope(|scope| {
        let alone = scope.spawn(|| Store::join(&environment(addr, 0, 2), &options(Duration::from_secs(2))));
        let mut stranger = connect(addr);
        let begin = Instant::now();
        // The connection may be closed before all bytes are sent.
        let _ = stranger.write_all(bytes);
        let answer = read_to_end(&mut stranger);
        assert!(begin.elapsed() < Duration::from_secs(1), "{name}");
        // The store sends at most a refusal.
        assert!(answer.is_empty() || answer.len() <= 7 && bytes[4..].starts_with(b"mstp"), "{name}");
        alone.join().unwrap().unwrap_err()
    })
}

#[test]
fn garbage_is_turned_away_at_once_and_named() {
    thread::scope(|scope| {
        for (name, bytes, why) in strangers() {
            scope.spawn(move || {
                let error = alone_with(name, &bytes);
                let Error::Missing { turned_away, missing, .. } = error else { panic!("{name}: {error}") };
                let whys: Vec<_> = turned_away.into_iter().map(|peer| peer.why).collect();
                assert_eq!((whys, missing), (vec![why], vec![1]), "{name}");
            });
        }
    });
}

/// Sends nothing, half a greeting, or a byte now and then, until the connection is closed.
fn loiter(addr: SocketAddr, way: usize) -> Duration {
    let mut stranger = connect(addr);
    let begin = Instant::now();
    match way % 3 {
        0 => {}
        1 => stranger.write_all(&greeting()[..20]).unwrap(),
        _ => trickle(&mut stranger),
    }
    read_to_end(&mut stranger);
    begin.elapsed()
}

fn trickle(stranger: &mut TcpStream) {
    for byte in greeting() {
        if stranger.write_all(&[byte]).is_err() {
            return;
        }
        // The attack is slow on purpose.
        thread::sleep(Duration::from_millis(25));
    }
}

#[test]
fn loiterers_are_cut_and_do_not_keep_ranks_out() {
    let addr = free_addr();
    let handshake = options(LONG).handshake;
    let longest = thread::scope(|scope| {
        let first = scope.spawn(|| Store::join(&environment(addr, 0, 2), &options(LONG)));
        // The store listens now.
        drop(connect(addr));
        // More connections than are served at a time.
        let loiterers: Vec<_> = (0..48).map(|way| scope.spawn(move || loiter(addr, way))).collect();
        let second = Store::join(&environment(addr, 1, 2), &options(LONG));
        let stores = [first.join().unwrap(), second].map(Result::unwrap);
        let longest = loiterers.into_iter().map(|loiterer| loiterer.join().unwrap()).max();
        // The store may end only now.
        assert!(stores.iter().all(|store| store.generation(0).failure().is_none()));
        longest.unwrap()
    });
    assert!(longest < handshake * 2 + Duration::from_secs(5), "{longest:?}");
}

#[test]
fn a_silent_stranger_is_recorded_as_silent() {
    let addr = free_addr();
    let short = Options { handshake: Duration::from_millis(100), ..options(Duration::from_secs(2)) };
    let result = thread::scope(|scope| {
        let alone = scope.spawn(|| Store::join(&environment(addr, 0, 2), &short).map(drop));
        let mut silent = connect(addr);
        assert_eq!(read_to_end(&mut silent), []);
        alone.join().unwrap()
    });
    let Err(Error::Missing { turned_away, .. }) = result else { panic!("{result:?}") };
    assert!(matches!(turned_away[0].why, Why::Silent { .. }), "{turned_away:?}");
}

#[test]
fn strangers_do_not_disturb_ranks_that_have_met() {
    let addr = free_addr();
    let ranks = [environment(addr, 0, 2), environment(addr, 1, 2)];
    let results = meet(&ranks, &options(LONG), |store| {
        let generation = store.generation(0);
        for (turn, (name, bytes, _)) in strangers().into_iter().enumerate() {
            if store.rank() == 1 {
                let mut stranger = connect(addr);
                let _ = stranger.write_all(&bytes);
                read_to_end(&mut stranger);
            }
            let mine = [turn as u8];
            assert_eq!(generation.all_gather(name, &mine, LONG).unwrap(), [mine, mine], "{name}");
        }
        generation.failure()
    });
    assert_eq!(results, [Ok(None), Ok(None)]);
}
