//! Groups formed by color and key, their independence, and the effects of a member's end.

use crate::backends::{BACKENDS, Backend};
use meshstep_comm::{Communicator, Error, Reduction};
use meshstep_tensor::{Buffer, Category, DType, Meter};
use std::sync::{Arc, Barrier};

fn one(value: f32) -> Buffer {
    Buffer::from_slice(&[value], &Meter::new(), Category::Grads).unwrap()
}

fn sum(comm: &Arc<dyn Communicator>, value: f32) -> Result<f32, Error> {
    let mut buffer = one(value);
    comm.all_reduce(&mut buffer, Reduction::Sum)?;
    Ok(buffer.typed::<f32>().unwrap()[0])
}

#[test]
fn colors_make_groups_and_keys_order_them() {
    for &backend in BACKENDS {
        let places = backend.spawn(6, |comm| {
            // Ranks 0, 2, 4 in reverse order; 1, 3 unchanged; 5 in none.
            let color = if comm.rank() == 5 { None } else { Some(comm.rank() as u32 % 2) };
            let key = if comm.rank() % 2 == 0 { -(comm.rank() as i64) } else { 0 };
            let group = comm.split(color, key).unwrap();
            group.map(|group| (group.rank(), group.world_size(), sum(&group, comm.rank() as f32).unwrap()))
        });
        let expected = [(2, 3, 6.0), (0, 2, 4.0), (1, 3, 6.0), (1, 2, 4.0), (0, 3, 6.0)].map(Some);
        assert_eq!(places.unwrap(), [&expected[..], &[None]].concat());
    }
}

#[test]
fn a_group_and_its_world_do_not_wait_for_each_other() {
    for &backend in BACKENDS {
        let sums = backend.spawn(4, |comm| {
            let half = comm.split(Some(comm.rank() as u32 / 2), 0).unwrap().unwrap();
            // The halves make different numbers of calls between two calls of the world.
            let turns = if comm.rank() < 2 { 5 } else { 1 };
            let inner: f32 = (0..turns).map(|_| sum(&half, 1.0).unwrap()).sum();
            let quarter = half.split(Some(comm.rank() as u32), 0).unwrap().unwrap();
            (inner, sum(&comm, 1.0).unwrap(), sum(&quarter, 7.0).unwrap())
        });
        assert_eq!(sums.unwrap(), [(10.0, 4.0, 7.0), (10.0, 4.0, 7.0), (2.0, 4.0, 7.0), (2.0, 4.0, 7.0)]);
    }
}

#[test]
fn a_split_of_some_and_something_else_of_others_is_a_mismatch() {
    for &backend in BACKENDS {
        let errors = backend.spawn(2, |comm| {
            if comm.rank() == 0 { comm.split(Some(0), 0).map(drop) } else { comm.barrier() }
        });
        for error in errors.unwrap() {
            assert!(matches!(error, Err(Error::Mismatch { op_number: 0, .. })), "{error:?}");
        }
    }
}

#[test]
fn a_rank_that_leaves_fails_only_its_own_groups() {
    for &backend in BACKENDS {
        let results = backend.spawn(4, |comm| {
            let pair = comm.split(Some(comm.rank() as u32 / 2), 0).unwrap().unwrap();
            if comm.rank() == 3 {
                return None;
            }
            Some((sum(&pair, 1.0), comm.rank()))
        });
        for result in results.unwrap().into_iter().flatten() {
            match result {
                (sum, 0 | 1) => assert_eq!(sum, Ok(2.0)),
                // Rank 3 of the world is rank 1 of its pair.
                (sum, _) => assert_eq!(sum, Err(Error::Left { rank: 1, op_number: 0 })),
            }
        }
    }
}

#[test]
fn a_panic_reaches_the_groups_of_its_rank() {
    for &backend in BACKENDS {
        let seen = std::sync::Mutex::new(Vec::new());
        let result = backend.spawn(4, |comm| {
            let pair = comm.split(Some(comm.rank() as u32 / 2), 0).unwrap().unwrap();
            if comm.rank() == 2 {
                std::panic::resume_unwind(Box::new("out of luck"));
            }
            let rank = comm.rank();
            // Only the pair is used from here on.
            drop(comm);
            let sum = sum(&pair, 1.0);
            seen.lock().unwrap().push((rank, sum));
        });
        let panicked = |rank| Error::Panicked { rank, message: "out of luck".to_owned() };
        assert_eq!(result.unwrap_err(), panicked(2));
        let mut seen = seen.into_inner().unwrap();
        seen.sort_by_key(|&(rank, _)| rank);
        assert_eq!(seen, [(0, Ok(2.0)), (1, Ok(2.0)), (3, Err(panicked(0)))]);
    }
}

/// Returns for each rank the results of a world, of a pair split from it, and of each rank's own group split from that, after an
/// abort of one.
fn after_an_abort(
    backend: Backend,
    abort: impl Fn(&[Arc<dyn Communicator>; 3]) + Sync,
) -> Vec<[Result<f32, Error>; 3]> {
    let together = Barrier::new(4);
    let ends = backend.spawn(4, |comm| {
        let me = comm.rank() as u32;
        let pair = comm.split(Some(me / 2), 0).unwrap().unwrap();
        // A parent group may be dropped, if its own parent is alive.
        let between = pair.split(Some(0), 0).unwrap().unwrap();
        let own = between.split(Some(me), 0).unwrap().unwrap();
        drop(between);
        let all = [comm, pair, own];
        together.wait();
        if me == 2 {
            abort(&all);
        }
        together.wait();
        let sums = all.each_ref().map(|comm| sum(comm, 1.0));
        together.wait();
        sums
    });
    ends.unwrap()
}

#[test]
fn an_abort_reaches_subgroups_and_no_ancestor() {
    for &backend in BACKENDS {
        let aborted = |rank| Err(Error::Aborted { rank });
        let end = after_an_abort(backend, |[comm, ..]| comm.abort());
        assert_eq!(end, vec![[aborted(2), aborted(2), aborted(2)]; 4]);
        let end = after_an_abort(backend, |[_, pair, _]| pair.abort());
        let there = [Ok(4.0), aborted(0), aborted(0)];
        let elsewhere = [Ok(4.0), Ok(2.0), Ok(1.0)];
        assert_eq!(end, [elsewhere.clone(), elsewhere, there.clone(), there]);
        let end = after_an_abort(backend, |[.., own]| own.abort());
        let ends = |rank| [Ok(4.0), Ok(2.0), if rank == 2 { aborted(0) } else { Ok(1.0) }];
        assert_eq!(end, [0, 1, 2, 3].map(ends));
    }
}

#[test]
fn many_generations_of_groups_come_and_go() {
    for &backend in BACKENDS {
        let results = backend.spawn(3, |comm| {
            for round in 0..50 {
                let group = comm.split(Some((comm.rank() as u32 + round) % 2), 0).unwrap().unwrap();
                let mut buffer =
                    Buffer::zeroed(group.world_size() * 4, DType::U64, &Meter::new(), Category::Grads)
                        .unwrap();
                group.all_gather(&mut buffer).unwrap();
            }
            comm.stats().of(meshstep_comm::Kind::Split).operations
        });
        assert_eq!(results.unwrap(), [50, 50, 50]);
    }
}
