//! Trainings, minimizations and replicas under `mpirun`: every rank ends with the bits of the same rank on loopback.

use crate::common::{Run, STAGES, WhichRule};
use crate::cross_shard::cases::{self, Comm, Ranks};
use crate::lbfgs::problems::Problem;
use crate::lbfgs::run;
use meshstep_cases::mpirun::{SCENARIO, launch};
use meshstep_comm::{loopback, mpi};
use meshstep_optim::LineSearch;
use meshstep_shard::{Clip, Missing, Options, SlotRuns, Stage};
use meshstep_tensor::Queue;
use std::fmt::Debug;
use std::time::Duration;

/// A case: its name, and one rank's part, which returns the rank's result.
struct Case {
    name: String,
    part: Box<dyn Fn(&Comm) -> String + Sync>,
}

impl Case {
    fn new<T: Debug>(name: String, part: impl Fn(Comm) -> T + Sync + 'static) -> Self {
        Case { name, part: Box::new(move |comm| format!("{:?}", part(Comm::clone(comm)))) }
    }
}

/// A rank of the test below. In the test's own process it does nothing.
#[test]
fn rank() {
    if std::env::var(SCENARIO).is_ok() {
        run_table();
    }
}

#[test]
fn steps_under_mpirun_have_loopbacks_bits() {
    if std::env::var(SCENARIO).is_ok() {
        return;
    }
    for ranks in [2, 4] {
        let ended = launch("table", ranks, &["--exact", "mpi::rank", "--nocapture"]);
        println!("steps on {ranks} ranks: {:.1} s", ended.took.as_secs_f64());
        assert!(ended.success && ended.orphans == 0, "{} orphans\n{}", ended.orphans, ended.output);
        assert!(ended.output.contains("cases have loopback's bits"), "{}", ended.output);
    }
}

/// Compares this rank's results with those of the same rank on loopback.
fn run_table() {
    let options = mpi::Options { deadline: Duration::from_secs(60), ..mpi::Options::default() };
    let comm = mpi::world(&options).unwrap().communicator();
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let table = table(ranks);
    for Case { name, part } in &table {
        let expected = loopback::spawn(ranks, |comm| part(&comm)).unwrap();
        assert!(part(&comm) == expected[rank], "{name}: rank {rank} of {ranks} differs from loopback's");
    }
    if rank == 0 {
        println!("{} cases have loopback's bits", table.len());
    }
}

fn table(ranks: usize) -> Vec<Case> {
    STAGES.into_iter().flat_map(at_stage).chain(slots(ranks)).chain(replicas(ranks)).collect()
}

/// Sums over slots, which have the bits of other numbers of ranks.
fn slots(ranks: usize) -> Vec<Case> {
    let case = |stage| {
        let lens: Vec<usize> = (0..ranks).map(|rank| 1 + rank % 3).collect();
        let options = Options { slots: Some(SlotRuns::new(&lens).unwrap()), ..Run::default().options };
        let run = Run { options, ..Run::default() }.stage(stage);
        Case::new(format!("slots {lens:?}, {stage:?}"), move |comm| run.on_rank(comm).unwrap())
    };
    STAGES[..4].iter().copied().map(case).collect()
}

/// SGD without clipping, AdamW with clipping and several micro-batches, buckets longer than a tile, and L-BFGS.
fn at_stage(stage: Stage) -> [Case; 6] {
    let training = |what: &str, run: Run| {
        let run = run.stage(stage);
        Case::new(format!("{what}, {stage:?}"), move |comm| run.on_rank(comm).unwrap())
    };
    let minimization = |problem, lens: &[usize], search| {
        let run = run::Run::new(problem, lens, search);
        let rule = meshstep_optim::Lbfgs { max_iter: 12, ..run.rule.clone() };
        let options = Options { stage, ..run.options.clone() };
        let run = run::Run { rule, options, ..run };
        Case::new(format!("L-BFGS, {problem:?}, {stage:?}"), move |comm| run.on_rank(comm).unwrap())
    };
    let long = Options { bucket_len: Some(60_001), ..Options::default() };
    let long = Run { lens: vec![70_001, 3, 0, 30_000, 999], steps: 2, options: long, ..Run::default() };
    [
        training("SGD", Run { rule: WhichRule::Sgd, max_norm: None, ..Run::default() }),
        training("clipped AdamW", Run { micro_batches: 2, shuffle: true, ..Run::default() }),
        training("clipped AdamW on 101,003 parameters", long),
        minimization(Problem::Rosenbrock, &[500, 1, 0, 399, 100], LineSearch::None),
        minimization(Problem::Logistic, &[3, 1, 0, 6], LineSearch::StrongWolfe),
        minimization(Problem::LeastSquares, &[3, 1, 0, 6], LineSearch::StrongWolfe),
    ]
}

/// This process's rank in place of all ranks.
struct Here(Comm);

impl Ranks for Here {
    /// Returns this rank's result alone.
    fn run<T: Send>(&self, ranks: usize, body: impl Fn(Comm, Queue) -> T + Sync) -> Vec<T> {
        assert_eq!(ranks, self.0.world_size());
        vec![body(Comm::clone(&self.0), Queue::cpu())]
    }
}

/// Replicas in groups, on as many ranks as the cases have. Some check their ranks themselves.
fn replicas(ranks: usize) -> Vec<Case> {
    let checked = |name: &str, case: fn(&Here)| Case::new(name.to_owned(), move |comm| case(&Here(comm)));
    let story = |missing, clip| {
        let options = Options { stage: Stage::Replicated, missing, clip, ..Options::default() };
        let name = format!("pairs of ranks, {missing:?}, {clip:?}");
        Case::new(name, move |comm| cases::story(&Here(comm), &options))
    };
    match ranks {
        2 => vec![
            checked("drift", cases::drift_is_measured_and_averaged_away),
            checked("own clipping", cases::a_rank_clips_what_its_micro_batches_have_together),
            checked("a skipped step", cases::a_held_gradient_that_is_not_finite_skips_the_step),
        ],
        _ => vec![
            story(Missing::Error, Clip::AfterReduce),
            story(Missing::Zero, Clip::BeforeReduce),
            checked("clipping", cases::clipping_before_and_after_the_reduction),
        ],
    }
}
