//! Meetings that go wrong: wrong cards, strangers, memory that is not sealed.

use super::super::MemoryListener;
use super::super::bell::Bell;
use super::super::card::Card;
use super::super::layout::Layout;
use super::super::link::{Intro, Link};
use super::common::{LONG, SMALL};
use crate::shared_memory::{MeetError, RegionFault, RingBytes};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

const SHORT: Duration = Duration::from_millis(200);

/// Calls the listener with this card.
fn dial(card: &[u8]) -> OwnedFd {
    let card = Card::decode(card).unwrap();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new_abstract_name(&card.name).unwrap()).unwrap();
    socket
}

/// Introduces a fake rank 1 with the memory `file` to rank 0 of two; returns rank 0's result.
fn with_memory(file: &OwnedFd) -> MeetError {
    let (honest, fake) = (MemoryListener::open(SMALL).unwrap(), MemoryListener::open(SMALL).unwrap());
    let cards = [honest.card(), fake.card()];
    let [to, from] = cards.each_ref().map(|card| Card::decode(card).unwrap());
    let layout = Layout { world_size: 2, rings: SMALL };
    let link = Link::new(dial(&cards[0]));
    let bell = Bell::new().unwrap();
    let intro = Intro { channel: u64::MAX, from: 1, to: 0, layout, proof: Card::proof(&from, &to) };
    link.send(&intro, &[file.as_fd(), bell.as_fd()]).unwrap();
    honest.connect(0, &cards, LONG, || false).unwrap_err()
}

fn memory(bytes: usize, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes as u64).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn memory_that_could_shrink_is_refused() {
    let bytes = Layout { world_size: 2, rings: SMALL }.bytes();
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE, SealFlags::SEAL] {
        let why = RegionFault::Seals { found: (all - missing).bits(), needed: all.bits() };
        assert_eq!(with_memory(&memory(bytes, all - missing)), MeetError::Region { rank: 1, why });
    }
    for wrong in [0, bytes - 1, bytes + 1] {
        let why = RegionFault::Size { found: wrong as i64, needed: bytes };
        assert_eq!(with_memory(&memory(wrong, all)), MeetError::Region { rank: 1, why });
    }
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes as u64).unwrap();
    assert!(matches!(with_memory(&file.into()), MeetError::Region { rank: 1, .. }));
}

#[test]
fn cards_of_another_group_are_refused() {
    let (mine, other, strange) = (
        MemoryListener::open(SMALL).unwrap(),
        MemoryListener::open(SMALL).unwrap(),
        MemoryListener::open(SMALL).unwrap(),
    );
    let [a, b, c] = [&mine, &other, &strange].map(MemoryListener::card);
    // Rank 1 of another group calls rank 0 without the right proof.
    let cards = [a.clone(), b];
    let theirs = [a.clone(), c.clone()];
    std::thread::scope(|scope| {
        let called = scope.spawn(|| mine.connect(0, &cards, SHORT * 5, || false).unwrap_err());
        assert_eq!(strange.connect(1, &theirs, LONG, || false).unwrap_err(), MeetError::Gone { rank: 0 });
        assert_eq!(called.join().unwrap(), MeetError::Late { ranks: vec![1] });
    });
    assert_eq!(
        other.connect(1, &[a, c], LONG, || false).unwrap_err(),
        MeetError::NotMine { rank: 1, world_size: 2 }
    );
}

#[test]
fn damaged_cards_and_other_sizes_are_refused() {
    let (mine, other) = (MemoryListener::open(SMALL).unwrap(), MemoryListener::open(SMALL).unwrap());
    let damaged = [mine.card(), other.card()[1..].to_vec()];
    assert_eq!(mine.connect(0, &damaged, LONG, || false).unwrap_err(), MeetError::Card { rank: 1 });
    let rings = RingBytes { single: 1 << 17, ..SMALL };
    let large = MemoryListener::open(rings).unwrap();
    let cards = [large.card(), other.card()];
    std::thread::scope(|scope| {
        let called = scope.spawn(|| large.connect(0, &cards, LONG, || false).unwrap_err());
        assert_eq!(other.connect(1, &cards, LONG, || false).unwrap_err(), MeetError::Differs { rank: 0 });
        assert_eq!(called.join().unwrap(), MeetError::Differs { rank: 1 });
    });
    let odd = RingBytes { single: 100_000, common: 1 << 16 };
    let listener = MemoryListener::open(odd).unwrap();
    let cards = [listener.card()];
    assert_eq!(listener.connect(0, &cards, LONG, || false).unwrap_err(), MeetError::Rings { rings: odd });
}

#[test]
fn strangers_delay_nobody() {
    let (mine, other) = (MemoryListener::open(SMALL).unwrap(), MemoryListener::open(SMALL).unwrap());
    let cards = [mine.card(), other.card()];
    let strangers: Vec<OwnedFd> = (0..50).map(|_| dial(&cards[0])).collect();
    for stranger in &strangers[..20] {
        rustix::io::write(stranger, &[1; 500]).unwrap();
    }
    std::thread::scope(|scope| {
        let called = scope.spawn(|| mine.connect(0, &cards, LONG, || false).map(drop));
        other.connect(1, &cards, LONG, || false).unwrap();
        called.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let (mine, absent) = (MemoryListener::open(SMALL).unwrap(), MemoryListener::open(SMALL).unwrap());
    let cards = [absent.card(), mine.card()];
    assert_eq!(mine.connect(1, &cards, SHORT, || false).unwrap_err(), MeetError::Late { ranks: vec![0] });
    let gone = MemoryListener::open(SMALL).unwrap();
    drop(absent);
    let cards = [cards[0].clone(), gone.card()];
    assert_eq!(gone.connect(1, &cards, LONG, || false).unwrap_err(), MeetError::Gone { rank: 0 });
}
