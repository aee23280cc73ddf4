//! One table of trainings, minimizations and replicas on ranks that are processes: every rank ends with the bits of its rank on loopback.

use crate::common::processes::{WAYS, compare, digest, role, serve};
use crate::common::{PRECISIONS, Run, STAGES, draws};
use crate::cross_shard::cases::{self, Comm, Ranks};
use crate::equality::RULES;
use crate::lbfgs::problems::Problem;
use crate::lbfgs::run::Run as Minimization;
use crate::lbfgs::{LARGE, SEARCHES, SMALL, at};
use crate::matrices;
use meshstep_optim::Lbfgs;
use meshstep_shard::{Clip, Missing, NonFinite, Options, Precision, SlotRuns, Stage};
use meshstep_tensor::{DType, Queue};

/// A training: its name, and what a rank does, which returns the rank's result.
struct Row {
    name: String,
    run: Box<dyn Fn(&Comm) -> String>,
}

impl Row {
    fn new(name: String, run: impl Fn(&Comm) -> String + 'static) -> Self {
        Row { name, run: Box::new(run) }
    }

    fn training(name: String, run: Run) -> Self {
        Row::new(name, move |comm| digest(&run.on_rank(Comm::clone(comm)).unwrap()))
    }
}

/// All rows for `n` ranks; a tenth of them for `cargo xtask check`.
fn table(n: usize) -> Vec<Row> {
    let all = rules().into_iter().chain(precisions()).chain(long_vectors()).chain(minimizations());
    let mut drawn = draws(1);
    all.chain(matrices(n)).chain(slots(n)).chain(replicas(n)).filter(|_| drawn()).collect()
}

/// Every stage with every rule, clipped and not, with different buckets, overlap and numbers of micro-batches.
fn rules() -> Vec<Row> {
    let mut rows = Vec::new();
    for (s, stage) in STAGES.into_iter().enumerate() {
        for (r, (rule, max_norm)) in RULES.into_iter().enumerate() {
            let bucket_len = [Some(150), None, Some(33)][(s + r) % 3];
            let options = Options { bucket_len, overlap: (s + r) % 2 == 0, ..Options::default() };
            let run =
                Run { rule, max_norm, micro_batches: 1 + r % 2, shuffle: true, options, ..Run::default() };
            rows.push(Row::training(
                format!("{rule:?}, clipped at {max_norm:?}, {stage:?}"),
                run.stage(stage),
            ));
        }
    }
    rows
}

/// Every precision, each at one stage.
fn precisions() -> Vec<Row> {
    let row = |(i, (dtype, precision)): (usize, (DType, Precision))| {
        let stage = STAGES[i % STAGES.len()];
        let grads = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let options = Options { precision, bucket_len: Some(100), ..Options::default() };
        let run = Run { dtype, grads, options, ..Run::default() };
        Row::training(format!("{dtype} {precision:?} {stage:?}"), run.stage(stage))
    };
    PRECISIONS.into_iter().enumerate().map(row).collect()
}

/// Buckets longer than a tile and a record.
fn long_vectors() -> Vec<Row> {
    let row = |stage: Stage| {
        let options = Options { bucket_len: Some(60_001), ..Options::default() };
        let run = Run { lens: vec![70_001, 3, 0, 30_000, 999], steps: 2, options, ..Run::default() };
        Row::training(format!("100,000 parameters, {stage:?}"), run.stage(stage))
    };
    let options = Options {
        stage: Stage::Zero1,
        non_finite: NonFinite::Propagate,
        reduce_in_step: true,
        ..Options::default()
    };
    let lens = vec![300_001, 3, 0, 90_000, 999];
    let one_pass = Run { lens, steps: 2, max_norm: None, options, ..Run::default() };
    let one_pass =
        Row::training("400,000 parameters, reduced, updated and gathered in one pass".to_owned(), one_pass);
    STAGES.map(row).into_iter().chain([one_pass]).collect()
}

/// L-BFGS at every stage, on rows of data that are spread over the ranks.
fn minimizations() -> Vec<Row> {
    let mut rows = Vec::new();
    for (s, stage) in STAGES.into_iter().enumerate() {
        for (k, search) in SEARCHES.into_iter().enumerate() {
            let (problem, lens) =
                [(Problem::Rosenbrock, LARGE), (Problem::Logistic, SMALL), (Problem::LeastSquares, SMALL)]
                    [(s + k) % 3];
            let run = Minimization::new(problem, lens, search);
            let run = at(&Minimization { rule: Lbfgs { max_iter: 12, ..run.rule.clone() }, ..run }, stage);
            let name = format!("L-BFGS, {problem:?}, {search:?}, {stage:?}");
            rows.push(Row::new(name, move |comm| digest(&run.on_rank(Comm::clone(comm)).unwrap())));
        }
    }
    rows
}

/// Muon beside AdamW; at stage 3 ranks exchange pieces of matrices.
fn matrices(n: usize) -> Vec<Row> {
    let row = |stage| {
        let run = matrices::Run { stage, bucket_len: Some(700), ..matrices::Run::on(n) };
        Row::new(format!("matrices, {stage:?}"), move |comm| digest(&run.on_rank(Comm::clone(comm))))
    };
    [Stage::Zero1, Stage::Zero2, Stage::Zero3].map(row).into()
}

/// Sums over slots, which have the bits of other numbers of ranks.
fn slots(n: usize) -> Vec<Row> {
    let row = |stage| {
        let lens: Vec<usize> = (0..n).map(|rank| 1 + rank % 3).collect();
        let options = Options { slots: Some(SlotRuns::new(&lens).unwrap()), ..Run::default().options };
        let run = Run { shuffle: true, options, ..Run::default() };
        Row::training(format!("slots {lens:?}, {stage:?}"), run.stage(stage))
    };
    STAGES[..4].iter().copied().map(row).collect()
}

/// The ranks of this process's world, of which it is one.
struct Here(Comm);

impl Ranks for Here {
    /// Returns this rank's result alone.
    fn run<T: Send>(&self, ranks: usize, body: impl Fn(Comm, Queue) -> T + Sync) -> Vec<T> {
        assert_eq!(ranks, self.0.world_size());
        vec![body(Comm::clone(&self.0), Queue::cpu())]
    }
}

/// Replicas in groups, on as many ranks as the cases have. Most of them check their ranks themselves.
fn replicas(n: usize) -> Vec<Row> {
    let checked = |name: &str, case: fn(&Here)| {
        let run = move |comm: &Comm| {
            case(&Here(Comm::clone(comm)));
            String::new()
        };
        Row::new(name.to_owned(), run)
    };
    match n {
        2 => vec![
            checked("drift", cases::drift_is_measured_and_averaged_away),
            checked("own clipping", cases::a_rank_clips_what_its_micro_batches_have_together),
            checked("a skipped step", cases::a_held_gradient_that_is_not_finite_skips_the_step),
            checked("clipping of a sum", cases::only_a_ranks_own_gradients_of_this_step_are_clipped),
        ],
        4 => {
            let story = |missing, clip| {
                let options = Options { stage: Stage::Replicated, missing, clip, ..Options::default() };
                let run = move |comm: &Comm| digest(&cases::story(&Here(Comm::clone(comm)), &options));
                Row::new(format!("pairs of ranks, {missing:?}, {clip:?}"), run)
            };
            vec![
                story(Missing::Error, Clip::AfterReduce),
                story(Missing::Zero, Clip::BeforeReduce),
                checked("clipping", cases::clipping_before_and_after_the_reduction),
                checked("closures", cases::groups_step_with_closures_and_restore_their_scales),
            ]
        }
        _ => Vec::new(),
    }
}

fn results(comm: Comm) -> Vec<String> {
    table(comm.world_size()).iter().map(|row| (row.run)(&comm)).collect()
}

/// A rank of the test below. In its process it does nothing.
#[test]
fn rank() {
    if let Some(role) = role() {
        serve(&role, results);
    }
}

#[test]
fn steps_of_processes_have_the_bits_of_loopback() {
    for way in WAYS {
        for n in [2, 4] {
            compare("processes::rank", way, n, results, |row| table(n)[row].name.clone());
        }
    }
}
