//! all_reduce, reduce_scatter and all_gather of 64 MiB of f32 on 2 and 4 ranks, compared with a copy loop in the same run.
//!
//! The table at the end shows the minimum number of bytes that the ranks together must read and write, as a speed in GB/s
//! and as a share of the copy loop's speed. In the copy loop each rank's thread copies 64 MiB.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

use criterion::{BenchmarkId, Criterion, Throughput};
use meshstep_bench_cases::collectives::operations;
use meshstep_comm::{Communicator, Error, Op, loopback};
use meshstep_tensor::{Buffer, Category, Meter};
use std::cell::RefCell;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const BYTES: usize = 64 << 20;
const RANKS: [usize; 2] = [2, 4];

/// One line of the table: the fastest time, and the bytes moved in this time.
struct Line {
    name: &'static str,
    ranks: usize,
    moved: usize,
    best: Duration,
}

fn buffer() -> Result<Buffer, Error> {
    Ok(Buffer::from_slice(&vec![1.0f32; BYTES / 4], &Meter::new(), Category::Grads)?)
}

/// Returns the time of `iterations` runs on all ranks together, and the time of the fastest run.
fn collective(ranks: usize, op: Op, iterations: u64) -> Result<(Duration, Duration), Error> {
    let run = |comm: Arc<dyn Communicator>| {
        let mut buffer = buffer()?;
        comm.run(op, &mut buffer)?;
        timed(iterations, || comm.barrier(), || comm.run(op, &mut buffer))
    };
    let times: Result<Vec<_>, _> = loopback::spawn(ranks, run)?.into_iter().collect();
    Ok(times?[0])
}

fn copies(ranks: usize, iterations: u64) -> Result<(Duration, Duration), Error> {
    let edge = Barrier::new(ranks);
    let run = |_| {
        let (from, mut to) = (buffer()?, buffer()?);
        let copy = || -> Result<(), Error> { Ok(to.as_mut().copy_from(from.as_slice())?) };
        let together = || {
            edge.wait();
            Ok(())
        };
        timed(iterations, together, copy)
    };
    let times: Result<Vec<_>, _> = loopback::spawn(ranks, run)?.into_iter().collect();
    Ok(times?[0])
}

fn timed(
    iterations: u64,
    together: impl Fn() -> Result<(), Error>,
    mut work: impl FnMut() -> Result<(), Error>,
) -> Result<(Duration, Duration), Error> {
    let (mut total, mut best) = (Duration::ZERO, Duration::MAX);
    for _ in 0..iterations {
        together()?;
        let start = Instant::now();
        work()?;
        together()?;
        total += start.elapsed();
        best = best.min(start.elapsed());
    }
    Ok((total, best))
}

fn measure(
    criterion: &mut Criterion,
    table: &RefCell<Vec<Line>>,
    (name, ranks, moved): (&'static str, usize, usize),
    run: impl Fn(u64) -> Result<(Duration, Duration), Error>,
) {
    let mut group = criterion.benchmark_group("64MiB");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    group.throughput(Throughput::Bytes(moved as u64));
    let best = RefCell::new(Duration::MAX);
    group.bench_function(BenchmarkId::new(name, ranks), |bencher| {
        bencher.iter_custom(|iterations| {
            let (total, fastest) = run(iterations).unwrap_or_else(|error| panic!("{name}: {error}"));
            let sooner = fastest.min(*best.borrow());
            best.replace(sooner);
            total
        });
    });
    group.finish();
    table.borrow_mut().push(Line { name, ranks, moved, best: best.into_inner() });
}

fn print(table: &[Line]) {
    let speed = |line: &Line| line.moved as f64 / 1e9 / line.best.as_secs_f64();
    println!("\n{:>16} {:>5} {:>9} {:>9} {:>9}", "64 MiB of f32", "ranks", "ms", "GB/s", "of a copy");
    for line in table.iter().filter(|line| line.best < Duration::MAX) {
        let copy = table.iter().find(|other| other.name == "copy" && other.ranks == line.ranks);
        let share = copy.map_or(f64::NAN, |copy| 100.0 * speed(line) / speed(copy));
        let ms = line.best.as_secs_f64() * 1e3;
        println!("{:>16} {:>5} {ms:>9.2} {:>9.1} {share:>8.0}%", line.name, line.ranks, speed(line));
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let table = RefCell::new(Vec::new());
    for ranks in RANKS {
        measure(&mut criterion, &table, ("copy", ranks, 2 * ranks * BYTES), |i| copies(ranks, i));
        for (name, op, buffers) in operations(ranks) {
            let line = (name, ranks, buffers * BYTES);
            measure(&mut criterion, &table, line, |i| collective(ranks, op, i));
        }
    }
    print(&table.into_inner());
    criterion.final_summary();
}
