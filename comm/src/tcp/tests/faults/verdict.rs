//! Judgement of a run: complete results or typed errors in time on every rank, and a generation that works afterwards.

use super::program::Ended;
use super::schedule::{Fault, RankFault, RankKind, Schedule};
use crate::Error;
use std::time::Duration;

/// Time after the deadline within which every operation ends.
const LIMIT: Duration = Duration::from_secs(2);
/// Time within which a rank learns that no generation follows.
const HOPELESS: Duration = Duration::from_secs(6);

/// Hashes of the results of each rank's steps.
pub(super) type Expected = Vec<Vec<u64>>;

/// Run of one rank.
#[derive(Clone, Debug, Default)]
pub(super) struct RankRun {
    pub(super) ended: Vec<Ended>,
    /// True if the rank left or panicked.
    pub(super) gone: bool,
    /// The next generation, and whether it works.
    pub(super) next: Option<Result<(), String>>,
    pub(super) next_took: Duration,
    /// The world after a new start of all ranks.
    pub(super) rejoined: Option<Result<(), String>>,
}

/// Result of a schedule that held.
#[derive(Clone, Debug, Default)]
pub(super) struct Report {
    /// Longest time of an operation after its deadline.
    pub(super) late: Duration,
    /// Operations that succeeded, and ranks that got an error.
    pub(super) succeeded: usize,
    pub(super) failed: usize,
    /// Schedules of which a rank got an error.
    pub(super) hit: usize,
}

impl Report {
    /// Adds the report of another schedule.
    pub(super) fn add(&mut self, other: &Report) {
        self.late = self.late.max(other.late);
        self.succeeded += other.succeeded;
        self.failed += other.failed;
        self.hit += usize::from(other.failed > 0);
    }
}

impl Schedule {
    /// Faults by which a rank is gone.
    pub(super) fn faults_of_departure(&self) -> impl Iterator<Item = &RankFault> {
        self.faults.iter().filter_map(|fault| match fault {
            Fault::Rank(fault)
                if matches!(fault.kind, RankKind::Leave | RankKind::Panic | RankKind::Kill) =>
            {
                Some(fault)
            }
            _ => None,
        })
    }

    /// True if a rank calls another operation at a step.
    fn calls_another(&self, rank: usize, step: usize) -> bool {
        self.of_rank(rank).any(|fault| fault.kind == RankKind::CallAnother && fault.step == step)
    }
}

/// Judges the runs of all ranks.
pub(super) fn judge(schedule: &Schedule, expected: &Expected, runs: &[RankRun]) -> Result<Report, String> {
    let mut report = Report::default();
    let somebody_left = runs.iter().any(|run| run.gone);
    for (rank, run) in runs.iter().enumerate() {
        let said = |text: String| format!("rank {rank}: {text}");
        for (step, ended) in run.ended.iter().enumerate() {
            let own = schedule.calls_another(rank, step);
            judge_step(schedule, ended, expected[rank][step], own, &mut report)
                .map_err(|text| said(format!("step {step}: {text}")))?;
            let here = |other: usize| runs[other].ended.len() > step && !schedule.calls_another(other, step);
            let absent = (0..schedule.n).find(|other| !here(*other));
            let needs_all = schedule.steps[step].is_of_all() && !own;
            if let (Ok(_), Some(absent), true) = (&ended.result, absent, needs_all) {
                return Err(said(format!("step {step} succeeded without rank {absent}")));
            }
        }
        judge_end(run, somebody_left).map_err(said)?;
    }
    judge_causes(schedule, runs).map(|()| report)
}

/// Ranks with whole streams have the same error.
fn judge_causes(schedule: &Schedule, runs: &[RankRun]) -> Result<(), String> {
    if !schedule.faults.iter().all(|fault| matches!(fault, Fault::Rank(_))) {
        return Ok(());
    }
    for (step, _) in schedule.steps.iter().enumerate().filter(|(_, step)| step.is_of_all()) {
        let errors: Vec<&Error> =
            runs.iter().filter_map(|run| run.ended.get(step)?.result.as_ref().err()).collect();
        if errors.iter().any(|error| *error != errors[0]) {
            return Err(format!("step {step} has several errors: {errors:?}"));
        }
    }
    Ok(())
}

fn judge_step(
    schedule: &Schedule,
    ended: &Ended,
    expected: u64,
    own: bool,
    report: &mut Report,
) -> Result<(), String> {
    let late = ended.took.saturating_sub(schedule.deadline);
    report.late = report.late.max(late);
    if late > LIMIT {
        return Err(format!("{:?} after the deadline: {:?}", late, ended.result));
    }
    match &ended.result {
        Ok(hash) if *hash == expected || own => report.succeeded += 1,
        Ok(_) => return Err("another result than loopback's".to_owned()),
        Err(error) if schedule.is_harmless() => return Err(format!("a harmless fault failed it: {error}")),
        Err(error) if is_typed(error) => report.failed += 1,
        Err(error) => return Err(format!("not the error of a failure: {error:?}")),
    }
    Ok(())
}

/// True for an error that a failed rank causes on the others.
pub(super) fn is_typed(error: &Error) -> bool {
    use Error::{Aborted, Left, Lost, Mismatch, Panicked, Remote, Timeout};
    matches!(
        error,
        Aborted { .. }
            | Left { .. }
            | Lost { .. }
            | Mismatch { .. }
            | Panicked { .. }
            | Remote { .. }
            | Timeout { .. }
    )
}

fn judge_end(run: &RankRun, somebody_left: bool) -> Result<(), String> {
    match &run.next {
        Some(Err(text)) if !somebody_left => return Err(format!("the next generation: {text}")),
        Some(Ok(())) if somebody_left => return Err("a generation without all ranks".to_owned()),
        Some(Err(_)) if run.next_took > HOPELESS => {
            return Err(format!("it learnt after {:?} that no generation follows", run.next_took));
        }
        _ => {}
    }
    match &run.rejoined {
        Some(Err(text)) => Err(format!("the new world: {text}")),
        _ => Ok(()),
    }
}
