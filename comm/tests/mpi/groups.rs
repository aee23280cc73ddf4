//! Groups that are split from others, many at once, and the ends of their streams.

use crate::bytes::{exchange_len, read_all, write_all};
use meshstep_comm::mpi::testing::TestStreams;
use std::time::{Duration, Instant};

/// Splits into halves, then each half again, in reverse order, and uses all at the same time.
pub(crate) fn nested(world: &mut TestStreams) {
    let (me, ranks) = (world.rank(), world.world_size());
    let half: Vec<usize> = (0..ranks).rev().filter(|rank| rank % 2 == me % 2).collect();
    let mut halves = world.split(&half, 5).unwrap();
    assert_eq!((halves.world_size(), half[halves.rank()]), (half.len(), me));
    let all: Vec<usize> = (0..half.len()).rev().collect();
    let mut again = halves.split(&all, 5).unwrap();
    assert_eq!(again.rank(), half.len() - 1 - halves.rank());
    let mut whole = world.split(&(0..ranks).collect::<Vec<_>>(), 6).unwrap();
    for round in 0..3 {
        exchange_len(&mut halves, 40_000, 10 + round);
        exchange_len(&mut whole, 40_000, 20 + round);
        exchange_len(&mut again, 40_000, 30 + round);
        exchange_len(world, 40_000, 40 + round);
    }
}

/// Makes and drops groups one after the other; their memory does not stay.
pub(crate) fn many(world: &mut TestStreams) {
    let members: Vec<usize> = (0..world.world_size()).collect();
    let mut after_warm_up = 0;
    for channel in 0..200 {
        let mut group = world.split(&members, channel).unwrap();
        exchange_len(&mut group, 5000, channel);
        drop(group);
        if channel == 50 {
            after_warm_up = resident();
        }
    }
    exchange_len(world, 5000, 7);
    let grown = resident().saturating_sub(after_warm_up);
    // 150 groups with 6 streams of 4 tiles would be 225 MiB, and 20 MiB in the pages that such short messages touch.
    assert!(grown < 8 << 20, "150 groups left {grown} bytes");
}

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Several threads use a group each, at the same time.
pub(crate) fn threads(mut world: TestStreams) {
    let members: Vec<usize> = (0..world.world_size()).collect();
    let mut groups: Vec<TestStreams> =
        (0..4).map(|channel| world.split(&members, channel).unwrap()).collect();
    std::thread::scope(|scope| {
        for (seed, group) in groups.iter_mut().enumerate() {
            scope.spawn(move || {
                (0..5).for_each(|round| exchange_len(group, 200_000, 100 * seed as u64 + round))
            });
        }
    });
}

/// A rank that ends its streams: the others read its last bytes, and then the end.
pub(crate) fn ends(world: &mut TestStreams) {
    let members: Vec<usize> = (0..world.world_size()).collect();
    let mut group = world.split(&members, 1).unwrap();
    exchange_len(&mut group, 1000, 1);
    if group.rank() == 0 {
        (1..group.world_size()).for_each(|to| write_all(&mut group, to, b"goodbye"));
        return;
    }
    let closed = "the connection to rank 0 ended: its process closed it";
    let began = Instant::now();
    // Other ranks may also leave, at any time.
    while group.wait(Duration::from_millis(100)).err().as_deref() != Some(closed) {
        if group.arrived(0) == 7 {
            assert_ne!(group.progress().err().as_deref(), Some(closed), "the end comes after the last byte");
            read_all(&mut group, 0, &mut [0; 7]);
        }
        assert!(began.elapsed() < Duration::from_secs(20), "the end did not arrive");
    }
    assert_eq!(group.write(0, b"x").err().as_deref(), Some(closed));
    // A loss is reported once.
    assert_ne!(group.wait(Duration::from_millis(10)).err().as_deref(), Some(closed));
}

/// Ranks that drop their group at once: what they have written arrives, however late the others begin.
pub(crate) fn last_words(world: &mut TestStreams) {
    let members: Vec<usize> = (0..world.world_size()).collect();
    let words: Vec<u8> = (0..150_000u32).map(|byte| byte as u8).collect();
    if world.rank() == 0 {
        let mut group = world.split(&members, 1).unwrap();
        (1..members.len()).for_each(|to| assert_eq!(group.write(to, &words), Ok(words.len())));
        drop(group);
    } else {
        std::thread::sleep(Duration::from_millis(300));
        let mut group = world.split(&members, 1).unwrap();
        let mut read = vec![0; words.len()];
        read_all(&mut group, 0, &mut read);
        assert!(read == words);
        let began = Instant::now();
        while group.progress().is_ok() {
            assert!(began.elapsed() < Duration::from_secs(10), "the end did not arrive");
        }
    }
    exchange_len(world, 1000, 9);
}
