//! A peer that publishes impossible positions: a typed loss, no panic, no access outside of a ring.

use super::super::bell::Bell;
use super::super::group::SharedMemory;
use super::super::layout::{Ack, Layout, RingStream};
use super::super::link::Link;
use super::super::peer::MemoryPeer;
use super::super::region::Region;
use super::common::{LONG, SMALL};
use crate::p2p::transport::{Lost, LostWhy, Source, Target, Transport};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

const ALTERED: Lost = Lost { peer: 1, why: LostWhy::Altered };

/// Rank 0 of two, and the memory of rank 1, which the test writes.
struct Faulty {
    rank: SharedMemory,
    region: Region,
    _socket: OwnedFd,
}

impl Faulty {
    fn new() -> Self {
        let layout = Layout { world_size: 2, rings: SMALL };
        let (region, file) = Region::create(layout).unwrap();
        let (own, _file) = Region::create(layout).unwrap();
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let mut peer = MemoryPeer::new(1, 0, &layout, Some(Arc::new(Link::new(near))));
        peer.attach(Region::attach(file.as_fd(), layout, 0).unwrap(), Bell::new().unwrap());
        let rank = SharedMemory::new(0, own, vec![None, Some(peer)], Arc::new(Bell::new().unwrap())).unwrap();
        Faulty { rank, region, _socket: far }
    }

    fn publish(&self, offset: usize, value: u64) {
        self.region.word(offset).store(value, SeqCst);
    }
}

#[test]
fn impossible_positions_of_bytes_are_a_loss() {
    for stream in [RingStream::To(0), RingStream::Common] {
        let source = if stream == RingStream::Common { Source::Common(1) } else { Source::Rank(1) };
        for value in [SMALL.single as u64 + 1, 1 << 40, u64::MAX, 1 << 63] {
            let mut faulty = Faulty::new();
            faulty.publish(faulty.region.layout().written(stream), value);
            assert!(faulty.rank.arrived(source).is_empty(), "{value}");
            assert_eq!(faulty.rank.wait(LONG), Err(ALTERED));
            assert!(faulty.rank.progress().is_ok(), "a loss is reported once");
            assert_eq!(faulty.rank.read(source, &mut [0; 9]), Err(ALTERED));
            assert_eq!(faulty.rank.write(Target::Rank(1), &[1]), Err(ALTERED));
        }
    }
}

#[test]
fn a_position_that_goes_back_keeps_what_was_seen() {
    let mut faulty = Faulty::new();
    let word = faulty.region.layout().written(RingStream::To(0));
    faulty.publish(word, 100);
    assert_eq!(faulty.rank.arrived(Source::Rank(1)).len(), 100);
    faulty.publish(word, 99);
    assert_eq!(faulty.rank.arrived(Source::Rank(1)).len(), 100);
    faulty.rank.consume(Source::Rank(1), 100);
    assert_eq!(faulty.rank.progress(), Err(ALTERED));
}

#[test]
fn impossible_acknowledgements_are_a_loss() {
    for (common, to) in [(false, Target::Rank(1)), (true, Target::Audience)] {
        for value in [SMALL.single as u64 + 1, u64::MAX] {
            let mut faulty = Faulty::new();
            let full = vec![1; SMALL.single];
            assert_eq!(faulty.rank.write(to, &full).unwrap(), full.len());
            faulty.publish(faulty.region.layout().ack(Ack { writer: 0, common }), value);
            // The impossible acknowledgement makes no room.
            assert_eq!(faulty.rank.write(to, &[1]), Ok(0));
            assert_eq!(faulty.rank.wait(LONG), Err(ALTERED));
            assert_eq!(faulty.rank.write(Target::Rank(1), &[1]), Err(ALTERED));
        }
    }
}

#[test]
fn random_words_cause_no_panic() {
    let mut random = super::common::Random::new(5);
    for _ in 0..200 {
        let mut faulty = Faulty::new();
        for _ in 0..20 {
            let word = random.below(9) * 128;
            let value = random.next() >> random.below(64);
            faulty.publish(word, value);
            let source = if random.below(2) == 0 { Source::Common(1) } else { Source::Rank(1) };
            let arrived = faulty.rank.arrived(source).len();
            assert!(arrived <= SMALL.single);
            faulty.rank.consume(source, random.below(arrived + 1));
            // Losses are expected; a panic or a signal is not.
            let _ = faulty.rank.write(Target::Rank(1), &[3; 5000]);
            let _ = faulty.rank.write(Target::Audience, &[3; 5000]);
            let _ = faulty.rank.progress();
        }
    }
}

/// The kernel refuses writes of a reader: the memory it has is sealed.
#[test]
fn a_reader_cannot_write_its_peers_memory() {
    let (_region, file) = Region::create(Layout { world_size: 2, rings: SMALL }).unwrap();
    assert!(rustix::io::pwrite(&file, &[1], 0).is_err());
    assert!(rustix::fs::ftruncate(&file, 0).is_err());
    // SAFETY: the system chooses addresses that nobody uses, and the call is expected to fail.
    let mapped = unsafe {
        let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        rustix::mm::mmap(std::ptr::null_mut(), 4096, access, rustix::mm::MapFlags::SHARED, &file, 0)
    };
    assert!(mapped.is_err());
}
