//! Bytes on the wire, and attempts to replay or change them.

use crate::rendezvous::common::{HEX, LONG, environment, free_addr, meet, options};
use crate::rendezvous::proxy::{Proxy, To, read_frame};
use meshstep_comm::rendezvous::{Environment, Error, Failure, Options, Store, Why};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

/// Rank 1 of two connects through a proxy; a session that both finish is recorded completely.
fn record() -> (Proxy, SocketAddr) {
    let (store, middle) = (free_addr(), free_addr());
    let proxy = Proxy::honest(middle, store);
    let ranks = [environment(store, 0, 2), environment(middle, 1, 2)];
    for result in meet(&ranks, &through(middle), session) {
        result.unwrap();
    }
    (proxy, middle)
}

/// Options of a store that is called by the name of `middle`, too.
fn through(middle: SocketAddr) -> Options {
    Options { names: vec![middle.to_string()], ..options(LONG) }
}

fn session(store: Store) {
    let generation = store.generation(0);
    generation.set(&format!("from {}", store.rank()), b"sixteen-letters!").unwrap();
    generation.wait("from 0", LONG).unwrap();
    generation.wait("from 1", LONG).unwrap();
    generation.all_gather("names", b"value", LONG).unwrap();
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    bytes.windows(needle.len()).any(|window| window == needle)
}

#[test]
fn the_token_never_travels() {
    let (proxy, _) = record();
    let token: Vec<u8> = (0..32).collect();
    for to in [To::Store, To::Rank] {
        let bytes = proxy.recorded(to);
        // Checks that the recording contains data: what travels in clear.
        assert!(to == To::Rank || contains(&bytes, b"store"), "{to:?}");
        assert!(bytes.len() > 200, "{to:?}");
        // Values are encrypted.
        assert!(!contains(&bytes, b"sixteen-letters!"), "{to:?}");
        for secret in [&token[..], HEX.as_bytes()] {
            // Not even a quarter of the secret appears.
            assert!(secret.chunks(8).all(|part| !contains(&bytes, part)), "{to:?}");
        }
    }
}

#[test]
fn a_recorded_rank_is_not_let_in() {
    let (proxy, called) = record();
    let recorded = proxy.recorded(To::Store);
    let addr = free_addr();
    // The recorded rank has called another name, which this store has, too.
    let options = through(called);
    thread::scope(|scope| {
        let first = scope.spawn(|| Store::join(&environment(addr, 0, 2), &options).map(session));
        let mut replay = connect(addr);
        replay.write_all(&recorded).unwrap();
        let answer = read_to_end(&mut replay);
        // The answer is the reply of the handshake, and nothing more.
        assert_eq!(answer.len(), 4 + 1 + 32 + 1 + 16);
        // The seat is still free.
        Store::join(&environment(addr, 1, 2), &options).map(session).unwrap();
        first.join().unwrap().unwrap();
    });
}

#[test]
fn a_recorded_store_is_not_believed() {
    let recorded = record().0.recorded(To::Rank);
    let addr = free_addr();
    let listener = TcpListener::bind(addr).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut rank, _) = listener.accept().unwrap();
            read_frame(&mut rank).unwrap();
            rank.write_all(&recorded).unwrap();
            read_to_end(&mut rank);
        });
        let error = Store::join(&environment(addr, 1, 2), &options(LONG)).unwrap_err();
        assert_eq!(error, Error::WrongToken { addr });
    });
}

/// Bytes of the greeting: its length, magic, version, two names and the message of Noise.
const GREETING: [(&str, usize); 6] =
    [("purpose", 11), ("endpoint", 18), ("public key", 60), ("claim", 75), ("claim", 90), ("tag", 105)];

#[test]
fn a_claim_cannot_be_changed_on_the_way() {
    for (field, at) in GREETING {
        let (store, middle) = (free_addr(), free_addr());
        let changed = Arc::new(AtomicBool::new(false));
        let once = Arc::clone(&changed);
        Proxy::new(middle, store, move |to, number, mut frame| {
            if to == To::Store && number == 0 && !once.swap(true, SeqCst) {
                frame[at] ^= 1;
            }
            vec![frame]
        });
        thread::scope(|scope| {
            let first = scope.spawn(|| Store::join(&environment(store, 0, 2), &through(middle)).map(session));
            let error = Store::join(&environment(middle, 1, 2), &options(LONG)).unwrap_err();
            assert_eq!(error, Error::WrongToken { addr: middle }, "{field}");
            assert!(changed.load(SeqCst));
            // No rank was mistaken for another meanwhile.
            Store::join(&environment(store, 1, 2), &options(LONG)).map(session).unwrap();
            first.join().unwrap().unwrap();
        });
    }
}

#[test]
fn a_version_changed_on_the_way_is_refused() {
    let (store, middle) = (free_addr(), free_addr());
    for (to, at, value) in [(To::Store, 8, 1), (To::Store, 8, 3), (To::Rank, 4, 2)] {
        let once = AtomicBool::new(true);
        let middle = if to == To::Store && value == 1 { middle } else { free_addr() };
        Proxy::new(middle, store, move |way, number, mut frame| {
            if way == to && number == 0 && once.swap(false, SeqCst) {
                frame[at] = value;
            }
            vec![frame]
        });
        thread::scope(|scope| {
            let first = scope.spawn(|| Store::join(&environment(store, 0, 2), &through(middle)).map(session));
            let error = Store::join(&environment(middle, 1, 2), &options(LONG)).unwrap_err();
            let refused = matches!(error, Error::OtherVersion { mine: 2, .. } | Error::NotAStore { .. });
            assert!(refused, "{to:?} {value}: {error}");
            Store::join(&environment(store, 1, 2), &options(LONG)).map(session).unwrap();
            first.join().unwrap().unwrap();
        });
    }
}

#[test]
fn a_store_of_another_version_is_named() {
    let addr = free_addr();
    let listener = TcpListener::bind(addr).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut rank, _) = listener.accept().unwrap();
            read_frame(&mut rank).unwrap();
            rank.write_all(&[3, 0, 0, 0, 2, 2, 7]).unwrap();
            read_to_end(&mut rank);
        });
        let error = Store::join(&environment(addr, 1, 2), &options(LONG)).unwrap_err();
        assert_eq!(error, Error::OtherVersion { addr, mine: 2, theirs: 7 });
    });
}

/// Frames to forward in place of one sealed frame.
type Tamper = fn(Vec<u8>) -> Vec<Vec<u8>>;

fn flip_payload(mut frame: Vec<u8>) -> Vec<Vec<u8>> {
    let last_of_payload = frame.len() - 17;
    frame[last_of_payload] ^= 0x20;
    vec![frame]
}

fn flip_seal(mut frame: Vec<u8>) -> Vec<Vec<u8>> {
    let last = frame.len() - 1;
    frame[last] ^= 1;
    vec![frame]
}

fn repeat(frame: Vec<u8>) -> Vec<Vec<u8>> {
    vec![frame.clone(), frame]
}

fn announce_too_much(mut frame: Vec<u8>) -> Vec<Vec<u8>> {
    frame[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    vec![frame]
}

#[test]
fn frames_cannot_be_changed_repeated_or_lengthened_on_the_way() {
    let too_long = Why::TooLong { len: u32::MAX as usize, max: 65535 };
    let table: [(&str, Tamper, Why); 4] = [
        ("payload", flip_payload, Why::Forged),
        ("seal", flip_seal, Why::Forged),
        ("repeat", repeat, Why::Forged),
        ("length", announce_too_much, too_long),
    ];
    for direction in [To::Store, To::Rank] {
        for (name, tamper, why) in &table {
            let [observed, own] = tampered(direction, *tamper);
            // The receiver of the changed frame reports it; the other side sees the connection end.
            let (of_1, of_0) = match direction {
                To::Store => (why.clone(), Why::Closed),
                To::Rank => (Why::Closed, why.clone()),
            };
            assert_eq!(observed, Some(Failure::Lost { rank: 1, why: of_1 }), "{name} {direction:?}");
            assert_eq!(own, Some(Failure::Lost { rank: 0, why: of_0 }), "{name} {direction:?}");
        }
    }
}

/// Returns the failures that ranks 0 and 1 see when a frame between the store and rank 1 is changed.
fn tampered(direction: To, tamper: Tamper) -> [Option<Failure>; 2] {
    let (store, middle) = (free_addr(), free_addr());
    let armed = Arc::new(AtomicBool::new(false));
    let fuse = Arc::clone(&armed);
    Proxy::new(middle, store, move |to, _, frame| match to == direction && fuse.swap(false, SeqCst) {
        true => tamper(frame),
        false => vec![frame],
    });
    let ranks = [environment(store, 0, 2), environment(middle, 1, 2)];
    let (both, heard) = (Barrier::new(2), Barrier::new(2));
    let results = meet(&ranks, &through(middle), |store| {
        let generation = store.generation(0);
        generation.barrier("there", LONG).unwrap();
        both.wait();
        if store.rank() == 1 {
            armed.store(true, SeqCst);
            generation.set("key", b"some value").unwrap();
        }
        let failure = generation.wait_failure(LONG);
        assert_eq!(generation.get("key").filter(|value| value != b"some value"), None);
        heard.wait();
        failure
    });
    let mut results = results.into_iter().map(Result::unwrap);
    [results.next().unwrap(), results.next().unwrap()]
}

#[test]
fn a_silent_rank_is_lost() {
    // The side with the shorter timeout reports silence and closes the connection.
    let silent = |why: &Why| matches!(why, Why::Silent { .. });
    let closed = |why: &Why| matches!(why, Why::Closed);
    let of_store_s_patience = || fall_silent([Duration::from_millis(1500), LONG]);
    let of_rank_s_patience = || fall_silent([Duration::from_secs(4), Duration::from_secs(2)]);
    let [by_store, by_rank] = thread::scope(|scope| {
        [scope.spawn(of_store_s_patience), scope.spawn(of_rank_s_patience)].map(|run| run.join().unwrap())
    });
    for (rank, lost) in [1, 0, 1].into_iter().enumerate() {
        let (of_1, of_0) = (&by_store[rank], &by_rank[rank]);
        let (at_1, at_0) = match rank {
            1 => (closed(&of_1.1), silent(&of_0.1)),
            _ => (silent(&of_1.1), closed(&of_0.1)),
        };
        assert!(at_1 && of_1.0 == lost, "the store hangs up, rank {rank}: {of_1:?}");
        assert!(at_0 && of_0.0 == lost, "rank 1 hangs up, rank {rank}: {of_0:?}");
    }
}

/// Returns the lost rank and the reason on each of three ranks when all traffic between the store and rank 1 is dropped;
/// arguments are the timeouts of the store and of rank 1.
fn fall_silent([of_store, of_rank]: [Duration; 2]) -> Vec<(usize, Why)> {
    let (store, middle) = (free_addr(), free_addr());
    let cut = Arc::new(AtomicBool::new(false));
    let hole = Arc::clone(&cut);
    Proxy::new(middle, store, move |_, _, frame| if hole.load(SeqCst) { vec![] } else { vec![frame] });
    let (quiet, all) = (Duration::from_millis(2500), Barrier::new(3));
    let lose = &|store: Result<Store, Error>| {
        let store = store.unwrap();
        let generation = store.generation(0);
        generation.barrier("there", LONG).unwrap();
        // Beats keep a quiet connection alive, for longer than any timeout.
        assert_eq!(generation.wait_failure(quiet), None);
        all.wait();
        cut.store(true, SeqCst);
        let failure = generation.wait_failure(LONG);
        all.wait();
        match failure {
            Some(Failure::Lost { rank, why }) => (rank, why),
            other => panic!("{other:?}"),
        }
    };
    let ranks = [(store, of_store), (middle, of_rank), (store, LONG)];
    thread::scope(|scope| {
        let start = |(rank, (addr, silence)): (usize, (SocketAddr, Duration))| {
            let patient = Options { silence, ..through(middle) };
            scope.spawn(move || lose(Store::join(&environment(addr, rank, 3), &patient)))
        };
        let threads: Vec<_> = ranks.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_listener_that_is_no_store_is_an_error() {
    let answers: [&'static [u8]; 3] = [b"HTTP/1.1 400 Bad Request\r\n\r\n", &[0; 8], &[1, 0, 0, 0, 5]];
    for answer in answers {
        let addr = free_addr();
        let listener = TcpListener::bind(addr).unwrap();
        thread::spawn(move || {
            let (mut rank, _) = listener.accept().unwrap();
            rank.write_all(answer).unwrap();
            read_to_end(&mut rank);
        });
        let begin = Instant::now();
        let error = Store::join(&environment(addr, 1, 2), &options(LONG)).unwrap_err();
        assert!(matches!(&error, Error::NotAStore { addr: at, .. } if *at == addr), "{error}");
        assert!(begin.elapsed() < LONG / 2);
    }
}

#[test]
fn a_silent_listener_is_an_error() {
    let addr = free_addr();
    let _listener = TcpListener::bind(addr).unwrap();
    let short = Duration::from_millis(400);
    let environment = Environment { token: None, ..environment(addr, 1, 2) };
    let error = Store::join(&environment, &options(short)).unwrap_err();
    assert!(matches!(error, Error::Unreachable { after, .. } if after == short), "{error}");
}

/// Connects to a store that begins to listen any moment.
pub(crate) fn connect(addr: SocketAddr) -> TcpStream {
    let begin = Instant::now();
    loop {
        match TcpStream::connect(addr) {
            Ok(stream) => return stream,
            Err(error) => assert!(begin.elapsed() < LONG, "{error}"),
        }
        thread::yield_now();
    }
}

/// Reads until the other side closes, in any way.
pub(crate) fn read_to_end(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.set_read_timeout(Some(LONG)).unwrap();
    match stream.read_to_end(&mut bytes) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("it is kept open: {error}"),
        _ => bytes,
    }
}
