//! Groups over two transports: bytes take the right one, losses have the group's ranks, subgroups are mixed in the same way.

use super::common::{Exchange, LONG};
use super::fakes::{Fake, Loss};
use crate::p2p::transport::{Lost, LostWhy, Source, Target, Transport};
use crate::tcp::mixed::Mixed;
use std::thread;
use std::time::{Duration, Instant};

/// Group of five ranks on two machines, and what loses ranks of the first machine and of all.
fn group() -> (Vec<Mixed>, Loss, Loss) {
    let (far, lose_far) = Fake::group(5, false);
    let (first, lose_near) = Fake::group(2, true);
    let (second, _) = Fake::group(3, true);
    // Ranks of a machine are neither adjacent nor in order.
    let machines = [vec![3, 0], vec![4, 1, 2]];
    let mut near: Vec<(usize, Fake, Vec<usize>)> = Vec::new();
    for (machine, fakes) in machines.into_iter().zip([first, second]) {
        near.extend(fakes.into_iter().map(|fake| (machine[fake.rank()], fake, machine.clone())));
    }
    near.sort_by_key(|(rank, ..)| *rank);
    let join = |(far, (_, near, members))| Mixed::new(Box::new(near), Box::new(far), members);
    (far.into_iter().zip(near).map(join).collect(), lose_near, lose_far)
}

#[test]
fn bytes_arrive_over_both_transports_and_in_subgroups() {
    let (ranks, _, _) = group();
    thread::scope(|scope| {
        for mut mixed in ranks {
            scope.spawn(move || {
                Exchange::new(&mixed, 1, 20_000).run(&mut mixed).unwrap();
                let members = [4, 0, 3, 2];
                if let Some(rank) = members.iter().position(|member| *member == mixed.rank()) {
                    let mut sub = mixed.split(&members, 9).unwrap();
                    assert_eq!((sub.rank(), sub.world_size()), (rank, 4));
                    assert_eq!(sub.audience().len(), 1);
                    Exchange::new(&*sub, 2, 20_000).run(&mut *sub).unwrap();
                }
            });
        }
    });
}

#[test]
fn the_audience_is_this_machine() {
    let (mut ranks, _, _) = group();
    let audiences: Vec<Vec<usize>> = ranks.iter().map(|rank| rank.audience().to_vec()).collect();
    assert_eq!(audiences, [vec![3], vec![4, 2], vec![4, 1], vec![0], vec![1, 2]]);
    assert_eq!(ranks[1].write(Target::Audience, b"all"), Ok(3));
    for reader in [2, 4] {
        assert_eq!(ranks[reader].progress(), Ok(true));
        assert_eq!(ranks[reader].arrived(Source::Common(1)), b"all");
        assert_eq!(ranks[reader].arrived(Source::Rank(1)), b"");
        ranks[reader].consume(Source::Common(1), 2);
        let mut rest = [0; 9];
        assert_eq!(ranks[reader].read(Source::Common(1), &mut rest), Ok(1));
        assert_eq!(rest[0], b'l');
    }
    assert_eq!(ranks[0].progress(), Ok(false));
}

#[test]
fn losses_of_both_are_reported_once_each_with_the_ranks_of_the_group() {
    let (mut ranks, lose_near, lose_far) = group();
    lose_near.of(1);
    lose_far.of(2);
    let rank = &mut ranks[3];
    let lost = |peer| Err(Lost { peer, why: LostWhy::Closed });
    assert_eq!([rank.progress(), rank.progress(), rank.progress()], [lost(0), lost(2), Ok(false)]);
}

#[test]
fn a_wait_ends_in_time_and_waits_for_both() {
    let (mut ranks, _, _) = group();
    let begin = Instant::now();
    for _ in 0..100 {
        ranks[0].wait(LONG).unwrap();
        ranks[0].wait(Duration::ZERO).unwrap();
    }
    assert!(begin.elapsed() < LONG / 4, "{:?}", begin.elapsed());
}
