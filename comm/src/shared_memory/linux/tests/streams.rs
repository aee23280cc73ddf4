//! Streams between threads: all bytes arrive as they were written, through rings that are full and wrap around.

use super::common::{LONG, Random, SMALL, on_each, read_all, wait_lost, world, write_all};
use crate::p2p::transport::{Lost, LostWhy, Source, Target, Transport};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// Streams of one rank to and from each other rank and its audience, in random pieces that are read and written in turns.
fn random_streams(rank: &mut dyn Transport, len: usize) {
    let (me, n) = (rank.rank(), rank.world_size());
    let others: Vec<usize> = (0..n).filter(|&other| other != me).collect();
    let single = |from: usize, to: usize| Random::new((from * n + to) as u64).bytes(len);
    let common = |from: usize| Random::new((1000 + from) as u64).bytes(len);
    let mut writes: Vec<(Target, Vec<u8>, usize)> =
        others.iter().map(|&to| (Target::Rank(to), single(me, to), 0)).collect();
    writes.push((Target::Audience, common(me), 0));
    let mut reads: Vec<(Source, Vec<u8>, usize)> = Vec::new();
    for &from in &others {
        reads.push((Source::Rank(from), single(from, me), 0));
        reads.push((Source::Common(from), common(from), 0));
    }
    let mut random = Random::new(me as u64 + 77);
    let begin = Instant::now();
    loop {
        for (to, bytes, done) in &mut writes {
            let end = (*done + 1 + random.below(40_000)).min(len);
            *done += rank.write(*to, &bytes[*done..end]).unwrap();
        }
        for (from, bytes, done) in &mut reads {
            let arrived = rank.arrived(*from);
            let take = arrived.len().min(random.below(50_000));
            assert!(arrived[..take] == bytes[*done..*done + take], "{from:?} at {done}");
            rank.consume(*from, take);
            *done += take;
        }
        let ends = writes.iter().map(|write| write.2).chain(reads.iter().map(|read| read.2));
        if ends.min() == Some(len) {
            return;
        }
        rank.wait(Duration::from_millis(20)).unwrap();
        assert!(begin.elapsed() < LONG, "rank {me} stands still");
    }
}

#[test]
fn random_bytes_arrive_on_all_streams() {
    for n in [1, 2, 3, 5] {
        on_each(n, SMALL, |rank| random_streams(rank, 300_000));
    }
}

#[test]
fn a_full_ring_takes_no_more_until_its_reader_consumes() {
    let mut ranks = world(2, SMALL);
    let mut reader = ranks.pop().unwrap();
    let mut writer = ranks.pop().unwrap();
    let bytes = Random::new(1).bytes(100_000);
    for (to, from) in [(Target::Rank(1), Source::Rank(0)), (Target::Audience, Source::Common(0))] {
        assert_eq!(writer.write(to, &bytes).unwrap(), 1 << 16);
        assert_eq!(writer.write(to, &bytes).unwrap(), 0);
        assert_eq!(reader.arrived(from), &bytes[..1 << 16]);
        reader.consume(from, 1000);
        assert_eq!(writer.write(to, &bytes[1 << 16..]).unwrap(), 1000);
        // The bytes at the wrap are contiguous.
        assert_eq!(reader.arrived(from), &bytes[1000..1000 + (1 << 16)]);
        reader.consume(from, 1 << 16);
        assert!(reader.arrived(from).is_empty());
    }
}

#[test]
fn the_slowest_reader_bounds_the_common_stream() {
    let mut ranks = world(3, SMALL);
    let bytes = Random::new(2).bytes(1 << 17);
    assert_eq!(ranks[0].write(Target::Audience, &bytes).unwrap(), 1 << 16);
    ranks[1].consume(Source::Common(0), 1 << 16);
    assert_eq!(ranks[0].write(Target::Audience, &bytes[1 << 16..]).unwrap(), 0);
    ranks[2].consume(Source::Common(0), 5);
    assert_eq!(ranks[0].write(Target::Audience, &bytes[1 << 16..]).unwrap(), 5);
    assert_eq!(ranks[1].arrived(Source::Common(0)), &bytes[1 << 16..][..5]);
    assert_eq!(ranks[2].arrived(Source::Common(0)), &bytes[5..][..1 << 16]);
}

/// Waits until `done`; fails if a wait takes its whole limit.
fn wait_until(rank: &mut dyn Transport, mut done: impl FnMut(&mut dyn Transport) -> bool) {
    while !done(rank) {
        let begin = Instant::now();
        rank.wait(LONG).unwrap();
        assert!(begin.elapsed() < LONG / 2, "nothing ended the wait");
    }
}

#[test]
fn news_end_a_wait() {
    let mut ranks = world(2, SMALL);
    let mut sleeper = ranks.pop().unwrap();
    let mut other = ranks.pop().unwrap();
    let pause = Duration::from_millis(50);
    let (waker, stop) = (sleeper.waker(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let stop = &stop;
        let slept = scope.spawn(move || {
            wait_until(&mut *sleeper, |rank| !rank.arrived(Source::Rank(0)).is_empty());
            while sleeper.write(Target::Rank(0), &[7; 4096]).unwrap() > 0 {}
            wait_until(&mut *sleeper, |rank| rank.write(Target::Rank(0), &[7; 4096]).unwrap() > 0);
            wait_until(&mut *sleeper, |_| stop.load(SeqCst));
            sleeper
        });
        std::thread::sleep(pause);
        assert_eq!(other.write(Target::Rank(1), b"news").unwrap(), 4);
        wait_until(&mut *other, |rank| rank.arrived(Source::Rank(1)).len() == 1 << 16);
        std::thread::sleep(pause);
        other.consume(Source::Rank(1), 4096);
        // The full ring again: the consumption alone has ended the sleep.
        wait_until(&mut *other, |rank| rank.arrived(Source::Rank(1)).len() == 1 << 16);
        std::thread::sleep(pause);
        stop.store(true, SeqCst);
        waker.wake();
        drop(slept.join().unwrap());
    });
}

#[test]
fn a_wait_without_news_ends_in_time_and_a_waker_ends_the_next_one() {
    let mut rank = world(2, SMALL).swap_remove(0);
    // The other rank is dropped: its end is reported once.
    assert_eq!(wait_lost(&mut *rank).0, Lost { peer: 1, why: LostWhy::Closed });
    let waits = (0..3).map(|_| {
        let begin = Instant::now();
        rank.wait(Duration::from_millis(30)).unwrap();
        begin.elapsed()
    });
    // The end has rung the bell and closed the socket: each may end one wait.
    let longest = waits.max().unwrap();
    assert!((Duration::from_millis(30)..Duration::from_secs(5)).contains(&longest), "{longest:?}");
    rank.waker().wake();
    let begin = Instant::now();
    rank.wait(LONG).unwrap();
    assert!(begin.elapsed() < LONG / 2);
}

#[test]
fn bytes_before_a_close_arrive_and_the_loss_follows_them() {
    let mut ranks = world(3, SMALL);
    let mut left = ranks.remove(1);
    let bytes = Random::new(3).bytes(1000);
    write_all(&mut *left, Target::Rank(0), &bytes).unwrap();
    write_all(&mut *left, Target::Audience, &bytes).unwrap();
    left.close();
    let lost = Lost { peer: 1, why: LostWhy::Closed };
    assert_eq!(left.write(Target::Rank(0), &[1]).unwrap_err().why, LostWhy::Closed);
    let mut read = [0; 1000];
    for (rank, expected) in ranks.iter_mut().zip([true, false]) {
        assert!(rank.progress().unwrap(), "bytes come before the loss");
        read_all(&mut **rank, Source::Common(1), &mut read).unwrap();
        assert_eq!(read, *bytes);
        if expected {
            read_all(&mut **rank, Source::Rank(1), &mut read).unwrap();
            assert_eq!(read, *bytes);
        }
        assert_eq!(wait_lost(&mut **rank).0, lost);
        assert_eq!(rank.progress(), Ok(false), "a loss is reported once");
        assert_eq!(rank.read(Source::Rank(1), &mut read), Err(lost.clone()));
        assert_eq!(rank.write(Target::Rank(1), &[1]), Err(lost.clone()));
    }
    // The other streams go on, the common ones too.
    let [first, last] = &mut ranks[..] else { unreachable!("two ranks are left") };
    write_all(&mut **first, Target::Rank(2), &bytes).unwrap();
    read_all(&mut **last, Source::Rank(0), &mut read).unwrap();
    assert_eq!(read, *bytes);
    // More than a ring: the lost reader holds nobody up.
    for _ in 0..100 {
        write_all(&mut **first, Target::Audience, &bytes).unwrap();
        read_all(&mut **last, Source::Common(0), &mut read).unwrap();
        assert_eq!(read, *bytes);
    }
}

#[test]
fn half_a_message_does_not_hide_the_end_of_its_writer() {
    let mut ranks = world(2, SMALL);
    write_all(&mut *ranks[1], Target::Rank(0), b"half").unwrap();
    drop(ranks.pop());
    let begin = Instant::now();
    let lost = loop {
        // The rank needs more than these four bytes.
        assert_eq!(ranks[0].arrived(Source::Rank(1)), b"half");
        if let Err(lost) = ranks[0].wait(LONG) {
            break lost;
        }
    };
    assert_eq!(lost, Lost { peer: 1, why: LostWhy::Closed });
    assert!(begin.elapsed() < LONG / 2);
    assert_eq!(ranks[0].arrived(Source::Rank(1)), b"half");
}

#[test]
#[should_panic(expected = "11 bytes consumed, 10 have arrived")]
fn more_than_has_arrived_cannot_be_consumed() {
    let mut ranks = world(2, SMALL);
    assert_eq!(ranks[0].write(Target::Rank(1), &[1; 10]).unwrap(), 10);
    assert_eq!(ranks[1].arrived(Source::Rank(0)).len(), 10);
    ranks[1].consume(Source::Rank(0), 11);
}
