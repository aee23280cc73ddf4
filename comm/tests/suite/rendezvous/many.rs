//! Many ranks and many barriers.

use crate::rendezvous::common::{LONG, meet, options, world};
use meshstep_cases::{cases, long};
use std::sync::Barrier;
use std::time::{Duration, Instant};

#[test]
fn an_all_gather_of_500_ranks_takes_less_than_half_a_second() {
    let world_size = if long() { 1024 } else { 500 };
    let together = Barrier::new(world_size);
    let begin = Instant::now();
    let all = meet(&world(world_size), &options(Duration::from_secs(120)), |store| {
        let joined = begin.elapsed();
        let generation = store.generation(0);
        let times: Vec<Duration> = (0..5u8)
            .map(|turn| {
                together.wait();
                let begin = Instant::now();
                let values = generation.all_gather("small", &[turn, store.rank() as u8], LONG).unwrap();
                let time = begin.elapsed();
                let expected = |(rank, value): (usize, &Vec<u8>)| *value == [turn, rank as u8];
                assert!(values.len() == world_size && values.iter().enumerate().all(expected));
                time
            })
            .collect();
        together.wait();
        (joined, times)
    });
    let all: Vec<(Duration, Vec<Duration>)> = all.into_iter().map(Result::unwrap).collect();
    let joined = all.iter().map(|(joined, _)| *joined).max().unwrap();
    let times: Vec<Duration> =
        (0..5).map(|turn| all.iter().map(|(_, times)| times[turn]).max().unwrap()).collect();
    println!("{world_size} ranks: joined after {joined:?}, all_gathers {times:?}");
    // The machine may have other work during some of them.
    assert!(*times.iter().min().unwrap() < Duration::from_millis(500), "{times:?}");
}

/// Returns the memory of this process in KiB.
#[cfg(target_os = "linux")]
fn memory() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn barriers_and_generations_need_no_more_memory_however_many() {
    let barriers = u64::from(cases(1000, 100_000));
    let (warm, kept) = (barriers / 5, 20);
    let all = meet(&world(64), &options(LONG), |store| {
        let mut before = 0;
        for number in 0..barriers {
            if number == warm {
                before = memory();
            }
            // A name of its own for every other barrier, and new generations with a value each.
            let generation = store.generation(number / kept);
            let name = if number % 2 == 0 { "same".to_owned() } else { format!("barrier {number}") };
            generation.barrier(&name, LONG).unwrap();
            if store.rank() == 0 {
                generation.set(&format!("key {number}"), &[1; 1000]).unwrap();
            }
        }
        (before, memory())
    });
    let (before, after) = all[0].clone().unwrap();
    println!("{barriers} barriers: {before} KiB after {warm}, {after} KiB at the end");
    // 64 entries of every barrier on 64 ranks would be some hundred KiB each.
    assert!(after < before + 16 * 1024, "{before} KiB, then {after} KiB");
}
