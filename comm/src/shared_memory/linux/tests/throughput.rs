//! Throughput of a reduce-scatter and an all-gather between processes, beside a copy in memory.
//!
//! A short run checks the sums. `MESHSTEP_SHARED_MIB=64 cargo test --release -p meshstep-comm --lib throughput -- --nocapture`
//! measures, for the ring sizes in `MESHSTEP_RINGS_KIB` (a list, or 64 to 1024).

use super::common::{LONG, read_all, write_all};
use super::processes::{Child, spawn};
use crate::p2p::transport::{Source, Target, Transport};
use std::time::{Duration, Instant};

/// Bytes of a rank's turn: it writes and reads this much of each stream before it turns to the next.
const TILE: usize = 1 << 17;
const ROUNDS: usize = 7;
/// Barriers in one measure, the mean of all.
const BARRIERS: u32 = 50;

/// Adds up what the peers send for this rank's chunk, in place in their memory.
fn reduce_scatter(rank: &mut dyn Transport, values: &[f32], sum: &mut [f32]) {
    let (me, n) = (rank.rank(), rank.world_size());
    let chunk = sum.len() * 4;
    let bytes = as_bytes(values);
    sum.copy_from_slice(&values[me * sum.len()..][..sum.len()]);
    let mut sent = vec![0; n];
    let mut added = vec![0; n];
    (sent[me], added[me]) = (chunk, chunk);
    while sent.iter().chain(&added).any(|&done| done < chunk) {
        let mut moved = false;
        for peer in (0..n).filter(|&peer| peer != me) {
            let end = (sent[peer] + TILE).min(chunk);
            let wrote = rank.write(Target::Rank(peer), &bytes[peer * chunk..][sent[peer]..end]).unwrap();
            sent[peer] += wrote;
            let arrived = rank.arrived(Source::Rank(peer));
            let len = arrived.len().min(TILE) & !3;
            add(&mut sum[added[peer] / 4..][..len / 4], &arrived[..len]);
            rank.consume(Source::Rank(peer), len);
            added[peer] += len;
            moved |= wrote + len > 0;
        }
        if !moved {
            rank.wait(LONG).unwrap();
        }
    }
}

/// Gives each rank's chunk to all, by the common stream.
fn all_gather(rank: &mut dyn Transport, values: &mut [f32]) {
    let (me, n) = (rank.rank(), rank.world_size());
    let chunk = values.len() * 4 / n;
    let bytes = as_bytes_mut(values);
    let mut done = vec![0; n];
    while done.iter().any(|&done| done < chunk) {
        let mut moved = false;
        for (peer, done) in done.iter_mut().enumerate() {
            let range = peer * chunk + *done..peer * chunk + (*done + TILE).min(chunk);
            let len = match peer == me {
                true => rank.write(Target::Audience, &bytes[range]).unwrap(),
                false => rank.read(Source::Common(peer), &mut bytes[range]).unwrap(),
            };
            *done += len;
            moved |= len > 0;
        }
        if !moved {
            rank.wait(LONG).unwrap();
        }
    }
}

fn add(sum: &mut [f32], bytes: &[u8]) {
    for (sum, value) in sum.iter_mut().zip(bytes.as_chunks().0) {
        *sum += f32::from_le_bytes(*value);
    }
}

fn as_bytes(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn as_bytes_mut(values: &mut [f32]) -> &mut [u8] {
    bytemuck::cast_slice_mut(values)
}

fn barrier(rank: &mut dyn Transport) {
    write_all(rank, Target::Audience, &[1]).unwrap();
    for peer in rank.audience().to_vec() {
        read_all(rank, Source::Common(peer), &mut [0]).unwrap();
    }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

fn timed(rank: &mut dyn Transport, body: impl FnOnce(&mut dyn Transport)) -> Duration {
    barrier(rank);
    let begin = Instant::now();
    body(rank);
    barrier(rank);
    begin.elapsed()
}

/// Body of a rank: prints the medians of copy, reduce-scatter, all-gather and a barrier.
pub(super) fn measure(rank: &mut dyn Transport, bytes: usize) -> String {
    let (me, n) = (rank.rank(), rank.world_size());
    let len = bytes / 4 / n * n;
    let mut values: Vec<f32> = (0..len).map(|i| ((i * 7 + me) % 31) as f32).collect();
    let (mut sum, mut copy) = (vec![0.0; len / n], vec![0.0; len]);
    let mut times: [Vec<Duration>; 4] = Default::default();
    for _ in 0..ROUNDS {
        times[0].push(timed(rank, |_| copy.copy_from_slice(&values)));
        times[1].push(timed(rank, |rank| reduce_scatter(rank, &values, &mut sum)));
        copy[me * sum.len()..][..sum.len()].copy_from_slice(&sum);
        times[2].push(timed(rank, |rank| all_gather(rank, &mut copy)));
        times[3].push(timed(rank, |rank| (0..BARRIERS).for_each(|_| barrier(rank))) / BARRIERS);
        for (i, sum) in copy.iter().enumerate() {
            let expected: usize = (0..n).map(|rank| (i * 7 + rank) % 31).sum();
            assert_eq!(*sum, expected as f32, "element {i}");
        }
        std::hint::black_box(&mut values);
    }
    let [copied, scattered, gathered, met] = times.map(median);
    format!(
        "copy {:.2} ms, reduce_scatter {:.2} ms ({:.2} x copy), all_gather {:.2} ms ({:.2} x copy), barrier {:.1} us",
        copied * 1e3,
        scattered * 1e3,
        scattered / copied,
        gathered * 1e3,
        gathered / copied,
        met * 1e6
    )
}

#[test]
fn sums_and_gathers_are_right_between_processes() {
    let variable = |name| std::env::var(name).ok();
    let mib = variable("MESHSTEP_SHARED_MIB").map(|text| text.parse::<usize>().unwrap());
    let rings = variable("MESHSTEP_RINGS_KIB").unwrap_or("64,128,256,512,1024".to_owned());
    let rings = if mib.is_some() { rings } else { "64".to_owned() };
    for ring in rings.split(',').map(|kib| kib.parse::<usize>().unwrap() << 10) {
        for n in [2, 4] {
            let bytes = mib.map_or(1 << 20, |mib| mib << 20);
            let mut children = spawn(n, &format!("measure {ring} {bytes}"));
            let lines: Vec<String> = children.iter_mut().map(|child| child.says("measured ")).collect();
            println!("{n} processes, rings of {} KiB: {}", ring >> 10, lines[0]);
            children.into_iter().for_each(Child::succeeds);
        }
    }
}
