//! Required outcomes of a program.

use crate::DEADLINE;
use crate::program::{Fault, Program, Trouble};
use crate::rank::Outcomes;
use meshstep_comm::Error;

/// Checks that every rank got the outcome that the program leads to.
pub(crate) fn judge(program: &Program, outcomes: &[Outcomes]) {
    let causes: Vec<&Error> = outcomes
        .iter()
        .flatten()
        .flatten()
        .filter_map(|result| result.as_ref().err())
        .map(Error::cause)
        .collect();
    assert!(
        causes.windows(2).all(|two| two[0] == two[1]),
        "one failure, one cause: {causes:?} of {program:?}"
    );
    if let Some(cause) = causes.first() {
        let fits = |fault: &Fault| explains(fault, cause);
        assert!(program.faults.iter().any(fits), "{cause} does not follow from {program:?}");
    }
    for (rank, its) in outcomes.iter().enumerate() {
        told_once(its);
        for (i, outcome) in its.iter().enumerate() {
            let Some(outcome) = outcome else { continue };
            let context = || format!("rank {rank}, step {i}: {outcome:?} in {program:?}");
            assert!(!must_fail(program, rank, i) || outcome.is_err(), "{}", context());
            assert!(!must_succeed(program, outcomes, i) || outcome.is_ok(), "{}", context());
        }
    }
}

/// The first failure of a rank is the cause itself, every later one [`Error::Poisoned`]. A forgotten operation may have been the
/// first.
fn told_once(outcomes: &Outcomes) {
    let errors: Vec<&Error> = outcomes.iter().flatten().filter_map(|result| result.as_ref().err()).collect();
    let later = errors.iter().skip(1).all(|error| matches!(error, Error::Poisoned { .. }));
    let all_seen = outcomes.iter().all(Option::is_some);
    let first = errors.first().is_none_or(|error| !all_seen || !matches!(error, Error::Poisoned { .. }));
    assert!(first && later, "{outcomes:?}");
}

fn explains(fault: &Fault, cause: &Error) -> bool {
    match (fault.trouble, cause) {
        (Trouble::Wrong(..), Error::Mismatch { calls, .. }) => calls.iter().flatten().count() >= 2,
        (Trouble::Return, Error::Left { rank, .. }) => *rank == fault.rank,
        (Trouble::Panic, Error::Panicked { rank, message }) => *rank == fault.rank && message == "as planned",
        (Trouble::Abort, Error::Aborted { rank }) => *rank == fault.rank,
        (Trouble::DropOp | Trouble::TooLate, Error::Timeout { missing, after, .. }) => {
            missing.contains(&fault.rank) && *after == DEADLINE
        }
        _ => false,
    }
}

/// A step must fail if it needs a rank that has gone wrong by then, or if it follows a collective that had to fail.
fn must_fail(program: &Program, rank: usize, step: usize) -> bool {
    let fatal = |fault: &Fault| fault.trouble != Trouble::LateButInTime;
    program.faults.iter().filter(|fault| fatal(fault)).any(|fault| {
        let broken = |i: usize| {
            let by_then = fault.step <= i;
            by_then && (program.steps[i].is_collective() || program.steps[i].needs(fault.rank))
        };
        let itself = broken(step) && program.steps[step].needs(rank);
        let before = (fault.step..step).any(|i| broken(i) && program.steps[i].is_collective());
        itself || before
    })
}

/// A step must succeed if it is over before anything goes wrong: because the faulty ranks have seen the end of it or of a later
/// collective.
fn must_succeed(program: &Program, outcomes: &[Outcomes], step: usize) -> bool {
    let fatal = || program.faults.iter().filter(|fault| fault.trouble != Trouble::LateButInTime);
    let Some(first) = fatal().map(|fault| fault.step).min() else { return true };
    let over = |i: usize| fatal().all(|fault| outcomes[fault.rank][i].is_some());
    (step..first).any(|i| program.steps[i].is_collective() && over(i))
}
