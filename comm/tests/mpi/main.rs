//! Tests of the MPI backend. Started alone this program runs itself under `mpirun` with several ranks, once for each row; started
//! by `mpirun` it is one rank of a row.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test program")]

mod bytes;
mod collectives;
mod drawn;
#[allow(dead_code, reason = "nothing calls `main`")]
#[path = "../../examples/mpi.rs"]
mod example;
mod failures;
mod groups;
mod library;
mod ranks;
mod settings;

use meshstep_cases::mpirun::{Ended, SCENARIO, launch, launch_alone};
use meshstep_comm::mpi::testing::{TestStreams, streams};
use meshstep_comm::mpi::{Options, World, world};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A scenario, the numbers of ranks it runs with (0: without a launcher), the check of its end, and one rank's part.
struct Row(&'static str, &'static [usize], fn(&Ended), Part);

/// One rank's part of a scenario.
enum Part {
    Process(fn(Options)),
    Streams(fn(TestStreams)),
    Ranks(fn(World)),
}

use Part::{Process, Ranks, Streams};

/// Jobs that run at a time: most of a job's time is mpirun's start, or a wait for a deadline.
const AT_A_TIME: usize = 2;

const ROWS: &[Row] = &[
    Row("alone", &[0, 1], passed, Streams(|world| assert_eq!((world.rank(), world.world_size()), (0, 1)))),
    Row("bytes", &[2, 3, 4], passed, Streams(|mut world| bytes::exchange(&mut world))),
    Row("bytes_under_a_lock", &[4], passed, Process(settings::locked_bytes)),
    Row("large", &[2], passed, Streams(|mut world| bytes::large(&mut world))),
    Row("groups_of_streams", &[2, 3, 4], passed, Streams(|mut world| groups::nested(&mut world))),
    Row("many_groups", &[4], passed, Streams(|mut world| groups::many(&mut world))),
    Row("threads", &[2, 4], passed, Streams(groups::threads)),
    Row("threads_under_a_lock", &[3], passed, Process(settings::locked_threads)),
    Row("ends", &[2, 3], passed, Streams(|mut world| groups::ends(&mut world))),
    Row("last_words", &[2, 4], passed, Streams(|mut world| groups::last_words(&mut world))),
    Row("slow_reader", &[2], passed, Streams(|mut world| bytes::slow_reader(&mut world))),
    Row("waker", &[2], passed, Streams(|mut world| bytes::waker(&mut world))),
    Row("collectives", &[0, 2, 3, 4], passed, Ranks(collectives::every_type)),
    Row("collectives_under_a_lock", &[3], passed, Process(settings::locked_collectives)),
    Row("started", &[2, 3, 4], passed, Ranks(collectives::started)),
    Row("groups", &[2, 3, 4], passed, Ranks(collectives::groups)),
    Row("kept_values", &[2, 4], passed, Ranks(collectives::kept_values)),
    Row("started_is_the_last", &[2, 4], passed, Process(ranks::started_is_the_last)),
    Row("group_is_the_last", &[3], passed, Process(ranks::group_is_the_last)),
    Row("library", &[0, 2, 3, 4], passed, Process(library::reduce)),
    Row("library_stops", &[2, 4], ranks::ended_by_abort, Process(library::stop)),
    Row("library_or_not", &[2, 3], ranks::one_error, Process(library::differ)),
    Row("library_needs_threads", &[0, 2], passed, Process(library::too_few_threads)),
    Row("too_few_threads", &[0, 2], passed, Process(settings::too_few_threads)),
    Row("second_world", &[0, 2], passed, Process(settings::second_world)),
    Row("contradiction", &[0, 2], passed, Process(settings::contradiction)),
    Row("failed_but_all_there", &[3], passed, Streams(|world| world.fail("a test"))),
    Row("killed", &[2, 4], failures::killed, Streams(|mut world| failures::die(&mut world))),
    Row("late_start", &[2, 3], failures::late_start, Process(failures::start_late)),
    Row("late_end", &[2, 3], failures::late_end, Streams(failures::end_late)),
    Row("mismatch", &[2, 4], ranks::one_error, Ranks(ranks::mismatch)),
    Row("late_but_comes", &[2, 4], ranks::one_error, Ranks(ranks::late_but_comes)),
    Row("stopped", &[2, 4], ranks::ended_by_abort, Ranks(ranks::stopped)),
    Row("late", &[2, 4], ranks::ended_by_abort, Ranks(ranks::late)),
    Row("aborted", &[2, 4], ranks::one_error, Ranks(ranks::aborted)),
    Row("aborted_group", &[2, 4], passed, Ranks(ranks::aborted_group)),
    Row("left", &[2, 4], passed, Ranks(ranks::left)),
    Row("panicked", &[2, 4], ranks::one_panicked, Ranks(ranks::panicked)),
    Row("killed_rank", &[2, 4], failures::killed, Ranks(ranks::killed)),
    Row("example", &[4], example_passed, Process(|_| print!("{}", example::run().unwrap()))),
];

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(SCENARIO) {
        run(&name);
        return ExitCode::SUCCESS;
    }
    // `cargo test` passes names to run only these.
    let only: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let rows = ROWS.iter().filter(|row| only.is_empty() || only.iter().any(|name| name == row.0));
    let jobs: Vec<_> = rows.flat_map(|row| row.1.iter().map(move |ranks| (row, *ranks))).collect();
    let next = AtomicUsize::new(0);
    let run_jobs = || {
        while let Some((row, ranks)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            run_job(row, *ranks);
        }
    };
    std::thread::scope(|scope| (0..AT_A_TIME).for_each(|_| drop(scope.spawn(run_jobs))));
    ExitCode::SUCCESS
}

/// Runs a row as a job, and checks its end.
fn run_job(Row(name, _, check, _): &Row, ranks: usize) {
    let ended = if ranks == 0 { launch_alone(name) } else { launch(name, ranks, &[]) };
    println!("{name} on {ranks} ranks: {:.1} s", ended.took.as_secs_f64());
    check(&ended);
    assert_eq!(ended.orphans, 0, "processes of {name} outlive their job\n{}", ended.output);
}

fn passed(ended: &Ended) {
    assert!(ended.success, "the job failed:\n{}", ended.output);
    assert!(ended.took < Duration::from_secs(60), "the job took {:?}\n{}", ended.took, ended.output);
}

/// Checks the text of the example.
fn example_passed(ended: &Ended) {
    passed(ended);
    for rank in 0..ended.ranks {
        let line = format!("rank {rank} of 4: ranks sum to 6, those of its group to {}\n", [2, 4][rank % 2]);
        assert!(ended.output.contains(&line), "{}", ended.output);
    }
}

/// Runs one rank's part.
fn run(name: &str) {
    let options = Options { deadline: Duration::from_secs(30), ..Options::default() };
    let Some(Row(.., part)) = ROWS.iter().find(|row| row.0 == name) else { panic!("no scenario {name}") };
    match part {
        Process(part) => part(options),
        Streams(part) => part(streams(&options).unwrap()),
        Ranks(part) => part(world(&options).unwrap()),
    }
}
