//! Requests to end a run: every rank learns of a request on any rank after the same step, at no further byte, and no bit changes.

use crate::common::{Run, STAGES, cases, hash, params};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{Sgd, Stop};
use meshstep_shard::{
    Error, Fault, MicroBatch, Missing, NonFinite, Optimizer, Options, Outcome, Plan, Preemption, Stage, Until,
};
use meshstep_tensor::{DType, Layout};
use std::sync::Arc;
use std::time::Duration;

type Comm = Arc<dyn Communicator>;

/// Steps of a run.
const STEPS: u64 = 5;

/// Returns the run with a request of its own for the rank that builds it.
fn own(run: &Run) -> (Run, Preemption) {
    let preemption = Preemption::new();
    let options = Options { preemption: preemption.clone(), ..run.options.clone() };
    (Run { options, ..run.clone() }, preemption)
}

fn step(run: &Run, opt: &mut Optimizer, t: u64) -> Result<Outcome, Error> {
    run.read_and_hand_over(opt, t, 0)?;
    opt.step(run.at(t))?.outcome()
}

/// Returns what each step of a rank says, its bytes as planned, and the last parameters, if rank `by` is asked before step `from`.
fn told(run: &Run, comm: Comm, by: usize, from: u64) -> (Vec<bool>, Vec<Vec<u8>>) {
    let (rank, (run, preemption)) = (comm.rank(), own(run));
    let plan = Plan::new(&run.layout(), run.ranks, &run.options).unwrap();
    let wire = plan.wire(rank, &*run.boxed_rule()).total();
    let mut opt = run.build(comm).unwrap();
    let mut preempted = Vec::new();
    for t in 1..=STEPS {
        if rank == by && t == from {
            preemption.request();
        }
        let outcome = step(&run, &mut opt, t).unwrap();
        let Outcome::Applied { traffic, .. } = outcome else { panic!("{outcome:?}") };
        assert_eq!(traffic.sent, wire, "step {t} of rank {rank}: {run:?}");
        preempted.push(outcome.preempted());
    }
    (preempted, params(&opt))
}

#[test]
fn every_rank_hears_of_it_in_the_same_step_and_nothing_else_changes() {
    for (s, stage) in STAGES.into_iter().enumerate() {
        for (i, ranks) in [1, 2, 4].into_iter().enumerate() {
            let non_finite = [NonFinite::Skip, NonFinite::Propagate][(s + i) % 2];
            let run = Run { ranks, ..Run::default() }.stage(stage);
            let run = Run { options: Options { non_finite, ..run.options.clone() }, ..run };
            let (by, from) = (s % ranks, 2 + i as u64);
            let undisturbed = loopback::spawn(ranks, |comm| told(&run, comm, by, STEPS + 1)).unwrap();
            let asked = loopback::spawn(ranks, |comm| told(&run, comm, by, from)).unwrap();
            for ((heard, end), (before, expected)) in asked.into_iter().zip(undisturbed) {
                assert_eq!(heard, (1..=STEPS).map(|t| t >= from).collect::<Vec<_>>(), "{stage:?} on {ranks}");
                assert!(before.iter().all(|preempted| !preempted));
                assert_eq!(end, expected, "{stage:?} on {ranks}");
            }
        }
    }
}

#[test]
fn a_skipped_step_says_so_and_a_failed_one_leaves_it_to_the_next() {
    loopback::spawn(3, |comm: Comm| {
        let (rank, (run, preemption)) = (comm.rank(), own(&Run { ranks: 3, ..Run::default() }));
        let run = Run { options: Options { missing: Missing::Error, ..run.options.clone() }, ..run };
        let mut opt = run.build(comm).unwrap();
        if rank == 2 {
            preemption.request();
        }
        // Rank 1 lacks every gradient: a fault outweighs the request, and the step has no outcome.
        let mb = opt.micro_batch(1).unwrap();
        if rank != 1 {
            (0..run.lens.len())
                .for_each(|i| mb.grad(&format!("p{i}"), &vec![1f32; run.lens[i]][..]).unwrap());
        }
        mb.finish().unwrap();
        let failed = opt.step(run.at(1)).unwrap_err();
        assert!(matches!(failed, Error::Fault { rank: 1, fault: Fault::MissingGradient { .. } }), "{failed}");
        let mb = opt.micro_batch(1).unwrap();
        let bad = if rank == 0 { f32::NAN } else { 1.0 };
        (0..run.lens.len()).for_each(|i| mb.grad(&format!("p{i}"), &vec![bad; run.lens[i]][..]).unwrap());
        mb.finish().unwrap();
        let skipped = opt.step(run.at(1)).unwrap().outcome().unwrap();
        assert!(matches!(skipped, Outcome::Skipped { in_a_row: 1, preempted: true, .. }), "{skipped:?}");
        let applied = step(&run, &mut opt, 1).unwrap();
        assert!(matches!(applied, Outcome::Applied { preempted: true, .. }), "{applied:?}");
    })
    .unwrap();
}

/// Requests at any moment, from threads that take no part in the steps.
#[test]
fn ranks_that_are_asked_at_random_moments_end_after_the_same_step() {
    for case in 0..u64::from(cases(20, 500)) {
        let run = Run { ranks: 3, lens: vec![40, 3], ..Run::default() }.stage(Stage::Zero1);
        let ends = loopback::spawn(3, |comm: Comm| {
            let (rank, (run, preemption)) = (comm.rank(), own(&run));
            let mut opt = run.build(comm).unwrap();
            let draw = hash(&[case, rank as u64]);
            std::thread::scope(|scope| {
                // At least one rank is asked, most times two at different moments.
                if rank as u64 == case % 3 || draw.is_multiple_of(2) {
                    scope.spawn(move || {
                        std::thread::sleep(Duration::from_micros(draw % 3000));
                        preemption.request();
                    });
                }
                let asked = |t: &u64| step(&run, &mut opt, *t).unwrap().preempted();
                assert!((1u64..).find(asked).is_some());
            });
            opt.steps()
        });
        let ends = ends.unwrap();
        assert!(ends.iter().all(|steps| *steps == ends[0]), "case {case}: {ends:?}");
    }
}

#[test]
fn a_run_to_a_tolerance_ends() {
    let ends = loopback::spawn(2, |comm: Comm| {
        let (rank, preemption) = (comm.rank(), Preemption::new());
        let layout = Layout::builder().param("w", &[1], DType::F32).build().unwrap();
        let options = Options { preemption: preemption.clone(), ..Options::default() };
        let mut opt = Optimizer::new(comm, layout, Sgd::default(), |_, _| Ok(()), options).unwrap();
        let mut evaluations = 0;
        let closure = |mb: &MicroBatch<'_>| {
            evaluations += 1;
            if (rank, evaluations) == (1, 3) {
                preemption.request();
            }
            mb.grad("w", &[1f32]).map(|()| f64::from(-evaluations))
        };
        opt.minimize(Until::default(), |_| Run::default().at(1), 1, closure).unwrap()
    });
    for end in ends.unwrap() {
        assert_eq!((end.stop, end.evaluations, end.iterations), (Stop::Preempted, 3, 3));
    }
}
