//! Services beside the store: admission of callers, and payloads.

use crate::rendezvous::common::{HEX, LONG, environment, free_addr, options};
use meshstep_comm::rendezvous::{
    Error, Forged, Incoming, Listener, Outgoing, RawConnection, Store, Token, Why, call, connect,
};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

type Ends = (Incoming, Outgoing);

fn token(hex: &str) -> Token {
    Token::from_hex(hex).unwrap()
}

fn listener(addr: SocketAddr) -> Listener {
    Listener::bind(addr, Some(&token(HEX)), "service", Duration::from_millis(400)).unwrap()
}

/// Waits for an admitted or a rejected connection.
fn decided(listener: &Listener) -> Result<Ends, Why> {
    let begin = Instant::now();
    loop {
        if let Some(accepted) = listener.accept(Instant::now() + Duration::from_millis(10), LONG) {
            return Ok((accepted.incoming, accepted.outgoing));
        }
        if let Some(turned_away) = listener.turned_away().pop() {
            return Err(turned_away.why);
        }
        assert!(begin.elapsed() < LONG, "no connection");
    }
}

/// Returns the results of both sides for `caller` at a listener for "service" with the token.
fn meet<T: Send>(caller: impl FnOnce(SocketAddr) -> T + Send) -> (Result<Ends, Why>, T) {
    let listener = listener(free_addr());
    let addr = listener.addr();
    thread::scope(|scope| {
        let called = scope.spawn(move || caller(addr));
        let admitted = decided(&listener);
        (admitted, called.join().unwrap())
    })
}

fn soon() -> Instant {
    Instant::now() + LONG
}

#[test]
fn payloads_arrive_whole_and_in_order_both_ways() {
    let (admitted, called) = meet(|addr| call(addr, Some(&token(HEX)), "service", LONG));
    let ((mut here_in, mut here_out), (mut there_in, mut there_out)) = (admitted.unwrap(), called.unwrap());
    // More than a record of Noise holds, and more than the system buffers.
    let payloads = [vec![], vec![1; 5], (0..1 << 20).map(|i| (i / 3) as u8).collect()];
    let (sent, all_sent) = sync_channel(2);
    thread::scope(|scope| {
        for outgoing in [&mut here_out, &mut there_out] {
            let (sent, payloads) = (sent.clone(), &payloads);
            scope.spawn(move || {
                payloads.iter().for_each(|payload| outgoing.send(payload).unwrap());
                sent.send(()).unwrap();
            });
        }
        for payload in &payloads {
            assert!(there_in.next(soon()).as_ref() == Ok(payload));
            assert!(here_in.next(soon()).as_ref() == Ok(payload));
        }
    });
    assert_eq!(all_sent.iter().take(2).count(), 2);
    let long = vec![0; Outgoing::MAX + 1];
    assert_eq!(here_out.send(&long), Err(Why::TooLong { len: long.len(), max: Outgoing::MAX }));
    // Silence does not end the connection.
    assert!(matches!(there_in.next(Instant::now()), Err(Why::Silent { .. })));
    here_out.send(b"after").unwrap();
    assert_eq!(there_in.next(soon()), Ok(b"after".to_vec()));
    here_out.cut();
    assert_eq!(there_in.next(soon()), Err(Why::Closed));
    assert_eq!(here_in.next(soon()), Err(Why::Closed));
}

#[test]
fn a_connection_comes_apart_after_the_same_payload() {
    use std::io::Read;
    let (admitted, called) = meet(|addr| call(addr, Some(&token(HEX)), "service", LONG));
    let ((here_in, mut here_out), (mut there_in, there_out)) = (admitted.unwrap(), called.unwrap());
    here_out.send(b"apart").unwrap();
    // The first bytes of the next protocol may arrive with the payload.
    let mut here = RawConnection::new(here_in, here_out).unwrap();
    let mut record = Vec::new();
    here.outgoing.seal(b"sealed", &mut record);
    (&*here.socket).write_all(&[&record[..], b"plain"].concat()).unwrap();
    assert_eq!(there_in.next(soon()), Ok(b"apart".to_vec()));
    let mut there = RawConnection::new(there_in, there_out).unwrap();
    let mut bytes = there.received;
    let mut rest = vec![0; record.len() + 5 - bytes.len()];
    (&*there.socket).read_exact(&mut rest).unwrap();
    bytes.extend(rest);
    assert_eq!(there.incoming.open(&bytes[..record.len()]), Ok(b"sealed".to_vec()));
    assert_eq!(&bytes[record.len()..], b"plain");
    assert_eq!(there.incoming.open(&record), Err(Forged));
}

#[test]
fn a_wrong_token_or_purpose_is_an_error_on_both_sides() {
    let other = token(&HEX.replace('0', "f"));
    let (admitted, called) = meet(|addr| call(addr, Some(&other), "service", LONG).map(drop));
    assert!(admitted.is_err());
    assert!(matches!(called, Err(Error::WrongToken { .. })), "{called:?}");

    let (admitted, called) = meet(|addr| call(addr, None, "service", LONG).map(drop));
    assert!(admitted.is_err());
    assert!(matches!(called, Err(Error::WrongToken { .. })), "{called:?}");

    let (admitted, called) = meet(|addr| call(addr, Some(&token(HEX)), "other", LONG).map(drop));
    assert_eq!(admitted.map(drop), Err(Why::OtherPurpose));
    assert!(matches!(&called, Err(Error::OtherRun { store, .. }) if store == "service"), "{called:?}");
}

#[test]
fn a_rank_at_a_service_and_a_caller_at_a_store_are_not_understood() {
    let (admitted, joined) =
        meet(|addr| Store::join(&environment(addr, 1, 2), &options(Duration::from_millis(300))).map(drop));
    assert_eq!(admitted.map(drop), Err(Why::OtherPurpose));
    assert!(matches!(joined, Err(Error::NotAStore { why: Why::OtherPurpose, .. })), "{joined:?}");

    let store = Store::join(&environment(free_addr(), 0, 1), &options(LONG)).unwrap();
    let called = call(store.addr(), Some(&token(HEX)), "service", LONG).map(drop);
    assert!(matches!(called, Err(Error::NotAStore { why: Why::OtherPurpose, .. })), "{called:?}");
}

#[test]
fn a_call_reaches_the_listener_of_its_name_alone() {
    let listener = listener(free_addr());
    let (addr, name) = (listener.addr(), listener.name().to_owned());
    let token = token(HEX);
    let result = |name: &str| {
        thread::scope(|scope| {
            let called = scope.spawn(|| connect(addr, Some(&token), "service", name, LONG).map(drop));
            (decided(&listener).map(drop), called.join().unwrap())
        })
    };
    assert_eq!(result(&name), (Ok(()), Ok(())));
    assert_eq!(result(&addr.to_string()), (Ok(()), Ok(())));
    // Another listener of the same purpose and token, to which somebody relays the call.
    let other = Listener::bind(free_addr(), Some(&token), "service", LONG).unwrap();
    for name in [other.name(), &other.addr().to_string(), "gateway:1"] {
        let error = Error::OtherEndpoint { addr, endpoint: name.to_owned(), listener: addr.to_string() };
        assert_eq!(result(name), (Err(Why::OtherEndpoint), Err(error)), "{name}");
    }
    listener.add_name("gateway:1").unwrap();
    assert_eq!(result("gateway:1"), (Ok(()), Ok(())));
    assert!(matches!(listener.add_name(&"n".repeat(257)), Err(Error::TooLarge { len: 257, .. })));
}

#[test]
fn garbage_and_silence_are_turned_away_in_time() {
    type Case<'a> = (&'a [u8], fn(&Why) -> bool);
    let cases: [Case<'_>; 5] = [
        (b"GET / HTTP/1.1\r\n\r\n", |why| matches!(why, Why::TooLong { .. })),
        (&[1, 0, 0, 0, 99], |why| matches!(why, Why::NotUnderstood)),
        (&[5, 0, 0, 0, b'm', b's', b't', b'p', 9], |why| matches!(why, Why::OtherVersion { .. })),
        (&[200, 0, 0, 0, 16, 1], |why| matches!(why, Why::Silent { .. })),
        (&[], |why| matches!(why, Why::Silent { .. })),
    ];
    for (bytes, expected) in cases {
        let begin = Instant::now();
        let (admitted, stream) = meet(|addr| {
            let mut stream = TcpStream::connect(addr).unwrap();
            stream.write_all(bytes).unwrap();
            stream
        });
        let why = admitted.map(drop).unwrap_err();
        assert!(expected(&why), "{bytes:?}: {why}");
        assert!(begin.elapsed() < Duration::from_secs(5));
        drop(stream);
    }
}

#[test]
fn a_service_needs_an_address_and_a_token_where_strangers_are() {
    let bind = |addr: &str, token: Option<&Token>| {
        Listener::bind(addr.parse().unwrap(), token, "service", LONG).map(drop)
    };
    assert!(matches!(bind("0.0.0.0:0", Some(&token(HEX))), Err(Error::NoAddress { .. })));
    assert!(matches!(bind("192.0.2.1:1", None), Err(Error::TokenNeeded { .. })));
    assert!(matches!(bind("192.0.2.1:1", Some(&token(HEX))), Err(Error::NotLocal { .. })));
    let first = Listener::bind("127.0.0.1:0".parse().unwrap(), None, "service", LONG).unwrap();
    let second = Listener::bind(first.addr(), None, "service", LONG).map(drop);
    assert_eq!(second, Err(Error::PortTaken { addr: first.addr() }));
    let called = call("192.0.2.1:1".parse().unwrap(), None, "service", LONG).map(drop);
    assert!(matches!(called, Err(Error::TokenNeeded { .. })));
    let long = "p".repeat(257);
    assert!(matches!(call(first.addr(), None, &long, LONG).map(drop), Err(Error::TooLarge { len: 257, .. })));
    // No listener answers.
    let addr = first.addr();
    drop(first);
    let called = call(addr, None, "service", Duration::from_millis(200)).map(drop);
    assert!(matches!(called, Err(Error::Unreachable { .. })), "{called:?}");
}
