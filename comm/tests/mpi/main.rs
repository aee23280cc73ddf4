//! Tests of the MPI backend. Started alone this program runs itself under `mpirun` with several ranks, once for each row; started
//! by `mpirun` it is one rank of a row.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test program")]

mod bytes;
mod failures;
mod groups;
mod launch;
mod settings;

use launch::{Ended, SCENARIO, launch, launch_alone};
use meshstep_comm::mpi::Options;
use meshstep_comm::mpi::testing::streams;
use std::process::ExitCode;
use std::time::Duration;

/// A scenario, the numbers of ranks it runs with, and the check of its end.
struct Row {
    name: &'static str,
    ranks: &'static [usize],
    check: fn(&Ended),
}

const ROWS: &[Row] = &[
    Row { name: "alone", ranks: &[0, 1], check: passed },
    Row { name: "bytes", ranks: &[2, 3, 4], check: passed },
    Row { name: "bytes_under_a_lock", ranks: &[2, 4], check: passed },
    Row { name: "large", ranks: &[2], check: passed },
    Row { name: "groups", ranks: &[2, 3, 4], check: passed },
    Row { name: "many_groups", ranks: &[4], check: passed },
    Row { name: "threads", ranks: &[2, 4], check: passed },
    Row { name: "threads_under_a_lock", ranks: &[3], check: passed },
    Row { name: "ends", ranks: &[2, 3], check: passed },
    Row { name: "last_words", ranks: &[2, 4], check: passed },
    Row { name: "slow_reader", ranks: &[2], check: passed },
    Row { name: "waker", ranks: &[2], check: passed },
    Row { name: "too_few_threads", ranks: &[0, 2], check: passed },
    Row { name: "second_world", ranks: &[0, 2], check: passed },
    Row { name: "contradiction", ranks: &[0], check: passed },
    Row { name: "failed_but_all_there", ranks: &[3], check: passed },
    Row { name: "killed", ranks: &[2, 4], check: failures::killed },
    Row { name: "late_start", ranks: &[2, 3], check: failures::late_start },
    Row { name: "late_end", ranks: &[2, 3], check: failures::late_end },
];

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(SCENARIO) {
        run(&name);
        return ExitCode::SUCCESS;
    }
    // `cargo test` passes names to run only these.
    let only: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    for row in ROWS.iter().filter(|row| only.is_empty() || only.iter().any(|name| name == row.name)) {
        for &ranks in row.ranks {
            let ended = if ranks == 0 { launch_alone(row.name) } else { launch(row.name, ranks) };
            println!("{} on {ranks} ranks: {:.1} s", row.name, ended.took.as_secs_f64());
            (row.check)(&ended);
            assert_eq!(ended.orphans, 0, "processes of {} outlive their job\n{}", row.name, ended.output);
        }
    }
    ExitCode::SUCCESS
}

fn passed(ended: &Ended) {
    assert!(ended.success, "the job failed:\n{}", ended.output);
    assert!(ended.took < Duration::from_secs(60), "the job took {:?}\n{}", ended.took, ended.output);
}

/// One rank's part.
fn run(name: &str) {
    let options = Options { deadline: Duration::from_secs(30), ..Options::default() };
    match name {
        "too_few_threads" => return settings::too_few_threads(options),
        "second_world" => return settings::second_world(options),
        "contradiction" => return settings::contradiction(options),
        "late_start" => return failures::start_late(options),
        "bytes_under_a_lock" => return bytes::exchange(&mut streams(&settings::locked(options)).unwrap()),
        "threads_under_a_lock" => return groups::threads(streams(&settings::locked(options)).unwrap()),
        _ => {}
    }
    let mut world = streams(&options).unwrap();
    match name {
        "alone" => assert_eq!((world.rank(), world.world_size()), (0, 1)),
        "bytes" => bytes::exchange(&mut world),
        "large" => bytes::large(&mut world),
        "slow_reader" => bytes::slow_reader(&mut world),
        "waker" => bytes::waker(&mut world),
        "groups" => groups::nested(&mut world),
        "many_groups" => groups::many(&mut world),
        "threads" => groups::threads(world),
        "ends" => groups::ends(&mut world),
        "last_words" => groups::last_words(&mut world),
        "failed_but_all_there" => world.fail("a test"),
        "killed" => failures::die(&mut world),
        "late_end" => failures::end_late(world),
        other => panic!("no scenario {other}"),
    }
}
