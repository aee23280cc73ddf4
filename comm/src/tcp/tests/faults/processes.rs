//! Schedules with processes as ranks: one process is killed or stopped in the middle of an operation.

use super::program::{self, Ended, Order};
use super::ranks::{expected, options_of};
use super::schedule::{Fault, RankFault, RankKind, Schedule};
use super::verdict::{Expected, Report, is_typed};
use crate::rendezvous::Environment;
use crate::tcp::tests::common::HEX;
use crate::tcp::{Options, World, join};
use meshstep_cases::process::{Process, free_addr};
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

/// Variable with the seed, if this binary runs as a rank.
const SEED: &str = "MESHSTEP_TEST_SCHEDULE";
/// Repetitions of the program, so that the signal comes in the middle.
const ROUNDS: u64 = 40;
/// Time for the next generation to begin, or to be refused.
const NEXT: Duration = Duration::from_secs(15);
/// Time for all ranks to join.
const JOIN: Duration = Duration::from_secs(5);
const CALM: Duration = Duration::from_secs(20);
/// Time after the deadline within which every operation ends.
const LIMIT: Duration = Duration::from_secs(2);

/// Rank of a schedule. Without the variable it does nothing.
#[test]
fn child() {
    let Ok(seed) = std::env::var(SEED) else { return };
    let schedule = Schedule::new(seed.parse().unwrap());
    let environment = Environment::from_env().unwrap();
    let check = expected(schedule.n, &program::check(), schedule.seed);
    if environment.restart == 0 {
        first(&schedule, &environment, &check);
        order("again");
    }
    let calm = Options { timeout: CALM, ..options_of(&schedule) };
    let world = join(&Environment { restart: 1, ..environment }, &calm).unwrap();
    println!("\nagain {}", checked(&world, &schedule, &check));
}

/// Runs the program in the first world, and goes on to its next generation.
fn first(schedule: &Schedule, environment: &Environment, check: &Expected) {
    let mut options = options_of(schedule);
    options.rendezvous.deadline = JOIN;
    let begin = Instant::now();
    match join(environment, &options) {
        Ok(world) => {
            println!("\nended {}", rounds(schedule, &world));
            order("next");
            println!("\nnext {}", go_on(world, schedule, check));
        }
        Err(error) => {
            println!("\nended late {} {error}", begin.elapsed().saturating_sub(JOIN).as_millis());
            order("next");
            println!("\nnext 0 refused: it has not joined");
        }
    }
}

/// Waits for an order of the test.
fn order(expected: &str) {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    assert_eq!(line.trim(), expected);
}

/// Runs the program many times, up to the first error; returns its milliseconds after the deadline.
fn rounds(schedule: &Schedule, world: &World) -> String {
    let Schedule { n, seed, deadline, .. } = *schedule;
    let (rank, comm) = (world.rank(), world.communicator());
    let expected = expected(n, &schedule.steps, seed);
    let fault = schedule.of_rank(rank).next().copied();
    let mut late = Duration::ZERO;
    for round in 0..ROUNDS {
        let announce = |step: usize| {
            if fault.is_some_and(|fault| fault.step == step) && round == seed % (ROUNDS / 4) {
                println!("\nat it");
            }
            Order::Go
        };
        for (step, Ended { result, took }) in
            program::run(&comm, &schedule.steps, seed, announce).into_iter().enumerate()
        {
            late = late.max(took.saturating_sub(deadline));
            match result {
                Ok(hash) if hash == expected[rank][step] => {}
                Ok(_) => return format!("wrong: step {step} of round {round}"),
                Err(error) if is_typed(&error) => return format!("late {} {error}", late.as_millis()),
                Err(error) => return format!("wrong: {error:?}"),
            }
        }
    }
    format!("well {}", late.as_millis())
}

/// Goes on to the next generation; returns the result and the milliseconds until it.
fn go_on(world: World, schedule: &Schedule, check: &Expected) -> String {
    let begin = Instant::now();
    let next = world.next_generation(NEXT);
    let took = begin.elapsed().as_millis();
    match next {
        Ok(next) => format!("{took} {}", checked(&next, schedule, check)),
        Err(error) => format!("{took} refused: {error}"),
    }
}

fn checked(world: &World, schedule: &Schedule, check: &Expected) -> String {
    let ended = program::run(&world.communicator(), &program::check(), schedule.seed, |_| Order::Go);
    for (step, Ended { result, .. }) in ended.iter().enumerate() {
        match result {
            Ok(hash) if *hash == check[world.rank()][step] => {}
            other => return format!("step {step}: {other:?}"),
        }
    }
    match world.generation().barrier("checked", CALM) {
        Ok(()) => "works".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// Starts the process of a rank.
fn start(schedule: &Schedule, addr: SocketAddr, rank: usize, restart: u64) -> Process {
    let number = |number: usize| number.to_string();
    let variables = [
        ("RANK", number(rank)),
        ("WORLD_SIZE", number(schedule.n)),
        ("LOCAL_RANK", number(rank)),
        ("MASTER_ADDR", addr.ip().to_string()),
        ("MESHSTEP_PORT", addr.port().to_string()),
        ("MESHSTEP_TOKEN", HEX.to_owned()),
        ("TORCHELASTIC_RUN_ID", "run".to_owned()),
        ("TORCHELASTIC_RESTART_COUNT", restart.to_string()),
        (SEED, schedule.seed.to_string()),
    ];
    let variables: Vec<(&str, &str)> =
        variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    Process::start("tcp::tests::faults::processes::child", &variables)
}

/// Runs a schedule and judges it.
pub(super) fn run(schedule: &Schedule) -> Result<Report, String> {
    let [Fault::Rank(fault)] = schedule.faults[..] else { panic!("{:?}", schedule.faults) };
    let addr = free_addr();
    let mut ranks: Vec<Process> = (0..schedule.n).map(|rank| start(schedule, addr, rank, 0)).collect();
    let moment = schedule.seed * 7919;
    match fault.kind {
        // The time of a start and a join.
        RankKind::KillEarly => thread::sleep(Duration::from_micros(moment % 200_000)),
        _ => {
            ranks[fault.rank].says("at it");
            thread::sleep(Duration::from_micros(moment % 20_000));
        }
    }
    let mut report = Report::default();
    match fault.kind {
        RankKind::Stop => ranks[fault.rank].stop(),
        _ => ranks[fault.rank].kill(),
    }
    for rank in (0..schedule.n).filter(|rank| *rank != fault.rank) {
        let said = ranks[rank].says("ended ");
        judge(&said, &mut report).map_err(|text| format!("rank {rank} {text}"))?;
    }
    match fault.kind {
        RankKind::Stop => continued(fault, ranks)?,
        _ => replaced(schedule, addr, fault, ranks)?,
    }
    Ok(report)
}

fn judge(said: &str, report: &mut Report) -> Result<(), String> {
    let mut words = said.split(' ').skip(1);
    let (kind, late) = (words.next(), words.next().and_then(|word| word.parse().ok()));
    let late = Duration::from_millis(late.ok_or_else(|| said.to_owned())?);
    report.late = report.late.max(late);
    match kind {
        _ if late > LIMIT => return Err(said.to_owned()),
        Some("late") => report.failed += 1,
        Some("well") => report.succeeded += 1,
        _ => return Err(said.to_owned()),
    }
    Ok(())
}

/// The stopped process goes on: it gets an error too, and the next generation has all ranks.
fn continued(fault: RankFault, mut ranks: Vec<Process>) -> Result<(), String> {
    ranks[fault.rank].signal("-CONT");
    let said = ranks[fault.rank].says("ended ");
    if said.contains("wrong") {
        return Err(format!("the stopped rank {said}"));
    }
    ranks.iter_mut().for_each(|rank| rank.order("next"));
    let said: Vec<String> = ranks.iter_mut().map(|rank| rank.says("next ")).collect();
    match said.iter().find(|said| !said.ends_with(" works")) {
        Some(_) => Err(format!("the next generation: {said:?}")),
        None => Ok(()),
    }
}

/// A new process takes the killed one's place: the survivors learn that no generation follows, and all ranks start again.
fn replaced(
    schedule: &Schedule,
    addr: SocketAddr,
    RankFault { rank: killed, .. }: RankFault,
    mut ranks: Vec<Process>,
) -> Result<(), String> {
    let survivors = || (0..schedule.n).filter(|rank| *rank != killed);
    survivors().for_each(|rank| ranks[rank].order("next"));
    for rank in survivors() {
        let said = ranks[rank].says("next ");
        let took = said.split(' ').nth(1).and_then(|word| word.parse::<u64>().ok());
        if !said.contains(" refused: ") || took.is_none_or(|took| took > 4000) {
            return Err(format!("rank {rank}: {said}"));
        }
    }
    ranks[killed] = start(schedule, addr, killed, 1);
    survivors().for_each(|rank| ranks[rank].order("again"));
    for (rank, process) in ranks.iter_mut().enumerate() {
        let said = process.says("again ");
        if said != "again works" || !process.wait().success() {
            return Err(format!("rank {rank}: {said}"));
        }
    }
    Ok(())
}
