//! Groups within a group.

use super::common::{LONG, Random, SMALL, on_each, read_all, wait_lost, world, write_all};
use crate::p2p::transport::{Lost, LostWhy, Source, Target, Transport};
use std::time::Duration;

/// Sends random bytes to each other rank and to the audience, and compares what arrives.
fn exchange(rank: &mut dyn Transport, seed: u64) {
    let (me, n) = (rank.rank() as u64, rank.world_size() as u64);
    let bytes = |from: u64, to: u64| Random::new(seed * 1000 + from * n + to).bytes(30_000);
    let others = rank.audience().to_vec();
    for &to in &others {
        write_all(rank, Target::Rank(to), &bytes(me, to as u64)).unwrap();
    }
    write_all(rank, Target::Audience, &bytes(me, me)).unwrap();
    let mut read = vec![0; 30_000];
    for &from in &others {
        read_all(rank, Source::Rank(from), &mut read).unwrap();
        assert!(read == bytes(from as u64, me), "from {from}");
        read_all(rank, Source::Common(from), &mut read).unwrap();
        assert!(read == bytes(from as u64, from as u64), "common stream of {from}");
    }
}

#[test]
fn groups_of_groups_carry_their_own_bytes() {
    on_each(5, SMALL, |rank| {
        exchange(rank, 1);
        let me = rank.rank();
        let (members, channel): (&[usize], u64) = if me % 2 == 0 { (&[4, 0, 2], 1) } else { (&[1, 3], 2) };
        let mut half = rank.split(members, channel).unwrap();
        assert_eq!(half.rank(), members.iter().position(|&member| member == me).unwrap());
        assert_eq!(half.world_size(), members.len());
        exchange(&mut *half, 2 + channel);
        let mut again = rank.split(&[0, 1, 2, 3, 4], 3).unwrap();
        // The order of first uses differs from the order of the splits.
        let mut third = rank.split(&[4, 3, 2, 1, 0], 4).unwrap();
        exchange(&mut *third, 8);
        exchange(&mut *again, 9);
        let mut alone = half.split(&[half.rank()], 1).unwrap();
        exchange(&mut *alone, 10);
        let mut nested = half.split(&(0..half.world_size()).rev().collect::<Vec<_>>(), 2).unwrap();
        exchange(&mut *nested, 11 + channel);
        drop(half);
        exchange(&mut *nested, 13 + channel);
        exchange(rank, 20);
    });
}

#[test]
fn a_split_waits_for_nobody_and_bytes_wait_for_the_other() {
    for first in [0, 1] {
        let mut ranks = world(2, SMALL);
        let mut early = ranks[first].split(&[0, 1], 7).unwrap();
        let bytes = Random::new(4).bytes(500);
        write_all(&mut *early, Target::Rank(1 - first), &bytes).unwrap();
        early.wait(Duration::from_millis(20)).unwrap();
        // The early rank needs to do nothing more.
        let mut late = ranks[1 - first].split(&[0, 1], 7).unwrap();
        let mut read = [0; 500];
        read_all(&mut *late, Source::Rank(first), &mut read).unwrap();
        assert_eq!(read, *bytes);
        write_all(&mut *late, Target::Audience, &bytes).unwrap();
        read_all(&mut *early, Source::Common(1 - first), &mut read).unwrap();
        assert_eq!(read, *bytes);
    }
}

#[test]
fn a_sleeping_rank_notices_a_late_split() {
    for first in [0, 1] {
        let mut ranks = world(2, SMALL);
        let mut early = ranks[first].split(&[0, 1], 7).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || read_all(&mut *early, Source::Rank(1 - first), &mut [0; 10]).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            let mut late = ranks[1 - first].split(&[0, 1], 7).unwrap();
            write_all(&mut *late, Target::Rank(first), &[5; 10]).unwrap();
        });
    }
}

#[test]
fn a_member_that_ends_before_its_split_is_a_loss() {
    for first in [0, 1] {
        let mut ranks = world(2, SMALL);
        let mut early = ranks[first].split(&[0, 1], 7).unwrap();
        let gone = Lost { peer: 1 - first, why: LostWhy::Closed };
        drop(ranks.remove(1 - first));
        let (lost, time) = wait_lost(&mut *early);
        assert_eq!(lost, gone);
        assert!(time < LONG / 2, "{time:?}");
        assert_eq!(early.write(Target::Rank(1 - first), &[1]), Err(gone));
    }
}

#[test]
fn the_end_of_a_group_is_not_the_end_of_another() {
    let mut ranks = world(2, SMALL);
    let mut groups: Vec<_> = ranks.iter_mut().map(|rank| rank.split(&[0, 1], 1).unwrap()).collect();
    drop(ranks.pop());
    assert_eq!(wait_lost(&mut *ranks[0]).0, Lost { peer: 1, why: LostWhy::Closed });
    write_all(&mut *groups[1], Target::Rank(0), &[9; 100]).unwrap();
    let mut read = [0; 100];
    read_all(&mut *groups[0], Source::Rank(1), &mut read).unwrap();
    assert_eq!(read, [9; 100]);
}

/// The end of a member is noticed or not when the other one splits, and its socket may have unread introductions.
#[test]
fn what_a_member_wrote_before_it_left_is_read_after_a_late_split() {
    let table = [0, 1].into_iter().flat_map(|first| [false, true].map(|noticed| (first, noticed)));
    for (first, noticed) in table {
        let mut ranks = world(2, SMALL);
        let mut unread = noticed.then(|| ranks[1 - first].split(&[0, 1], 8).unwrap());
        let mut early = ranks[first].split(&[0, 1], 7).unwrap();
        let bytes = Random::new(4).bytes(500);
        write_all(&mut *early, Target::Rank(1 - first), &bytes).unwrap();
        drop(early);
        drop(ranks.remove(first));
        if noticed {
            assert_eq!(wait_lost(&mut *ranks[0]).0, Lost { peer: first, why: LostWhy::Closed });
        }
        let mut late = ranks[0].split(&[0, 1], 7).unwrap();
        let mut read = [0; 500];
        read_all(&mut *late, Source::Rank(first), &mut read).unwrap();
        assert_eq!(read, *bytes);
        for group in [Some(&mut late), unread.as_mut()].into_iter().flatten() {
            assert_eq!(wait_lost(&mut **group).0, Lost { peer: first, why: LostWhy::Closed });
        }
    }
}
