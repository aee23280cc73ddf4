//! Streams carry random bytes both ways: plain and encrypted, IPv4 and IPv6, in groups and subgroups.

use super::common::{Exchange, on_ranks};
use crate::p2p::transport::{LostWhy, Source, Target, Transport};
use crate::tcp::Encrypt;
use crate::tcp::meeting::WorldStreams;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LEN: usize = 3_000_001;

fn exchange(mut world: WorldStreams, seed: u64, len: usize) {
    let transport = world.transport();
    Exchange::new(transport, seed, len).run(transport).unwrap();
    // A rank that leaves early must not disturb the others, so all leave at once or none.
    world.generation().barrier("end", super::common::LONG).unwrap();
}

#[test]
fn bytes_arrive_as_they_were_written() {
    for (seed, n) in [(1, 2), (2, 4)] {
        for encrypt in [Encrypt::Remote, Encrypt::Always] {
            on_ranks(n, "127.0.0.1", encrypt, |world| exchange(world, seed, LEN / n));
        }
    }
}

#[test]
fn ipv6_carries_them_too() {
    on_ranks(3, "::1", Encrypt::Always, |world| exchange(world, 3, 300_000));
}

#[test]
fn ranks_leave_when_they_are_done() {
    let left = on_ranks(3, "127.0.0.1", Encrypt::Never, |mut world| {
        let transport = world.transport();
        Exchange::new(transport, 4, 500_000).run(transport)
    });
    assert_eq!(left, vec![Ok(()); 3]);
}

/// The system tells of room once. A sender that has nothing else to wait for must learn of it, or it sleeps with room in its socket.
#[test]
fn a_sender_learns_of_room_without_bytes_of_the_other_rank() {
    let told = AtomicBool::new(false);
    on_ranks(2, "127.0.0.1", Encrypt::Never, |mut world| {
        let (me, until) = (world.rank(), Instant::now() + super::common::LONG);
        if me == 0 {
            fill(world.transport(), until);
        }
        world.generation().barrier("full", super::common::LONG).unwrap();
        let transport = world.transport();
        while !told.load(Ordering::Relaxed) {
            assert!(Instant::now() < until, "no room is told");
            let moved = transport.progress().unwrap();
            if me == 0 {
                told.store(moved, Ordering::Relaxed);
            } else {
                let len = transport.arrived(Source::Rank(0)).len();
                transport.consume(Source::Rank(0), len);
            }
        }
        world.generation().barrier("end", super::common::LONG).unwrap();
    });
}

/// Writes to rank 1 until its socket and this one's take nothing for a while.
fn fill(transport: &mut dyn Transport, until: Instant) {
    let bytes = vec![7; 64 << 20];
    let (mut written, mut last) = (0, Instant::now());
    while written == 0 || last.elapsed() < Duration::from_millis(100) {
        assert!(Instant::now() < until && written < bytes.len(), "the sockets have taken {written} bytes");
        transport.progress().unwrap();
        let len = transport.write(Target::Rank(1), &bytes[written..]).unwrap();
        if len > 0 {
            (written, last) = (written + len, Instant::now());
        }
    }
}

#[test]
fn the_goodbye_ends_a_stream_for_its_readers_alone() {
    on_ranks(3, "127.0.0.1", Encrypt::Remote, |mut world| {
        let me = world.rank();
        let transport = world.transport();
        Exchange::new(transport, 5, 1000).run(transport).unwrap();
        if me == 2 {
            return transport.close();
        }
        // The other stream goes on; nobody has looked at the ended one.
        let other = 1 - me;
        std::thread::sleep(Duration::from_millis(100));
        transport.progress().unwrap();
        assert_eq!(transport.write(Target::Rank(other), b"still"), Ok(5));
        let until = Instant::now() + super::common::LONG;
        while transport.arrived(Source::Rank(other)).len() < 5 {
            assert!(Instant::now() < until);
            transport.progress().unwrap();
        }
        // The end of the other is an error for a rank that awaits bytes of it.
        let lost = loop {
            assert!(Instant::now() < until);
            assert_eq!(transport.arrived(Source::Rank(2)), b"");
            if let Err(lost) = transport.progress() {
                break lost;
            }
        };
        assert_eq!((lost.peer, lost.why), (2, LostWhy::Closed));
        assert!(transport.progress().is_ok(), "reported twice");
        assert_eq!(transport.write(Target::Rank(2), b"x").unwrap_err().why, LostWhy::Closed);
        world.generation().barrier("end", super::common::LONG).ok();
    });
}

#[test]
fn subgroups_have_streams_of_their_own() {
    on_ranks(4, "127.0.0.1", Encrypt::Remote, |mut world| {
        let me = world.rank();
        let pair = if me % 2 == 0 { [2, 0] } else { [1, 3] };
        let transport = world.transport();
        let mut half = transport.split(&pair, 7).unwrap();
        let mut all = transport.split(&[3, 2, 1, 0], 7).unwrap();
        assert_eq!((all.rank(), all.world_size()), (3 - me, 4));
        let until = Instant::now() + super::common::LONG;
        let mut exchanges = [
            Exchange::new(&*half, 10 + me as u64 % 2, 400_000),
            Exchange::new(&*all, 12, 200_000),
            Exchange::new(transport, 13, 100_000),
        ];
        let mut done = false;
        while !done {
            let [a, b, c] = &mut exchanges;
            done = a.turn(&mut *half).unwrap() & b.turn(&mut *all).unwrap() & c.turn(transport).unwrap();
            assert!(Instant::now() < until);
        }
        let ranks = [half.rank(), all.rank(), me];
        exchanges.iter().zip(ranks).for_each(|(exchange, rank)| exchange.compare(rank));
        world.generation().barrier("end", super::common::LONG).unwrap();
    });
}

#[test]
fn the_next_generation_has_fresh_streams() {
    on_ranks(3, "127.0.0.1", Encrypt::Always, |mut world| {
        // Bytes of an operation that was given up.
        let peer = (world.rank() + 1) % 3;
        for _ in 0..100 {
            // The others may have gone on already.
            let _ = world.transport().write(Target::Rank(peer), &[0xee; 3000]);
            let _ = world.transport().wait(Duration::from_millis(1));
        }
        let world = world.next_generation(super::common::LONG).unwrap();
        assert_eq!(world.generation().number(), 1);
        exchange(world, 6, 100_000);
    });
}

#[test]
fn the_waker_ends_a_wait() {
    on_ranks(1, "127.0.0.1", Encrypt::Remote, |mut world| {
        let transport = world.transport();
        let waker = transport.waker();
        let begin = Instant::now();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            waker.wake();
        });
        transport.wait(super::common::LONG).unwrap();
        assert!(begin.elapsed() < super::common::LONG / 2);
        thread.join().unwrap();
    });
}
