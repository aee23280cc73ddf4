//! Streams through a relay that damages them: a typed loss, never a hang, never an altered byte.

use super::common::{Bytes, Exchange, HEX, LONG};
use super::relay::{Damage, Kind, start};
use crate::p2p::transport::{LostWhy, Transport};
use crate::rendezvous::{Listener, Token};
use crate::tcp::Encrypt;
use crate::tcp::card::Card;
use crate::tcp::host::Host;
use crate::tcp::hub::{Hub, PURPOSE};
use crate::tcp::streams::SocketStreams;
use meshstep_cases::cases;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const LEN: usize = 300_000;

/// Two ranks connected through the relay. Rank 0 is the caller.
fn pair(encrypt: Encrypt, from_caller: bool, damage: Damage) -> [SocketStreams; 2] {
    let token = Some(Token::from_hex(HEX).unwrap());
    let listen = || Listener::bind("127.0.0.1:0".parse().unwrap(), token.as_ref(), PURPOSE, LONG).unwrap();
    let listeners = [listen(), listen()];
    let cards: Vec<Card> = (0..2)
        .map(|rank| {
            let listener: &Listener = &listeners[rank];
            let (addr, name, host) = (listener.addr(), listener.name().to_owned(), Host::read(None));
            let addr = if rank == 1 { start(addr, from_caller, damage) } else { addr };
            Card { addr, name, host, encrypt }
        })
        .collect();
    let mut ranks = 0..2;
    listeners.map(|listener| {
        let rank = ranks.next().unwrap();
        let hub = Hub::start(rank, cards.clone(), listener, token.clone(), LONG).unwrap();
        SocketStreams::world(&Arc::new(hub), 0).unwrap()
    })
}

/// Exchanges bytes through the relay; returns the reasons for which the two ranks have ended.
fn outcome(seed: u64, encrypt: Encrypt, from_caller: bool, damage: Damage) -> Vec<Option<LostWhy>> {
    let run = |mut streams: SocketStreams| {
        let result = Exchange::new(&streams, seed, LEN).run(&mut streams);
        streams.close();
        result.err().map(|lost| {
            assert_eq!(lost.peer, 1 - streams.rank());
            lost.why
        })
    };
    thread::scope(|scope| {
        let threads = pair(encrypt, from_caller, damage).map(|streams| scope.spawn(move || run(streams)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn random(dice: &mut Bytes) -> Damage {
    let len = 1 + dice.number() as usize % 2000;
    let kind = match dice.number() % 7 {
        0 => Kind::Flip((len % 8) as u8),
        1 => Kind::Drop(len),
        2 => Kind::Repeat(len),
        3 => Kind::Garbage(len),
        4 => Kind::Cut,
        5 => Kind::HalfClose,
        _ => Kind::Delay(Duration::from_millis(len as u64 / 50)),
    };
    // Often within the first headers.
    let range = if dice.number().is_multiple_of(3) { 200 } else { LEN };
    Damage { at: dice.number() as usize % range, kind }
}

#[test]
fn damaged_streams_end_and_nothing_altered_arrives() {
    for seed in 0..cases(70, 1000).into() {
        let mut dice = Bytes::new(seed, 0, 0);
        let damage = random(&mut dice);
        let encrypt = if dice.number().is_multiple_of(2) { Encrypt::Always } else { Encrypt::Never };
        let from_caller = dice.number().is_multiple_of(2);
        let begin = Instant::now();
        let ends = outcome(seed, encrypt, from_caller, damage);
        let receiver = &ends[usize::from(from_caller)];
        let context = format!("seed {seed}: {damage:?} {encrypt:?} from_caller {from_caller}: {ends:?}");
        let fits = match damage.kind {
            Kind::Delay(_) => ends == [None, None],
            Kind::Flip(_) | Kind::Garbage(_) => *receiver == Some(LostWhy::Altered),
            // The end of a stream may come before the place of the next record is known.
            Kind::Drop(_) | Kind::Repeat(_) => {
                matches!(receiver, Some(LostWhy::Altered | LostWhy::Closed))
            }
            Kind::Cut | Kind::HalfClose => *receiver == Some(LostWhy::Closed),
        };
        assert!(fits, "{context}");
        assert!(begin.elapsed() < LONG / 4, "{context}: {:?}", begin.elapsed());
    }
}
