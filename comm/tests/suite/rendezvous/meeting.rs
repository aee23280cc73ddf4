//! Correct ranks: values, all-gathers, barriers, generations, failures, and the end.

use crate::rendezvous::common::{LONG, meet, options, world};
use meshstep_comm::rendezvous::{Error, Failure, Store, Why};
use std::thread;
use std::time::{Duration, Instant};

const SHORT: Duration = Duration::from_millis(150);

#[test]
fn a_value_of_one_reaches_all() {
    for world_size in [1, 2, 5] {
        let id: Vec<u8> = (0..128).collect();
        let got = meet(&world(world_size), &options(LONG), |store| {
            assert_eq!(store.world_size(), world_size);
            let first = store.generation(0);
            if store.rank() == world_size - 1 {
                first.set("id", &id).unwrap();
            }
            let value = first.wait("id", LONG).unwrap();
            assert_eq!(first.get("id").as_ref(), Some(&value));
            assert_eq!((first.get("di"), store.generation(1).get("id")), (None, None));
            first.barrier("end", LONG).unwrap();
            value
        });
        assert_eq!(got, vec![Ok(id); world_size]);
    }
}

#[test]
fn an_all_gather_is_in_the_order_of_ranks_every_time() {
    let got = meet(&world(4), &options(LONG), |store| {
        let generation = store.generation(0);
        (0..20u8)
            .map(|turn| {
                let value = vec![store.rank() as u8; usize::from(turn) * store.rank()];
                generation
                    .all_gather("lengths", &value, LONG)
                    .unwrap()
                    .iter()
                    .map(Vec::len)
                    .collect::<Vec<_>>()
            })
            .collect::<Vec<_>>()
    });
    let expected: Vec<Vec<usize>> = (0..20).map(|turn| (0..4).map(|rank| turn * rank).collect()).collect();
    assert_eq!(got, vec![Ok(expected); 4]);
}

#[test]
fn a_failure_reaches_all_in_its_generation_only() {
    let heard = meet(&world(3), &options(LONG), |store| {
        let (old, new) = (store.generation(7), store.generation(8));
        assert_eq!(old.failure(), None);
        old.barrier("nobody failed yet", LONG).unwrap();
        if store.rank() == 1 {
            old.fail("out of memory").unwrap();
        }
        // Rank 1 gets it as well, and so does every pending wait.
        let failure = old.wait_failure(LONG).unwrap();
        assert_eq!(old.wait("never", LONG), Err(Error::Failed(failure.clone())));
        if store.rank() != 1 {
            assert!(matches!(old.barrier("never", LONG), Err(Error::Failed(_))));
        }
        assert_eq!(new.failure(), None);
        new.barrier("rebuilt", LONG).unwrap();
        assert_eq!(new.wait_failure(Duration::ZERO), None);
        failure
    });
    let failure = Failure::Published { rank: 1, generation: 7, text: "out of memory".to_owned() };
    assert_eq!(heard, vec![Ok(failure); 3]);
}

#[test]
fn a_long_text_is_cut_between_characters() {
    let heard = meet(&world(2), &options(LONG), |store| {
        let generation = store.generation(0);
        if store.rank() == 1 {
            generation.fail(&"ü".repeat(5000)).unwrap();
            generation.fail(&format!("a{}", "ü".repeat(5000))).unwrap();
        }
        let failure = generation.wait_failure(LONG);
        store.generation(1).barrier("end", LONG).unwrap();
        failure
    });
    for failure in heard {
        let Ok(Some(Failure::Published { text, .. })) = failure else { panic!("{failure:?}") };
        assert_eq!(text, "ü".repeat(2048));
    }
}

#[test]
fn late_ranks_are_named() {
    let got = meet(&world(3), &options(LONG), |store| {
        let generation = store.generation(2);
        let got = match store.rank() {
            1 => Ok(Vec::new()),
            _ => generation.all_gather("sizes", &[1], SHORT),
        };
        let not_set = generation.wait("id", SHORT);
        generation.barrier("end", LONG).unwrap();
        (got, not_set)
    });
    let late = Error::Late { name: "sizes".to_owned(), generation: 2, missing: vec![1], after: SHORT };
    let not_set = Error::NotSet { key: "id".to_owned(), generation: 2, after: SHORT };
    for rank in [0, 2] {
        assert_eq!(got[rank], Ok((Err(late.clone()), Err(not_set.clone()))));
    }
}

#[test]
fn large_values_are_refused_before_they_are_sent() {
    let got = meet(&world(1), &options(LONG), |store| {
        let generation = store.generation(0);
        let too_large = |what, len, max| Err(Error::TooLarge { what, len, max });
        assert_eq!(generation.set(&"k".repeat(257), &[]), too_large("key", 257, 256));
        assert_eq!(generation.set("k", &vec![0; 16385]), too_large("value", 16385, 16384));
        assert_eq!(generation.barrier(&"k".repeat(257), LONG), too_large("name", 257, 256));
        generation.set(&"k".repeat(256), &vec![3; 16384]).unwrap();
        generation.wait(&"k".repeat(256), LONG)
    });
    assert_eq!(got, [Ok(Ok(vec![3; 16384]))]);
}

#[test]
fn a_store_that_is_full_says_so_to_all() {
    let got = meet(&world(2), &options(LONG), |store| {
        let generation = store.generation(0);
        let value = vec![0; 16 * 1024];
        let mut sent = (0..5000).map(|number| generation.set(&format!("k{number}"), &value));
        if store.rank() == 0 {
            sent.find_map(Result::err);
        }
        generation.wait("never", LONG)
    });
    assert_eq!(got, vec![Ok(Err(Error::Full { max: 64 << 20 })); 2]);
}

#[test]
fn a_rank_that_leaves_is_no_failure_but_not_waited_for() {
    let got = meet(&world(3), &options(LONG), |store| {
        let generation = store.generation(0);
        generation.barrier("all", LONG).unwrap();
        if store.rank() == 2 {
            return Ok(());
        }
        let begin = Instant::now();
        let result = generation.barrier("without 2", LONG);
        assert!(begin.elapsed() < LONG / 2);
        assert_eq!(generation.failure(), None);
        // Rank 0 stays until rank 1 has the failure too.
        while store.rank() == 0 && generation.get("heard").is_none() {
            let _ = generation.wait("heard", SHORT);
        }
        if store.rank() == 1 {
            generation.set("heard", &[]).unwrap();
        }
        result
    });
    let left = Error::Left { rank: 2, awaited: "it came to \"without 2\"".to_owned() };
    assert_eq!(got, [Ok(Err(left.clone())), Ok(Err(left)), Ok(Ok(()))]);
}

#[test]
fn without_rank_0_there_is_no_store_and_earlier_messages_have_arrived() {
    let got = meet(&world(3), &options(LONG), |store| {
        let generation = store.generation(0);
        if store.rank() == 0 {
            generation.set("last words", b"goodbye").unwrap();
            return None;
        }
        let words = generation.wait("last words", LONG).unwrap();
        assert_eq!(generation.wait_failure(LONG), None);
        let errors = [generation.wait("more", LONG).unwrap_err(), generation.set("more", b"").unwrap_err()];
        for error in errors {
            assert!(matches!(error, Error::Left { rank: 0, .. }), "{error}");
        }
        assert_eq!(generation.get("last words"), Some(words.clone()));
        Some(words)
    });
    let words = Ok(Some(b"goodbye".to_vec()));
    assert_eq!(got, [Ok(None), words.clone(), words]);
}

#[test]
fn a_rank_that_panics_is_lost() {
    for victim in [1, 0] {
        let world = world(3);
        let lost = thread::scope(|scope| {
            let start = |environment| {
                scope.spawn(move || {
                    let store = Store::join(environment, &options(LONG)).unwrap();
                    let generation = store.generation(3);
                    generation.barrier("all", LONG).unwrap();
                    assert!(store.rank() != victim, "on purpose");
                    let failure = generation.wait_failure(LONG);
                    // Keep rank 0's store until both have the failure.
                    let _ = generation.barrier("heard", SHORT);
                    failure
                })
            };
            let threads: Vec<_> = world.iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().ok()).collect::<Vec<_>>()
        });
        let failure = Some(Some(Failure::Lost { rank: victim, why: Why::Closed }));
        for (rank, heard) in lost.into_iter().enumerate() {
            assert_eq!(heard, if rank == victim { None } else { failure.clone() }, "victim {victim}");
        }
    }
}

#[test]
fn a_dropped_store_takes_its_threads_its_port_and_its_generations_along() {
    let world = world(2);
    // The port is free again at once, several times.
    for _ in 0..3 {
        let generations = meet(&world, &options(LONG), |store| {
            let generation = store.generation(0);
            generation.barrier("all", LONG).unwrap();
            generation
        });
        for generation in generations {
            let generation = generation.unwrap();
            assert_eq!(generation.set("k", b""), Err(Error::Closed));
            assert_eq!(generation.wait("k", LONG), Err(Error::Closed));
            assert_eq!(generation.wait_failure(LONG), None);
        }
    }
}
